"""Time to join as a picture: `python -m benchmarks.harness.rendezvous_plot RUN.json OUT.png`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.crowd import EMBEDDED, ETCD, TORCHRUN, System
from benchmarks.harness.rendezvous_report import JOIN, key, medians, sizes
from benchmarks.harness.results import Results
from benchmarks.harness.summary import growth_exponent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    EMBEDDED: "torchelastic, embedded store",
    ETCD: "torchelastic at etcd",
    TORCHRUN: "torchrun, c10d",
}
COLOURS = {EMBEDDED: "#d9480f", ETCD: "#f4a261", TORCHRUN: "#868e96"}


def draw(results: Results, path: Path) -> bool:
    """Write the picture; False when no line would have two points."""
    drawn = [system for system in LABELS if len(medians(results, JOIN, system)) > 1]
    if not drawn:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.4), dpi=150)
    for system in drawn:
        _line(axes, results, system)
        _unfinished(axes, results, system)
    _dress(axes, results)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _line(axes: Axes, results: Results, system: System) -> None:
    points = medians(results, JOIN, system)
    agents, times = zip(*points, strict=True)
    spans = [results.summary(key(JOIN, int(n)), system.name).times for n in agents]
    below = [time - min(span) for time, span in zip(times, spans, strict=True)]
    above = [max(span) - time for time, span in zip(times, spans, strict=True)]
    axes.errorbar(
        agents,
        times,
        yerr=[below, above],
        color=COLOURS[system],
        marker="o",
        markersize=5,
        capsize=3,
        lw=1.8,
        label=_label(system, points),
    )
    axes.annotate(
        f"{times[-1]:.2g} s",
        (agents[-1], times[-1]),
        xytext=(7, -3),
        textcoords="offset points",
        color=COLOURS[system],
        fontsize=10,
    )


def _label(system: System, points: Sequence[tuple[float, float]]) -> str:
    if system is TORCHRUN:
        return LABELS[system]  # it polls every second: a power law it is not
    return f"{LABELS[system]}: grows as N to the power of {growth_exponent(points):.2f}"


def _unfinished(axes: Axes, results: Results, system: System) -> None:
    """A cross where a system was still at it when its time was up."""
    missed = [
        (n, results.repetitions(key(JOIN, n), system.name))
        for n in sizes(results, JOIN, system)
        if not results.summary(key(JOIN, n), system.name).times
    ]
    for agents, repetitions in missed:
        limit = repetitions[0].details.get("limit", 1.0)
        axes.plot([agents], [limit], marker="x", markersize=9, mew=2, color=COLOURS[system])
        axes.annotate(
            f"{agents}: {repetitions[0].note.partition(':')[0]}",
            (agents, limit),
            xytext=(9, -4),
            textcoords="offset points",
            color=COLOURS[system],
            fontsize=9,
        )


def _dress(axes: Axes, results: Results) -> None:
    every = sorted({n for system in LABELS for n in sizes(results, JOIN, system)})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(every, [f"{n:,}" for n in every])
    axes.set_xlim(every[0] / 1.3, every[-1] * 1.9)  # room for the last remark
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(which="major", color="#e9ecef")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("agents")
    axes.set_ylabel("seconds from the first join until all have the world")
    cores = results.about["cores"]
    axes.set_title(
        f"Joining, all at once, on one machine of {cores} cores (medians, min to max)", loc="left"
    )
    axes.legend(frameon=False, fontsize=9, loc="upper left")


if __name__ == "__main__":
    draw(Results.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
