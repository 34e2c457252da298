"""What faults and steps cost a sharded training: `torchelastic.train` beside native HSDP.

Replicas of two workers under `torchelastic.train`, under tuned torchrun with checkpoints, and under
torchft. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import bandwidth, contestants, runs, sharded_rows
from benchmarks.harness.job import JobFailed
from benchmarks.harness.results import about_this_run
from benchmarks.harness.scenarios import Attempt
from benchmarks.harness.sharded_contestants import (
    OURS_SHARDED,
    TORCHFT_HSDP,
    TORCHRUN_HSDP,
    ShardedContestant,
)
from benchmarks.harness.sharded_report import render
from benchmarks.harness.sharded_rows import CONTROL, COST, SINGLE, ShardedResults

ROWS = ("kill", "kill-4x2", "single", "back", "cost", "joint")


def attempt(row: str, contestant: ShardedContestant) -> Attempt:
    """What is done to a job in a row."""
    if row == "back":
        return sharded_rows.back(contestant, workers=4)
    if row == "single":
        return sharded_rows.single(contestant)
    return sharded_rows.kill(contestant, workers=8 if row == "kill-4x2" else 4)


def counts(row: str, quick: bool) -> list[tuple[ShardedContestant, int]]:
    """How often each contestant meets a kill: peers less often, for each costs them seconds."""
    short, shipped = TORCHFT_HSDP
    if row == "kill":
        ours, theirs, few = (3, 1, 0) if quick else (20, 5, 2)
        return [(OURS_SHARDED, ours), (TORCHRUN_HSDP, theirs), (short, theirs), (shipped, few)]
    return [(OURS_SHARDED, 2 if quick else 10)]


class Run(runs.Run[ShardedResults]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, ShardedResults(about_this_run()))

    def perform(self, row: str) -> None:
        if not self.results.bandwidth:
            self.results.bandwidth = bandwidth.socket_bandwidth()
        try:
            if row == "cost":
                for comparison in (COST, SINGLE, CONTROL):
                    count = 2 if self.arguments.quick else 10
                    self._compare(self.results.steady, comparison, count, "cpu")
            elif row == "joint":
                self.results.joint = sharded_rows.joint_times()
            else:
                wanted = counts(row, self.arguments.quick)
                self._contest(row, wanted, partial(attempt, row))
        except JobFailed as failure:
            print(f"{row}: {failure}", file=sys.stderr)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, ROWS, quick="a look, in five minutes", contest="kill")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse(None)
    contestants.install()
    save = partial(runs.save, directory=arguments.results, name="sharded")
    return runs.carry_out(arguments, Run, render, save, everything=runs.is_whole(arguments, ROWS))


if __name__ == "__main__":
    sys.exit(main())
