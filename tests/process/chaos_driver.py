"""Does a schedule of faults to a job of `chaos_worker`s, each when the job has come to its step.

A gate holds the job where a fault is to strike: no worker begins a step behind it. So the driver
finds all ranks of the present world in one place, strikes, and opens the gate as far as to the next
fault. No fault is placed by time. Inside of a step workers strike themselves, at places of
`torchelastic.faults`: an order says which rank, and is claimed by that one and nobody else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.process.chaos_record import Record
from tests.process.chaos_schedule import NODES, Fault
from tests.process.jobs import Job, Node, alive, tree
from tests.support import poll_for
from torchelastic.agent.watch.hang_watchdog import is_frozen

T = TypeVar("T")

SCRIPT = Path(__file__).with_name("chaos_worker.py")
#: Kinds of faults that need a world of all workers there are, and of how many otherwise: one must
#: be left that has the state.
WHOLE = ("kill-node", "leave", "freeze-node")
LEAST = {"join": 1, "kill": 2, "freeze": 2, "kill-entering": 3}
#: Seconds for whatever is waited for, on a machine that does much else.
PATIENCE = 180.0
#: Seconds from one step to the next while the world is not yet such as a fault needs.
PACE = 0.2
#: Seconds between two looks at what a step leads to.
LOOK = 0.02
NO_GATE = 1 << 30


@dataclass
class Member:
    """A node of the job."""

    number: int
    node: Node
    workers: int


@dataclass
class Chaos:
    """A job, and what is done to it."""

    job: Job
    mode: str
    keys: dict[str, Any] = field(default_factory=dict)
    start: int = 0
    #: The number of workers in a replica, all on one node.
    replica: int = 1
    members: list[Member] = field(default_factory=list)
    gate: int = 0
    #: What was done, for whoever reads that it went wrong.
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("record", "ledger"):
            (self.job.directory / name).mkdir()
        self.record = Record(self.job.directory / "record", self.start)
        self.ledger = self.job.directory / "ledger"
        self._began = time.monotonic()
        #: Steps that the job has taken besides those of the schedule, until a world was complete.
        self._delay = 0
        self._order("gate", "0")

    # --- nodes -----------------------------------------------------------------------------------

    def join(self, workers: int = 0) -> None:
        """Another node: every second one has two workers, every other second loading processes."""
        number = len(self.job.nodes)
        workers, loaders = workers or 1 + number % 2, number // 2 % 2
        if self.replica > 1:
            workers = self.replica
        keys = {"node": number, "loaders": loaders, **self.keys}
        words = [self.mode, str(self.record.directory), str(self._orders), str(self.ledger)]
        words += [f"{name}={value}" for name, value in keys.items()]
        node = self.job.start(f"--nproc-per-node={workers}", script=[str(SCRIPT), *words])
        self.members.append(Member(number, node, workers))

    @property
    def workers(self) -> int:
        return sum(member.workers for member in self.members)

    def _take(self, fault: Fault) -> Member:
        """The node that is lost by a fault."""
        return self.members.pop(fault.target % len(self.members))

    # --- where the job is ------------------------------------------------------------------------

    def world(self) -> list[dict[str, Any]]:
        """The lines of the present world's ranks at the gate; empty unless all are there."""
        lines = self.record.of("gate")
        newest = max((line["generation"] for line in lines), default=-1)
        found = {
            line["rank"]: line
            for line in lines
            if (line["generation"], line["step"]) == (newest, self.gate)
        }
        there = [found[rank] for rank in sorted(found) if alive(found[rank]["pid"])]
        return there if there and len(there) == there[0]["size"] else []

    def reach(self, step: int, *, least: int) -> list[dict[str, Any]]:
        """Wait until a world of so many workers stands at the gate of this step, or a later one;
        of fewer, but two replicas, if some nodes are held out."""
        deadline = time.monotonic() + PATIENCE
        self.open(step)
        while True:
            world = self.wait_for(self.world, f"a world at step {self.gate}")
            if len(world) >= min(least, max(least - self._held_out(), 2 * self.replica)):
                return world
            if time.monotonic() > deadline:
                raise AssertionError(self.told(f"no world of {least} workers in {PATIENCE:g} s"))
            time.sleep(PACE)
            self.open(self.gate + 1)

    def _held_out(self) -> int:
        """The workers of nodes that the newest world holds out: they may be so for minutes."""
        if self.replica == 1:
            return 0
        worlds = [world for one in self.members for world in one.node.events("world-formed")]
        newest = max(worlds, key=lambda world: world["generation"], default={"held": {}})
        return len(newest["held"]) * self.replica

    def open(self, step: int) -> None:
        """Let the job go on, as far as to this step."""
        if step > self.gate:
            self.gate = step
            self._order("gate", str(step))

    # --- faults ----------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        self.story.append(f"{fault} (at the gate of step {self.gate})")
        least = self.workers if fault.kind in WHOLE else LEAST[fault.kind] * self.replica
        wanted = fault.at_step + self._delay
        world = self.reach(wanted, least=least)
        self._delay += self.gate - wanted
        where = f"step {self.gate} of generation {world[0]['generation']}, {len(world)} workers"
        self.story[-1] = f"{time.monotonic() - self._began:6.1f} s: {fault} (done at {where})"
        getattr(self, "_" + fault.kind.replace("-", "_"))(fault, world)
        for member in self.members:
            if member.node.process.poll() is not None:
                raise AssertionError(self.told(f"node {member.number} has ended"))

    def _kill(self, fault: Fault, world: list[dict[str, Any]]) -> None:
        where = "kill@here" if fault.place == "here" else f"kill@place={fault.place}"
        pid = self.claimed("fault", fault, where)
        self._step_until(lambda: not alive(pid), f"the end of process {pid}")

    def _kill_entering(self, fault: Fault, world: list[dict[str, Any]]) -> None:
        """One is killed, and another one on its way into the next world."""
        where = f"kill@place={fault.place}"
        if self.mode != "script":
            pid = self.claimed("entering", fault, where)
            (*_, mine) = [line for line in self.record.of("gate") if line["pid"] == pid]
            others = [line for line in self._peers_of(pid) if alive(line["pid"])]
            if self.replica > 1 and mine["size"] == 2 * self.replica:
                # Another part: of this one, the two may have the only copies.
                others = [o for o in others if (o["rank"] - mine["rank"]) % self.replica]
            victim = others[fault.target % len(others)]["pid"]
        else:
            self._order("entering", f"{fault.number} {fault.target} 0 {where}")
            victim = world[fault.target % len(world)]["pid"]
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        self.open(self.gate + 1)
        pid = self._claimant(fault)
        self._step_until(lambda: not alive(pid), f"the end of process {pid}, entering")

    def _freeze(self, fault: Fault, world: list[dict[str, Any]]) -> None:
        """In a script nobody looks after a frozen worker, and it has to wake again."""
        pid = self.claimed("fault", fault, f"stop@place={fault.place}")
        self._step_until(lambda: is_frozen(pid) or not alive(pid), f"process {pid} frozen")
        if self.mode != "script":
            self.wait_for(lambda: not alive(pid), f"the frozen process {pid} killed")
            return
        self.wait_for(
            lambda: not alive(pid) or all(map(self._has_used, self._peers_of(pid))),
            "the others waiting for the frozen one",
        )
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _kill_node(self, fault: Fault, world: list[dict[str, Any]]) -> None:
        self._take(fault).node.kill()
        self.open(self.gate + 1)

    def _leave(self, fault: Fault, world: list[dict[str, Any]]) -> None:
        """It leaves between two steps, which may be a later one than this."""
        process = self._take(fault).node.process
        process.terminate()
        self._step_until(lambda: process.poll() is not None, "a node that has left")
        assert process.poll() == 143, self.told(f"a node has left with {process.poll()}")

    def _join(self, fault: Fault, world: list[dict[str, Any]]) -> None:
        self.join()
        self.open(self.gate + 1)

    def _freeze_node(self, fault: Fault, world: list[dict[str, Any]]) -> None:
        """Until the others have taken a step without it."""
        training = {line["node"] for line in world}
        members = [member for member in self.members if member.number in training]
        member = members[fault.target % len(members)]
        generation = world[0]["generation"]
        with frozen(member.node):
            self.open(self.gate + 1)
            self.wait_for(
                lambda: [
                    line
                    for line in self.record.of("gate")
                    if line["generation"] > generation and line["step"] >= self.gate
                ],
                f"a world without node {member.number}",
            )

    # --- orders ----------------------------------------------------------------------------------

    @property
    def _orders(self) -> Path:
        return self.job.directory / "orders"

    def _order(self, name: str, text: str) -> None:
        part = self._orders / f"{name}.part"
        part.write_text(text)
        part.rename(self._orders / name)

    def claimed(self, name: str, fault: Fault, what: str) -> int:
        """Give an order, let the job take the step; the process that has claimed it."""
        self._order(name, f"{fault.number} {fault.target} {int(fault.is_of_first)} {what}")
        self.open(self.gate + 1)
        return self._claimant(fault)

    def _claimant(self, fault: Fault) -> int:
        mark = f"claimed-{fault.number}-"
        found = self.wait_for(lambda: [*self._orders.glob(mark + "*")], f"who claims {fault}")
        return int(found[0].name.removeprefix(mark))

    def _peers_of(self, pid: int) -> list[dict[str, Any]]:
        """The lines of the other ranks of a worker's world at the gate that it came to last."""
        lines = self.record.of("gate")
        (*_, last) = [line for line in lines if line["pid"] == pid]
        place = last["generation"], last["step"]
        return [
            line
            for line in lines
            if (line["generation"], line["step"]) == place and line["pid"] != pid
        ]

    def _has_used(self, at_gate: dict[str, Any]) -> bool:
        """Whether a rank has taken its samples of the step that it was at the gate of."""
        who = {name: at_gate[name] for name in ("generation", "step", "rank")}
        return any(who.items() <= line.items() for line in self.record.of("used"))

    def _step_until(self, done: Callable[[], bool], what: str) -> None:
        """Let the job take steps until this is so: a world at the gate takes another one."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(self.told(f"not seen within {PATIENCE:g} s: {what}"))
            if self.world():
                self.open(self.gate + 1)
            time.sleep(LOOK)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let the whole job come to the end of the epoch it is in."""
        world = self.reach(self.gate, least=self.workers)
        self._order("epochs", str(world[0]["epoch"] + 1))
        self.open(NO_GATE)
        for member in self.members:
            code = member.node.wait(PATIENCE)
            assert code == 0, self.told(f"node {member.number} has ended with {code}")

    def wait_for(self, probe: Callable[[], T], what: str) -> T:
        try:
            return poll_for(probe, what=what, timeout=PATIENCE)
        except AssertionError as error:
            raise AssertionError(self.told(str(error))) from None

    def told(self, what: str) -> str:
        gates = map(str, self.record.of("gate")[-8:])
        faults = ["faults so far:", *self.story]
        return "\n".join([what, *faults, "last at the gate:", *gates, self.job.said()])


@contextmanager
def frozen(node: Node) -> Iterator[None]:
    """The whole node stands still: first its agent, so that it sees nothing of the rest."""
    stopped: list[int] = []
    try:
        while left := [pid for pid in tree(node.pid, node.agent_pid) if pid not in stopped]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def kill_all(nodes: Sequence[Node]) -> None:
    """All agents and all workers, at once; wait for their end."""
    pids = [pid for node in nodes for pid in tree(node.agent_pid, node.pid)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for node in nodes:
        node.process.wait(PATIENCE)
    poll_for(lambda: not any(map(alive, pids)), what="the end of all", timeout=PATIENCE)


def started(
    job: Job,
    mode: str,
    *,
    nodes: int = NODES,
    workers: int = 0,
    start: int = 0,
    replica: int = 1,
    **keys: Any,
) -> Chaos:
    """A job of so many nodes, each with so many workers, if it is said how many, or one replica."""
    made = Chaos(job, mode, keys, start, replica)
    for _ in range(nodes):
        made.join(workers)
    return made
