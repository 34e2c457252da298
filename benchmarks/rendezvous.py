"""How long agents take to meet, to go on without one of them, and to go on without their host.

Thousands of real protocol clients in a few processes, beside torchrun's dynamic rendezvous in the
same harness. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import crowd, host_faults, processes, rendezvous_plot, runs
from benchmarks.harness.crowd import EMBEDDED, ETCD, SYSTEMS, TORCHRUN, System
from benchmarks.harness.etcd import EtcdServer
from benchmarks.harness.host_faults import NOBODY_LEFT, HostFault
from benchmarks.harness.network import Network, isolate
from benchmarks.harness.rendezvous_report import FAIL, JOIN, key, render
from benchmarks.harness.results import Results, about_this_run
from benchmarks.harness.scenarios import Repetition, attempts, interleave

HERE = Path(__file__).resolve().parent
ROWS = ("join", "fail", "host-kill", "host-freeze", "host-cut")
#: Seconds until a join counts as one that does not finish.
LIMIT, QUICK_LIMIT = 300.0, 60.0


def join_counts(agents: int, quick: bool) -> list[tuple[System, int]]:
    """How often each system joins so many agents."""
    if quick:
        most = {EMBEDDED: 512, ETCD: 128, TORCHRUN: 128}
        often = {EMBEDDED: 3, ETCD: 2, TORCHRUN: 1}
    else:
        most = {EMBEDDED: 4096, ETCD: 1024, TORCHRUN: 1024}
        often = {EMBEDDED: 5, ETCD: 3, TORCHRUN: 3 if agents <= 128 else 1}
    return [(system, often[system]) for system in SYSTEMS if agents <= most[system]]


def join_sizes(quick: bool) -> list[int]:
    return [8, 32, 128, 512] if quick else [8 * 2**power for power in range(10)]


def fail_counts(quick: bool) -> list[tuple[System, int, int]]:
    """System, number of agents, and how many of them fail, one after the other."""
    if quick:
        return [(EMBEDDED, 64, 5), (EMBEDDED, 256, 5), (ETCD, 64, 2)]
    embedded = [(EMBEDDED, agents, 5) for agents in (64, 128, 256, 512)]
    return [*embedded, (EMBEDDED, 1024, 10), *((ETCD, agents, 3) for agents in (64, 256, 1024))]


class Run(runs.Run[Results]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, Results(about_this_run()))
        self.results.about["processes"] = arguments.processes
        self.results.about["isolated"] = isolate()
        self.results.about["descriptors"] = processes.raise_descriptor_limit()
        self._limit = arguments.limit or (QUICK_LIMIT if arguments.quick else LIMIT)
        #: Systems that did not finish: they are not asked for more agents.
        self._beaten: set[System] = set()

    def perform(self, row: str) -> None:
        if row == "join":
            for agents in self.arguments.agents or join_sizes(self.arguments.quick):
                self._join(agents)
        elif row == "fail":
            for system, agents, count in fail_counts(self.arguments.quick):
                if self._is_wanted(system):
                    self._fail(system, agents, self._often(count))
        elif row == "host-cut":
            self._cut()
        else:
            self._lose_host(host_faults.kill() if row == "host-kill" else host_faults.freeze())

    def _join(self, agents: int) -> None:
        wanted = [
            (system, self._often(count))
            for system, count in join_counts(agents, self.arguments.quick)
            if self._is_wanted(system)
        ]
        for system, numbers in interleave(wanted, block=1):
            if system not in self._beaten:
                found = crowd.measure_join(system, agents, self.arguments.processes, self._limit)
                self._keep(key(JOIN, agents), system.name, numbers[0], found)
                if found.seconds is None:
                    self._beaten.add(system)

    def _fail(self, system: System, agents: int, count: int) -> None:
        found = crowd.measure_failures(system, agents, self.arguments.processes, count, self._limit)
        for number, repetition in enumerate(found):
            self._keep(key(FAIL, agents), system.name, number, repetition)

    def _cut(self) -> None:
        if not Network.available():
            print("host-cut: not measured, it needs root and the ip command", file=sys.stderr)
            return
        with Network() as network:
            self._lose_host(host_faults.cut(network))

    def _lose_host(self, fault: HostFault) -> None:
        if self.arguments.only not in (None, EMBEDDED.name):
            return
        count = self._often(2 if self.arguments.quick else 10)
        for number, found in enumerate(attempts(fault.attempt, range(count))):
            self._keep(fault.name, EMBEDDED.name, number, found)
            if found.note == NOBODY_LEFT:
                break  # so would the others

    def _keep(self, row: str, who: str, number: int, found: Repetition) -> None:
        self._progress.keep(self.results, row, who, number, found)

    def _is_wanted(self, system: System) -> bool:
        if system is ETCD and EtcdServer.program() is None:
            return False
        return self.arguments.only in (None, system.name)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, ROWS, quick="a look, in minutes")
    parser.add_argument("--repetitions", type=int, help="at most as many of each")
    parser.add_argument("--only", choices=[system.name for system in SYSTEMS])
    parser.add_argument(
        "--agents", type=int, nargs="+", metavar="N", help="join so many (default 8 to 4096)"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="that agents share, the host's aside (default 2)"
    )
    parser.add_argument("--limit", type=float, help="seconds a join may take (default 300)")
    parser.add_argument(
        "--plot", type=Path, default=HERE.parent / "docs/images/rendezvous.png", metavar="FILE"
    )
    return parser.parse_args(arguments)


def save(results: Results, rendered: str, directory: Path, picture: Path) -> None:
    """The report, the raw numbers and the picture."""
    runs.save(results, rendered, directory, "rendezvous")
    if rendezvous_plot.draw(results, picture):
        print(f"saved: {picture}", file=sys.stderr)


def main() -> int:
    arguments = parse(None)
    keep = partial(save, directory=arguments.results, picture=arguments.plot)
    return runs.carry_out(arguments, Run, render, keep, everything=runs.is_whole(arguments, ROWS))


if __name__ == "__main__":
    sys.exit(main())
