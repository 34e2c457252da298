"""What `torchelastic.Guard` finds, what it leaves alone, and what it costs.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import guard_measures, guard_rows, runs
from benchmarks.harness.guard_report import GuardResults, render
from benchmarks.harness.results import about_this_run

ROWS = {
    "audit": guard_rows.audit,
    "nan": guard_measures.nan,
    "flips": guard_measures.flips,
    "cost": guard_measures.cost,
    "alarms": guard_measures.alarms,
}


class Run(runs.Run[GuardResults]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, GuardResults(about_this_run()))

    def perform(self, row: str) -> None:
        found = self.results.found[row] = []
        for number, one in enumerate(ROWS[row](self.arguments.quick)):
            found.append(one)
            self._progress.tell(row, one["what"], number, one["seconds"])
            if one["note"]:
                print(f"  {one['note']}", file=sys.stderr)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return runs.parser(__doc__, tuple(ROWS), quick="two or three runs of each kind").parse_args(
        arguments
    )


def main() -> int:
    arguments = parse(None)
    save = partial(runs.save, directory=arguments.results, name="guard")
    whole = runs.is_whole(arguments, tuple(ROWS))
    return runs.carry_out(arguments, Run, render, save, everything=whole)


if __name__ == "__main__":
    sys.exit(main())
