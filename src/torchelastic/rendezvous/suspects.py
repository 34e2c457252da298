"""Find the nodes that caused the end of a generation, to hold them out of the next worlds. Pure.

    event                                                          held out
    it failed before its first step, with nodes that were not in   these nodes, at once; the others
    the last world that trained                                    continue as before
    workers of two nodes could not talk to each other              one of the two, at once
    its program cannot run on some nodes (`Failure.incurable`)     these nodes, at once
    it failed before its first step on one node alone              that node, if it keeps doing so
    its worker computes other bits (`Failure.other_bits`)          that node, at once if it has just
                                                                   joined, else the second time
    a node was lost, and its agent came back                       that node for a short time, if it
                                                                   keeps doing so

A node that the next world needs is never held out: for its size, or because the newest state in
memory would be lost (`choosing.needed_though_held`). A kill from outside counts against no node,
nor does the loss of most nodes at once: the network, or this node, is the likelier cause. Nor is a
start counted that failed by a lost connection, or after another node was lost: it says nothing of
the node.

Workers may fail to connect while their agents see nothing wrong: the agents use another network, or
a firewall blocks the workers' ports. The workers' errors name the pairs of nodes: gloo and TCPStore
give the address they tried, `train` gives the rank. A pair does not show which of its two nodes is
to blame. The node with the most pairs is, counting those of earlier worlds (`HeldOut.other`); of
several, the newest. If agents cannot reach each other either, no node is held out (`connectivity`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from torchelastic.errors import UnfitError
from torchelastic.events.failure import OTHER_BITS, Failure
from torchelastic.records import replace
from torchelastic.rendezvous import connectivity, held_out, root_cause
from torchelastic.rendezvous.choosing import candidates, enough_without, needed_though_held
from torchelastic.rendezvous.held_out import HeldOutNodes
from torchelastic.rendezvous.restart_policy import is_from_outside
from torchelastic.rendezvous.round_state import (
    REASON_NAMES_LIMIT,
    TRAINED_AFTER,
    RoundRules,
    RoundState,
    failed_alike,
    failed_nodes,
    follows_later_host,
    has_stepped,
    names_of,
    reports_steps,
    the_world,
)
from torchelastic.rendezvous.world import World, WorldNode

#: Errors of connections that could not be made.
_NEVER_MADE = re.compile(
    r"connectfullmesh failed|connect timeout|timed out connecting|failed to connect|"
    r"timed out after \d+ms while trying to connect|no answer from (ranks? \d+|\S+:\d+)",
    re.IGNORECASE,
)
#: Errors of silent peers, connected or not.
_NO_ANSWER = re.compile(r"no answer from (ranks? \d+|\S+:\d+)")
#: Errors between workers, at any address: a script may connect to servers of its own.
_BETWEEN_WORKERS = re.compile(r"gloo|client socket|tcpstore|no answer from", re.IGNORECASE)
#: The peer's rank or address.
_RANK = re.compile(r"no answer from ranks? (\d+)")
_ADDRESSES = re.compile(
    r"remote=\[(?P<remote>[^\]]+)\]"
    r"|(?:to|of|from) \(?(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[\w.:%-]+?))(?::| )[\d(,]"
)


class HoldDecision(NamedTuple):
    """Which nodes to hold out after the end of a generation, and why."""

    held: HeldOutNodes
    #: The nodes that are held out from now on.
    out: frozenset[str] = frozenset()
    #: The consequence, for users.
    sentence: str = ""
    #: The reason for the generation's end if these nodes caused it: it then uses no restart.
    instead: str = ""


def find(
    rules: RoundRules, state: RoundState, cause: Failure | None, others: Iterable[Failure]
) -> HoldDecision:
    """Find nodes to hold out, given what ended the generation.

    `cause`: the first failure of a worker, or None. `others`: the other failures.
    """
    held = _without_forgiven(state)
    others = tuple(others)
    decision = _hold_for_other_bits(rules, state, held, cause, others)
    world = the_world(state)
    if world.goes_back:  # the job is not restarted, and which worker was wrong may not be known
        return (decision or HoldDecision(held))._replace(instead=world.reason)
    if decision is not None:
        return decision
    if cause is not None and _may_be_caused_by_node(cause):
        failed_alone = _failed_alone(cause, others)
        # Newcomers have no part in the last step of the generation before.
        early = failed_early(state) and not cause.before
        pairs = _pairs(state, cause, others, early=early)
        if rules.probes and _is_explained_by_cut(state, cause, pairs):
            # The sides of the cut decide who continues (`connectivity.sides`), as long as it lasts.
            why = (
                f"{connectivity.sentence(state, connectivity.cut_pairs(state))}: {cause.sentence()}"
            )
            return HoldDecision(held, instead=why)
        decision = (
            _hold_newcomers(rules, state, held, cause, failed_alone, pairs) if early else None
        )
        decision = decision or _hold_incapable(rules, state, held, cause)
        decision = decision or _hold_unconnected(rules, state, held, cause, pairs)
        if early:
            decision = decision or _count_failing_start(rules, state, held, cause, failed_alone)
    return decision or _count_lost(rules, state, held)


def _without_forgiven(state: RoundState) -> HeldOutNodes:
    """The list without the nodes of a world that ran long enough for their failures to be
    forgotten."""
    world = the_world(state)
    if state.since - state.running_since < held_out.FORGIVE_AFTER:
        return world.held
    return held_out.forgive(world.held, world.members)


def _may_be_caused_by_node(cause: Failure) -> bool:
    """Return whether a node may have caused the failure: not if the worker was killed from
    outside or the user's code ends the job, and not if a worker has built another model: it ends
    by itself."""
    if cause.fatal or is_from_outside(cause):
        return False
    return not cause.message.startswith(UnfitError.__name__)


def _hold_for_other_bits(
    rules: RoundRules,
    state: RoundState,
    held: HeldOutNodes,
    cause: Failure | None,
    others: Iterable[Failure],
) -> HoldDecision | None:
    """Hold out nodes whose workers computed other bits: newcomers at once, else the second time.
    Until then only the worker is replaced: a bit may flip anywhere once."""
    told = {one.node: one for one in (cause, *others) if one is not None and one.other_bits}
    found = [
        one for one in the_world(state).nodes if one.name in told and one.node in state.members
    ]
    if not found:
        return None
    for node in found:
        reason = told[node.name].message.removeprefix(OTHER_BITS)
        at_once = node.new and failed_early(state)
        held = held_out.note_other_bits(held, node.node, node.name, reason, at_once=at_once)
    instead = told[found[0].name].sentence()
    decision = _hold_counted(rules, state, held, found, "computes other bits", instead)
    if decision.out:
        return decision
    names = names_of(state, [node.node for node in found])
    is_again = any(one.seconds for one in held if one.name in told)
    later = "the job needs it, so it stays" if is_again else "held out if it does so again"
    return decision._replace(sentence=f"{names} computes other bits; {later}")


def _failed_alone(cause: Failure, others: Iterable[Failure]) -> frozenset[str]:
    """Names of the nodes whose workers failed by themselves; empty if they only waited for
    others."""
    if root_cause.waited_for_others(cause):
        return frozenset()
    return frozenset((cause.node, *(other.node for other in others if other.by_itself)))


def failed_early(state: RoundState) -> bool:
    """Return whether the world ended before its first step, if steps are known."""
    if has_stepped(state):
        return False
    return reports_steps(state) or state.since - state.running_since < TRAINED_AFTER


def _hold_newcomers(
    rules: RoundRules,
    state: RoundState,
    held: HeldOutNodes,
    cause: Failure,
    names: Set[str],
    pairs: Sequence[Unconnected],
) -> HoldDecision | None:
    """Hold out the newcomers, so that the last membership that worked continues. If only some
    newcomers failed, or the errors name unconnected pairs, only the newcomers concerned are held
    out."""
    world = the_world(state)
    new = [node for node in world.nodes if node.new and node.node in state.members]
    if names and names <= {node.name for node in new}:
        new = [node for node in new if node.name in names]
    if pairs and all(pair.other is not None for pair in pairs):
        new = [node for node in new if any(node in pair for pair in pairs)]
    nodes = frozenset(node.node for node in new)
    if not nodes or not enough_without(rules, state, nodes | state.out):
        return None
    named = names_of(state, [node.node for node in new])
    what = f"generation {world.generation} with {named} failed before its first step"
    reason = f"{what}: {cause.message}"
    return _hold_all(rules, state, held, new, reason, f"{what}: {cause.sentence()}", unable=False)


def _hold_all(
    rules: RoundRules,
    state: RoundState,
    held: HeldOutNodes,
    nodes: Sequence[WorldNode],
    reason: str,
    instead: str = "",
    other: str = "",
    unable: bool = True,
) -> HoldDecision | None:
    """Hold these nodes out from now on; None if these are too many, or the state would be lost."""
    for node in nodes:
        held = held_out.hold(held, node.node, node.name, reason, other, unable=unable)
    every = frozenset(node.node for node in nodes)
    out = [one for one in held if one.node in every and one.seconds]
    if len(out) < len(nodes) or _would_lose_state(rules, state, held, every):
        return None
    longest = max(out, key=lambda one: one.seconds).span()
    named = names_of(state, [node.node for node in nodes])
    return HoldDecision(held, every, f"holding out {named} for {longest}", instead)


def _would_lose_state(
    rules: RoundRules, state: RoundState, held: HeldOutNodes, out: frozenset[str]
) -> bool:
    """Return whether the newest state in memory would be held out with these nodes."""
    state = replace(state, world=replace(the_world(state), held=held))
    return not out.isdisjoint(
        needed_though_held(rules, state, candidates(rules, state), out | state.out)
    )


def _hold_incapable(
    rules: RoundRules, state: RoundState, held: HeldOutNodes, failure: Failure
) -> HoldDecision | None:
    """Hold out nodes that lack something the program needs, such as a module; others may have it.
    The failure is counted: if the next nodes lack it too, the job ends (`restart_policy.judge`)."""
    nodes = failed_alike(state, failure)
    if not failure.incurable or not nodes or not enough_without(rules, state, nodes | state.out):
        return None
    found = [node for node in the_world(state).nodes if node.node in nodes]
    return _hold_all(rules, state, held, found, failure.message)


def _pairs(
    state: RoundState, cause: Failure, others: Iterable[Failure], *, early: bool
) -> list[Unconnected]:
    """The pairs of nodes that could not connect to each other, if that ended the generation.

    A worker that loses its peer because the peer gave up on such a pair may be taken for the cause.
    Once a world has trained, failed connections may be the script's own: only silence counts.
    """
    if not is_unconnected(cause) and not root_cause.waited_for_others(cause):
        return []
    told = [one for one in (cause, *others) if early or got_no_answer(one)]
    return pairs(the_world(state), told)


def _hold_unconnected(
    rules: RoundRules,
    state: RoundState,
    held: HeldOutNodes,
    cause: Failure,
    found: Sequence[Unconnected],
) -> HoldDecision | None:
    """Continue without a node whose workers could not connect to others; name the pair in any
    case."""
    if not found:
        return None
    said = "; ".join(pair.sentence() for pair in found[:REASON_NAMES_LIMIT])
    node, other = worst(found, {frozenset((one.node, one.other)) for one in held if one.other})
    others = [side for pair in found for side in (pair.node, pair.other) if side and node in pair]
    for left_out in dict.fromkeys((node, *others)):
        rival = other if left_out is node else node.node
        excused = {one.node for one in held if one.other == left_out.node}
        if enough_without(rules, state, (state.out - excused) | {left_out.node}):
            instead = f"{said}: {cause.sentence()}"
            held_now = _hold_all(rules, state, held, [left_out], said, instead, rival, unable=False)
            if held_now is not None:
                return held_now
    return HoldDecision(held, sentence=said)


def _is_explained_by_cut(state: RoundState, cause: Failure, found: Sequence[Unconnected]) -> bool:
    """Return whether agents of the world cannot reach each other, as they found out, and that is
    why its workers failed."""
    members = the_world(state).members
    cut = {pair for pair in connectivity.cut_pairs(state) if pair <= members}
    if not found:
        return bool(cut) and root_cause.waited_for_others(cause)
    return any(_sides(pair) in cut for pair in found)


def _count_failing_start(
    rules: RoundRules, state: RoundState, held: HeldOutNodes, cause: Failure, names: Set[str]
) -> HoldDecision | None:
    """Count a start that failed on one node of several, unless it may have lost a peer."""
    world = the_world(state)
    if root_cause.lost_connection(cause) or world.ending == "node-failure":
        return None
    found = [node for node in world.nodes if node.name in names and node.node in state.members]
    if len(names) > 1 or not found or world.count == 1:
        return None
    node = found[0]
    reason = f"its workers keep failing at start: {cause.message}"
    held = held_out.note_failure(held, node.node, node.name, reason, unable=True)
    return _hold_counted(rules, state, held, found, "keeps failing at start", cause.sentence())


def _count_lost(rules: RoundRules, state: RoundState, held: HeldOutNodes) -> HoldDecision:
    """Count nodes that were lost without notice. Only if the same agent comes back, it is held out:
    long enough not to interrupt the others at each flap of its network, no longer."""
    world = the_world(state)
    failed = set(failed_nodes(state))
    lost = [node for node in world.nodes if node.node in failed]
    if not lost or 2 * len(lost) > world.count or follows_later_host(state):
        return HoldDecision(held)
    for node in lost:
        held = held_out.note_failure(
            held, node.node, node.name, "it was lost repeatedly", longest=held_out.LOST_HOLD
        )
    return _hold_counted(rules, state, held, lost, "was lost repeatedly")


def _hold_counted(
    rules: RoundRules,
    state: RoundState,
    held: HeldOutNodes,
    nodes: Iterable[WorldNode],
    what: str,
    instead: str = "",
) -> HoldDecision:
    """Hold out the nodes that have failed too often, if the others can continue without them."""
    counted = {node.node for node in nodes}
    out = [one for one in held if one.node in counted and one.seconds]
    gone = frozenset(one.node for one in out)
    enough = bool(out) and enough_without(rules, state, gone | state.out)
    if not enough or _would_lose_state(rules, state, held, gone):
        return HoldDecision(held_out.end_all_but(held, state.out))
    said = [f"{one.name} {what}; holding out {one.name} for {one.span()}" for one in out]
    return HoldDecision(held, gone, "; ".join(said), instead)


# --- pairs of nodes that cannot connect -----------------------------------------------------------


class Unconnected(NamedTuple):
    """Two nodes whose workers cannot connect; `other` is None if the error does not name it."""

    node: WorldNode
    other: WorldNode | None = None

    def sentence(self) -> str:
        if self.other is None:
            return f"workers of {self.node.name} cannot connect to some other nodes"
        return f"workers of {self.node.name} cannot connect to {self.other.name}"


def pairs(world: World, failures: Iterable[Failure]) -> list[Unconnected]:
    """The pairs that the failures of a generation name, each once."""
    named = {node.name: node for node in world.nodes}
    found: dict[frozenset[str], Unconnected] = {}
    for failure in failures:
        node = named.get(failure.node)
        if node is None or not is_unconnected(failure):
            continue
        other = _other(world, failure)
        if other is not None and other.node != node.node:
            found.setdefault(frozenset((node.node, other.node)), Unconnected(node, other))
        elif _BETWEEN_WORKERS.search(failure.message):
            found.setdefault(frozenset((node.node,)), Unconnected(node))
    return list(found.values())


def is_unconnected(failure: Failure) -> bool:
    """Return whether a worker reports that a connection could not be made."""
    return _NEVER_MADE.search(failure.message) is not None


def got_no_answer(failure: Failure) -> bool:
    """Return whether a worker reports that another one does not answer, connected or not."""
    return _NO_ANSWER.search(failure.message) is not None


def _other(world: World, failure: Failure) -> WorldNode | None:
    if rank := _RANK.search(failure.message):
        return next(
            (node for node in world.nodes if 0 <= int(rank[1]) - node.first_rank < node.nproc), None
        )
    for match in _ADDRESSES.finditer(failure.message):
        address = match["remote"] or match["bracketed"] or match["plain"]
        for node in world.nodes:
            if address in (node.addr, node.peer.rpartition(":")[0].strip("[]")):
                return node
    return None


def worst(
    found: Sequence[Unconnected], known: Iterable[frozenset[str]] = ()
) -> tuple[WorldNode, str]:
    """The node to continue without, and another node that may be to blame instead (or "").

    The first is the node with the most pairs, including those already `known`; of several, the
    newest.
    """
    every = {*known, *map(_sides, found)}
    counts = Counter(node for pair in every for node in pair)
    sides = [side for pair in found for side in (pair.node, pair.other) if side is not None]
    node = max(sides, key=lambda side: (counts[side.node], side.new, side.node_rank))
    rivals = {
        other
        for pair in every
        if node.node in pair
        for other in pair - {node.node}
        if counts[other] == counts[node.node]
    }
    return node, min(rivals, default="")


def _sides(pair: Unconnected) -> frozenset[str]:
    return frozenset(side.node for side in (pair.node, pair.other) if side is not None)
