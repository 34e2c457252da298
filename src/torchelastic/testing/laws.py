"""The checker of the laws of a job, over a history of plain events. Pure.

An observer of a job (a simulation, a chaos run, a soak) tells `Laws` what happens, in order of
time, and reads `violations` after every event. The laws, by their numbers in the design:

    1  at most one world makes progress: once a world has made a step, no older one does
    2  generations only grow, on every node; no number is given twice
    3  a step that all nodes of a world have finished is not repeated while a copy of it is left
    7  an agent that ends says why, and a job that fails names one of its first failures
    8  when enough machines are up and can talk to each other, and a majority of the last electorate
       is among them, the job trains again within one lease plus one round

It shares no rule with the product: the meaning of a majority is defined here a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple


class Electorate(NamedTuple):
    """Nodes of which a strict majority must agree; of two, the host alone is enough."""

    nodes: frozenset[str]
    host: str = ""

    def agrees(self, there: frozenset[str]) -> bool:
        given = len(self.nodes & there)
        tied = len(self.nodes) == 2 and self.host in self.nodes & there
        return 2 * given > len(self.nodes) or tied


#: Who is asked where nobody is left that knows of the job.
NOBODY = Electorate(frozenset())


# --- events: all have a time, in seconds of one clock --------------------------------------------


class Up(NamedTuple):
    """An agent has been started; again as the same node if it remembers what that was."""

    at: float
    node: str


class Down(NamedTuple):
    """An agent is gone, and its workers with it; it is not expected back as the same node."""

    at: float
    node: str


class Frozen(NamedTuple):
    """A node does nothing, until it is thawed."""

    at: float
    node: str


class Thawed(NamedTuple):
    at: float
    node: str


class Leaves(NamedTuple):
    """A node was asked to leave: it no longer trains, and agrees to what the others do."""

    at: float
    node: str


class Cut(NamedTuple):
    """Nothing gets from one node to another any more; the other direction is another event."""

    at: float
    source: str
    target: str


class Mended(NamedTuple):
    at: float
    source: str
    target: str


class Disturbed(NamedTuple):
    """Another event after which the job may need a lease and a round: a worker was killed, a node
    was asked to leave."""

    at: float
    what: str


class Formed(NamedTuple):
    """A host has published a world with a number that it had not published before."""

    at: float
    generation: int
    host: str
    nodes: frozenset[str]
    #: Who must agree to what follows it: its own electorate, and those before while it is not
    #: settled. Empty: nobody (an arbiter outside, or `--quorum none`).
    electorates: tuple[Electorate, ...] = ()
    #: The nodes that its host had: a copy of the state elsewhere could not be asked for. None: any.
    present: frozenset[str] | None = None


class TookUp(NamedTuple):
    """A node knows of a world; an observer that reports none means that all know of all."""

    at: float
    node: str
    generation: int


class Settled(NamedTuple):
    """Only the nodes of this world have a vote on what follows it."""

    at: float
    generation: int


class Began(NamedTuple):
    """A node's workers begin to train in a world, with this step."""

    at: float
    node: str
    generation: int
    step: int


class Stepped(NamedTuple):
    """A node's workers have finished a step."""

    at: float
    node: str
    generation: int
    step: int


class Forgot(NamedTuple):
    """A node has no copy of the state any more."""

    at: float
    node: str


class Finished(NamedTuple):
    """There is nothing more to train."""

    at: float


class Failed(NamedTuple):
    """A worker or a node has failed, and was in the world of this generation."""

    at: float
    node: str
    generation: int


class Ended(NamedTuple):
    """An agent has ended by itself; `asked`: it was told to leave, or heard that the job closed."""

    at: float
    node: str
    reason: str
    asked: bool


class Closed(NamedTuple):
    """The job was closed. `blamed` is the node that is named for it, if any."""

    at: float
    generation: int
    exitcode: int
    reason: str
    blamed: str = ""


Event = (
    Up
    | Down
    | Frozen
    | Thawed
    | Leaves
    | Cut
    | Mended
    | Disturbed
    | Formed
    | TookUp
    | Settled
    | Began
    | Stepped
    | Forgot
    | Finished
    | Failed
    | Ended
    | Closed
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
    #: Seconds in which a job that can go on must train again: one lease plus one round.
    within: float = float("inf")
    #: How many steps that all nodes have finished may be done again: what keeps the state may
    #: be behind by so many.
    redone: int = 0
    #: So many failures the job is asked to survive.
    endures: int = 0
    #: Seconds within which nobody can say which of two failures was the first.
    together: float = float("inf")
    #: Who must be there before the first world.
    founders: Iterable[Electorate] = ()


@dataclass
class _Known:
    """The known facts about one world."""

    nodes: frozenset[str] = frozenset()
    host: str = ""
    electorates: tuple[Electorate, ...] = ()
    present: frozenset[str] | None = None
    #: By step: the nodes that have finished it.
    finished: dict[int, set[str]] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)


class Laws:
    """Takes the events of one job in order, and records violations."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self.violations: list[Violation] = []
        self._worlds: dict[int, _Known] = {}
        #: The newest world that was formed, and the newest that made a step.
        self._latest = self._stepped = -1
        #: By node: the newest world it knows of.
        self._known: dict[str, int] = {}
        #: By node: the newest generation it began, and the newest version of the state it holds.
        self._begun: dict[str, int] = {}
        self._held: dict[str, int] = {}
        #: The last step that all nodes of a world have finished.
        self._finished = -1
        self._up: set[str] = set()
        self._frozen: set[str] = set()
        self._leaving: set[str] = set()
        self._cut: set[tuple[str, str]] = set()
        self._failures = 0
        #: Since when nothing was disturbed; when the last step was made.
        self._quiet_since = 0.0
        self._progress_at = 0.0
        #: Whether the job could train as things stand; None: not known since they have changed.
        self._able: bool | None = None
        self._is_done = False
        #: Whether the job has been closed.
        self.is_closed = False

    def note(self, event: Event) -> None:
        """Take an event."""
        self.look(event.at)
        _HANDLERS[type(event)](self, event)

    def look(self, now: float) -> None:
        """Check what must have happened by now: law 8."""
        since = max(self._quiet_since, self._progress_at)
        if now - since <= self._rules.within or self.is_closed or self._is_done:
            return
        if not self._is_able():
            return
        self._break(
            8, now, f"the job could train since {self._quiet_since:.3f} s, and no step was made"
        )
        self._progress_at = now  # say it once per limit

    @property
    def last_step_at(self) -> float:
        """The time of the last step; 0.0 if there was none."""
        return self._progress_at

    # --- laws 1, 2 and 3 -------------------------------------------------------------------------

    def _formed(self, event: Formed) -> None:
        known = self._worlds.get(event.generation)
        if known is not None and known.nodes:
            if (known.nodes, known.host) != (event.nodes, event.host):
                both = f"{_names(known.nodes)} and {_names(event.nodes)}"
                self._break(2, event.at, f"generation {event.generation} is both {both}")
            return
        known = self._world(event.generation)
        known.nodes, known.host = event.nodes, event.host
        known.electorates, known.present = event.electorates, event.present
        self._latest = max(self._latest, event.generation)
        self._able = None

    def _took_up(self, event: TookUp) -> None:
        if event.generation > self._known.get(event.node, -1):
            self._known[event.node] = event.generation
            self._able = None

    def _settled(self, event: Settled) -> None:
        known = self._world(event.generation)
        known.electorates = known.electorates[-1:]
        self._able = None

    def _began(self, event: Began) -> None:
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
        self._held[node] = max(self._held.get(node, -1), event.step - 1)

    def _holders(self, world: _Known, node: str) -> frozenset[str]:
        """The nodes that have the last finished state, and could hand it to the nodes of a
        world."""
        there = self._up - self._frozen if self._up else set(self._held)
        if world.present is not None:
            there &= world.present
        return frozenset(
            holder
            for holder in there
            if self._held.get(holder, -1) >= self._finished
            and all(self._are_linked(holder, other) for other in world.nodes | {node})
        )

    def _stepped_in(self, event: Stepped) -> None:
        known, generation = self._world(event.generation), event.generation
        finished = known.finished.setdefault(event.step, set())
        if generation < self._stepped:
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
        self._held[event.node] = max(self._held.get(event.node, -1), event.step)
        if known.nodes and known.nodes <= finished:
            self._finished = max(self._finished, event.step)
            for step in [step for step in known.finished if step < event.step]:
                del known.finished[step]
        self._progress_at = max(self._progress_at, event.at)

    def _forgot(self, event: Forgot) -> None:
        self._held.pop(event.node, None)

    def _finish(self, event: Finished) -> None:
        self._is_done = True

    # --- law 7 -----------------------------------------------------------------------------------

    def _failed(self, event: Failed) -> None:
        self._world(event.generation).failures.append(event)
        self._failures += 1
        self._disturbed(event)

    def _ended(self, event: Ended) -> None:
        if not event.reason:
            self._break(7, event.at, f"{event.node} has ended, and does not say why")
        if not event.asked and not self.is_closed:
            self._break(8, event.at, f"{event.node} has ended unasked: {event.reason}")
        self._down(event)

    def _close(self, event: Closed) -> None:
        self.is_closed = True
        if not event.reason:
            self._break(7, event.at, "the job is closed, and nobody says why")
        if not event.exitcode:
            return
        if self._failures < self._rules.endures:
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
        """Return whether nodes that can all talk to each other, and to no other node, are
        enough."""
        if self._able is None:
            self._able = any(self._are_enough(group) for group in self._groups())
        return self._able

    def _are_enough(self, group: frozenset[str]) -> bool:
        return (
            len(group) >= self._rules.min_nodes
            and all(self._agrees(each, group) for each in self._electorates_for(group))
            and all(self._are_linked(one, other) for one, other in combinations(group, 2))
        )

    def _agrees(self, electorate: Electorate, group: frozenset[str]) -> bool:
        """Return whether an electorate agrees, counting leaving nodes that can say so; but one of
        it must stay: nobody else could host."""
        leaving = {
            node
            for node in self._leaving - self._frozen
            if all(self._are_linked(node, other) for other in group)
        }
        stay = not electorate.nodes or bool(electorate.nodes & group)
        return stay and electorate.agrees(group | leaving)

    def _electorates_for(self, group: frozenset[str]) -> Iterable[Electorate]:
        """The electorates that these nodes know of: for a world that only lost nodes know, nobody
        can be asked."""
        newest = self._latest
        if self._known:
            newest = max(self._known.get(node, -1) for node in group)
        if newest < 0:
            return self._rules.founders if self._latest < 0 else [NOBODY]
        return self._world(newest).electorates

    def _groups(self) -> list[frozenset[str]]:
        """The nodes that are up, grouped by who can reach whom."""
        left, groups = self._up - self._frozen - self._leaving, []
        while left:
            group, edge = set[str](), {left.pop()}
            while edge:
                group |= edge
                edge = {
                    node
                    for node in left
                    if any(
                        (node, one) not in self._cut or (one, node) not in self._cut for one in edge
                    )
                }
                left -= edge
            groups.append(frozenset(group))
        return groups

    def _are_linked(self, one: str, other: str) -> bool:
        return (one, other) not in self._cut and (other, one) not in self._cut

    def _came_up(self, event: Up) -> None:
        self._up.add(event.node)
        self._disturbed(event)

    def _down(self, event: Down | Ended) -> None:
        self._up.discard(event.node)
        self._frozen.discard(event.node)
        self._leaving.discard(event.node)
        self._held.pop(event.node, None)
        self._disturbed(event)

    def _freeze(self, event: Frozen) -> None:
        self._frozen.add(event.node)
        self._disturbed(event)

    def _thaw(self, event: Thawed) -> None:
        self._frozen.discard(event.node)
        self._disturbed(event)

    def _leave(self, event: Leaves) -> None:
        self._leaving.add(event.node)
        self._disturbed(event)

    def _cut_off(self, event: Cut) -> None:
        self._cut.add((event.source, event.target))
        self._disturbed(event)

    def _mend(self, event: Mended) -> None:
        self._cut.discard((event.source, event.target))
        self._disturbed(event)

    def _disturbed(self, event: Event) -> None:
        self._quiet_since, self._able = event.at, None

    # --- small parts -----------------------------------------------------------------------------

    def _world(self, generation: int) -> _Known:
        known = self._worlds.get(generation)
        if known is None:
            known = self._worlds[generation] = _Known()
        return known

    def _break(self, law: int, at: float, sentence: str) -> None:
        self.violations.append(Violation(law, at, sentence))


_HANDLERS: Mapping[type, Callable[[Laws, Any], None]] = {
    Up: Laws._came_up,
    Down: Laws._down,
    Frozen: Laws._freeze,
    Thawed: Laws._thaw,
    Leaves: Laws._leave,
    Cut: Laws._cut_off,
    Mended: Laws._mend,
    Disturbed: Laws._disturbed,
    Formed: Laws._formed,
    TookUp: Laws._took_up,
    Settled: Laws._settled,
    Began: Laws._began,
    Stepped: Laws._stepped_in,
    Forgot: Laws._forgot,
    Finished: Laws._finish,
    Failed: Laws._failed,
    Ended: Laws._ended,
    Closed: Laws._close,
}


def _names(nodes: Iterable[str]) -> str:
    return " ".join(sorted(nodes)) or "nobody"


def check(events: Iterable[Event], rules: Rules | None = None) -> list[Violation]:
    """The violations in a whole history."""
    laws = Laws(rules)
    for event in events:
        laws.note(event)
    return laws.violations
