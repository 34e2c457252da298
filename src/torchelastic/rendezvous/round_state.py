"""What the leader knows, and how it changes: the data of a round. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torchelastic.config import Grow, LaunchConfig, WorldSizes
from torchelastic.failure import Failure
from torchelastic.rendezvous.restart_policy import AT_ONCE, Kind
from torchelastic.rendezvous.world import Member, World

#: How many nodes a reason names; it is sent to all of them.
NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """What the user asked for, as far as rounds are concerned."""

    min_nodes: int
    max_nodes: int
    settle: float = 1.0
    wait_for_nodes: float = 3600.0
    grow: Grow = field(default_factory=Grow)
    world_sizes: WorldSizes = field(default_factory=WorldSizes)
    max_restarts: int = 100
    count_resizes: bool = False

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
        )


@dataclass(frozen=True, kw_only=True)
class Present:
    """A member that is there, and since when."""

    member: Member
    #: Orders members by arrival, the same for every leader.
    created: int
    #: When the leader first saw it: its arrival, ready or not.
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """All the leader knows."""

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
    step: int = -1
    #: When the world took its phase, on the leader's clock.
    since: float = 0.0
    #: When it was last published.
    said_at: float = 0.0
    #: When the generation began to run.
    running_since: float = 0.0
    #: A checkpoint was written since the waiting newcomers came (`--grow after-checkpoint:PATH`).
    checkpoint: bool = False


@dataclass(frozen=True)
class Decision:
    """The world to publish now, if any, and when to ask again."""

    world: World | None = None
    kind: Kind | None = None
    wake_at: float | None = None


def seen(state: RoundState, member: Member, created: int, now: float) -> RoundState:
    """A member came or changed what it says."""
    before = state.members.get(member.node)
    if before is not None and before.created != created:
        state = lost(state, member.node)
        before = None
    seen_at = before.seen_at if before else now
    present = Present(member=member, created=created, seen_at=seen_at)
    state = replace(state, members={**state.members, member.node: present})
    return _note_report(state, member)


def lost(state: RoundState, node: str) -> RoundState:
    """A member's key is gone: it failed, or left after saying so."""
    present = state.members.get(node)
    members = {key: value for key, value in state.members.items() if key != node}
    state = replace(state, members=members)
    world = state.world
    if present is None or world is None:
        return state
    if not _is_missed(world, present.member):
        return state
    if node in state.done or node in state.lost:
        return state
    return replace(state, lost=(*state.lost, node))


def _is_missed(world: World, member: Member) -> bool:
    """Whether others wait for what a node that is gone was to do."""
    if member.node in world.handing_over:
        return member.gone < world.generation - 1
    if world.place(member.node) is None:
        return False
    if member.leaving:  # it has said so, but may have had a step to run through
        return world.phase == "over" and world.after is not None and member.gone < world.generation
    return True


def taken_over(world: World, now: float) -> RoundState:
    """What a new leader knows of a world: not how long it has lived; neither briefly nor long."""
    return RoundState(world=world, since=now, said_at=now, running_since=now - AT_ONCE - 1)


def vanished(state: RoundState, node: str) -> RoundState:
    """A node of the world has no member key when a new leader takes over."""
    return replace(state, lost=(*state.lost, node))


def checkpoint_seen(state: RoundState, seen: bool) -> RoundState:
    """Whether a checkpoint has appeared since the waiting newcomers came."""
    return replace(state, checkpoint=seen)


def published(state: RoundState, world: World, now: float) -> RoundState:
    """The store has taken `world`; what was said about an older generation counts no more."""
    before = state.world
    if before is None or world.generation != before.generation:
        state = replace(
            state, failures=(), done=frozenset(), finished=-1, lost=(), running_since=now
        )
    if world.phase == "over" and world.ending == "finished":
        state = replace(state, forgiven=state.failures, lost=())
    since = state.since if before is not None and before.phase == world.phase else now
    return replace(state, world=world, since=since, said_at=now)


def _note_report(state: RoundState, member: Member) -> RoundState:
    """Take up what a member of the current generation says of it."""
    world = state.world
    if world is None or world.phase == "closed":
        return state
    if world.place(member.node) is None and member.node not in world.handing_over:
        return state
    last = world.generation - (member.node in world.handing_over)
    theirs = [item for item in member.failures if item.generation >= last]
    fresh = tuple(item for item in theirs if item not in state.failures)
    done = state.done | {member.node} if member.done == world.generation else state.done
    state = replace(
        state,
        failures=state.failures + fresh,
        done=done,
        finished=_first_finished(state.finished, member, world.generation),
        step=max(state.step, member.step),
    )
    if world.phase in ("running", "pausing") and member.gone >= world.generation:
        explained = theirs or member.leaving or member.node in state.done
        if not explained and member.node not in state.lost:
            # Given up and back before anybody noticed: its workers are gone all the same.
            return replace(state, lost=(*state.lost, member.node))
    return state


def _first_finished(known: int, member: Member, generation: int) -> int:
    """Beyond the first end of data nobody can step: it would wait for who has none left."""
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
    assert state.world is not None, "asked before the first world"
    return state.world
