"""The leader's state of a round, and its changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torchelastic.config import Grow, LaunchConfig, WorldSizes
from torchelastic.events.failure import Failure
from torchelastic.records import replace
from torchelastic.rendezvous import held_out, majority
from torchelastic.rendezvous.majority import Roll
from torchelastic.rendezvous.restart_policy import IN_VAIN, Kind
from torchelastic.rendezvous.world import Base, Member, World

#: A world that lived this long, in seconds, has trained where nobody tells of steps.
TRAINED_AFTER = 30.0
#: How many nodes a reason names; it is sent to all of them.
NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """The user's settings for rounds."""

    min_nodes: int
    max_nodes: int
    settle: float = 1.0
    wait_for_nodes: float = 3600.0
    grow: Grow = field(default_factory=Grow)
    world_sizes: WorldSizes = field(default_factory=WorldSizes)
    max_restarts: int = 100
    count_resizes: bool = False
    #: Whether the host of the store needs a majority to go on without the others.
    quorum: bool = True
    #: Seconds after which a node that cannot be reached has stopped its workers.
    lease: float = 3.0

    @classmethod
    def from_config(cls, config: LaunchConfig) -> RoundRules:
        return cls(
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            settle=config.settle,
            wait_for_nodes=config.wait_for_nodes,
            grow=config.grow,
            world_sizes=config.world_sizes,
            max_restarts=config.max_restarts,
            count_resizes=config.count_resizes,
            quorum=config.quorum == "majority",
            lease=config.lease,
        )


@dataclass(frozen=True, kw_only=True)
class Present:
    """A member, and since when it is one."""

    member: Member
    #: Orders members by arrival, the same for every leader.
    created: int
    #: When the leader first saw it: its arrival, ready or not.
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class Witnessed:
    """The witness's votes, as the host knows them."""

    url: str = ""
    #: Those that this host has in its term.
    held: frozenset[str] = frozenset()
    #: Those that it cannot have any more, and the node that has each.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Why it did not answer when it was asked last.
    silent: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """Everything the leader knows."""

    world: World | None = None
    members: Mapping[str, Present] = field(default_factory=dict)
    #: Failures of the world's generation in the order in which they became known.
    failures: tuple[Failure, ...] = ()
    #: Members of the world that finished it; they stay finished if they leave now.
    done: frozenset[str] = frozenset()
    #: After how many steps a worker has come to the end of its data, the first if several have:
    #: the training is done.
    finished: int = -1
    #: Failures from before the training was done: they are nobody's any more.
    forgiven: tuple[Failure, ...] = ()
    #: Members of the world that went without a word.
    lost: tuple[str, ...] = ()
    #: Those that were given up because others could not reach them, though the store could.
    unreachable: frozenset[str] = frozenset()
    step: int = -1
    #: The newest that a member has told of.
    base: Base | None = None
    #: When the world took its phase, on the leader's clock.
    since: float = 0.0
    #: When it was last published.
    said_at: float = 0.0
    #: When the generation began to run.
    running_since: float = 0.0
    #: The leader hosts the store: as which node, and in which term.
    host: str = ""
    term: int = 0
    #: Nodes that are gone after saying goodbye.
    left: frozenset[str] = frozenset()
    #: Nodes that are known to be no more, though they never said goodbye.
    dead: frozenset[str] = frozenset()
    #: Who must agree to the next world; None: nobody but the store.
    roll: Roll | None = None
    witness: Witnessed = field(default_factory=Witnessed)
    #: No first world before this time.
    may_begin_at: float = 0.0
    #: A checkpoint was written since the waiting newcomers came (`--grow after-checkpoint:PATH`).
    checkpoint: bool = False
    #: Nodes that hold up the others, or did when they were last in a world.
    slow: frozenset[str] = frozenset()
    #: When the holds of `World.held` began, and who is held out now (`with_holds`).
    held_since: Mapping[str, float] = field(default_factory=dict)
    out: frozenset[str] = frozenset()
    #: Nodes whose agents were started anew: what an agent before them did is not held against them.
    resumed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """The world to publish now, if any, and when to ask again."""

    world: World | None = None
    kind: Kind | None = None
    wake_at: float | None = None
    #: Votes of the witness, with which a world could be formed at once.
    claims: tuple[str, ...] = ()


class Draft:
    """A state under change: what thousands of reports change is copied only once."""

    def __init__(self, state: RoundState) -> None:
        self.members = dict(state.members)
        self._state = state
        self._failures = dict.fromkeys(state.failures)
        self._done = set(state.done)
        self._lost = dict.fromkeys(state.lost)
        self._left = set(state.left)
        self._resumed = set(state.resumed)
        self._finished = state.finished
        self._step = state.step
        self._base = state.base

    def finish(self) -> RoundState:
        """The state as it is now."""
        return replace(
            self._state,
            members=self.members,
            failures=tuple(self._failures),
            done=frozenset(self._done),
            lost=tuple(self._lost),
            left=frozenset(self._left),
            resumed=frozenset(self._resumed),
            finished=self._finished,
            step=self._step,
            base=self._base,
        )

    def see(self, member: Member, created: int, now: float) -> None:
        """Note that a member joined or changed its record."""
        before = self.members.get(member.node)
        if before is not None and before.created != created:
            self.lose(member.node)
            before = None
        if before is None and member.resumed:
            self._resumed.add(member.node)
        seen_at = before.seen_at if before else now
        self._left.discard(member.node)
        if member.base is not None and (self._base is None or self._base < member.base):
            self._base = member.base
        self.members[member.node] = Present(member=member, created=created, seen_at=seen_at)
        self._note_report(member)

    def lose(self, node: str) -> None:
        """Note that a member's key is gone: it failed, or left after saying so."""
        present = self.members.pop(node, None)
        world = self._state.world
        if present is not None and present.member.leaving:
            self._left.add(node)
        if present is None or world is None or not _is_missed(world, present.member):
            return
        if node not in self._done:
            self._lost[node] = None

    def _note_report(self, member: Member) -> None:
        """Note what a member of the current generation reports about it."""
        world, node = self._state.world, member.node
        if world is None or world.phase == "closed":
            return
        is_leaver = node in world.handing_over
        if world.find(node) is None and not is_leaver:
            return
        last = world.generation - is_leaver
        theirs = [item for item in member.failures if item.generation >= last]
        self._failures.update(dict.fromkeys(theirs))
        if member.done == world.generation:
            self._done.add(node)
        self._finished = _first_finished(self._finished, member, world.generation)
        self._step = max(self._step, member.step)
        if world.phase in ("running", "pausing") and member.gone >= world.generation:
            explained = theirs or member.leaving or node in self._done
            if not explained:
                # Given up and back before anybody noticed: its workers are gone all the same.
                self._lost[node] = None


def seen(state: RoundState, member: Member, created: int, now: float) -> RoundState:
    """The state after a member joined or changed its record."""
    draft = Draft(state)
    draft.see(member, created, now)
    return draft.finish()


def lost(state: RoundState, node: str) -> RoundState:
    """The state after a member's key is gone: it failed, or left after saying so."""
    draft = Draft(state)
    draft.lose(node)
    return draft.finish()


def _is_missed(world: World, member: Member) -> bool:
    """Return whether others wait for something from a node that is gone."""
    if member.node in world.handing_over:
        return member.gone < world.generation - 1
    if world.place(member.node) is None:
        return False
    if member.leaving:  # it has said so, but may have had a step to run through
        return world.phase == "over" and world.after is not None and member.gone < world.generation
    return True


def taken_over(world: World, now: float) -> RoundState:
    """The state of a world for a new leader; how long it has run is unknown: neither briefly nor
    long."""
    return RoundState(
        world=world,
        base=world.base,
        since=now,
        said_at=now,
        running_since=now - IN_VAIN,
        held_since=held_out.begun({}, (), world.held, now),
    )


def hosted(
    state: RoundState,
    host: str,
    term: int,
    stored: Mapping[str, Any] | None,
    *,
    settled: int = -1,
    quorum: bool = True,
) -> RoundState:
    """The state of a leader that hosts the store; `stored` is the stored roll, and `settled` the
    last world stored as settled.

    Without `quorum` nobody has to agree: the list of unreachable voters would grow without end.
    """
    world = state.world
    roll = Roll() if quorum else None
    if world is not None and world.nodes:
        nodes = [node.node for node in world.nodes]
        if quorum:
            known = stored if settled != world.generation else None
            roll = majority.from_json(
                known, world.generation, nodes, world.host, witness=bool(world.witness)
            )
        if world.term != term and world.phase in ("agreeing", "running", "pausing"):
            # Those who voted have stopped their workers, and the others cannot go on without them.
            reason = "the rendezvous host was lost"
            world = replace(world, phase="over", after=None, ending="node-failure", reason=reason)
    return replace(state, world=world, host=host, term=term, roll=roll)


def votes(state: RoundState) -> set[str]:
    """The nodes that agree to another world: those whose workers have stopped, or wait at a step,
    or that have none in the last one, and those that left after saying so."""
    world = state.world
    if world is None:
        return set()
    return {node for node in _asked(state, world) if _agrees(state, world, node)}


def departing(state: RoundState) -> set[str]:
    """Voters that need not take up the next world: they have left after saying so, or have
    announced it, and vote for nobody any more. An announced leave is consent."""
    world = state.world
    if world is None:
        return set()
    asked = _asked(state, world)
    gone = {node for node in asked - state.members.keys() if _agrees(state, world, node)}
    return gone | {
        node for node, one in state.members.items() if one.member.leaving and node in asked
    }


def _asked(state: RoundState, world: World) -> Set[str]:
    """The voters on what follows the world."""
    electorates = state.roll.electorates if state.roll is not None else ()
    return world.members.union(*(electorate.nodes for electorate in electorates))


def follows_later_host(state: RoundState) -> bool:
    """Return whether the last world is of an earlier host. All members have stopped its workers
    before they followed this host, and could no longer be told of that world."""
    return state.world is not None and state.world.term != state.term


def _agrees(state: RoundState, world: World, node: str) -> bool:
    if node in state.dead:
        return True
    present = state.members.get(node)
    if present is None:
        return node in state.left
    member = present.member
    if follows_later_host(state):
        return True
    if world.place(node) is None:
        # Who does not have the last world could vote for another host that lacks it, too.
        return member.accepted == world.generation
    return member.gone >= world.generation or member.paused == world.generation


def to_claim(state: RoundState) -> tuple[str, ...] | None:
    """The witness's votes that are missing for a quorum; None if they would not be enough, or
    cannot be had."""
    if state.roll is None:
        return ()
    missing = majority.to_claim(state.roll.electorates, votes(state) | state.witness.held)
    return None if missing is None or state.witness.refused.keys() & set(missing) else missing


def has_ended(state: RoundState) -> bool:
    """Return whether the job is closed, or only the host could continue: all others have left."""
    if state.world is not None and state.world.phase == "closed":
        return True
    electorates = state.roll.electorates if state.roll is not None else ()
    alone = not state.members.keys() - {state.host}
    return alone and majority.agreed(electorates, votes(state) | {state.host})


def roll_after(state: RoundState, world: World) -> Roll:
    """The roll for what follows `world`, which the host forms next."""
    assert state.roll is not None
    return majority.formed(
        state.roll,
        world.generation,
        [node.node for node in world.nodes],
        world.host,
        witness=bool(world.witness),
        held=state.witness.held,
    )


def may_step_elsewhere(state: RoundState) -> bool:
    """Return whether no node that trained in the last world is known to have stopped.

    With a quorum that is possible only if one node trained alone, and its host did not: a host that
    has just taken over waits until that node's lease must have ended.
    """
    world = state.world
    if world is None or state.roll is None or not world.nodes:
        return False
    return not any(_agrees(state, world, node.node) for node in world.nodes)


def settled(state: RoundState) -> RoundState:
    """The state after enough voters have the last world: then only its nodes have a vote."""
    if state.roll is None or not state.roll.before:
        return state
    have = {node: present.member.accepted for node, present in state.members.items()}
    roll = majority.settled(state.roll, have, departing(state))
    return state if roll == state.roll else replace(state, roll=roll)


def can_be_settled(state: RoundState) -> bool:
    """Return whether enough voters on the last world are here to take it up."""
    if state.roll is None:
        return True
    there = {state.roll.latest.host, *state.members, *departing(state)}
    return majority.agreed(state.roll.before, there)


def without_the_vanished(state: RoundState) -> RoundState:
    """Count nodes of the world as lost that have no member key when a new leader takes over."""
    world = state.world
    gone = [node.node for node in world.nodes if node.node not in state.members] if world else []
    return replace(state, lost=tuple(dict.fromkeys((*state.lost, *gone))))


def checkpoint_seen(state: RoundState, seen: bool) -> RoundState:
    """Note that a checkpoint has appeared since the waiting newcomers came."""
    return replace(state, checkpoint=seen)


def given_up(state: RoundState, node: str) -> RoundState:
    """Note that the leader dropped a node that others could not reach."""
    return replace(state, unreachable=state.unreachable | {node})


def slow_seen(state: RoundState, slow: Set[str]) -> RoundState:
    """Note exactly which nodes of the world slow down the others."""
    known = _outside(state.slow, state.world).union(slow)
    return replace(state, slow=known.intersection(state.members))


def with_holds(state: RoundState, now: float) -> RoundState:
    """The state with the nodes that are held out at this time."""
    held = state.world.held if state.world is not None else ()
    ends = held_out.ends(held, state.held_since)
    out = frozenset(node for node, end in ends.items() if now < end) - state.resumed
    return state if out == state.out else replace(state, out=out)


def next_let_in(state: RoundState) -> float | None:
    """The time when the next held-out member is let back in."""
    if state.world is None or not state.out:
        return None
    ends = held_out.ends(state.world.held, state.held_since)
    return min((ends[node] for node in state.out if node in state.members), default=None)


def has_stepped(state: RoundState) -> bool:
    """Return whether a worker has taken a step in the last world, as reported by members."""
    generation = the_world(state).generation
    return any(present.member.trained == generation for present in state.members.values())


def tells_steps(state: RoundState) -> bool:
    """Return whether steps are known of any world."""
    return any(present.member.trained >= 0 for present in state.members.values())


def has_trained(state: RoundState) -> bool:
    """Return whether the last world has trained: it took a step or, if no steps are reported, it
    ran."""
    world = state.world
    if world is None or not world.nodes:
        return False
    if has_stepped(state):
        return True
    return state.since - state.running_since >= TRAINED_AFTER and not tells_steps(state)


def failed_alike(state: RoundState, failure: Failure) -> frozenset[str]:
    """The nodes of the last world whose workers have failed with the same exception."""
    names = {one.node for one in state.failures if one.kind == failure.kind}
    return frozenset(node.node for node in the_world(state).nodes if node.name in names)


def _outside(nodes: Iterable[str], world: World | None) -> frozenset[str]:
    return frozenset(node for node in nodes if world is None or world.place(node) is None)


def published(state: RoundState, world: World, now: float) -> RoundState:
    """The state after the store has accepted `world`; reports about older generations no longer
    count."""
    before = state.world
    if before is None or world.generation != before.generation:
        state = replace(
            state,
            failures=(),
            done=frozenset(),
            finished=-1,
            lost=(),
            unreachable=frozenset(),
            resumed=frozenset(),
            running_since=now,
            slow=_outside(state.slow, world),  # those in it are judged anew
        )
    if _is_finished(world) and not _is_finished(before):
        state = replace(state, forgiven=state.failures, lost=())
    if state.roll is not None and world.nodes and world.generation != state.roll.generation:
        state = replace(state, roll=roll_after(state, world))
    since = state.since if before is not None and before.phase == world.phase else now
    known = before.held if before is not None else ()
    if world.held is not known:
        begun = held_out.begun(state.held_since, known, world.held, now)
        state = replace(state, held_since=begun)
    return replace(state, world=world, since=since, said_at=now)


def _is_finished(world: World | None) -> bool:
    return world is not None and world.phase == "over" and world.ending == "finished"


def _first_finished(known: int, member: Member, generation: int) -> int:
    """The earliest end of data: nobody can step beyond it without waiting for a worker that has
    none left."""
    if member.finished != generation:
        return known
    return member.finished_after if known < 0 else min(known, member.finished_after)


def names_of(state: RoundState, nodes: Iterable[str]) -> str:
    """`node-b, node-c and 40 more`, for people."""
    every = list(nodes)
    more = len(every) - NAMES_SHOWN
    named = ", ".join(_name_of(state, node) for node in every[:NAMES_SHOWN])
    return f"{named} and {more:,} more" if more > 0 else named


def _name_of(state: RoundState, node: str) -> str:
    if (present := state.members.get(node)) is not None:
        return present.member.name
    found = the_world(state).find(node)
    return node if found is None else found.name


def the_world(state: RoundState) -> World:
    assert state.world is not None, "read before the first world"
    return state.world
