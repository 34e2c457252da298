"""The round: which world comes next. Pure: members and time in, the next world out.

The leader keeps a `RoundState`, changes it by `seen`, `lost` and `published`, and asks `decide`
after every change and at every `wake_at`. The world's phases:

    waiting ──enough ready members, settled──▶ running ──all done──▶ closed
       ▲                                          │
       │                      worker failure, node failure, leave, resize
       │ fewer than min                           ▼
       └──────────────── gone everywhere ◀────── over ──the policy gives up──▶ closed

Workers of a new generation start only when every member that is alive and stays has said that its
workers of the old one are gone: nobody reads a checkpoint that an old worker is still writing, and
no two worlds make progress at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torchelastic.config import Grow, LaunchConfig, WorldSizes
from torchelastic.errors import EXIT_FAILED, EXIT_NOT_ENOUGH_NODES
from torchelastic.failure import Failure
from torchelastic.rendezvous import root_cause
from torchelastic.rendezvous.restart_policy import AT_ONCE, Ending, Kind, judge
from torchelastic.rendezvous.world import Member, World, WorldNode

#: How long a world may be held back for members that are there but not ready to start workers.
WARM_UP_PATIENCE = 30.0
#: How often a waiting job says what it is waiting for.
SAY_EVERY = 60.0
#: How many consequences of a failure are told.
CONSEQUENCES = 32


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
    if present is None or world is None or world.place(node) is None or present.member.leaving:
        return state
    if node in state.done or node in state.lost:
        return state
    return replace(state, lost=(*state.lost, node))


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
        state = replace(state, failures=(), done=frozenset(), lost=(), running_since=now)
    since = state.since if before is not None and before.phase == world.phase else now
    return replace(state, world=world, since=since, said_at=now)


def decide(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """What the state calls for."""
    world = state.world
    if world is None or world.phase == "waiting":
        return _form(rules, state, now, at_once=False)
    if world.phase == "running":
        return _watch(rules, state, now)
    if world.phase == "over":
        return _succeed(rules, state, now)
    return Decision()


def waits_for_checkpoint(rules: RoundRules, state: RoundState) -> bool:
    """Whether somebody must look at the checkpoint path: only while newcomers wait for one."""
    return rules.grow.when == "after-checkpoint" and bool(_newcomers(rules, state))


# --- running -------------------------------------------------------------------------------------


def _watch(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """A running world ends by success, by a failure, by a leave or for newcomers."""
    world = _world(state)
    if all(node.node in state.done for node in world.nodes):
        reason = "every worker succeeded"
        return Decision(replace(world, phase="closed", reason=reason, cause=None, consequences=()))
    if state.failures:
        cause, _ = root_cause.pick(state.failures)
        return _over(state, "failure", cause.sentence() if cause else "a worker failed")
    if state.lost:
        return _over(state, "node-failure", f"{_names(state, state.lost)} failed")
    leaving = [
        node.node
        for node in world.nodes
        if node.node in state.members and state.members[node.node].member.leaving
    ]
    if leaving:
        reason = state.members[leaving[0]].member.leaving
        return _over(state, "leave", f"{_names(state, leaving)} leaves ({reason})")
    return _consider_growth(rules, state, now)


def _consider_growth(rules: RoundRules, state: RoundState, now: float) -> Decision:
    newcomers = _newcomers(rules, state)
    if not newcomers or state.done:  # work that is finished is not done again for a newcomer
        return Decision()
    at = _settled_at(rules, state, newcomers)
    if rules.grow.when == "every":
        at = max(at, state.running_since + rules.grow.seconds)
    if rules.grow.when == "after-checkpoint" and not state.checkpoint:
        return Decision()
    if now < at:
        return Decision(wake_at=at)
    return _over(state, "resize", f"{_names(state, newcomers)} joins")


def _newcomers(rules: RoundRules, state: RoundState) -> list[str]:
    """Ready members outside the running world that would make the next one larger."""
    world = state.world
    if world is None or world.phase != "running":
        return []
    chosen = _choose(rules, _in_order(_candidates(state), world))
    if sum(member.nproc for member in chosen) <= world.size:
        return []
    return [member.node for member in chosen if world.place(member.node) is None]


def _over(state: RoundState, kind: Kind, reason: str) -> Decision:
    cause, consequences = root_cause.pick(state.failures)
    world = replace(
        _world(state),
        phase="over",
        ending=kind,
        reason=reason,
        cause=cause,
        consequences=_brief(consequences),
    )
    return Decision(world, kind)


def _brief(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """What of the consequences is worth sending to every node: a line each, and not thousands."""
    return tuple(replace(failure, traceback="") for failure in failures[:CONSEQUENCES])


# --- over ----------------------------------------------------------------------------------------


def _succeed(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """Once the old workers are gone everywhere: go on, wait, or end."""
    world = _world(state)
    slow = [node.node for node in world.nodes if _holds_up(state, node.node, world.generation)]
    if slow:
        return _wait_for_stop(state, slow, now)
    kind, cause, consequences = _classify(state)
    verdict = judge(
        Ending(
            kind=kind,
            lifetime=state.since - state.running_since,
            failure=cause,
            step=state.step,
        ),
        world.ledger,
        budget=rules.max_restarts,
        count_resizes=rules.count_resizes,
    )
    state = replace(
        state,
        world=replace(
            world,
            ledger=verdict.ledger,
            cause=cause,
            consequences=_brief(consequences),
            reason=f"{_why(state, kind, cause, world)}; {verdict.sentence}",
        ),
    )
    if not verdict.go_on:
        return Decision(replace(_world(state), phase="closed", exitcode=EXIT_FAILED), kind)
    return replace(_form(rules, state, now, at_once=True), kind=kind)


def _wait_for_stop(state: RoundState, slow: list[str], now: float) -> Decision:
    """Somebody's workers do not end: say whose, again and again, or all would wait in silence."""
    at = state.said_at + SAY_EVERY
    if now < at:
        return Decision(wake_at=at)
    reason = f"waiting for the workers of {_names(state, slow)} to end"
    return Decision(replace(_world(state), reason=reason), _world(state).ending)


def _holds_up(state: RoundState, node: str, generation: int) -> bool:
    """Whether a node is there, stays, and still has workers of the old generation."""
    present = state.members.get(node)
    return present is not None and not present.member.leaving and present.member.gone < generation


def _classify(state: RoundState) -> tuple[Kind, Failure | None, tuple[Failure, ...]]:
    """What really ended the generation, now that everybody has spoken.

    The collectives of the survivors fail a few milliseconds before a dead node's connection is
    given up: their errors must not be taken, and charged, for the cause.
    """
    cause, consequences = root_cause.pick(state.failures)
    ending = _world(state).ending or "failure"
    if cause is not None and not root_cause.is_consequence(cause):
        return "failure", cause, consequences
    if state.lost:
        return "node-failure", None, state.failures
    if ending == "failure" and not _leaving(state):
        return "failure", cause, consequences
    return ("leave" if _leaving(state) else ending), None, state.failures


def _leaving(state: RoundState) -> bool:
    """Whether a node of the world goes, or has gone, after saying so."""
    return any(
        node.node not in state.members or state.members[node.node].member.leaving
        for node in _world(state).nodes
        if node.node not in state.lost
    )


def _why(state: RoundState, kind: Kind, cause: Failure | None, world: World) -> str:
    if kind == "node-failure":
        return f"{_names(state, state.lost)} failed"
    if kind == "failure" and cause is not None:
        return cause.sentence()
    return world.reason


# --- forming -------------------------------------------------------------------------------------


def _form(rules: RoundRules, state: RoundState, now: float, *, at_once: bool) -> Decision:
    """The next world if enough members are ready, else a waiting one, else the end."""
    ordered = _in_order(_candidates(state), state.world)
    chosen = _choose(rules, ordered)
    if not chosen:
        return _wait(rules, state, now)
    if not at_once and len(chosen) < rules.max_nodes:
        at = _settled_at(rules, state, [member.node for member in ordered])
        if now < at:
            return Decision(wake_at=at) if state.world else _wait(rules, state, now)
    if not chosen[0].store:
        return Decision()
    last = state.world or World(generation=-1, phase="waiting", reason="the job starts")
    world = replace(
        last,
        generation=last.generation + 1 if last.nodes or last.generation < 0 else last.generation,
        phase="running",
        nodes=_place(chosen),
        store=chosen[0].store,
        ending=None,
        reason=_beginning(last),
        spares=tuple(member.name for member in ordered[len(chosen) :]),
        missing=(),
    )
    return Decision(world)


def _beginning(last: World) -> str:
    """Why a generation begins."""
    if not last.nodes:
        return "the job starts"
    return "enough nodes are there again" if last.phase == "waiting" else last.reason


def _wait(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """Too few members: say so, again every minute, and end when it takes too long."""
    last = state.world
    still = last is not None and last.phase == "waiting"
    since = state.since if still else now
    what, warming = _lacks(rules, state)
    left = None
    if rules.wait_for_nodes and not warming:
        left = since + rules.wait_for_nodes - now
    if last is not None and left is not None and left <= 0:
        reason = f"{what}: giving up after {rules.wait_for_nodes:g} s (--wait-for-nodes)"
        return Decision(
            replace(last, phase="closed", exitcode=EXIT_NOT_ENOUGH_NODES, reason=reason)
        )
    if still and now < state.said_at + SAY_EVERY:
        again = state.said_at + SAY_EVERY
        return Decision(wake_at=again if left is None else min(again, now + left))
    limit = "" if left is None else f", for {left:.0f} s more"
    world = replace(
        last or World(generation=0, phase="waiting"),
        phase="waiting",
        reason=f"{what}{limit}",
        missing=_missing(state),
    )
    return Decision(world)


def _lacks(rules: RoundRules, state: RoundState) -> tuple[str, bool]:
    """What keeps a world from being formed, and whether that is only a matter of warming up."""
    staying = [item.member for item in state.members.values() if not item.member.leaving]
    there = f"{len(staying)} of at least {rules.min_nodes} there"
    if len(staying) < rules.min_nodes:
        return f"waiting for nodes: {there}", False
    if not all(member.ready for member in staying):
        return f"warming up: {there}", True
    if len(_candidates(state)) < rules.min_nodes:
        return "waiting for nodes: two of them claim the same --node-rank", False
    if _choose(rules, _in_order(_candidates(state), state.world)):
        return f"settling: {there}", True
    workers = sum(member.nproc for member in staying)
    return (
        f"waiting for nodes: --world-sizes {rules.world_sizes} has no use for {workers} workers",
        False,
    )


def _missing(state: RoundState) -> tuple[str, ...]:
    """Names of the nodes of the last world that are not there any more."""
    if state.world is None:
        return ()
    return tuple(node.name for node in state.world.nodes if node.node not in state.members)


def _settled_at(rules: RoundRules, state: RoundState, nodes: Iterable[str]) -> float:
    """When arrivals count as over: a settle time after the last one, at once when all are there.

    Members that are there but still warming up are waited for, within reason.
    """
    if len(_candidates(state)) >= rules.max_nodes:
        return 0.0
    at = max(state.members[node].seen_at for node in nodes) + rules.settle
    warming = [
        present.seen_at
        for present in state.members.values()
        if not present.member.ready and not present.member.leaving and present.member.gone < 0
    ]
    if warming:
        at = max(at, max(warming) + WARM_UP_PATIENCE)
    return at


def _candidates(state: RoundState) -> list[Present]:
    """Members that could be in the next world, in order of arrival, each static place once."""
    world = state.world
    taken: set[int] = set()
    found = []
    for present in sorted(state.members.values(), key=lambda item: item.created):
        member = present.member
        in_world = world is not None and world.place(member.node) is not None
        if member.leaving or not (member.ready or in_world):
            continue
        if member.node_rank is not None:
            if member.node_rank in taken:
                continue
            taken.add(member.node_rank)
        found.append(present)
    return found


def _choose(rules: RoundRules, ordered: list[Member]) -> list[Member]:
    """The longest beginning of the list that makes an allowed world; empty if none does."""
    sizes = list(accumulate(member.nproc for member in ordered[: rules.max_nodes]))
    for count in range(len(sizes), rules.min_nodes - 1, -1):
        if rules.world_sizes.allows(sizes[count - 1]):
            return ordered[:count]
    return []


def _in_order(candidates: Iterable[Present], last: World | None) -> list[Member]:
    """Static places first; then survivors in their order, newcomers last."""

    def place(present: Present) -> tuple[int, int, int]:
        member = present.member
        static = member.node_rank if member.node_rank is not None else -1
        survivor = last.place(member.node) if last is not None else None
        return static, survivor if survivor is not None else 1 << 30, present.created

    return [present.member for present in sorted(candidates, key=place)]


def _place(members: Iterable[Member]) -> tuple[WorldNode, ...]:
    """Give every worker its ranks."""
    nodes: list[WorldNode] = []
    rank, role_ranks = 0, dict[str, int]()
    for member in members:
        role_rank = role_ranks.get(member.role, 0)
        nodes.append(
            WorldNode(
                node=member.node,
                name=member.name,
                addr=member.addr,
                nproc=member.nproc,
                role=member.role,
                first_rank=rank,
                first_role_rank=role_rank,
            )
        )
        rank += member.nproc
        role_ranks[member.role] = role_rank + member.nproc
    return tuple(nodes)


# --- reports -------------------------------------------------------------------------------------


def _note_report(state: RoundState, member: Member) -> RoundState:
    """Take up what a member of the current generation says of it."""
    world = state.world
    if world is None or world.place(member.node) is None or world.phase == "closed":
        return state
    theirs = [item for item in member.failures if item.generation == world.generation]
    fresh = tuple(item for item in theirs if item not in state.failures)
    done = state.done | {member.node} if member.done == world.generation else state.done
    state = replace(
        state, failures=state.failures + fresh, done=done, step=max(state.step, member.step)
    )
    if world.phase == "running" and member.gone >= world.generation:
        explained = theirs or member.leaving or member.node in state.done
        if not explained and member.node not in state.lost:
            # Given up and back before anybody noticed: its workers are gone all the same.
            return replace(state, lost=(*state.lost, member.node))
    return state


def _names(state: RoundState, nodes: Iterable[str]) -> str:
    """`node-b, node-c`, for people."""
    known = {node.node: node.name for node in _world(state).nodes}
    known.update((node, present.member.name) for node, present in state.members.items())
    return ", ".join(known.get(node, node) for node in nodes)


def _world(state: RoundState) -> World:
    assert state.world is not None, "asked before the first world"
    return state.world
