"""The three recoveries as a picture: `python -m benchmarks.harness.plot RESULTS.json OUT.png`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.launchers import OURS
from benchmarks.harness.report import FAULTS, best_setting
from benchmarks.harness.results import Results
from benchmarks.harness.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "worker": "a worker is killed\nuntil all train again",
    "node": "a node is killed\nuntil the survivors train",
    "grow": "a node joins\nlongest time nobody trains",
}
COLOURS = {"ours": "#d9480f", "theirs": "#adb5bd"}


def draw(results: Results, path: Path) -> bool:
    """Write the picture; False when there is nothing to set side by side."""
    groups = [
        (LABELS[scenario.name], results.summary(scenario.name, OURS.name), theirs, best)
        for scenario in FAULTS
        if (best := best_setting(results, scenario.name))
        and (theirs := results.summary(scenario.name, best)).times
        and results.summary(scenario.name, OURS.name).times
    ]
    if not groups:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.35 * len(groups) + 1.5), dpi=150)
    for index, (_, ours, theirs, best) in enumerate(groups):
        faster = f"{theirs.median / ours.median:.0f} times faster"
        _bar(axes, index - 0.19, ours, COLOURS["ours"], faster)
        _bar(axes, index + 0.19, theirs, COLOURS["theirs"], best.removeprefix("torchrun "))
    _dress(axes, [label for label, *_ in groups], results)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _bar(axes: Axes, place: float, summary: Summary, colour: str, remark: str) -> None:
    median, low, high = summary.median, min(summary.times), max(summary.times)
    axes.barh(place, median, height=0.36, color=colour)
    axes.errorbar(
        median, place, xerr=[[median - low], [high - median]], color="#212529", capsize=3, lw=1
    )
    axes.annotate(
        f"{median:.2f} s   {remark}",
        (high, place),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=10,
    )


def _dress(axes: Axes, labels: list[str], results: Results) -> None:
    from matplotlib.patches import Patch

    version = results.about["torch"].partition("+")[0]
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, 0.1), right * 4)  # room for the remarks
    axes.set_yticks(range(len(labels)), labels, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel("seconds without training (log scale; median, whiskers from min to max)")
    axes.set_title(
        "What a fault costs: two nodes of two workers on one machine", loc="left", pad=30
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(
        handles=[
            Patch(color=COLOURS["ours"], label="torchelastic run"),
            Patch(color=COLOURS["theirs"], label=f"torchrun {version}, at its best setting"),
        ],
        loc="lower left",
        bbox_to_anchor=(-0.01, 1),
        ncols=2,
        frameon=False,
        fontsize=9,
    )


if __name__ == "__main__":
    draw(Results.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
