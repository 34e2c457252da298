"""Form the next world, or wait for more members and say why. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from torchelastic.errors import EXIT_NOT_ENOUGH_NODES
from torchelastic.events import words
from torchelastic.records import replace
from torchelastic.rendezvous import connectivity, held_out, majority, replicas
from torchelastic.rendezvous.choosing import (
    Offer,
    are_in_process,
    candidates,
    choose,
    holders_left_out,
    in_order,
    in_world_order,
    nodes_per_replica,
    replica_size,
    workers,
    would_lose_parts,
)
from torchelastic.rendezvous.round_state import (
    RoundDecision,
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
from torchelastic.rendezvous.world import LISTED_NAMES_LIMIT, Member, World, WorldNode

#: Seconds that a world waits for members that are not ready to start workers.
WARM_UP_TIMEOUT = 30.0
#: Seconds after which a waiting job repeats its reason, and the least between two different ones:
#: every node receives each, and thousands of nodes may join one by one.
REPEAT_INTERVAL, CHANGE_INTERVAL = 60.0, 5.0


def form(rules: RoundRules, state: RoundState, now: float, *, at_once: bool) -> RoundDecision:
    """The next world if enough members are ready; else a waiting one, or the end of the job."""
    if len(state.members) < rules.min_nodes:
        return _wait(rules, state, now)  # before looking at each: they join one by one
    ordered = in_order(candidates(rules, state), state.world)
    chosen = choose(rules, ordered, state, awaits_starts=now < _starts_awaited_until(state))
    chosen = in_world_order(rules, state, chosen)
    missing = to_claim(state)
    if not chosen or missing is None or would_lose_parts(rules, state, chosen):
        return _wait(rules, state, now)
    if holders_left_out(rules, state, [offer.node for offer in chosen]):
        return _wait(rules, state, now)
    if now < state.may_begin_at and (
        _may_have_other_host(rules, state, chosen) or may_step_elsewhere(state)
    ):
        return RoundDecision(wake_at=state.may_begin_at)
    if not at_once and len(chosen) < rules.max_nodes:
        at = settled_at(rules, state, [offer.node for offer in ordered], len(ordered))
        if now < at:
            return RoundDecision(wake_at=at) if state.world else _wait(rules, state, now)
    # A node whose store host is being replaced offers none, and does not delay the others.
    store = next((offer.member.store for offer in chosen if offer.member.store), "")
    if not store:
        return RoundDecision()
    if missing:
        return _ask_witness(rules, state, missing, now)
    last = state.world or World(generation=-1, phase="waiting", reason="the job starts")
    trained = has_trained(state)
    still_out = state.out.difference(offer.node for offer in chosen)
    host = state.members.get(state.host)
    world = replace(
        last,
        generation=_number(last, state),
        start=last.start or chosen[0].node,
        phase="running",
        host=state.host,
        # Whether or not it is in this world.
        candidates={} if host is None else {state.host: host.member.peer},
        term=state.term,
        witness=_witness(state, chosen),
        store=store,
        ending=None,
        after=None,
        in_process=are_in_process(state),
        replica=replica_size(rules, state),
        reason=_start_reason(last),
        spares=_names_of_others(ordered, chosen),
        spare_count=len(ordered) - len(chosen),
        missing=(),
        missing_count=0,
        held=held_out.forget(held_out.end_all_but(last.held, still_out), state.resumed),
        proven=last.proven or trained,
        patience=None,
        enough=False,
        certified=-1,
        wrong=(),
        blamed="",
    )
    world = world.with_nodes(_place(chosen, _proven(last, trained)))
    if state.roll is not None and not majority.confirms_itself(
        roll_after(state, world), departing(state)
    ):
        world = replace(world, phase="agreeing")  # until enough nodes have confirmed it
    return RoundDecision(world)


def _proven(last: World, trained: bool) -> frozenset[str] | None:
    """The nodes of the last world that has trained; None if none has."""
    if trained:
        return last.members
    if not last.proven:
        return None
    return frozenset(node.node for node in last.nodes if not node.new)


def _witness(state: RoundState, chosen: list[Offer]) -> str:
    """The token of the witness if it gets a vote on the world after this one: if the nodes could be
    split into halves, and all of them and the host read the same token there."""
    host = state.members.get(state.host)
    if state.roll is None or host is None or not host.member.witness:
        return ""
    tokens = {host.member.witness, *(offer.member.witness for offer in chosen)}
    may_tie = majority.may_tie([offer.node for offer in chosen], state.host)
    return host.member.witness if may_tie and len(tokens) == 1 else ""


def _ask_witness(
    rules: RoundRules, state: RoundState, missing: tuple[str, ...], now: float
) -> RoundDecision:
    """Claim the votes that only the witness can give. This comes last, because no other node can
    get them afterwards.

    If the host has no place in the last world, it first waits for the length of a lease, because
    nodes that it cannot reach may still take steps. It does not wait here for a node that trained
    alone: such a node counts as lost only after its lease has ended.
    """
    world = state.world
    if (
        world is not None
        and world.count
        and world.place(state.host) is None
        and not world.steps_without(state.host)
    ):
        ended = state.since + rules.lease if world.phase == "waiting" else math.inf
        if now < ended:
            waiting = _wait(rules, state, now)
            wake_at = ended if waiting.wake_at is None else min(waiting.wake_at, ended)
            return waiting if waiting.world is not None else RoundDecision(wake_at=wake_at)
    asked = _wait(rules, state, now) if state.witness.silent else RoundDecision()
    return asked if asked.world is not None else replace(asked, claims=missing)


def _names_of_others(ordered: list[Offer], chosen: list[Offer]) -> tuple[str, ...]:
    """The names of the first nodes that were not chosen."""
    taken = {offer.node for offer in chosen}
    others = (offer.member.name for offer in ordered if offer.node not in taken)
    return tuple(islice(others, LISTED_NAMES_LIMIT))


def _may_have_other_host(rules: RoundRules, state: RoundState, chosen: list[Offer]) -> bool:
    """Return whether the job may already have a host that this store does not know.

    Not if the job has a fixed number of nodes and all of them are here and new: the others would be
    too few to train.
    """
    is_first = state.world is None or not state.world.nodes
    return is_first and not rules.min_nodes == rules.max_nodes == len(chosen)


def _number(last: World, state: RoundState) -> int:
    """The number of the world after `last`, which may have had no nodes."""
    if not last.nodes:
        return max(last.generation, 0, majority.first_generation(state.term))
    return majority.next_generation(last.generation, state.term)


def newcomers_to(rules: RoundRules, state: RoundState) -> list[str]:
    """Nodes whose additional workers would make the next world larger."""
    world = state.world
    if world is None or world.phase != "running":
        return []
    members = (present.member for present in state.members.values())
    if not any(_brings_more(world, one.node, one.standing) for one in members):
        return []  # the usual case, checked at every report of thousands
    chosen = choose(rules, in_order(candidates(rules, state), world), state)
    if workers(chosen) <= world.size:
        return []
    return [offer.node for offer in chosen if _brings_more(world, offer.node, offer.ranks)]


def _brings_more(world: World, node: str, ranks: Sequence[int]) -> bool:
    found = world.find(node)
    return found is None or found.nproc < len(ranks)


def _start_reason(last: World) -> str:
    """The reason why a generation begins."""
    if not last.nodes:
        return "the job starts"
    if last.phase != "waiting":
        return last.reason
    return f"enough {'workers' if last.in_process else 'nodes'} are available again"


def _wait(rules: RoundRules, state: RoundState, now: float) -> RoundDecision:
    """Wait for more members, state the reason (again every minute), and give up in the end."""
    last = state.world
    still = last is not None and last.phase == "waiting"
    since = state.since if still else now
    what, enough = _missing_for_world(rules, state)
    left = None
    if rules.wait_for_nodes and not enough:
        left = since + rules.wait_for_nodes - now
    if last is not None and left is not None and left <= 0:
        reason = f"{what}; giving up after {rules.wait_for_nodes:g} s (--wait-for-nodes)"
        return RoundDecision(
            replace(last, phase="closed", exitcode=EXIT_NOT_ENOUGH_NODES, reason=reason)
        )
    missing = _missing(state)
    again = state.said_at + _pause(last, what, len(missing), enough)
    if still and now < again:
        times = [again, _starts_awaited_until(state) if state.out else math.inf]
        times += [now + left] if left is not None else []
        return RoundDecision(wake_at=min(time for time in times if time > now))
    if last is not None and last.in_process and last.phase == "over":
        what = f"{last.reason}; {what}"  # the reason for its end is known by now
    world = replace(
        last or World(generation=0, phase="waiting"),
        phase="waiting",
        after=None,
        reason=f"{what}{time_limit(left)}",
        missing=missing[:LISTED_NAMES_LIMIT],
        missing_count=len(missing),
        patience=left,
        enough=enough,
    )
    return RoundDecision(world)


def _starts_awaited_until(state: RoundState) -> float:
    """The time until which a waiting job prefers starting workers, which may hang, to a node that
    is held out."""
    waits = state.world is not None and state.world.phase == "waiting"
    return state.since + WARM_UP_TIMEOUT if waits else math.inf


def _pause(last: World | None, what: str, missing: int, enough: bool) -> float:
    """Seconds until the job states again what it waits for.

    None when `enough` changes: from that statement on, goodput counts the time differently.
    """
    if last is None or last.enough != enough:
        return 0.0
    unchanged = what in last.reason and missing == last.missing_count
    return REPEAT_INTERVAL if unchanged else CHANGE_INTERVAL


def time_limit(left: float | None) -> str:
    """The time limit at the end of a sentence about waiting."""
    return "" if left is None else f", for {words.span(round(left))} more"


def _missing_for_world(rules: RoundRules, state: RoundState) -> tuple[str, bool]:
    """Describe what keeps a world from forming, and whether enough nodes are here (warming up)."""
    missing = to_claim(state)
    if missing and state.witness.silent:
        return f"waiting for the witness at {state.witness.url}: {state.witness.silent}", False
    if majority.FIRST_VOTE in state.witness.refused:
        return "another node has started the job again", False
    if missing is None:
        return f"waiting for a majority: {_who_agrees(state)} (--quorum){_tie(state)}", False
    every = [item.member for item in state.members.values() if not item.member.leaving]
    staying = [member for member in every if not member.unfit]
    there = f"{len(staying)} of at least {rules.min_nodes} joined{_unfit(every)}"
    if len(staying) < rules.min_nodes:
        return f"waiting for nodes: {there}", False
    starting = sum(member.starting for member in staying)
    found = candidates(rules, state)
    if what := _kept_apart(rules, state, found):
        return what, False
    if are_in_process(state) and (lacking := _no_replica(rules, state, staying, found)):
        return lacking, starting > 0
    if are_in_process(state) and starting:
        return f"waiting for {starting} worker{'s' if starting > 1 else ''} to start", True
    if not all(member.ready for member in staying):
        return f"warming up: {there}", True
    size = replica_size(rules, state)
    if len(found) < rules.min_nodes and size <= 1:
        return "waiting for nodes: two nodes have the same --node-rank", False
    if choose(rules, in_order(found, state.world), state):
        return f"settling: {there}", True
    there = f"{sum(member.nproc for member in staying)} workers"
    limit = f"--world-sizes {rules.world_sizes} allows no world of {there}"
    if size > 1:
        limit += f" in whole replicas of {size}"
    return f"waiting for nodes: {limit}", False


def _kept_apart(rules: RoundRules, state: RoundState, found: list[Offer]) -> str:
    """Say who cannot reach whom, and where the newest state is, if that is in the way of a world;
    empty if not."""
    cut = connectivity.cut_pairs(state) if rules.probes else frozenset()
    chosen = choose(rules, in_order(found, state.world), state)
    if not chosen:
        apart = bool(cut) and choose(
            replace(rules, probes=False), in_order(found, state.world), state
        )
        return (
            f"waiting for nodes that reach each other: {connectivity.sentence(state, cut)}"
            if apart
            else ""
        )
    holders = holders_left_out(rules, state, [offer.node for offer in chosen])
    if not holders:
        return ""
    parts = {state.members[node].member.place for node in holders}
    part = f"part {', '.join(map(str, sorted(parts)))} of " if max(parts) >= 0 else ""
    about = f"; {connectivity.sentence(state, cut)}" if cut else ""
    return (
        f"waiting for {part}the newest state, which only {names_of(state, holders)} may have{about}"
    )


def _no_replica(
    rules: RoundRules, state: RoundState, staying: list[Member], found: list[Offer]
) -> str:
    """Say what the in-process workers lack for one whole replica; empty if nothing."""
    size, spanned = replica_size(rules, state), nodes_per_replica(rules, state)
    if size <= 1 or (spanned == 1 and found):
        return ""
    if spanned > 1 and replicas.most_replicas((one.member.place for one in found), spanned):
        return ""
    ready = {member.name: (member.nproc, member.standing) for member in staying}
    return replicas.lacking(ready, size)


def _who_agrees(state: RoundState) -> str:
    """Describe how many of the nodes that must agree can be reached, and which of these have not
    stopped their workers."""
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
    """Name the nodes that have the witness's vote, or recommend a witness."""
    assert state.roll is not None
    wanted = [each for each in state.roll.electorates if not each.agrees(votes(state))]
    refused = state.witness.refused
    if holders := [refused[each.witness] for each in wanted if each.witness in refused]:
        return f"; the witness voted for {names_of(state, holders)}"
    may_tie = all(len(each.voters) % 2 == 0 for each in wanted)
    return "; with --witness, either half of the nodes could continue" if may_tie else ""


def _unfit(members: Iterable[Member]) -> str:
    """Name the first node that cannot participate, the reason, and the number of others."""
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
    """The time when the leader stops waiting for more arrivals: a settle time after the last of
    `nodes`, or at once with the maximum number of nodes.

    It also waits, within a limit, for members that are still warming up.
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
        at = max(at, max(warming) + WARM_UP_TIMEOUT)
    return at


def _is_warming_up(member: Member) -> bool:
    if member.unfit:
        return False
    return (not member.ready and member.gone < 0) or (member.starting > 0 and not member.standing)


def _place(offers: Iterable[Offer], proven: frozenset[str] | None) -> tuple[WorldNode, ...]:
    """Assign ranks to every worker; nodes that are not among the `proven` are new."""
    nodes: list[WorldNode] = []
    rank, role_ranks = 0, dict[str, int]()
    for place, (node, member, _, ranks, _) in enumerate(offers):
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
