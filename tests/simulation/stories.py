"""Stories: short histories of the control plane, told in plain words by the simulation.

    python -m tests.simulation.stories             tell every story, and show what has changed
    python -m tests.simulation.stories --rewrite   write what has changed to tests/stories/*.txt
    python -m tests.simulation.stories host_lost   tell one

A file begins with a comment and a schedule, which people write:

    # The law or promise that the story shows.
    train abcd --nnodes 1:5
    10.0 kill c
    from 9
    until 12

The first line says what trains (`train`: in-process workers; `script`: a script that is started
anew), on which machines (one letter each), and with which options: `--nnodes MIN:MAX`, `etcd`,
`resume` (an agent that starts again is the same node), `steps N` (the training ends),
`endpoints abc` (the agents that may host the store), `seed N`. The faults are those of
`fault_schedule`. `from` and `until` say when the story begins and ends. The rest of the file is the
story: all that is sent, and what each node does about it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from tests.simulation.fault_schedule import ENDLESS, Schedule, ScheduledFault
from tests.simulation.job_simulation import JobSimulation
from tests.simulation.virtual_network import ConnectionEnd
from torchelastic.agent.lifecycle import node_state as happens
from torchelastic.agent.lifecycle.machine import Machine
from torchelastic.agent.node_loop import NodeLoop
from torchelastic.chaos import laws
from torchelastic.events.failure import Failure, signal_name
from torchelastic.rendezvous.leader import Leader
from torchelastic.rendezvous.membership.member_session import MemberRecord
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

FOLDER = Path(__file__).parents[1] / "stories"
#: Between what people write, and what the simulation tells.
RULE = "-" * 100
#: Equal sentences of several nodes within this many seconds are one line.
TOGETHER = 0.1
#: Who a line is for: the agent of a worker, the worker of an agent.
AGENT, WORKER = ["agent"], ["worker"]
DISTURBANCES = {
    "kill": "the machine {0} is lost",
    "restart": "the agent of {0} is killed, and starts again",
    "freeze": "the machine {0} freezes",
    "thaw": "the machine {0} runs again",
    "stall": "the agent of {0} freezes; its worker runs on",
    "worker": "the worker of {0} is killed",
    "join": "the machine {0} comes",
    "leave": "{0} is asked to leave (SIGTERM)",
    "mend": "every node reaches every other one again",
}


# --- a file --------------------------------------------------------------------------------------


def schedule_of(text: str) -> tuple[Schedule, float, float]:
    """Read what people write: the job and its faults, and when the story begins and ends."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kind, machines, *options = lines[0].split()
    given = dict(pairwise(options))
    least, most = given["--nnodes"].split(":")
    made = Schedule(
        seed=int(given.get("seed", 0)),
        resident=kind == "train",
        machines=machines,
        min_nodes=int(least),
        max_nodes=int(most),
        remembers="resume" in options,
        steps=int(given.get("steps", ENDLESS)),
        faults=tuple(_fault(line) for line in lines[1:] if line[0].isdigit()),
        etcd="etcd" in options,
        endpoints=given.get("endpoints", machines[0]),
    )
    times = dict(line.split() for line in lines if line.startswith(("from", "until")))
    return made, float(times.get("from", 0)), float(times["until"])


def _fault(line: str) -> ScheduledFault:
    """`10.0 cut ab | cd`: both ways; `->`: from the one side to the other."""
    at, kind, *sides = line.split()
    machines, way, others = [*sides, "", "", ""][:3]
    return ScheduledFault(float(at), kind, machines, others, way != "->")


def told(path: Path) -> str:
    """The whole file: its head, and the story as the product tells it now."""
    head = path.read_text().partition(RULE)[0]
    schedule, since, until = schedule_of(head)
    return f"{head}{RULE}\n" + "\n".join(Story(schedule).tell(since, until)) + "\n"


# --- the story -----------------------------------------------------------------------------------


@dataclass
class Line:
    """Something that is sent or done. `to`: nodes, or one of the names below."""

    at: float
    who: list[str]
    to: list[str]
    text: str
    #: Whether it was said again and again.
    repeated: bool = False

    def __str__(self) -> str:
        who, to = " ".join(sorted(self.who)), " ".join(sorted(self.to))
        several = len(self.who) > 1
        if self.to == AGENT:
            who = f"workers of {who}" if several else f"worker of {who}"
            to = "their agents" if several else "its agent"
        elif self.to == WORKER:
            to = "their workers" if several else "its worker"
        ends = f"{who} -> {to}" if to else who
        often = " (again and again)" if self.repeated else ""
        return f"{self.at:6.2f}  {ends:36}  {self.text}{often}".rstrip()


@dataclass
class Story:
    """One job, and the lines that are told of it."""

    schedule: Schedule
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._simulation = JobSimulation(self.schedule)
        self._names = {host.machine.address: name for name, host in self._simulation.hosts.items()}
        self._world = ""
        self._host = "etcd" if self.schedule.etcd else "host"
        #: Nodes that have lost the host, and know no other yet.
        self._without: set[str] = set()
        #: What was said in elections since the last fault.
        self._asked: dict[tuple[str, str, str], Line] = {}
        #: The newest finished step, and its nodes.
        self._steps: dict[str, int] = {}
        self._told = -1
        #: By connection: whether the vote asked for there counts.
        self._binding: dict[int, bool] = {}
        self._until = 0.0

    def tell(self, since: float, until: float) -> Iterator[str]:
        self._until = until
        with self._listening():
            broken = self._simulation.run(until)
        self._tell_steps(until)
        worlds = [line for line in self.lines if line.at < since and line.to == ["all"]]
        for line in [*worlds[-1:], *(line for line in self.lines if line.at >= since)]:
            yield str(line)
        yield f"{until:6.2f}  {' '.join(map(str, broken)) or 'no law is broken'}"

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Listen where agents decide and messages are sent; change nothing."""
        note, perform = self._simulation.laws.note, self._simulation.perform
        with contextlib.ExitStack() as patches:

            def before(owner: Any, name: str, tell: Any) -> None:
                original = getattr(owner, name)

                def listened(it: Any, *args: Any, **given: Any) -> Any:
                    tell(it, *args, **given)
                    return original(it, *args, **given)

                patches.enter_context(mock.patch.object(owner, name, listened))

            before(Machine, "take", self._heard)
            before(NodeLoop, "_perform", self._performed)
            before(MemberRecord, "update", self._recorded)
            before(MemberRecord, "mention", self._recorded)
            before(Leader, "_publish", self._published)
            before(ConnectionEnd, "write", self._sent)

            def noted(event: laws.Event) -> None:
                self._noted(event)
                note(event)

            def performed(fault: ScheduledFault) -> None:
                self._disturbed(fault)
                perform(fault)

            patches.enter_context(mock.patch.object(self._simulation.laws, "note", noted))
            patches.enter_context(mock.patch.object(self._simulation, "perform", performed))
            yield

    def say(self, who: str, text: str, to: Sequence[str] = ()) -> Line | None:
        """Tell a line, or add to one that was just told: another node says the same, or the same
        node to another one."""
        now = self._simulation.now
        if now > self._until:
            return None  # the simulation is being taken down
        for line in reversed(self.lines):
            if line.at < now - TOGETHER or not line.who:
                break
            if line.text == text and line.to == list(to):
                line.who += [who] if who not in line.who else []
                return line
            if line.text == text and line.who == [who] and to and self._are_nodes(line.to, to):
                line.to += to
                return line
        self.lines.append(Line(now, [who], list(to), text))
        return self.lines[-1]

    def _are_nodes(self, *sides: Sequence[str]) -> bool:
        return all(name in self._simulation.hosts for side in sides for name in side)

    def _store(self, node: str) -> list[str]:
        """Where a node's record goes."""
        return ["the next host"] if node in self._without else [self._host]

    # What happens to the job

    def _disturbed(self, fault: ScheduledFault) -> None:
        self._tell_steps()
        if fault.kind in ("cut", "slow"):
            way = "and" if fault.both_ways else "to"
            text = f"{fault.kind} between {' '.join(fault.machines)} {way} {' '.join(fault.others)}"
        else:
            text = DISTURBANCES[fault.kind].format(fault.machines)
            if fault.kind == "restart" and self._simulation.hosts[fault.machines].loop is None:
                text = f"the agent of {fault.machines} starts again"
        self._asked.clear()
        self.lines.append(Line(self._simulation.now, [], [], f"*** {text} ***"))

    def _noted(self, event: laws.Event) -> None:
        match event:
            case laws.StepFinished(_, node, _, step):
                self._steps[node] = step
            case laws.WorkersBegan(_, node, generation, step):
                self._tell_steps()
                self._told = step - 1
                self._steps.clear()
                self.say(node, f"train from step {step} on, in generation {generation}")
            case laws.LeaseOver(_, node):
                self.say("etcd", f"the lease of {node} is over")
            case laws.AgentEnded(_, node, reason):
                self.say(node, f"the agent ends: {reason}")

    def _tell_steps(self, now: float | None = None) -> None:
        """Tell which steps have been made since they were told last."""
        newest = max(self._steps.values(), default=-1)
        if newest > self._told:
            nodes = sorted(node for node, step in self._steps.items() if step == newest)
            at = self._simulation.now if now is None else now
            self.lines.append(Line(at, nodes, [], f"have made step {newest}"))
            self._told = newest

    # What an agent hears and does

    def _heard(self, machine: Machine, event: happens.Event, seen: object) -> None:
        node = machine.state.node
        match event:
            case happens.WorkerFailed(failure):
                self._tell_steps()
                self.say(node, _cause(failure), AGENT if failure.alive else ())
            case happens.WorkerMessage(_, report):
                if text := _report(report):
                    self.say(node, text, AGENT)
            case happens.WorkerSucceeded():
                self.say(node, "the script has ended, with success", AGENT)
            case happens.LeaseLost():
                self._without |= set() if self.schedule.etcd else {node}
                self.say(node, "lease lost: others may train without this node")
            case happens.LeaveOverdue() if machine.state.exitcode is None:
                self.say(node, "waits no longer for the last step: its worker is killed")
            case happens.StoreLost(reason):
                self.say(node, f"gives up: {reason}")

    def _performed(self, loop: NodeLoop, command: happens.Command) -> None:
        node = loop.node
        match command:
            case happens.StartWorkers(world):
                self.say(node, f"start the workers of generation {world.generation}")
            case happens.Stop(signum):
                if signum:
                    self.say(node, f"stop ({signal_name(signum)})", WORKER)
            case happens.Spawn():
                self.say(node, "start a new worker, which will wait for the next world")
            case happens.Kill(_, why):
                self.say(node, f"kill it: {why}", WORKER)
            case happens.Tell(_, order):
                if text := _order(order):
                    self.say(node, text, WORKER)

    # What is sent between nodes

    def _recorded(self, record: MemberRecord, **changes: Any) -> None:
        before = vars(record.member)
        for name, tell in MEMBER.items():
            is_new = name in changes and changes[name] != before[name]
            if is_new and (text := tell({**before, **changes})):
                self.say(before["node"], text, self._store(before["node"]))

    def _published(self, leader: Leader, world: World, kind: object) -> None:
        text = _phase(world)
        if text == self._world:
            return
        self._tell_steps()
        self._world = text
        if not self.schedule.etcd:
            self._host = world.host or leader._node
            self._without.clear()
        self.say(f"leader {leader._node}", text, ["all"])

    def _sent(self, end: ConnectionEnd, data: Any) -> None:
        source, target = (
            self._names.get(address, "") for address in (end.address[0], end.peer_address[0])
        )
        for message in _frames(bytes(data)):
            if "binding" in message:
                self._binding[id(end.connection)] = message["binding"]
            if text := _ballot(message, self._binding.get(id(end.connection), False)):
                if message["kind"] == "host_announcement":
                    self._host = source
                    self._without.discard(target)
                if before := self._asked.get((source, target, text)):
                    before.repeated |= before.at < self._simulation.now - 1.0
                elif line := self.say(source, text, [target]):
                    self._asked[source, target, text] = line


# --- in plain words ------------------------------------------------------------------------------


def _phase(world: World) -> str:
    nodes, number = " ".join(node.node for node in world.nodes), world.generation
    because = f": {world.reason}" if world.reason else ""
    match world.phase:
        case "waiting":
            return f"wait{because}"
        case "agreeing":
            return f"generation {number} is to be {nodes}; a majority of the voters must confirm it"
        case "running" if world.after is not None:
            leave = f", and {' '.join(world.handing_over)} leaves" if world.handing_over else ""
            return f"after step {world.after}, generation {number} is {nodes}{leave}"
        case "running":
            return f"generation {number} is {nodes}"
        case "pausing":
            return f"say which step you are in, and begin no other{because}"
        case "over":
            return f"generation {number} is over{because}"
    return f"the job is closed{because}"


#: For each field of a member's record, the words for its new value; empty: not told.
MEMBER: Mapping[str, Any] = {
    "ready": lambda it: "ready to start workers" if it["ready"] else "",
    "in_process": lambda it: "the workers here have called train" if it["in_process"] else "",
    "doubts": lambda it: _unless_empty("is {} alive? no word from there", it["doubts"]),
    "silent": lambda it: _unless_empty("{} has not answered for a lease", it["silent"]),
    "unreached": lambda it: _unless_empty("I cannot reach {}", it["unreached"]),
    "failures": lambda it: _cause(it["failures"][-1]) if it["failures"] else "",
    "accepted": lambda it: f"generation {it['accepted']} has reached me",
    "stopping": lambda it: f"I know that generation {it['stopping']} is over",
    "paused": lambda it: f"the workers here are in step {it['entered']}" * (it["entered"] >= 0),
    "gone": lambda it: f"no worker here is in generation {it['gone']} any more",
    "done": lambda it: f"the workers here have done generation {it['done']}" * (it["done"] >= 0),
    "finished": lambda it: "the data is at its end" * (it["finished"] >= 0),
    "leaving": lambda it: f"I leave ({it['leaving']})" if it["leaving"] else "",
}


def _unless_empty(words: str, nodes: Sequence[str]) -> str:
    return words.format(" ".join(nodes)) if nodes else ""


def _cause(failure: Failure) -> str:
    if failure.alive:
        return failure.message
    if failure.exitcode < 0:
        return f"its worker was killed by {signal_name(-failure.exitcode)}"
    return f"its worker has failed: {failure.message}"


def _order(order: orders.Order) -> str:
    match order:
        case orders.Enter(generation=number, size=size, after=None):
            return f"enter generation {number}, of {_workers(size)}"
        case orders.Enter(generation=number, size=size, after=step):
            return f"run through step {step}, then enter generation {number}, of {_workers(size)}"
        case orders.Ask():
            return "which step are you in? begin no other"
        case orders.Through(_, step):
            return f"run through step {step}, then stop"
        case orders.Over(finished=True):
            return "the training is done"
        case orders.Over(number):
            return f"generation {number} is over: abort, and roll back to the last whole step"
        case orders.Leave():
            return "end"
        case orders.Closed():
            return "the job is closed"
    return ""


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _report(report: orders.Report) -> str:
    match report:
        case orders.Enlisted():
            return "train was called: I can enter a world"
        case orders.Entered(_, step):
            return f"I am in step {step}"
        case orders.Stopped(_, steps):
            return f"stopped; {steps} steps are made"
        case orders.Finished(_, steps):
            return f"the data is at its end; {steps} steps are made"
    return ""


def _ballot(message: Mapping[str, Any], binding: bool) -> str:
    """The messages of an election."""
    match message:
        case {"kind": "vote_request", "binding": True, "term": term}:
            return f"vote for me as host, term {term}"
        case {"kind": "vote_request"}:
            return "would you vote for me as host?"
        case {"kind": "ballot", "granted": True}:
            return "you have my vote" if binding else "I would"
        case {"kind": "ballot", "why": why}:
            return f"no: {why}"
        case {"kind": "host_announcement", "term": term}:
            return f"I am the host, term {term}"
    return ""


def _frames(data: bytes) -> Iterator[Mapping[str, Any]]:
    while len(data) > 4:
        size = int.from_bytes(data[:4], "big")
        with contextlib.suppress(ValueError):
            message = json.loads(data[4 : 4 + size])
            if isinstance(message, dict):
                yield message
        data = data[4 + size :]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.stories")
    parser.add_argument("names", nargs="*", help="stories (default: all)")
    parser.add_argument("--rewrite", action="store_true", help="write what has changed")
    options = parser.parse_args(argv)
    paths = [FOLDER / f"{name}.txt" for name in options.names] or sorted(FOLDER.glob("*.txt"))
    changed = [(path, text) for path in paths if (text := told(path)) != path.read_text()]
    for path, text in changed:
        if options.rewrite:
            path.write_text(text)
        print(f"{'written' if options.rewrite else 'changed'}: {path.name}")
        if options.names:
            print(text)
    return 0 if options.rewrite or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
