"""Choose the nodes and workers of the next world among the members. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from functools import cache, partial
from itertools import accumulate, chain
from typing import NamedTuple

from torchelastic.records import replace
from torchelastic.rendezvous import connectivity, replicas
from torchelastic.rendezvous.round_state import RoundRules, RoundState, the_world
from torchelastic.rendezvous.world import Member, World


class InMemory(NamedTuple):
    """The state in a node's memory; of a sharded model, its workers' part of it."""

    #: Of a sharded model: the workers of at least one replica, or of its part on this node, all
    #: have it.
    whole: bool
    generation: int


class Offer(NamedTuple):
    """A member that could be in the next world, and its workers."""

    node: str
    member: Member
    created: int
    #: The local ranks of its workers.
    ranks: tuple[int, ...]
    #: The state in their memory.
    memory: InMemory


def are_in_process(state: RoundState) -> bool:
    """Return whether the next world has in-process workers."""
    if state.world is not None and state.world.nodes:
        return state.world.in_process
    members = state.members.values()
    return bool(members) and all(present.member.in_process for present in members)


def replica_size(rules: RoundRules, state: RoundState) -> int:
    """The number of workers in a replica of the next world; 0 or 1: the model is not sharded."""
    if rules.replica_size or not are_in_process(state):
        return rules.replica_size
    if state.world is not None and state.world.nodes:
        return state.world.replica
    return max(present.member.replica for present in state.members.values())


def nodes_per_replica(rules: RoundRules, state: RoundState) -> int:
    """The number of nodes that a replica spans. If more than 1, all nodes have equally many
    workers."""
    nproc = next((present.member.nproc for present in state.members.values()), 1)
    return replicas.nodes_per_replica(replica_size(rules, state), nproc)


def candidates(rules: RoundRules, state: RoundState, *, soon: bool = False) -> list[Offer]:
    """Members that could be in the next world, oldest first, each static node rank once.

    `soon`: also those whose in-process workers are still starting.
    """
    in_process, handing_over = are_in_process(state), _handing_over(rules, state)
    size = replica_size(rules, state)
    taken: set[int] = set()
    found = []
    for present in sorted(state.members.values(), key=lambda item: item.created):
        member = present.member
        ranks = member.standing if in_process else _startable(state, member)
        if soon and in_process and member.starting and not member.unfit:
            ranks = _first(member.nproc)
        if size > 1:
            ranks = _in_whole_replicas(state, member, ranks, size)
        if (member.leaving and member.node not in handing_over) or not ranks:
            continue
        if rules.probes and not _is_at_hand(state, member):
            continue
        if member.node_rank is not None:
            if member.node_rank in taken:
                continue
            taken.add(member.node_rank)
        memory = InMemory(_has_whole(member, ranks, size), member.holds)
        found.append(Offer(member.node, member, present.created, ranks, memory))
    return found


def _is_at_hand(state: RoundState, member: Member) -> bool:
    """Return whether a member knows which others it can reach, and no worker of an ended world is
    left on it."""
    if member.probed < connectivity.required_probe(state, member.node):
        return False
    world = state.world
    if world is None or not world.has_ended or world.place(member.node) is None:
        return True
    return member.gone >= world.generation


def _in_whole_replicas(
    state: RoundState, member: Member, ranks: tuple[int, ...], size: int
) -> tuple[int, ...]:
    """The workers of a node that can be in a whole replica: those of whole blocks or, if a replica
    spans nodes, all of a node that has its place."""
    if size <= member.nproc:
        return tuple(chain(*replicas.whole_blocks(ranks, size)))
    has_place = member.place >= 0 and member.place == state.places.get(member.node, member.place)
    return ranks if has_place and len(ranks) == member.nproc else ()


def _has_whole(member: Member, ranks: tuple[int, ...], size: int) -> bool:
    """Return whether workers of one replica on this node have all of their state."""
    if not member.blank:
        return True
    having = set(ranks).difference(member.blank)
    return bool(replicas.whole_blocks(having, min(size, member.nproc)))


def would_lose_parts(rules: RoundRules, state: RoundState, chosen: Iterable[Offer]) -> bool:
    """Return whether to wait: the chosen workers lack a part of the newest sharded state, and a
    node that has it is starting a replacement.

    When all replicas are broken, the first one that is repaired must wait for that node.
    """
    size = replica_size(rules, state)
    members = [present.member for present in state.members.values()]
    newest = max((member.holds for member in members), default=-1)
    if size <= 1 or newest < 0 or not are_in_process(state):
        return False
    there = set(chain(*(_parts(offer.member, offer.ranks, size, newest) for offer in chosen)))
    return len(there) < size and any(
        member.starting and not member.unfit and not member.leaving
        for member in members
        if _parts(member, member.standing, size, newest) - there
    )


def _parts(member: Member, ranks: Iterable[int], size: int, newest: int) -> set[int]:
    """The coordinates of these workers of a node that have the newest state."""
    if member.holds != newest:
        return set()
    first = max(member.place, 0) * member.nproc
    return {(first + rank) % size for rank in ranks if rank not in member.blank}


def holders_left_out(rules: RoundRules, state: RoundState, chosen: Iterable[str]) -> list[str]:
    """The members that may have a newer state in memory, or part of it, than all the `chosen`: a
    world without them would lose it.

    A node of the last world that has not stopped may have taken steps since it last reported. It
    has not if another node of that world stopped without a step: a step needs all of them.
    """
    size, world = replica_size(rules, state), state.world
    unable = {one.node for one in world.held if one.unable} if world is not None else set()
    presumed = _steps_unreported(state)
    taken, newest = set(chosen), dict[int, int]()
    held: dict[str, int] = {}
    for node, present in state.members.items():
        member = present.member
        held[node] = max(member.holds, presumed if _may_have_stepped(world, member) else -1)
        if node in taken:
            newest[member.place] = max(newest.get(member.place, -1), held[node])
    return [
        node
        for node, present in state.members.items()
        if node not in taken
        and node not in unable
        and not present.member.leaving
        and not present.member.unfit
        and held[node] > newest.get(present.member.place, -1)
        and _has_whole(present.member, present.member.standing, size)
    ]


def _steps_unreported(state: RoundState) -> int:
    """The generation of which nodes may have steps that they have not reported; -1: none."""
    world = state.world
    if world is None or not world.nodes:
        return -1
    members = [present.member for present in state.members.values()]
    if not world.in_process and all(member.holds < 0 for member in members):
        return -1  # a script without kept state
    without_step = any(
        member.gone >= world.generation > member.holds
        for member in members
        if world.place(member.node) is not None
    )
    return -1 if without_step else world.generation


def _may_have_stepped(world: World | None, member: Member) -> bool:
    """Return whether a node is in the last world and has not reported since it ended."""
    if world is None or world.place(member.node) is None:
        return False
    return member.gone < world.generation


def _handing_over(rules: RoundRules, state: RoundState) -> frozenset[str]:
    """Leaving nodes that must be in one more world to hand over their state: no staying node of the
    last world has it (per place, if replicas span nodes), and there are newcomers to receive it."""
    world = state.world
    if world is None or not world.in_process or world.phase != "pausing":
        return frozenset()
    there = [present.member for present in state.members.values()]
    standing = [member for member in there if member.standing]
    staying = [member for member in standing if not member.leaving]
    survivors = {member.place for member in staying if world.place(member.node) is not None}
    spanned = nodes_per_replica(rules, state)
    if not staying or len(survivors) == spanned:
        return frozenset()
    if spanned > 1:
        places = [member.place for member in standing if member.place >= 0]
        possible = min(replicas.most_replicas(places, spanned), rules.max_nodes // spanned)
        if possible * spanned <= world.count:
            return frozenset()  # no newcomer would be in that world
    return frozenset(member.node for member in there if world.place(member.node) is not None)


def _startable(state: RoundState, member: Member) -> tuple[int, ...]:
    """The local ranks that can start with a world: all of a node's, or none while it is not
    ready."""
    if member.unfit:
        return ()
    if member.ready or (state.world is not None and state.world.find(member.node) is not None):
        return _first(member.nproc)
    return ()


@cache
def _first(count: int) -> tuple[int, ...]:
    """The local ranks 0 to `count` - 1; cached, because thousands of nodes share them."""
    return tuple(range(count))


def choose(
    rules: RoundRules, ordered: list[Offer], state: RoundState, *, awaits_starts: bool = True
) -> list[Offer]:
    """The members of the largest allowed world, earlier ones in the list preferred; empty if there
    is none.

    Nodes that are held out are included only if there is no world without them, as few as possible,
    or if only they have the state. `awaits_starts`: they stay out while enough other workers are
    starting.

    Of nodes that cannot reach each other, one side is chosen: that of the running world, the one
    with the newest whole state, the one with the most workers, the one with the lowest old rank.
    """
    cut = connectivity.cut_pairs(state) if rules.probes else frozenset()
    if not cut:
        return _choose_on_side(ordered, rules, state, awaits_starts)
    world = state.world
    staying = world.members if world is not None and world.is_under_way else frozenset()
    best_first = sorted(
        ordered, key=lambda offer: (offer.node in staying, offer.member.holds), reverse=True
    )
    found = [
        _choose_on_side(
            [offer for offer in ordered if offer.node in side], rules, state, awaits_starts
        )
        for side in connectivity.sides([offer.node for offer in best_first], cut)
    ]
    return max(found, key=partial(_merit, rules, state))


def _merit(rules: RoundRules, state: RoundState, chosen: list[Offer]) -> tuple[int, bool, int, int]:
    """How good a side of a cut is: more is better."""
    world, nodes = state.world, [offer.node for offer in chosen]
    places = [place for node in nodes if world and (place := world.place(node)) is not None]
    under_way = len(places) if world is not None and world.is_under_way else 0
    whole = bool(chosen) and not holders_left_out(rules, state, nodes)
    return under_way, whole, workers(chosen), -min(places, default=1 << 30)


def _choose_on_side(
    ordered: list[Offer], rules: RoundRules, state: RoundState, awaits_starts: bool
) -> list[Offer]:
    """The members of the largest allowed world among nodes that reach each other."""
    out = state.out
    if out:
        out -= needed_though_held(rules, state, ordered, out)
    for offers in _without_held_out(ordered, state, out):
        chosen = _prefer_holders(rules, offers, state)
        awaited = awaits_starts and out and enough_without(rules, state, out)
        if chosen or awaited:
            return chosen
    return []


def needed_though_held(
    rules: RoundRules, state: RoundState, offers: Iterable[Offer], out: Set[str]
) -> frozenset[str]:
    """The held-out nodes without which the newest state in memory, or a part of it, would be lost;
    of several that have it, the one with the fewest failures."""
    times = {one.node: one.times for one in the_world(state).held}
    there: list[str] = []
    offered: set[str] = set()
    for offer in offers:
        if offer.node in out:
            offered.add(offer.node)
        elif offer.memory.whole:
            there.append(offer.node)
    needed: list[str] = []
    while left := offered.intersection(holders_left_out(rules, state, [*there, *needed])):
        needed.append(min(left, key=times.__getitem__))
    return frozenset(needed)


def _by_place(offers: Iterable[Offer]) -> list[list[Offer]]:
    """The offers that can replace each other in a replica; all, if no replica spans nodes."""
    found: dict[int, list[Offer]] = {}
    for offer in offers:
        found.setdefault(offer.member.place, []).append(offer)
    return list(found.values())


def _without_held_out(
    ordered: list[Offer], state: RoundState, held_out_nodes: Set[str]
) -> Iterator[list[Offer]]:
    """The list without held-out nodes; then with one more of them each time, fewest failures
    first."""
    out = {offer.node for offer in ordered if offer.node in held_out_nodes}
    yield [offer for offer in ordered if offer.node not in out] if out else ordered
    for one in sorted(the_world(state).held if out else (), key=lambda one: one.times):
        if one.node in out:
            out.remove(one.node)
            yield [offer for offer in ordered if offer.node not in out]


def enough_without(rules: RoundRules, state: RoundState, nodes: Set[str]) -> bool:
    """Return whether the other candidates make an allowed world, now or after their workers have
    started."""
    others = [offer for offer in candidates(rules, state, soon=True) if offer.node not in nodes]
    return bool(_choose(rules, in_order(others, state.world), state))


def _prefer_holders(rules: RoundRules, ordered: list[Offer], state: RoundState) -> list[Offer]:
    """Prefer nodes that have the newest state in memory. At least one of them is chosen, slow or
    not: it may be the only one that has the state. The order is kept."""
    newest = {
        same[0].member.place: max(offer.memory for offer in same) for same in _by_place(ordered)
    }

    def holds(offer: Offer) -> bool:
        return offer.memory == newest[offer.member.place]

    whole = _in_former_replicas(rules, ordered, state)
    holders_first = sorted(  # stable
        ordered, key=lambda offer: (not holds(offer), offer.node not in whole)
    )
    chosen = _prefer_fast(rules, holders_first, state)
    if not all(any(map(holds, same)) for same in _by_place(chosen)):
        chosen = _choose(rules, holders_first, replace(state, slow=frozenset()))
    position = {offer.node: index for index, offer in enumerate(ordered)}
    return sorted(chosen, key=lambda offer: position[offer.node])


def _in_former_replicas(
    rules: RoundRules, offers: list[Offer], state: RoundState
) -> frozenset[str]:
    """The nodes of the last world whose replicas are still whole, if replicas span nodes."""
    if (spanned := nodes_per_replica(rules, state)) == 1 or state.world is None:
        return frozenset()
    there = {offer.node for offer in offers}
    nodes = [node.node for node in state.world.nodes]
    former = (nodes[begin : begin + spanned] for begin in range(0, len(nodes), spanned))
    return frozenset(node for made in former if there.issuperset(made) for node in made)


def _prefer_fast(rules: RoundRules, ordered: list[Offer], state: RoundState) -> list[Offer]:
    """Choose slow nodes last, unless the world would be smaller without them."""
    chosen = _choose(rules, ordered, state)
    if not any(offer.node in state.slow for offer in chosen):
        return chosen
    slow_last = sorted(ordered, key=lambda offer: offer.node in state.slow)  # stable
    better = _choose(rules, slow_last, state)
    return chosen if workers(better) < workers(chosen) else better


def workers(offers: Iterable[Offer]) -> int:
    return sum(len(offer.ranks) for offer in offers)


def _choose(rules: RoundRules, ordered: list[Offer], state: RoundState) -> list[Offer]:
    size, spanned = replica_size(rules, state), nodes_per_replica(rules, state)
    if spanned > 1:
        return _choose_replicas(rules, ordered, size, spanned)
    if are_in_process(state):
        return _choose_workers(rules, ordered[: rules.max_nodes], state, max(size, 1))
    return _choose_nodes(rules, ordered)


def _choose_replicas(
    rules: RoundRules, ordered: list[Offer], size: int, spanned: int
) -> list[Offer]:
    """Choose the first nodes of each place, as many as make the largest allowed world. Which of
    them form a replica together is decided by `in_world_order`."""
    places = replicas.by_place(((offer.member.place, offer) for offer in ordered), spanned)
    most = min(rules.max_nodes // spanned, *map(len, places))
    for count in range(most, 0, -1):
        if count * spanned >= rules.min_nodes and rules.world_sizes.allows(count * size):
            taken = {offer.node for same in places for offer in same[:count]}
            return [offer for offer in ordered if offer.node in taken]
    return []


def in_world_order(rules: RoundRules, state: RoundState, chosen: list[Offer]) -> list[Offer]:
    """The chosen nodes in the order of their ranks: replica by replica, if replicas span nodes."""
    if (spanned := nodes_per_replica(rules, state)) == 1:
        return chosen
    last = state.world.nodes if state.world is not None else ()
    found = {offer.node: offer for offer in chosen}
    nodes = [(offer.node, offer.member.place) for offer in chosen]
    ranks = {node.node: node.node_rank for node in last}
    return [found[node] for node in replicas.arranged(nodes, ranks, spanned)]


def _choose_workers(
    rules: RoundRules, offers: list[Offer], state: RoundState, size: int
) -> list[Offer]:
    """Choose workers, in blocks of `size`; a node may be in the world with only some of its
    workers. Fast nodes come before slow ones, then workers with the newest state, then workers of
    the last world."""
    every = [(offer.node, block) for offer in offers for block in _blocks(offer.ranks, size)]
    last = state.world
    if last is not None:
        newest = max((offer.member.holds for offer in offers), default=-1)
        without = {
            (offer.node, rank)
            for offer in offers
            for rank in (offer.member.blank if offer.member.holds == newest else offer.ranks)
        }
        # A stable sort: equals keep their order.
        every.sort(
            key=lambda one: (
                one[0] in state.slow,
                any((one[0], rank) in without for rank in one[1]),
                last.rank(one[0], one[1][0]) is None,
            )
        )
    blocks = _largest(rules, every, size)
    ranks: dict[str, list[int]] = {}
    for node, block in every[:blocks]:
        ranks.setdefault(node, []).extend(block)
    return [
        offer._replace(ranks=tuple(sorted(ranks[offer.node])))
        for offer in offers
        if offer.node in ranks
    ]


def _blocks(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return replicas.whole_blocks(ranks, size) if size > 1 else [(rank,) for rank in ranks]


def _largest(rules: RoundRules, blocks: list[tuple[str, tuple[int, ...]]], size: int) -> int:
    """The number of blocks in the largest allowed world of the first of these; 0 if there is
    none."""
    nodes: set[str] = set()
    largest = 0
    for count, (node, _) in enumerate(blocks, start=1):
        nodes.add(node)
        if len(nodes) >= rules.min_nodes and rules.world_sizes.allows(count * size):
            largest = count
    return largest


def _choose_nodes(rules: RoundRules, ordered: list[Offer]) -> list[Offer]:
    """The longest prefix of the list that makes an allowed world."""
    sizes = list(accumulate(len(offer.ranks) for offer in ordered[: rules.max_nodes]))
    for count in range(len(sizes), rules.min_nodes - 1, -1):
        if rules.world_sizes.allows(sizes[count - 1]):
            return ordered[:count]
    return []


def in_order(offers: Iterable[Offer], last: World | None) -> list[Offer]:
    """The order of nodes: static places first, then survivors in their order, newcomers last."""

    def position(offer: Offer) -> tuple[int, int, int]:
        static = offer.member.node_rank if offer.member.node_rank is not None else -1
        survivor = last.place(offer.node) if last is not None else None
        return static, survivor if survivor is not None else 1 << 30, offer.created

    return sorted(offers, key=position)


# --- places in replicas that span nodes ----------------------------------------------------------


def to_allot(rules: RoundRules, state: RoundState) -> dict[str, int]:
    """Places for members that have none, and other places for nodes in no world that would then
    complete one more replica: their workers start again."""
    spanned = nodes_per_replica(rules, state)
    if spanned == 1:
        return {}
    there = [
        present
        for present in sorted(state.members.values(), key=lambda item: item.created)
        if not present.member.leaving and not present.member.unfit
    ]
    known = {one.member.node: state.places.get(one.member.node, one.member.place) for one in there}
    places = {node: place for node, place in known.items() if place >= 0}
    new = {one.member.node: one.member.node_rank for one in there if known[one.member.node] < 0}
    if new:
        return replicas.allot(new, places, spanned)
    world = state.world
    if world is not None and world.phase not in ("waiting", "running"):
        return {}
    places = {node: place for node, place in places.items() if node not in state.out}
    movable = [
        one.member
        for one in reversed(there)
        if one.member.node in places
        and one.member.node_rank is None
        and one.member.place == known[one.member.node]
        and (world is None or world.phase == "waiting" or world.place(one.member.node) is None)
    ]
    ready = [one.member for one in there if one.member.place >= 0]
    oldest_first = sorted(_not_only_holders(movable, ready), key=lambda member: member.holds)
    best_first = [member.node for member in oldest_first]
    return replicas.moves(places, best_first, spanned, rules.max_nodes // spanned)


def _not_only_holders(movable: Iterable[Member], members: list[Member]) -> list[Member]:
    """The nodes whose state is not needed: another one of the same place has it, or a newer one."""
    holders = Counter((member.place, member.holds) for member in members)
    newest = {member.place: member.holds for member in sorted(members, key=lambda one: one.holds)}
    return [
        member
        for member in movable
        if member.holds < max(newest[member.place], 0) or holders[member.place, member.holds] > 1
    ]
