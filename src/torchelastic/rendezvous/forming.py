"""Form the next world: choose its nodes among the members. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from functools import cache
from itertools import accumulate, islice
from typing import NamedTuple

from torchelastic.errors import EXIT_NOT_ENOUGH_NODES
from torchelastic.events import words
from torchelastic.records import replace
from torchelastic.rendezvous import held_out, majority
from torchelastic.rendezvous.round_state import (
    Decision,
    RoundRules,
    RoundState,
    departing,
    has_trained,
    may_step_elsewhere,
    names_of,
    roll_after,
    the_world,
    to_claim,
    votes,
)
from torchelastic.rendezvous.world import NAMED, Member, World, WorldNode

#: How long a world may be held back for members that are there but not ready to start workers.
WARM_UP_PATIENCE = 30.0
#: How often a waiting job says what it is waiting for; and when that has changed: thousands of
#: nodes come one by one, and all are told.
SAY_EVERY, SAY_CHANGES = 60.0, 5.0


class Offer(NamedTuple):
    """A member that could be in the next world, and its workers."""

    node: str
    member: Member
    created: int
    #: Local ranks.
    ranks: tuple[int, ...]


def form(rules: RoundRules, state: RoundState, now: float, *, at_once: bool) -> Decision:
    """Decide on the next world if enough members are ready, else on a waiting one, else on the
    end."""
    if len(state.members) < rules.min_nodes:
        return _wait(rules, state, now)  # before a look at each: they come one by one
    ordered = in_order(candidates(state), state.world)
    chosen = choose(rules, ordered, state, awaits_starts=now < _starts_awaited_until(state))
    missing = to_claim(state)
    if not chosen or missing is None:
        return _wait(rules, state, now)
    if now < state.may_begin_at and (
        _may_be_known_elsewhere(rules, state, chosen) or may_step_elsewhere(state)
    ):
        return Decision(wake_at=state.may_begin_at)
    if not at_once and len(chosen) < rules.max_nodes:
        at = settled_at(rules, state, [offer.node for offer in ordered], len(ordered))
        if now < at:
            return Decision(wake_at=at) if state.world else _wait(rules, state, now)
    store = _store_of(chosen)
    if not store:
        return Decision()
    if missing:
        return _ask_witness(rules, state, missing, now)
    last = state.world or World(generation=-1, phase="waiting", reason="the job starts")
    trained = has_trained(state)
    still_out = state.out.difference(offer.node for offer in chosen)
    world = replace(
        last,
        generation=_number(last, state),
        start=last.start or chosen[0].node,
        phase="running",
        host=state.host,
        heirs=_host_of(state),
        term=state.term,
        witness=_witness(state, chosen),
        store=store,
        ending=None,
        after=None,
        resident=are_resident(state),
        reason=_beginning(last),
        spares=_names_of_others(ordered, chosen),
        spare_count=len(ordered) - len(chosen),
        missing=(),
        missing_count=0,
        held=held_out.forget(held_out.end_all_but(last.held, still_out), state.resumed),
        proven=last.proven or trained,
        patience=None,
        enough=False,
    )
    known = _proven(last, trained)
    return Decision(_to_agree_on(state, world.with_nodes(_place(chosen, known))))


def _store_of(chosen: Iterable[Offer]) -> str:
    """The worker store of a world: at the first node that offers one. A node whose store host is
    being replaced offers none, and does not delay the others."""
    return next((offer.member.store for offer in chosen if offer.member.store), "")


def _proven(last: World, trained: bool) -> frozenset[str] | None:
    """The nodes of the last world that has trained; None if none has."""
    if trained:
        return last.members
    if not last.proven:
        return None
    return frozenset(node.node for node in last.nodes if not node.new)


def _witness(state: RoundState, chosen: list[Offer]) -> str:
    """The token of the witness, if it votes on what follows a world of these nodes: if they could
    be split into halves, and all of them and the host read the same token there."""
    host = state.members.get(state.host)
    if state.roll is None or host is None or not host.member.witness:
        return ""
    tokens = {host.member.witness, *(offer.member.witness for offer in chosen)}
    may_tie = majority.may_tie([offer.node for offer in chosen], state.host)
    return host.member.witness if may_tie and len(tokens) == 1 else ""


def _ask_witness(
    rules: RoundRules, state: RoundState, missing: tuple[str, ...], now: float
) -> Decision:
    """Claim the votes that only the witness can give; last, because nobody else can have them then.

    A host outside the world first waits a lease's time, while others may still step in it. A node
    that trains alone counts as lost no sooner.
    """
    world = the_world(state)
    if world.place(state.host) is None and not world.steps_without(state.host):
        ended = state.since + rules.lease if world.phase == "waiting" else math.inf
        if now < ended:
            waiting = _wait(rules, state, now)
            wake_at = ended if waiting.wake_at is None else min(waiting.wake_at, ended)
            return waiting if waiting.world is not None else Decision(wake_at=wake_at)
    asked = _wait(rules, state, now) if state.witness.silent else Decision()
    return asked if asked.world is not None else replace(asked, claims=missing)


def _host_of(state: RoundState) -> dict[str, str]:
    """The address of the host of the store, whether or not it is in the next world."""
    present = state.members.get(state.host)
    return {} if present is None else {state.host: present.member.peer}


def _names_of_others(ordered: list[Offer], chosen: list[Offer]) -> tuple[str, ...]:
    """The names of the first nodes that were not chosen."""
    taken = {offer.node for offer in chosen}
    others = (offer.member.name for offer in ordered if offer.node not in taken)
    return tuple(islice(others, NAMED))


def _may_be_known_elsewhere(rules: RoundRules, state: RoundState, chosen: list[Offer]) -> bool:
    """Return whether the job may already have a host that this store does not know.

    Not if the job has a fixed number of nodes and all of them are here and new: the others would be
    too few to train.
    """
    is_first = state.world is None or not state.world.nodes
    return is_first and not rules.min_nodes == rules.max_nodes == len(chosen)


def _to_agree_on(state: RoundState, world: World) -> World:
    """The world as it is published: to start at once, or after enough nodes have taken it up."""
    if state.roll is None:
        return world
    if majority.settles_itself(roll_after(state, world), departing(state)):
        return world
    return replace(world, phase="agreeing")


def _number(last: World, state: RoundState) -> int:
    """The number of the world after `last`, which may have had no nodes."""
    if not last.nodes:
        return max(last.generation, 0, majority.first_generation(state.term))
    return majority.next_generation(last.generation, state.term)


def newcomers_to(rules: RoundRules, state: RoundState) -> list[str]:
    """Nodes with workers outside the running world that would make the next one larger."""
    world = state.world
    if world is None or world.phase != "running":
        return []
    if not any(_may_bring_more(world, present.member) for present in state.members.values()):
        return []  # nearly always, and asked whenever one of thousands says something
    chosen = choose(rules, in_order(candidates(state), world), state)
    if workers(chosen) <= world.size:
        return []
    return [offer.node for offer in chosen if _brings_more(world, offer)]


def _may_bring_more(world: World, member: Member) -> bool:
    found = world.find(member.node)
    return found is None or len(member.standing) > found.nproc


def _brings_more(world: World, offer: Offer) -> bool:
    found = world.find(offer.node)
    return found is None or found.nproc < len(offer.ranks)


def _beginning(last: World) -> str:
    """The reason why a generation begins."""
    if not last.nodes:
        return "the job starts"
    if last.phase != "waiting":
        return last.reason
    return f"enough {'workers' if last.resident else 'nodes'} are available again"


def _wait(rules: RoundRules, state: RoundState, now: float) -> Decision:
    """Wait for more members: say so, again every minute, and end after too long."""
    last = state.world
    still = last is not None and last.phase == "waiting"
    since = state.since if still else now
    what, enough = _lacks(rules, state)
    left = None
    if rules.wait_for_nodes and not enough:
        left = since + rules.wait_for_nodes - now
    if last is not None and left is not None and left <= 0:
        reason = f"{what}: giving up after {rules.wait_for_nodes:g} s (--wait-for-nodes)"
        return Decision(
            replace(last, phase="closed", exitcode=EXIT_NOT_ENOUGH_NODES, reason=reason)
        )
    missing = _missing(state)
    again = state.said_at + _pause(last, what, len(missing), enough)
    if still and now < again:
        times = [again, _starts_awaited_until(state) if state.out else math.inf]
        times += [now + left] if left is not None else []
        return Decision(wake_at=min(time for time in times if time > now))
    if last is not None and last.resident and last.phase == "over":
        what = f"{last.reason}; {what}"  # what ended the world is known by now
    world = replace(
        last or World(generation=0, phase="waiting"),
        phase="waiting",
        after=None,
        reason=f"{what}{limit(left)}",
        missing=missing[:NAMED],
        missing_count=len(missing),
        patience=left,
        enough=enough,
    )
    return Decision(world)


def _starts_awaited_until(state: RoundState) -> float:
    """The time until which a waiting job prefers workers that are starting, and may hang, to a node
    that is held out."""
    waits = state.world is not None and state.world.phase == "waiting"
    return state.since + WARM_UP_PATIENCE if waits else math.inf


def _pause(last: World | None, what: str, missing: int, enough: bool) -> float:
    """Seconds until the job says again what it waits for.

    It says at once when enough nodes have joined: until then, time counts as waiting for them.
    """
    if last is None or last.enough != enough:
        return 0.0
    return SAY_EVERY if what in last.reason and missing == last.missing_count else SAY_CHANGES


def limit(left: float | None) -> str:
    """The end of a sentence about waiting."""
    return "" if left is None else f", for {words.span(round(left))} more"


def _lacks(rules: RoundRules, state: RoundState) -> tuple[str, bool]:
    """Describe what keeps a world from forming, and whether enough nodes are here (warming up)."""
    missing = to_claim(state)
    if missing and state.witness.silent:
        return f"waiting for the witness at {state.witness.url}: {state.witness.silent}", False
    if missing is None:
        return f"waiting for a majority: {_who_agrees(state)} (--quorum){_tie(state)}", False
    every = [item.member for item in state.members.values() if not item.member.leaving]
    staying = [member for member in every if not member.unfit]
    there = f"{len(staying)} of at least {rules.min_nodes} joined{_unfit(every)}"
    if len(staying) < rules.min_nodes:
        return f"waiting for nodes: {there}", False
    starting = sum(member.starting for member in staying)
    if are_resident(state) and starting:
        return f"waiting for {starting} worker{'s' if starting > 1 else ''} to start", True
    if not all(member.ready for member in staying):
        return f"warming up: {there}", True
    if len(candidates(state)) < rules.min_nodes:
        return "waiting for nodes: two nodes have the same --node-rank", False
    if choose(rules, in_order(candidates(state), state.world), state):
        return f"settling: {there}", True
    workers = sum(member.nproc for member in staying)
    return (
        f"waiting for nodes: --world-sizes {rules.world_sizes} allows no world of {workers} "
        "workers",
        False,
    )


def _who_agrees(state: RoundState) -> str:
    """Describe how many of the nodes that must agree can be reached, which nodes these are, and
    which of them the others wait for."""
    world, given = the_world(state), votes(state)
    assert state.roll is not None, "no majority is needed"
    asked = next(each for each in reversed(state.roll.electorates) if not each.agrees(given))
    there = asked.nodes & (given | state.members.keys())
    nodes = f"{len(there)} of the {len(asked.nodes)} nodes"
    if asked is not state.roll.latest:
        nodes += f" that must agree to replace generation {world.generation}"
    elif world.host and world.place(world.host) is None:
        nodes += f" (those of generation {world.generation} and its host)"
    else:
        nodes += f" of generation {world.generation}"
    slow = names_of(state, sorted(there - given))
    busy = f", but the workers of {slow} have not been reported as stopped" if slow else ""
    return f"{nodes} can be reached{busy}"


def _tie(state: RoundState) -> str:
    """Say which nodes have the witness's vote, or what a witness would be good for."""
    assert state.roll is not None
    wanted = [each for each in state.roll.electorates if not each.agrees(votes(state))]
    refused = state.witness.refused
    if holders := [refused[each.witness] for each in wanted if each.witness in refused]:
        return f"; the witness voted for {names_of(state, holders)}"
    may_tie = all(len(each.voters) % 2 == 0 for each in wanted)
    return "; with --witness, either half of the nodes could continue" if may_tie else ""


def _unfit(members: Iterable[Member]) -> str:
    """Name the first node that cannot take part, and why, and count the others."""
    unfit = [member for member in members if member.unfit]
    if not unfit:
        return ""
    more = f" and {len(unfit) - 1:,} more" if len(unfit) > 1 else ""
    return f", without {unfit[0].name} ({unfit[0].unfit}){more}"


def _missing(state: RoundState) -> tuple[str, ...]:
    """The names of the last world's nodes, and of its host, that are gone."""
    world = state.world
    if world is None:
        return ()
    missing = [node.name for node in world.nodes if node.node not in state.members]
    if state.roll is not None and world.host not in {*world.members, *state.members, ""}:
        missing.append(f"the host of generation {world.generation}")
    return tuple(missing)


def settled_at(rules: RoundRules, state: RoundState, nodes: Iterable[str], there: int) -> float:
    """The time when arrivals count as over: a settle time after the last of `nodes`, or at once
    when the maximum number of nodes is here.

    Members that are still warming up are waited for, within limits.
    """
    if there >= rules.max_nodes:
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
    if member.unfit:
        return False
    return (not member.ready and member.gone < 0) or (member.starting > 0 and not member.standing)


def are_resident(state: RoundState) -> bool:
    """Return whether the next world has resident workers."""
    if state.world is not None and state.world.nodes:
        return state.world.resident
    members = state.members.values()
    return bool(members) and all(present.member.resident for present in members)


def candidates(state: RoundState, *, soon: bool = False) -> list[Offer]:
    """Members that could be in the next world, oldest first, each static node rank once.

    `soon`: also those that could be once their starting resident workers have started.
    """
    resident, handing_over = are_resident(state), _handing_over(state)
    taken: set[int] = set()
    found = []
    for present in sorted(state.members.values(), key=lambda item: item.created):
        member = present.member
        ranks = member.standing if resident else _startable(state, member)
        if soon and resident and member.starting and not member.unfit:
            ranks = _first(member.nproc)
        if (member.leaving and member.node not in handing_over) or not ranks:
            continue
        if member.node_rank is not None:
            if member.node_rank in taken:
                continue
            taken.add(member.node_rank)
        found.append(Offer(member.node, member, present.created, ranks))
    return found


def _handing_over(state: RoundState) -> frozenset[str]:
    """Leaving nodes that are in one more world first: no other node of the last world has its
    state, and there are others to take it."""
    world = state.world
    if world is None or not world.resident or world.phase != "pausing":
        return frozenset()
    there = [present.member for present in state.members.values()]
    staying = [member.node for member in there if member.standing and not member.leaving]
    if not staying or any(world.place(node) is not None for node in staying):
        return frozenset()
    return frozenset(member.node for member in there if world.place(member.node) is not None)


def _startable(state: RoundState, member: Member) -> tuple[int, ...]:
    """Workers that start with a world: all of a node's, or none while it cannot start them."""
    if member.ready or (state.world is not None and state.world.find(member.node) is not None):
        return _first(member.nproc)
    return ()


@cache
def _first(count: int) -> tuple[int, ...]:
    """One shared tuple for the thousands of nodes with equally many workers."""
    return tuple(range(count))


def choose(
    rules: RoundRules, ordered: list[Offer], state: RoundState, *, awaits_starts: bool = True
) -> list[Offer]:
    """The most workers that make an allowed world, from the beginning of the list; possibly none.

    Nodes that are held out are included only if there is no world without them, and as few as
    possible, or to hand over the state if no other node has it. `awaits_starts`: they are not
    included while other workers are starting that would make a world.
    """
    out = state.out
    if out:
        out -= {only_holder(ordered, the_world(state).held, out)}
    for offers in _holding_out(ordered, state, out):
        chosen = _prefer_holders(rules, offers, state)
        awaited = awaits_starts and out and enough_without(rules, state, out)
        if chosen or awaited:
            return chosen
    return []


def only_holder(offers: Iterable[Offer], held: held_out.Held, out: Set[str]) -> str:
    """The node among those held `out` without which the newest state in memory would be lost; if
    several have it, the one with the fewest failures. Empty if there is none."""
    kept_out = {one.node: one for one in held if one.node in out}
    unable = {one.node for one in kept_out.values() if one.unable}
    able = [offer for offer in offers if offer.node not in unable]
    newest = max((offer.member.holds for offer in able), default=-1)
    holders = [offer.node for offer in able if offer.member.holds == newest]
    if newest < 0 or any(node not in kept_out for node in holders):
        return ""
    return min(holders, key=lambda node: kept_out[node].times)


def _holding_out(ordered: list[Offer], state: RoundState, held: Set[str]) -> Iterator[list[Offer]]:
    """The list without nodes that are held out; then with one more of them each time, those with
    the fewest failures first."""
    out = {offer.node for offer in ordered} & held if held else set()
    yield [offer for offer in ordered if offer.node not in out] if out else ordered
    for one in sorted(the_world(state).held if out else (), key=lambda one: one.times):
        if one.node in out:
            out.remove(one.node)
            yield [offer for offer in ordered if offer.node not in out]


def enough_without(rules: RoundRules, state: RoundState, nodes: Set[str]) -> bool:
    """Return whether the candidates without these nodes make an allowed world, now or after their
    workers have started."""
    others = [offer for offer in candidates(state, soon=True) if offer.node not in nodes]
    return bool(_choose(rules, in_order(others, state.world), state))


def _prefer_holders(rules: RoundRules, ordered: list[Offer], state: RoundState) -> list[Offer]:
    """Prefer nodes that have the newest state in memory; at least one of them is chosen, slow or
    not: the last world may never have begun, without the only node that has the state. The order is
    kept."""
    newest = max((offer.member.holds for offer in ordered), default=-1)
    holders_first = sorted(ordered, key=lambda offer: offer.member.holds < newest)  # stable
    chosen = _prefer_fast(rules, holders_first, state)
    if chosen and not any(offer.member.holds == newest for offer in chosen):
        chosen = _choose(rules, holders_first, replace(state, slow=frozenset()))
    places = {offer.node: place for place, offer in enumerate(ordered)}
    return sorted(chosen, key=lambda offer: places[offer.node])


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
    if are_resident(state):
        return _choose_workers(rules, ordered[: rules.max_nodes], state)
    return _choose_nodes(rules, ordered)


def _choose_workers(rules: RoundRules, offers: list[Offer], state: RoundState) -> list[Offer]:
    """Choose workers; a node may bring only some of its workers. Those of the last world come
    first, but not before those of a node that is not slow or has the newest state."""
    every = [(offer.node, rank) for offer in offers for rank in offer.ranks]
    last = state.world
    if last is not None:
        newest = max((offer.member.holds for offer in offers), default=-1)
        without = {offer.node for offer in offers if offer.member.holds < newest}
        # Stable: else in order.
        every.sort(
            key=lambda one: (one[0] in state.slow, one[0] in without, last.rank(*one) is None)
        )
    size = _largest(rules, every)
    ranks: dict[str, list[int]] = {}
    for node, rank in every[:size]:
        ranks.setdefault(node, []).append(rank)
    return [
        offer._replace(ranks=tuple(sorted(ranks[offer.node])))
        for offer in offers
        if offer.node in ranks
    ]


def _largest(rules: RoundRules, workers: list[tuple[str, int]]) -> int:
    """The number of these workers, from the first, in the largest allowed world; 0 if there is
    none."""
    nodes: set[str] = set()
    largest = 0
    for size, (node, _) in enumerate(workers, start=1):
        nodes.add(node)
        if len(nodes) >= rules.min_nodes and rules.world_sizes.allows(size):
            largest = size
    return largest


def _choose_nodes(rules: RoundRules, ordered: list[Offer]) -> list[Offer]:
    """The longest beginning of the list that makes an allowed world."""
    sizes = list(accumulate(len(offer.ranks) for offer in ordered[: rules.max_nodes]))
    for count in range(len(sizes), rules.min_nodes - 1, -1):
        if rules.world_sizes.allows(sizes[count - 1]):
            return ordered[:count]
    return []


def in_order(offers: Iterable[Offer], last: World | None) -> list[Offer]:
    """The order of nodes: static places first, then survivors in their order, newcomers last."""

    def place(offer: Offer) -> tuple[int, int, int]:
        static = offer.member.node_rank if offer.member.node_rank is not None else -1
        survivor = last.place(offer.node) if last is not None else None
        return static, survivor if survivor is not None else 1 << 30, offer.created

    return sorted(offers, key=place)


def _place(offers: Iterable[Offer], proven: frozenset[str] | None) -> tuple[WorldNode, ...]:
    """Assign ranks to every worker; nodes that are not among the `proven` are new."""
    nodes: list[WorldNode] = []
    rank, role_ranks = 0, dict[str, int]()
    for place, (node, member, _, ranks) in enumerate(offers):
        role_rank = role_ranks.get(member.role, 0)
        nodes.append(
            WorldNode(
                node=node,
                name=member.name,
                addr=member.addr,
                peer=member.peer,
                node_rank=place,
                nproc=len(ranks),
                role=member.role,
                first_rank=rank,
                first_role_rank=role_rank,
                local_ranks=ranks,
                new=proven is not None and node not in proven,
            )
        )
        rank += len(ranks)
        role_ranks[member.role] = role_rank + len(ranks)
    return tuple(nodes)
