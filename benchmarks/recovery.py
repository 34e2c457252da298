"""What a fault, a cold start and an idle job cost under torchelastic and under torchrun.

Every time is read from the workers' own logs. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import cold_start, footprint, plot, report, runs, scenarios
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
ROWS = ("worker", "node", "grow", "keep", "imports", "cold", "idle")


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
        "keep": [(OURS, repetitions)],
        "imports": [(OURS, half), (OURS_PRELOAD, half), (SAFE, half)],
    }[scenario.name]


def is_ours(launcher: Launcher) -> bool:
    return launcher.name.startswith(OURS.name)


class Run(runs.Run[Results]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, Results(about_this_run()))

    def perform(self, row: str) -> None:
        if row == "cold":
            self._cold_starts()
        elif row == "idle":
            self._idle()
        else:
            self._faults(getattr(scenarios, row.upper()))

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
                self._progress.tell(scenario.name, launcher.name, number, repetition.seconds)
                if repetition.note:
                    print(f"  {repetition.note}\n{repetition.output}", file=sys.stderr)

    def _cold_starts(self) -> None:
        for comparison in cold_start.COMPARISONS:
            if not (self._wanted(comparison.first) and self._wanted(comparison.second)):
                continue
            pairs = self.results.cold.setdefault(comparison.name, [])
            for pair in cold_start.measure_pairs(comparison, self.arguments.repetitions):
                pairs.append(pair)
                self._progress.tell(f"cold start, {comparison.name}", "pair", len(pairs) - 1, *pair)

    def _idle(self) -> None:
        for launcher in filter(self._wanted, (OURS, OURS_NO_ZYGOTE, TORCHRUN)):
            try:
                found = footprint.measure_footprint(launcher, self.arguments.idle_seconds)
            except JobFailed as failure:
                print(failure, file=sys.stderr)
                continue
            self.results.idle[launcher.name] = found
            self._progress.tell("idle", launcher.name, 0, found.agent_cpu_percent)


def save(results: Results, rendered: str, directory: Path, picture: Path) -> None:
    """The report, the raw numbers and the picture."""
    runs.save(results, rendered, directory, "recovery")
    if plot.draw(results, picture):
        print(f"saved: {picture}", file=sys.stderr)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, ROWS)
    parser.add_argument("--repetitions", type=int, default=10, help="per fault (default 10)")
    parser.add_argument("--stock", type=int, default=1, help="the same for stock torchrun")
    parser.add_argument("--only", choices=("ours", "torchrun"))
    parser.add_argument("--idle-seconds", type=float, default=60)
    parser.add_argument(
        "--plot", type=Path, default=HERE.parent / "docs/images/recovery.png", metavar="FILE"
    )
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse(None)
    keep = partial(save, directory=arguments.results, picture=arguments.plot)
    everything = arguments.rows == ROWS and arguments.only is None
    return runs.carry_out(arguments, Run, report.render, keep, everything=everything)


if __name__ == "__main__":
    sys.exit(main())
