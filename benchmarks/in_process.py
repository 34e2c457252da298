"""What a fault costs workers that never stop, beside everybody else who keeps a training alive.

Four workers under `torchelastic.train`, tuned torchrun, torchft and NVRx's in-process restart; the
same model, the same faults, the same log. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import bandwidth, contestants, in_process_faults, runs, steady
from benchmarks.harness.contestants import (
    NVRX,
    OURS_IN_PROCESS,
    TORCHFT,
    TORCHFT_SHORT,
    TORCHRUN_TUNED,
    Contestant,
)
from benchmarks.harness.in_process_faults import WATCHED, Fault, cut_node, last_resorts
from benchmarks.harness.in_process_report import CONTROLS, LARGE, SMALL, render
from benchmarks.harness.in_process_results import InProcessResults
from benchmarks.harness.job import Job, JobFailed
from benchmarks.harness.network import Network
from benchmarks.harness.results import about_this_run
from benchmarks.harness.scenarios import Attempt

FAULTS = {
    fault.name: fault
    for fault in (
        in_process_faults.KILL,
        in_process_faults.KILL_LARGE,
        in_process_faults.STOP,
        in_process_faults.FREEZE,
        in_process_faults.JOIN,
        in_process_faults.JOIN_LARGE,
        in_process_faults.NOTICED,
    )
}
ROWS = ("kill", "kill-25m", "stop", "freeze", "cut", "join", "join-25m", "notice", "steady")


def counts(row: str, quick: bool) -> list[tuple[Contestant, int]]:
    """How often each contestant meets a fault: peers less often, for each costs them seconds.

    torchft's release least of all: about every other kill ends its survivors.
    """
    ours, theirs, few = (2, 1, 1) if quick else (10, 5, 2)
    nightly = TORCHFT[2]
    release = [] if quick else [(each, 3) for each in TORCHFT[:2]]
    named = (nightly,) if quick else TORCHFT[2:]
    return {
        "kill": [
            (OURS_IN_PROCESS, ours),
            *((each, theirs) for each in (TORCHRUN_TUNED, *named, TORCHFT_SHORT, NVRX)),
            *release,
        ],
        "kill-25m": [
            (OURS_IN_PROCESS, ours),
            *((each, few) for each in (TORCHRUN_TUNED, nightly, NVRX) if not quick),
        ],
        "stop": [(WATCHED, ours)],
        "freeze": [(OURS_IN_PROCESS, ours)],
        "cut": [(OURS_IN_PROCESS, ours)],
        "join": [(OURS_IN_PROCESS, ours), (TORCHRUN_TUNED, theirs)],
        "notice": [(OURS_IN_PROCESS, ours)],
        "join-25m": [(OURS_IN_PROCESS, (ours + 1) // 2)],
    }[row]


def steady_pairs(quick: bool) -> list[tuple[steady.Comparison, int]]:
    """How many pairs of jobs tell what a step costs, and how many tell what is noise."""
    if quick:
        return [(SMALL, 2), (LARGE, 1), (CONTROLS[0], 1)]
    return [(SMALL, 6), (LARGE, 4), (CONTROLS[0], 4), (CONTROLS[1], 3)]


class Run(runs.Run[InProcessResults]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, InProcessResults(about_this_run()))

    def perform(self, row: str) -> None:
        if not self.results.bandwidth:
            self.results.bandwidth = bandwidth.socket_bandwidth()
        if row == "steady":
            self._steady()
        elif row == "cut":
            self._cut()
        else:
            self._fault(FAULTS[row])

    def _cut(self) -> None:
        if not Network.available():
            print("cut: not measured, it needs root and the ip command", file=sys.stderr)
            return
        with Network() as network:
            self._fault(cut_node(network))

    def _fault(self, fault: Fault) -> None:
        def attempt(contestant: Contestant) -> Attempt:
            return replace(fault.attempt(contestant, fault), look=self._look)

        self._contest(fault.name, counts(fault.name, self.arguments.quick), attempt)

    def _look(self, job: Job) -> None:
        self.results.last_resorts += last_resorts(job.directory)

    def _steady(self) -> None:
        quick = self.arguments.quick
        try:
            for script in (steady.RESIDENT, steady.BARE):
                if (found := steady.trace(script, SMALL.size)) is not None:
                    self.results.calls[script] = found
            for comparison, count in steady_pairs(quick):
                self._compare(self.results.steady, comparison, count, "wall")
        except JobFailed as failure:
            print(f"steady: {failure}", file=sys.stderr)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, ROWS, quick="a look, in six minutes", contest="fault")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse(None)
    contestants.install()
    save = partial(runs.save, directory=arguments.results, name="in-process")
    return runs.carry_out(arguments, Run, render, save, everything=runs.is_whole(arguments, ROWS))


if __name__ == "__main__":
    sys.exit(main())
