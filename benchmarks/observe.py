"""What it costs to be seen: a step's processor time and system calls, and what disturbs training.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import observe_rows, runs
from benchmarks.harness.job import JobFailed
from benchmarks.harness.observe_report import render
from benchmarks.harness.observe_rows import MODES, ObserveResults
from benchmarks.harness.results import about_this_run

ROWS = ("parts", *MODES, "agent", "disturbed")


class Run(runs.Run[ObserveResults]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, ObserveResults(about_this_run()))
        quick, results = arguments.quick, self.results
        rounds, pairs, seconds = (15, 2, 3.0) if quick else (150, 10, 10.0)
        self._rows: dict[str, Callable[[], None]] = {
            "parts": lambda: observe_rows.parts(results, 5 if quick else 30),
            "agent": lambda: observe_rows.agent(results, 5.0 if quick else 30.0),
            "disturbed": lambda: observe_rows.disturbed(results, pairs, seconds),
        }
        self._rows |= {mode: partial(observe_rows.steps, results, mode, rounds) for mode in MODES}

    def perform(self, row: str) -> None:
        try:
            self._rows[row]()
        except (JobFailed, subprocess.CalledProcessError) as failure:
            print(f"{row}: {failure}", file=sys.stderr)
            self.results.failed_rows.append(row)
        self._progress.tell("observe", row, 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return runs.parser(__doc__, ROWS, quick="a look, about 2 minutes").parse_args(arguments)


def main() -> int:
    arguments = parse(None)
    save = partial(runs.save, directory=arguments.results, name="observe")
    return runs.carry_out(arguments, Run, render, save, everything=runs.is_whole(arguments, ROWS))


if __name__ == "__main__":
    sys.exit(main())
