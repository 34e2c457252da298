"""What it costs to lose nothing: snapshots, checkpoints, and the way back from both.

A gigabyte of state under a real agent, beside a plain copy, `torch.save`, torch's own asynchronous
checkpoints and a plain socket. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import runs, state_rows
from benchmarks.harness.job import JobFailed
from benchmarks.harness.results import about_this_run
from benchmarks.harness.state_report import render
from benchmarks.harness.state_results import StateResults
from benchmarks.sizes import SIZES

ROWS = ("blocked", "sharded", "overhead", "one-core", "checkpoint", "restore", "peer")


@dataclass(frozen=True)
class Extent:
    """How much is measured: a size of the model, and how often each thing is done."""

    size: str
    #: Of what takes a moment, and of what takes seconds.
    many: int
    few: int
    #: Pairs of steps, and of ten steps each.
    pairs: int
    tens: int


WHOLE = Extent("126m", many=20, few=5, pairs=40, tens=2)
QUICK = Extent("10m", many=5, few=2, pairs=4, tens=2)


class Run(runs.Run[StateResults]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._extent = extent = QUICK if arguments.quick else WHOLE
        nbytes = SIZES[extent.size].state_bytes
        super().__init__(arguments, StateResults(about_this_run(), bytes=nbytes))
        results, size, few = self.results, extent.size, extent.few
        self._rows: dict[str, Callable[[], None]] = {
            "blocked": lambda: state_rows.blocked(results, size, extent.many),
            "sharded": lambda: state_rows.sharded(results, size, extent.many),
            "overhead": lambda: self._overhead(state_rows.OVERHEAD, extent.pairs, extent.tens),
            "one-core": lambda: self._overhead(state_rows.ONE_CORE, extent.few, 0, cores=1),
            "checkpoint": lambda: state_rows.checkpoints(results, size, few, arguments.storage),
            "restore": lambda: state_rows.restores(results, size, few),
            "peer": lambda: state_rows.peer(results, size, few),
        }

    def perform(self, row: str) -> None:
        try:
            self._rows[row]()
        except JobFailed as failure:
            print(f"{row}: {failure}", file=sys.stderr)
            self.results.failed_rows.append(row)
        for who in self.results.faults.get(row, {}):
            summary = self.results.summary(row, who)
            self._progress.tell(row, who, summary.count - 1, summary.median)

    def _overhead(self, row: str, pairs: int, tens: int, cores: int = 0) -> None:
        state_rows.overhead(self.results, row, self._extent.size, pairs, tens, cores)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, ROWS, quick="a look, at 84 MB")
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="where checkpoints go (default: $TMPDIR)"
    )
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse(None)
    save = partial(runs.save, directory=arguments.results, name="state")
    return runs.carry_out(arguments, Run, render, save, everything=runs.is_whole(arguments, ROWS))


if __name__ == "__main__":
    sys.exit(main())
