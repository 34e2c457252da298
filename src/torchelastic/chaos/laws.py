"""The checker of the laws of a job, over a history of plain events. Pure.

An observer of a job (a simulation, a chaos run, a soak) passes events to `Laws` in order of time,
and reads `violations` after every event. The laws, by their numbers in the design:

    1  at most one world makes progress: once a world has made a step, no older one finishes that
       step or a later one. A node that leaves may finish the agreed last step late: it is earlier
       than the first step of the world that follows, which began with its result
    2  generations only grow, on every node; no number is given twice
    3  a step that all nodes of a world have finished is not repeated while a copy of it is left.
       With an external arbiter (etcd), a node has its copy while its lease there is alive, whether
       or not other nodes reach it
    7  an agent that ends says why, and a job that fails names one of its first failures
    8  when enough machines are up and can talk to each other, and a majority of the last electorate
       is among them, the job trains again within one lease plus one round. With an arbiter, the
       newest state must be among them: they wait for holders whose leases are alive
    9  a world of a sharded model has whole replicas only, and a worker keeps its coordinate; law 3
       holds while a whole replica has the step

It shares no rule with the product: the meaning of a majority is defined here a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import inf
from typing import Any, NamedTuple


class LawElectorate(NamedTuple):
    """Nodes, a strict majority of which must agree; of two, the host alone is enough."""

    nodes: frozenset[str]
    host: str = ""

    def agrees(self, there: frozenset[str]) -> bool:
        given = len(self.nodes & there)
        tied = len(self.nodes) == 2 and self.host in self.nodes & there
        return 2 * given > len(self.nodes) or tied


#: The electorate if no node that knows the job is left.
NOBODY = LawElectorate(frozenset())


# --- events: all have a time, in seconds of one clock --------------------------------------------


class NodeUp(NamedTuple):
    """An agent has been started; again as the same node if it remembers what that was."""

    at: float
    node: str


class NodeDown(NamedTuple):
    """An agent is gone, and its workers with it; it is not expected back as the same node."""

    at: float
    node: str


class NodeFrozen(NamedTuple):
    """A node is stopped until it is thawed."""

    at: float
    node: str


class NodeThawed(NamedTuple):
    at: float
    node: str


class NodeLeaves(NamedTuple):
    """A node was asked to leave: it stops training, and agrees to the others' decisions."""

    at: float
    node: str


class PathCut(NamedTuple):
    """Messages from one node to another are blocked; the other direction is another event."""

    at: float
    source: str
    target: str


class PathRestored(NamedTuple):
    at: float
    source: str
    target: str


class LeaseOpened(NamedTuple):
    """A node has a lease at the external arbiter."""

    at: float
    node: str


class LeaseOver(NamedTuple):
    """A node's lease has expired, or the node has given it back. A lease that another node has
    revoked is alive until it would have expired."""

    at: float
    node: str


class JobDisturbed(NamedTuple):
    """Another event after which the job may need a lease and a round: a killed worker, a leave."""

    at: float
    what: str


class WorldPublished(NamedTuple):
    """A host has published a world with a new number."""

    at: float
    generation: int
    host: str
    nodes: frozenset[str]
    #: The electorates of the next world: its own, and those before while it is not confirmed.
    #: Empty: none (an external arbiter, or `--quorum none`).
    electorates: tuple[LawElectorate, ...] = ()
    #: The nodes that its host could reach: copies of the state elsewhere do not count. None: any.
    present: frozenset[str] | None = None


class WorldTakenUp(NamedTuple):
    """A node knows a world. An observer that never reports this means that all nodes know all
    worlds."""

    at: float
    node: str
    generation: int


class WorldConfirmed(NamedTuple):
    """Only the nodes of this world have a vote on the next one."""

    at: float
    generation: int


class WorkersBegan(NamedTuple):
    """A node's workers begin to train in a world, with this step."""

    at: float
    node: str
    generation: int
    step: int
    #: The local ranks of the workers.
    ranks: tuple[int, ...] = (0,)


class StepFinished(NamedTuple):
    """A node's workers have finished a step."""

    at: float
    node: str
    generation: int
    step: int
    ranks: tuple[int, ...] = (0,)


class StateForgotten(NamedTuple):
    """A node, or these workers of it, has no copy of the state left."""

    at: float
    node: str
    ranks: tuple[int, ...] | None = None


class WorkerEntered(NamedTuple):
    """A worker of a sharded model enters a world."""

    at: float
    node: str
    #: Names the process: a replacement is another one.
    process: str
    #: Its number in a replica, when the process was started.
    coordinate: int
    generation: int
    rank: int
    size: int


class TrainingFinished(NamedTuple):
    """The training is done."""

    at: float


class NodeFailed(NamedTuple):
    """A worker or a node of this generation has failed."""

    at: float
    node: str
    generation: int


class AgentEnded(NamedTuple):
    """An agent has exited; `asked`: it was told to leave, or learned that the job closed."""

    at: float
    node: str
    reason: str
    asked: bool


class ClosedJob(NamedTuple):
    """The job was closed; `blamed` is the node named as the cause, if any."""

    at: float
    generation: int
    exitcode: int
    reason: str
    blamed: str = ""


Event = (
    NodeUp
    | NodeDown
    | NodeFrozen
    | NodeThawed
    | NodeLeaves
    | PathCut
    | PathRestored
    | LeaseOpened
    | LeaseOver
    | JobDisturbed
    | WorldPublished
    | WorldTakenUp
    | WorldConfirmed
    | WorkersBegan
    | StepFinished
    | StateForgotten
    | WorkerEntered
    | TrainingFinished
    | NodeFailed
    | AgentEnded
    | ClosedJob
)


class Violation(NamedTuple):
    law: int
    at: float
    sentence: str

    def __str__(self) -> str:
        return f"law {self.law}, at {self.at:.3f} s: {self.sentence}"


@dataclass(kw_only=True)
class Rules:
    """The job's promises that depend on its settings."""

    min_nodes: int = 1
    #: The number of workers in a replica (0: the model is not sharded), and on each node.
    replica: int = 0
    workers: int = 1
    #: Seconds in which a job that can continue must train again: one lease plus one round.
    within: float = float("inf")
    #: How many finished steps may be repeated: copies of the state may lag by this many.
    redone: int = 0
    #: Whether nodes have leases at an external arbiter (etcd), whose events are reported.
    arbiter: bool = False
    #: The number of failures that the job must survive.
    endures: int = 0
    #: Two failures within this many seconds have no known order.
    together: float = float("inf")
    #: The electorates that must agree to the first world.
    founders: Iterable[LawElectorate] = ()


@dataclass
class _Known:
    """The known facts about one world."""

    nodes: frozenset[str] = frozenset()
    host: str = ""
    electorates: tuple[LawElectorate, ...] = ()
    present: frozenset[str] | None = None
    #: The nodes that had a lease when it was published.
    leased: frozenset[str] = frozenset()
    #: The first step that it has made; infinity: none.
    first: float = inf
    #: The nodes that have finished each step.
    finished: dict[int, set[str]] = field(default_factory=dict)
    failures: list[NodeFailed] = field(default_factory=list)


# --- who has which state, and who reaches whom ---------------------------------------------------


class HeldState:
    """The newest step that each worker has; of a sharded model, a worker has one shard of it."""

    def __init__(self, replica: int, workers: int) -> None:
        """`replica`: the number of workers in a replica, 0 if the model is not sharded; `workers`:
        on each node."""
        self._replica, self._workers = replica, workers
        self._steps: dict[str, dict[int, int]] = {}
        self._places: dict[str, int] = {}

    def hold(self, node: str, ranks: Iterable[int], step: int) -> None:
        held = self._steps.setdefault(node, {})
        for rank in ranks:
            held[rank] = max(held.get(rank, -1), step)

    def forget(self, node: str, ranks: Iterable[int] | None = None) -> None:
        """Forget what these workers have; None: all of the node."""
        held = self._steps.get(node, {})
        for rank in tuple(held) if ranks is None else ranks:
            held.pop(rank, None)

    def forget_all(self) -> None:
        self._steps.clear()

    def note_place(self, node: str, coordinate: int) -> None:
        """Note the place of a node among those of a replica."""
        self._places[node] = coordinate // self._workers

    @property
    def nodes(self) -> set[str]:
        return set(self._steps)

    def holders(self, nodes: Iterable[str], step: int) -> frozenset[str]:
        """Those of these nodes that have the step; empty if they do not have all shards of it."""
        size, workers = self._replica, self._workers
        if size <= workers:
            size = max(size, 1)
            blocks = [range(first, first + size) for first in range(0, workers, size)]
            return frozenset(n for n in nodes if any(self._has(n, block, step) for block in blocks))
        whole = frozenset(node for node in nodes if self._has(node, range(workers), step))
        places = {self._places.get(node) for node in whole}
        return whole if len(places) == size // workers else frozenset()

    def _has(self, node: str, ranks: Iterable[int], step: int) -> bool:
        held = self._steps.get(node, {})
        return all(held.get(rank, -1) >= step for rank in ranks)


#: The ways that are cut: from a node, to a node.
Cuts = Set[tuple[str, str]]


def are_linked(one: str, other: str, cut: Cuts) -> bool:
    """Return whether two nodes reach each other, both ways."""
    return (one, other) not in cut and (other, one) not in cut


def all_linked(nodes: Collection[str], cut: Cuts) -> bool:
    return all(are_linked(one, other, cut) for one, other in combinations(nodes, 2))


def groups(nodes: Set[str], cut: Cuts) -> list[frozenset[str]]:
    """The nodes in groups, none of which hears anything of another.

    >>> sorted(map(sorted, groups({"a", "b", "c"}, {("a", "c"), ("c", "a"), ("b", "c")})))
    [['a', 'b', 'c']]
    """
    left, found = set(nodes), []
    while left:
        group, edge = set[str](), {left.pop()}
        while edge:
            group |= edge
            edge = {
                node
                for node in left
                if any((node, one) not in cut or (one, node) not in cut for one in edge)
            }
            left -= edge
        found.append(frozenset(group))
    return found


# --- the laws ------------------------------------------------------------------------------------

#: Events after which the job may need a lease and a round.
_DISTURBING = (
    NodeUp, NodeDown, NodeFrozen, NodeThawed, NodeLeaves, NodeFailed, AgentEnded, PathCut,
    PathRestored, LeaseOpened, LeaseOver, JobDisturbed,
)  # fmt: skip


class Laws:
    """Takes the events of one job in order, and records violations."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self.violations: list[Violation] = []
        self._worlds: dict[int, _Known] = {}
        #: The newest published world, and the newest that made a step.
        self._latest = self._stepped = -1
        #: The newest world that each node knows.
        self._known: dict[str, int] = {}
        #: By node: the newest generation it started; and the state that its workers have.
        self._begun: dict[str, int] = {}
        self._held = HeldState(self._rules.replica, self._rules.workers)
        #: The last step that all nodes of a world have finished.
        self._finished = -1
        self._up: set[str] = set()
        self._frozen: set[str] = set()
        self._leaving: set[str] = set()
        self._cut: set[tuple[str, str]] = set()
        #: The nodes with a lease at the arbiter, if there is one.
        self._leased: set[str] = set()
        self._failures = 0
        #: The time of the last disturbance, and of the last step.
        self._quiet_since = 0.0
        self._progress_at = 0.0
        #: Whether the job can train now; None: not computed since the last change.
        self._able: bool | None = None
        self._is_done = False
        #: Whether the job has been closed.
        self.is_closed = False

    def note(self, event: Event) -> None:
        """Process an event."""
        self.look(event.at)
        _HANDLERS[type(event)](self, event)
        if isinstance(event, _DISTURBING):
            self._quiet_since, self._able = event.at, None

    def look(self, now: float) -> None:
        """Check law 8, which depends on time."""
        since = max(self._quiet_since, self._progress_at)
        if now - since <= self._rules.within or self.is_closed or self._is_done:
            return
        if not self._is_able():
            return
        self._break(
            8, now, f"the job could train since {self._quiet_since:.3f} s, and no step was made"
        )
        self._progress_at = now  # report it once per limit

    # --- laws 1, 2 and 3 -------------------------------------------------------------------------

    def _formed(self, event: WorldPublished) -> None:
        known = self._worlds.get(event.generation)
        if known is not None and known.nodes:
            if (known.nodes, known.host) != (event.nodes, event.host):
                both = f"{_names(known.nodes)} and {_names(event.nodes)}"
                self._break(2, event.at, f"generation {event.generation} is both {both}")
            return
        known = self._world(event.generation)
        known.nodes, known.host = event.nodes, event.host
        known.electorates, known.present = event.electorates, event.present
        known.leased = frozenset(self._leased)
        self._latest = max(self._latest, event.generation)
        self._able = None

    def _took_up(self, event: WorldTakenUp) -> None:
        if event.generation > self._known.get(event.node, -1):
            self._known[event.node] = event.generation
            self._able = None

    def _confirmed(self, event: WorldConfirmed) -> None:
        known = self._world(event.generation)
        known.electorates = known.electorates[-1:]
        self._able = None

    def _began(self, event: WorkersBegan) -> None:
        node, generation = event.node, event.generation
        before = self._begun.get(node, -1)
        if generation <= before:
            self._break(2, event.at, f"{node} begins generation {generation} after {before}")
        self._begun[node] = max(before, generation)
        if event.step <= self._finished - self._rules.redone:
            holders = self._holders(self._world(generation), node)
            if holders:
                self._break(
                    3,
                    event.at,
                    f"generation {generation} begins with step {event.step} on {node}, but step "
                    f"{self._finished} was finished, and {_names(holders)} has it",
                )
            else:
                self._finished = event.step - 1
                self._held.forget_all()  # what is left of later steps is void
        self._held.hold(node, event.ranks, event.step - 1)

    def _holders(self, world: _Known, node: str) -> frozenset[str]:
        """The nodes that have the last finished state and could hand it to the nodes of a world.
        With an arbiter, silence between nodes is no excuse: the world has to wait, or to be
        another one."""
        if self._rules.arbiter:
            return self._held.holders(self._leased & world.leased, self._finished)
        there = self._up - self._frozen if self._up else self._held.nodes
        if world.present is not None:
            there &= world.present
        linked = (
            holder
            for holder in there
            if all(are_linked(holder, other, self._cut) for other in world.nodes | {node})
        )
        return self._held.holders(linked, self._finished)

    def _stepped_in(self, event: StepFinished) -> None:
        known, generation = self._world(event.generation), event.generation
        finished = known.finished.setdefault(event.step, set())
        known.first = min(known.first, event.step)
        if generation < self._stepped and event.step >= self._made_after(generation):
            self._break(
                1,
                event.at,
                f"step {event.step} of generation {generation} on {event.node}, after a step of "
                f"generation {self._stepped}",
            )
        finished.add(event.node)
        self._stepped = max(self._stepped, generation)
        if self._begun.get(event.node, -1) < generation:
            self._begun[event.node] = generation
        self._held.hold(event.node, event.ranks, event.step)
        if known.nodes and known.nodes <= finished:
            self._finished = max(self._finished, event.step)
            for step in [step for step in known.finished if step < event.step]:
                del known.finished[step]
        self._progress_at = max(self._progress_at, event.at)

    def _made_after(self, generation: int) -> float:
        """The first step that a later world has made."""
        return min(known.first for number, known in self._worlds.items() if number > generation)

    def _forgot(self, event: StateForgotten) -> None:
        self._held.forget(event.node, event.ranks)

    def _finish(self, event: TrainingFinished) -> None:
        self._is_done = True

    # --- law 9 -----------------------------------------------------------------------------------

    def _entered(self, event: WorkerEntered) -> None:
        size, generation = self._rules.replica, event.generation
        self._held.note_place(event.node, event.coordinate)
        if event.size % size:
            whole = f"{event.size} workers are not whole replicas of {size}"
            self._break(9, event.at, f"generation {generation}: {whole}")
        if event.rank % size != event.coordinate % size:
            other = f"rank {event.rank} of generation {generation}"
            began = event.coordinate % size
            self._break(9, event.at, f"{event.process} has coordinate {began}, and is {other}")

    # --- law 7 -----------------------------------------------------------------------------------

    def _failed(self, event: NodeFailed) -> None:
        self._world(event.generation).failures.append(event)
        self._failures += 1

    def _ended(self, event: AgentEnded) -> None:
        if not event.reason:
            self._break(7, event.at, f"{event.node} has ended, and does not say why")
        if not event.asked and not self.is_closed:
            self._break(8, event.at, f"{event.node} has ended unasked: {event.reason}")
        self._down(event)

    def _close(self, event: ClosedJob) -> None:
        self.is_closed = True
        if not event.reason:
            self._break(7, event.at, "the job is closed without a reason")
        if not event.exitcode:
            return
        if self._failures < self._rules.endures and not self._is_done:
            self._break(8, event.at, f"the job has given up: {event.reason}")
        failures = self._world(event.generation).failures
        if not failures:
            return
        first = [one for one in failures if one.at <= failures[0].at + self._rules.together]
        if event.blamed not in {one.node for one in first}:
            names = _names(frozenset(one.node for one in first))
            blamed = event.blamed or "nobody"
            self._break(7, event.at, f"{blamed} is blamed, but {names} failed first")

    # --- law 8 -----------------------------------------------------------------------------------

    def _is_able(self) -> bool:
        """Return whether one group of connected nodes is enough to train. With an arbiter, that is
        open while some nodes of a larger group do not reach each other: the job may be theirs."""
        if self._able is None:
            there = groups(self._up - self._frozen - self._leaving, self._cut)
            if self._rules.arbiter:
                torn = [len(group) for group in there if not all_linked(group, self._cut)]
                there = [group for group in there if len(group) >= max(torn, default=0)]
            self._able = any(self._are_enough(group) for group in there)
        return self._able

    def _are_enough(self, group: frozenset[str]) -> bool:
        return (
            len(group) >= self._rules.min_nodes
            and all_linked(group, self._cut)
            and self._has_state(group)
            and all(self._agrees(each, group) for each in self._electorates_for(group))
        )

    def _has_state(self, group: frozenset[str]) -> bool:
        """Return whether these nodes need not wait for the state of others, whose leases are
        alive."""
        if not self._rules.arbiter or self._finished < self._rules.redone:
            return True
        has_it = partial(self._held.holders, step=self._finished)
        return bool(has_it(group)) or not has_it(self._leased)

    def _agrees(self, electorate: LawElectorate, group: frozenset[str]) -> bool:
        """Return whether an electorate agrees, counting leaving nodes that can be reached. One of
        its nodes must stay: no other could host."""
        leaving = {
            node
            for node in self._leaving - self._frozen
            if all(are_linked(node, other, self._cut) for other in group)
        }
        stay = not electorate.nodes or bool(electorate.nodes & group)
        return stay and electorate.agrees(group | leaving)

    def _electorates_for(self, group: frozenset[str]) -> Iterable[LawElectorate]:
        """The electorates that these nodes know: voters of a world that only lost nodes know cannot
        be asked."""
        newest = self._latest
        if self._known:
            newest = max(self._known.get(node, -1) for node in group)
        if newest < 0:
            return self._rules.founders if self._latest < 0 else [NOBODY]
        return self._world(newest).electorates

    def _down(self, event: NodeDown | AgentEnded) -> None:
        for nodes in (self._up, self._frozen, self._leaving, self._leased):
            nodes.discard(event.node)
        self._held.forget(event.node)

    # --- small parts -----------------------------------------------------------------------------

    def _world(self, generation: int) -> _Known:
        known = self._worlds.get(generation)
        if known is None:
            known = self._worlds[generation] = _Known()
        return known

    def _break(self, law: int, at: float, sentence: str) -> None:
        self.violations.append(Violation(law, at, sentence))


_HANDLERS: Mapping[type, Callable[[Laws, Any], None]] = {
    NodeUp: lambda it, event: it._up.add(event.node),
    NodeDown: Laws._down,
    NodeFrozen: lambda it, event: it._frozen.add(event.node),
    NodeThawed: lambda it, event: it._frozen.discard(event.node),
    NodeLeaves: lambda it, event: it._leaving.add(event.node),
    PathCut: lambda it, event: it._cut.add((event.source, event.target)),
    PathRestored: lambda it, event: it._cut.discard((event.source, event.target)),
    LeaseOpened: lambda it, event: it._leased.add(event.node),
    LeaseOver: lambda it, event: it._leased.discard(event.node),
    JobDisturbed: lambda it, event: None,
    WorldPublished: Laws._formed,
    WorldTakenUp: Laws._took_up,
    WorldConfirmed: Laws._confirmed,
    WorkersBegan: Laws._began,
    StepFinished: Laws._stepped_in,
    StateForgotten: Laws._forgot,
    WorkerEntered: Laws._entered,
    TrainingFinished: Laws._finish,
    NodeFailed: Laws._failed,
    AgentEnded: Laws._ended,
    ClosedJob: Laws._close,
}


def _names(nodes: Iterable[str]) -> str:
    return " ".join(sorted(nodes)) or "nobody"


def check(events: Iterable[Event], rules: Rules | None = None) -> list[Violation]:
    """The violations in a whole history."""
    laws = Laws(rules)
    for event in events:
        laws.note(event)
    return laws.violations
