"""The leader's state of a round, and its changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torchelastic.config import ETCD_BACKENDS, Grow, LaunchConfig, WorldSizes
from torchelastic.events.failure import Failure
from torchelastic.records import replace
from torchelastic.rendezvous import held_out, majority
from torchelastic.rendezvous.majority import Roll
from torchelastic.rendezvous.restart_policy import START_FAILURE_TIME, Kind
from torchelastic.rendezvous.world import Base, Member, World

#: Seconds after which a world counts as having trained if its job reports no steps.
TRAINED_AFTER = 30.0
#: The most nodes that a reason names; every node receives it.
REASON_NAMES_LIMIT = 8


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """The user's settings for rounds."""

    min_nodes: int
    max_nodes: int
    settle: float = LaunchConfig.settle
    wait_for_nodes: float = LaunchConfig.wait_for_nodes
    grow: Grow = field(default_factory=Grow)
    world_sizes: WorldSizes = field(default_factory=WorldSizes)
    max_restarts: int = LaunchConfig.max_restarts
    count_resizes: bool = False
    #: Whether the host of the store needs a majority to continue without the other nodes.
    quorum: bool = True
    #: Seconds after which an unreachable node has stopped its workers.
    lease: float = LaunchConfig.lease
    #: The number of workers in a replica of a sharded model; 0: the script's mesh says it.
    replica_size: int = 0
    #: Whether members probe each other: with etcd, nodes that cannot reach each other may all reach
    #: the store.
    probes: bool = False

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
            replica_size=config.replica_size,
            probes=config.rdzv_backend in ETCD_BACKENDS,
        )


@dataclass(frozen=True, kw_only=True)
class MemberEntry:
    """A member's record, and when it joined."""

    member: Member
    #: The revision that created its key: every leader orders members by it.
    created: int
    #: When the leader first saw it, ready or not.
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class WitnessVotes:
    """The witness's votes, as the host knows them."""

    url: str = ""
    #: The votes that this host has in its term.
    held: frozenset[str] = frozenset()
    #: The votes that another node has, and that node.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Why the witness did not answer last time.
    silent: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """Everything the leader knows."""

    world: World | None = None
    members: Mapping[str, MemberEntry] = field(default_factory=dict)
    #: Failures of the world's generation, in the order in which the leader learned of them.
    failures: tuple[Failure, ...] = ()
    #: Members of the world whose workers succeeded; they stay in it when they leave.
    done: frozenset[str] = frozenset()
    #: The number of steps after which the first worker reached the end of its data: the training is
    #: done. -1: none has.
    finished: int = -1
    #: Failures from before the end of the training: they no longer count.
    forgiven: tuple[Failure, ...] = ()
    #: Members of the world that are gone without an announcement.
    lost: tuple[str, ...] = ()
    #: Members whose machines refuse connections: their agents are dead, unless a firewall answers
    #: for them; and members that have written their record since then.
    refused: frozenset[str] = frozenset()
    contested: frozenset[str] = frozenset()
    step: int = -1
    #: The newest base that a member has reported.
    base: Base | None = None
    #: When the world entered its phase, on the leader's clock.
    since: float = 0.0
    #: When the world was last published.
    said_at: float = 0.0
    #: When the generation started to run.
    running_since: float = 0.0
    #: If the leader hosts the store: its node and its term.
    host: str = ""
    term: int = 0
    #: Nodes that are gone after announcing it.
    left: frozenset[str] = frozenset()
    #: Nodes that are known to be dead, without having announced a leave.
    dead: frozenset[str] = frozenset()
    #: The electorates of the next world; None: the leader alone decides.
    roll: Roll | None = None
    witness: WitnessVotes = field(default_factory=WitnessVotes)
    #: The leader forms no first world before this time.
    may_begin_at: float = 0.0
    #: A checkpoint was written after the waiting newcomers came (`--grow after-checkpoint:PATH`).
    checkpoint: bool = False
    #: Nodes that slow down the others, or did when they were last in a world.
    slow: frozenset[str] = frozenset()
    #: When each hold of `World.held` began, and which nodes are held out now (`with_holds`).
    held_since: Mapping[str, float] = field(default_factory=dict)
    out: frozenset[str] = frozenset()
    #: Nodes whose agents were restarted, or whose machines were fixed: earlier failures no longer
    #: count.
    resumed: frozenset[str] = frozenset()
    #: The places in replicas that this leader has allotted, if replicas span nodes.
    places: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundDecision:
    """The world to publish now, if any, and when to decide again."""

    world: World | None = None
    kind: Kind | None = None
    wake_at: float | None = None
    #: Votes to claim from the witness: with them a world could be formed at once.
    claims: tuple[str, ...] = ()
    #: Members whose leases to end: their machines refuse connections.
    drop: tuple[str, ...] = ()


class StateUpdate:
    """A mutable copy of the state, so that thousands of reports cost only one copy."""

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
        """The changed state."""
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
        is_fixed = before is not None and before.member.unfit and not member.unfit
        if (
            is_fixed
            or (before is None and member.resumed)
            or self._has_contact(before, member, now)
        ):
            self._resumed.add(member.node)
        seen_at = before.seen_at if before else now
        self._left.discard(member.node)
        if member.base is not None and (self._base is None or self._base < member.base):
            self._base = member.base
        self.members[member.node] = MemberEntry(member=member, created=created, seen_at=seen_at)
        self._note_report(member)

    def _has_contact(self, before: MemberEntry | None, member: Member, now: float) -> bool:
        """Return whether a node reaches one again that it is held out for."""
        world = self._state.world
        if before is None or world is None:
            return False
        reached = set(before.member.unreached).difference(member.unreached)
        if not any(one.node == member.node and one.other in reached for one in world.held):
            return False
        return now < held_out.ends(world.held, self._state.held_since).get(member.node, now)

    def lose(self, node: str) -> None:
        """Note that a member's key is gone: it failed, or left after announcing it."""
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
        if member.finished == world.generation:
            # The earliest: no worker can step beyond it without the one that has no data left.
            first = self._finished if self._finished >= 0 else member.finished_after
            self._finished = min(first, member.finished_after)
        self._step = max(self._step, member.step)
        if world.phase in ("running", "pausing") and member.gone >= world.generation:
            explained = theirs or member.leaving or node in self._done
            if not explained:
                # It was dropped and came back unnoticed; its workers are gone nevertheless.
                self._lost[node] = None


def _is_missed(world: World, member: Member) -> bool:
    """Return whether other nodes still wait for a node that is gone."""
    if member.node in world.handing_over:
        return member.gone < world.generation - 1
    if world.place(member.node) is None:
        return False
    if member.leaving:  # it announced it, but may have had a step to run through
        return world.phase == "over" and world.after is not None and member.gone < world.generation
    return True


def taken_over(world: World, now: float) -> RoundState:
    """The state of a new leader. It does not know how long the world has run, and assumes neither a
    short nor a long time."""
    return RoundState(
        world=world,
        base=world.base,
        since=now,
        said_at=now,
        running_since=now - START_FAILURE_TIME,
        held_since=held_out.begun({}, (), world.held, now),
    )


def hosted(
    state: RoundState,
    host: str,
    term: int,
    stored: Mapping[str, Any] | None,
    *,
    confirmed: int = -1,
    quorum: bool = True,
) -> RoundState:
    """The state of a leader that hosts the store. `stored` is the stored roll, `confirmed` the last
    world stored as confirmed.

    Without `quorum` there are no electorates: their unreachable voters would accumulate forever.
    """
    world = state.world
    roll = Roll() if quorum else None
    if world is not None and world.nodes:
        nodes = [node.node for node in world.nodes]
        if quorum:
            known = stored if confirmed != world.generation else None
            roll = majority.from_json(
                known, world.generation, nodes, world.host, witness=bool(world.witness)
            )
        if world.term != term and world.phase in ("agreeing", "running", "pausing"):
            # The nodes that voted for this host have stopped their workers, and the others cannot
            # step without them.
            reason = "the rendezvous host was lost"
            world = replace(world, phase="over", after=None, ending="node-failure", reason=reason)
    return replace(state, world=world, host=host, term=term, roll=roll)


def votes(state: RoundState) -> set[str]:
    """The nodes that agree to another world: their workers have stopped, wait at a step, or were
    not in the last world; or they left after announcing it."""
    world = state.world
    if world is None:
        return set()
    return {node for node in _asked(state, world) if _agrees(state, world, node)}


def departing(state: RoundState) -> set[str]:
    """Voters that need not confirm the next world: they have left, or have announced it, and vote
    for no other host. An announced leave is consent."""
    world = state.world
    if world is None:
        return set()
    asked = _asked(state, world)
    gone = {node for node in asked - state.members.keys() if _agrees(state, world, node)}
    return gone | {
        node for node, one in state.members.items() if one.member.leaving and node in asked
    }


def _asked(state: RoundState, world: World) -> Set[str]:
    """The voters on the world after this one."""
    electorates = state.roll.electorates if state.roll is not None else ()
    return world.members.union(*(electorate.nodes for electorate in electorates))


def follows_later_host(state: RoundState) -> bool:
    """Return whether an earlier host formed the last world. All members stopped its workers before
    they followed this host, and cannot hear of that world any more."""
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
        # A node without the last world could also vote for another host that lacks it.
        return member.accepted == world.generation
    return member.gone >= world.generation or member.paused == world.generation


def to_claim(state: RoundState) -> tuple[str, ...] | None:
    """The witness's votes that are missing for a quorum; None if they are not enough or another
    node has them."""
    if state.roll is None:
        return ()
    missing = majority.to_claim(state.roll.electorates, votes(state) | state.witness.held)
    is_first = state.roll.generation < 0 and bool(state.witness.url)
    if is_first and majority.FIRST_VOTE not in state.witness.held:
        missing = (majority.FIRST_VOTE,)
    return None if missing is None or state.witness.refused.keys() & set(missing) else missing


def has_ended(state: RoundState) -> bool:
    """Return whether the job is closed, or all nodes but the host have left."""
    if state.world is not None and state.world.phase == "closed":
        return True
    electorates = state.roll.electorates if state.roll is not None else ()
    alone = not state.members.keys() - {state.host}
    return alone and majority.agreed(electorates, votes(state) | {state.host})


def roll_after(state: RoundState, world: World) -> Roll:
    """The electorates of the world after `world`, which the host forms now."""
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
    """Return whether every node of the last world may still be training.

    With a quorum, that is possible only if one node trained alone and its host did not: a new host
    waits until that node's lease must have ended.
    """
    world = state.world
    if world is None or state.roll is None or not world.nodes:
        return False
    return not any(_agrees(state, world, node.node) for node in world.nodes)


def confirmed(state: RoundState) -> RoundState:
    """The state after enough voters have confirmed the last world: then only its nodes have a
    vote."""
    if state.roll is None or not state.roll.before:
        return state
    have = {node: present.member.accepted for node, present in state.members.items()}
    roll = majority.confirmed(state.roll, have, departing(state))
    return state if roll == state.roll else replace(state, roll=roll)


def can_be_confirmed(state: RoundState) -> bool:
    """Return whether enough voters are here to confirm the last world."""
    if state.roll is None:
        return True
    there = {state.roll.latest.host, *state.members, *departing(state)}
    return majority.agreed(state.roll.before, there)


def with_missing_lost(state: RoundState) -> RoundState:
    """Count nodes of the world without a member key as lost, when a new leader takes over."""
    world = state.world
    gone = [node.node for node in world.nodes if node.node not in state.members] if world else []
    return replace(state, lost=tuple(dict.fromkeys((*state.lost, *gone))))


def allotted(state: RoundState, places: Mapping[str, int]) -> RoundState:
    """The state after nodes were told their places in replicas."""
    return replace(state, places={**state.places, **places})


def slow_seen(state: RoundState, slow: Set[str]) -> RoundState:
    """Note which nodes of the world slow down the others; the rest of them do not."""
    known = _outside(state.slow, state.world).union(slow)
    return replace(state, slow=known.intersection(state.members))


def with_holds(state: RoundState, now: float) -> RoundState:
    """The state with the nodes that are held out at this time."""
    held = state.world.held if state.world is not None else ()
    ends = held_out.ends(held, state.held_since)
    out = frozenset(node for node, end in ends.items() if now < end) - state.resumed
    return state if out == state.out else replace(state, out=out)


def next_hold_end(state: RoundState) -> float | None:
    """The time when the next held-out member is let back in."""
    if state.world is None or not state.out:
        return None
    ends = held_out.ends(state.world.held, state.held_since)
    return min((ends[node] for node in state.out if node in state.members), default=None)


def has_stepped(state: RoundState) -> bool:
    """Return whether members have reported a step of the last world."""
    generation = the_world(state).generation
    return any(present.member.trained == generation for present in state.members.values())


def reports_steps(state: RoundState) -> bool:
    """Return whether the job reports steps."""
    return any(present.member.trained >= 0 for present in state.members.values())


def has_trained(state: RoundState) -> bool:
    """Return whether the last world has trained: it took a step or, if the job reports no steps, it
    ran long enough."""
    world = state.world
    if world is None or not world.nodes:
        return False
    if has_stepped(state):
        return True
    return state.since - state.running_since >= TRAINED_AFTER and not reports_steps(state)


def failed_nodes(state: RoundState) -> tuple[str, ...]:
    """The nodes of the last world that are gone without an announcement, or refuse connections."""
    if not state.refused:
        return state.lost
    refused = (node.node for node in the_world(state).nodes if node.node in state.refused)
    return tuple(dict.fromkeys((*state.lost, *refused)))


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
            contested=frozenset(),
            resumed=frozenset(),
            running_since=now,
            slow=_outside(state.slow, world),  # nodes in it are measured again
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


def names_of(state: RoundState, nodes: Iterable[str]) -> str:
    """`node-b, node-c and 40 more`, for people."""
    every = list(nodes)
    more = len(every) - REASON_NAMES_LIMIT
    named = ", ".join(_name_of(state, node) for node in every[:REASON_NAMES_LIMIT])
    return f"{named} and {more:,} more" if more > 0 else named


def _name_of(state: RoundState, node: str) -> str:
    if (present := state.members.get(node)) is not None:
        return present.member.name
    found = the_world(state).find(node)
    return node if found is None else found.name


def the_world(state: RoundState) -> World:
    assert state.world is not None, "read before the first world"
    return state.world
