"""What a fault, a cold start and an idle job cost under torchelastic and under torchrun.

Every time is read from the workers' own logs. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import cold_start, footprint, plot, processes, report, scenarios
from benchmarks.harness.job import JobFailed
from benchmarks.harness.launchers import (
    FAST,
    OURS,
    OURS_NO_ZYGOTE,
    OURS_PRELOAD,
    SAFE,
    STOCK,
    TORCHRUN,
    Launcher,
)
from benchmarks.harness.results import Results, about_this_run
from benchmarks.harness.scenarios import Scenario

HERE = Path(__file__).resolve().parent
ROWS = ("worker", "node", "grow", "imports", "cold", "idle")


def counts(scenario: Scenario, repetitions: int, stock: int) -> list[tuple[Launcher, int]]:
    """How often each launcher meets a fault.

    torchrun's setting known to lose a row meets it less often: it costs minutes and decides
    nothing. Should it win, its fewer repetitions are what the row is measured against.
    """
    half, third = (repetitions + 1) // 2, (repetitions + 2) // 3
    return {
        "worker": [(OURS, repetitions), (SAFE, repetitions), (FAST, third), (STOCK, stock)],
        "node": [(OURS, repetitions), (SAFE, half), (FAST, repetitions), (STOCK, stock)],
        "grow": [
            (OURS, 2 * repetitions),
            (SAFE, repetitions),
            (FAST, third),
            (STOCK, stock),
        ],
        "imports": [(OURS, half), (OURS_PRELOAD, half), (SAFE, half)],
    }[scenario.name]


def is_ours(launcher: Launcher) -> bool:
    return launcher.name.startswith(OURS.name)


class Run:
    """One run of the benchmark: performs rows, keeps their results, tells how it goes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.results = Results(about_this_run())
        self._began = time.monotonic()

    def perform(self, row: str) -> None:
        if row == "cold":
            self._cold_starts()
        elif row == "idle":
            self._idle()
        else:
            self._faults(getattr(scenarios, row.upper()))

    def finish(self) -> None:
        self.results.about["minutes"] = round((time.monotonic() - self._began) / 60, 1)
        self.results.about["load_after"] = os.getloadavg()[0]

    def _wanted(self, launcher: Launcher) -> bool:
        only = self.arguments.only
        return only is None or is_ours(launcher) == (only == "ours")

    def _faults(self, scenario: Scenario) -> None:
        wanted = [
            (launcher, count)
            for launcher, count in counts(
                scenario, self.arguments.repetitions, self.arguments.stock
            )
            if self._wanted(launcher)
        ]
        for launcher, numbers in scenarios.interleave(wanted, scenario.faults_per_job):
            for number, repetition in zip(
                numbers, scenarios.run_block(scenario, launcher, numbers), strict=True
            ):
                self.results.add(scenario.name, launcher.name, repetition)
                self._tell(scenario.name, launcher.name, number, repetition.seconds)
                if repetition.note:
                    print(f"  {repetition.note}\n{repetition.output}", file=sys.stderr)

    def _cold_starts(self) -> None:
        for comparison in cold_start.COMPARISONS:
            if not (self._wanted(comparison.first) and self._wanted(comparison.second)):
                continue
            pairs = self.results.cold.setdefault(comparison.name, [])
            for pair in cold_start.measure_pairs(comparison, self.arguments.repetitions):
                pairs.append(pair)
                self._tell(f"cold start, {comparison.name}", "pair", len(pairs) - 1, *pair)

    def _idle(self) -> None:
        for launcher in filter(self._wanted, (OURS, OURS_NO_ZYGOTE, TORCHRUN)):
            try:
                found = footprint.measure_footprint(launcher, self.arguments.idle_seconds)
            except JobFailed as failure:
                print(failure, file=sys.stderr)
                continue
            self.results.idle[launcher.name] = found
            self._tell("idle", launcher.name, 0, found.agent_cpu_percent)

    def _tell(self, row: str, launcher: str, number: int, *values: float | None) -> None:
        shown = ", ".join("failed" if value is None else f"{value:.2f}" for value in values)
        minutes = (time.monotonic() - self._began) / 60
        print(f"{minutes:5.1f} min  {row}, {launcher}, {number + 1}: {shown}", file=sys.stderr)


def save(results: Results, directory: Path, picture: Path) -> None:
    """The report, the raw numbers and the picture."""
    name = f"{results.about['date']}-{results.about['commit']}-recovery"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(results.to_json())
    (directory / f"{name}.md").write_text(report.render(results))
    print(f"saved: {directory / name}.json and .md", file=sys.stderr)
    if plot.draw(results, picture):
        print(f"saved: {picture}", file=sys.stderr)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="per fault (default 10)")
    parser.add_argument("--stock", type=int, default=1, help="the same for stock torchrun")
    parser.add_argument("--rows", type=_rows, default=ROWS, help=",".join(ROWS))
    parser.add_argument("--only", choices=("ours", "torchrun"))
    parser.add_argument("--idle-seconds", type=float, default=60)
    parser.add_argument("--save", action="store_true", help="save a run of some rows, too")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR")
    parser.add_argument(
        "--plot", type=Path, default=HERE.parent / "docs/images/recovery.png", metavar="FILE"
    )
    return parser.parse_args(arguments)


def _rows(text: str) -> tuple[str, ...]:
    rows = tuple(text.split(","))
    if unknown := set(rows) - set(ROWS):
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(sorted(unknown))}")
    return rows


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def perform_all(run: Run, rows: Iterable[str]) -> bool:
    """Whether all rows were performed; interrupted, what is there is still shown."""
    try:
        for row in rows:
            run.perform(row)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return False
    finally:
        run.finish()
    return True


def main() -> int:
    arguments = parse(None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # jobs are ended whichever way we are
    processes.become_subreaper()
    run = Run(arguments)
    whole = perform_all(run, arguments.rows)
    print(report.render(run.results))
    everything = whole and arguments.rows == ROWS and arguments.only is None
    if (everything or arguments.save) and not arguments.no_save:
        save(run.results, arguments.results, arguments.plot)
    return 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())
