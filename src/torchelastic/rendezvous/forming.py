"""Who is in the next world: a choice among the members that are there. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from torchelastic.errors import EXIT_NOT_ENOUGH_NODES
from torchelastic.rendezvous.round_state import Decision, Present, RoundRules, RoundState
from torchelastic.rendezvous.world import NAMED, Member, World, WorldNode

#: How long a world may be held back for members that are there but not ready to start workers.
WARM_UP_PATIENCE = 30.0
#: How often a waiting job says what it is waiting for.
SAY_EVERY = 60.0


def form(rules: RoundRules, state: RoundState, now: float, *, at_once: bool) -> Decision:
    """The next world if enough members are ready, else a waiting one, else the end."""
    ordered = in_order(candidates(state), state.world)
    chosen = choose(rules, ordered, state)
    if not chosen:
        return _wait(rules, state, now)
    if not at_once and len(chosen) < rules.max_nodes:
        at = settled_at(rules, state, [member.node for member in ordered])
        if now < at:
            return Decision(wake_at=at) if state.world else _wait(rules, state, now)
    if not chosen[0].store:
        return Decision()
    last = state.world or World(generation=-1, phase="waiting", reason="the job starts")
    world = replace(
        last,
        generation=last.generation + 1 if last.nodes or last.generation < 0 else last.generation,
        phase="running",
        store=chosen[0].store,
        ending=None,
        after=None,
        resident=are_resident(state),
        reason=_beginning(last),
        spares=tuple(member.name for member in ordered[len(chosen) :][:NAMED]),
        spare_count=len(ordered) - len(chosen),
        missing=(),
        missing_count=0,
    )
    return Decision(world.with_nodes(_place(chosen)))


def newcomers_to(rules: RoundRules, state: RoundState) -> list[str]:
    """Nodes with workers outside the running world that would make the next one larger."""
    world = state.world
    if world is None or world.phase != "running":
        return []
    chosen = choose(rules, in_order(candidates(state), world), state)
    if sum(member.nproc for member in chosen) <= world.size:
        return []
    return [member.node for member in chosen if _brings_more(world, member)]


def _brings_more(world: World, member: Member) -> bool:
    found = world.find(member.node)
    return found is None or found.nproc < member.nproc


def _beginning(last: World) -> str:
    """Why a generation begins."""
    if not last.nodes:
        return "the job starts"
    if last.phase != "waiting":
        return last.reason
    return f"enough {'workers' if last.resident else 'nodes'} are there again"


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
    if last is not None and last.resident and last.phase == "over":
        what = f"{last.reason}; {what}"  # what ended the world is known by now
    limit = "" if left is None else f", for {left:.0f} s more"
    missing = _missing(state)
    world = replace(
        last or World(generation=0, phase="waiting"),
        phase="waiting",
        after=None,
        reason=f"{what}{limit}",
        missing=missing[:NAMED],
        missing_count=len(missing),
    )
    return Decision(world)


def _lacks(rules: RoundRules, state: RoundState) -> tuple[str, bool]:
    """What keeps a world from being formed, and whether that is only a matter of warming up."""
    staying = [item.member for item in state.members.values() if not item.member.leaving]
    there = f"{len(staying)} of at least {rules.min_nodes} there"
    if len(staying) < rules.min_nodes:
        return f"waiting for nodes: {there}", False
    starting = sum(member.starting for member in staying)
    if are_resident(state) and starting:
        return f"waiting for {starting} worker{'s' if starting > 1 else ''} to start", True
    if not all(member.ready for member in staying):
        return f"warming up: {there}", True
    if len(candidates(state)) < rules.min_nodes:
        return "waiting for nodes: two of them claim the same --node-rank", False
    if choose(rules, in_order(candidates(state), state.world), state):
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


def settled_at(rules: RoundRules, state: RoundState, nodes: Iterable[str]) -> float:
    """When arrivals count as over: a settle time after the last one, at once when all are there.

    Members that are there but still warming up are waited for, within reason.
    """
    if len(candidates(state)) >= rules.max_nodes:
        return 0.0
    at = max(state.members[node].seen_at for node in nodes) + rules.settle
    warming = [
        present.seen_at
        for present in state.members.values()
        if not present.member.leaving and _is_warming_up(present.member)
    ]
    if warming:
        at = max(at, max(warming) + WARM_UP_PATIENCE)
    return at


def _is_warming_up(member: Member) -> bool:
    return (not member.ready and member.gone < 0) or (member.starting > 0 and not member.standing)


def are_resident(state: RoundState) -> bool:
    """Whether the next world is one of resident workers."""
    if state.world is not None and state.world.nodes:
        return state.world.resident
    members = [present.member for present in state.members.values()]
    return bool(members) and all(member.resident for member in members)


def candidates(state: RoundState) -> list[Present]:
    """Members that could be in the next world, in order of arrival, each static place once.

    `standing` and `nproc` of what is returned are the workers each of them brings.
    """
    taken: set[int] = set()
    found = []
    for present in sorted(state.members.values(), key=lambda item: item.created):
        member = _with_workers(state, present.member)
        if member.leaving or not member.nproc:
            continue
        if member.node_rank is not None:
            if member.node_rank in taken:
                continue
            taken.add(member.node_rank)
        found.append(replace(present, member=member))
    return found


def _with_workers(state: RoundState, member: Member) -> Member:
    """Of resident workers those that stand; otherwise all, or none while it cannot start them."""
    if are_resident(state):
        return replace(member, nproc=len(member.standing))
    in_world = state.world is not None and state.world.place(member.node) is not None
    nproc = member.nproc if member.ready or in_world else 0
    return replace(member, nproc=nproc, standing=tuple(range(nproc)))


def choose(rules: RoundRules, ordered: list[Member], state: RoundState) -> list[Member]:
    """The most workers that make an allowed world, from the beginning of the list; may be none."""
    if are_resident(state):
        return _choose_workers(rules, ordered[: rules.max_nodes], state.world)
    return _choose_nodes(rules, ordered)


def _choose_workers(rules: RoundRules, members: list[Member], last: World | None) -> list[Member]:
    """A node may bring some of its workers only; those of the last world have precedence."""
    every = [(member.node, rank) for member in members for rank in member.standing]
    if last is not None:
        every.sort(key=lambda worker: last.rank(*worker) is None)  # stable: else in order
    for size in range(len(every), rules.min_nodes - 1, -1):
        nodes = {node for node, _ in every[:size]}
        if rules.world_sizes.allows(size) and len(nodes) >= rules.min_nodes:
            return [_cut(member, every[:size]) for member in members if member.node in nodes]
    return []


def _cut(member: Member, workers: list[tuple[str, int]]) -> Member:
    standing = tuple(sorted(rank for node, rank in workers if node == member.node))
    return replace(member, standing=standing, nproc=len(standing))


def _choose_nodes(rules: RoundRules, ordered: list[Member]) -> list[Member]:
    """The longest beginning of the list that makes an allowed world."""
    sizes = list(accumulate(member.nproc for member in ordered[: rules.max_nodes]))
    for count in range(len(sizes), rules.min_nodes - 1, -1):
        if rules.world_sizes.allows(sizes[count - 1]):
            return ordered[:count]
    return []


def in_order(candidates: Iterable[Present], last: World | None) -> list[Member]:
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
    for place, member in enumerate(members):
        role_rank = role_ranks.get(member.role, 0)
        nodes.append(
            WorldNode(
                node=member.node,
                name=member.name,
                addr=member.addr,
                peer=member.peer,
                node_rank=place,
                nproc=member.nproc,
                role=member.role,
                first_rank=rank,
                first_role_rank=role_rank,
                local_ranks=member.standing,
            )
        )
        rank += member.nproc
        role_ranks[member.role] = role_rank + member.nproc
    return tuple(nodes)
