"""Find the nodes that caused the end of a generation, to hold them out of the next worlds. Pure.

    event                                                          held out
    it failed before its first step, with nodes that were not in   these nodes, at once; the others
    the last world that trained                                    continue as before
    workers of two nodes could not talk to each other              one of the two, at once
    its program cannot run on some nodes (`Failure.incurable`)     these nodes, at once
    it failed before its first step on one node alone              that node, if it keeps doing so
    no other node could reach a node                               that node, at once
    a node was lost                                                that node, if it keeps doing so

A node that the next world needs is never held out: for its size, or because the newest state in
memory would be lost (`forming.only_holder`). A kill from outside counts against no node, nor does
the loss of most nodes at once: the network, or this node, is the likelier cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from torchelastic.errors import UnfitError
from torchelastic.events.failure import Failure
from torchelastic.rendezvous import held_out, root_cause, unconnected
from torchelastic.rendezvous.forming import candidates, enough_without, only_holder
from torchelastic.rendezvous.held_out import Held
from torchelastic.rendezvous.restart_policy import is_from_outside
from torchelastic.rendezvous.round_state import (
    NAMES_SHOWN,
    TRAINED_AFTER,
    RoundRules,
    RoundState,
    failed_alike,
    follows_later_host,
    has_stepped,
    names_of,
    tells_steps,
    the_world,
)
from torchelastic.rendezvous.unconnected import Unconnected
from torchelastic.rendezvous.world import WorldNode


class Finding(NamedTuple):
    """The consequences for nodes after the end of a generation."""

    held: Held
    #: Those that are held out from now on.
    out: frozenset[str] = frozenset()
    #: What is done about them, in words.
    sentence: str = ""
    #: The end of the generation in other words, where it is put down to them: it spends no restart.
    instead: str = ""


def find(
    rules: RoundRules, state: RoundState, cause: Failure | None, others: Iterable[Failure]
) -> Finding:
    """Find nodes to hold out, given what ended the generation.

    `cause`: the first failure of a worker, or None. `others`: the other failures.
    """
    held = _without_cleared(state)
    finding = None
    if cause is not None and _tells_of_nodes(cause):
        failed_alone = _failed_alone(cause, others)
        early = _failed_early(state)
        pairs = _pairs(state, cause, others, early=early)
        finding = _newcomers(rules, state, held, cause, failed_alone, pairs) if early else None
        finding = finding or _unable(rules, state, held, cause)
        finding = finding or _unconnected(rules, state, held, cause, pairs)
        if early:
            finding = finding or _failing_start(rules, state, held, cause, failed_alone)
    return finding or _lost(rules, state, held)


def _without_cleared(state: RoundState) -> Held:
    """The list without nodes that have trained long enough to be forgiven."""
    world = the_world(state)
    if state.since - state.running_since < held_out.FORGOTTEN_AFTER:
        return world.held
    return held_out.forget(world.held, world.members)


def _tells_of_nodes(cause: Failure) -> bool:
    """Return whether a node may be the reason. Not if the worker was killed from outside, nor if
    the user's code ends the job; and a worker that has built another model ends by itself, and its
    node with the last one."""
    if cause.fatal or is_from_outside(cause):
        return False
    return not cause.message.startswith(UnfitError.__name__)


def _failed_alone(cause: Failure, others: Iterable[Failure]) -> frozenset[str]:
    """Names of the nodes whose workers failed by themselves: none if they only waited for others in
    vain, whoever reported it first."""
    if root_cause.waited_for_others(cause):
        return frozenset()
    return frozenset((cause.node, *(other.node for other in others if other.by_itself)))


def _failed_early(state: RoundState) -> bool:
    """Return whether the world ended before its first step, if steps are known."""
    if has_stepped(state):
        return False
    return tells_steps(state) or state.since - state.running_since < TRAINED_AFTER


def _newcomers(
    rules: RoundRules,
    state: RoundState,
    held: Held,
    cause: Failure,
    names: Set[str],
    pairs: Sequence[Unconnected],
) -> Finding | None:
    """Return to the last membership that worked. Newcomers that did not fail stay if only other
    newcomers did; those that could talk to all others stay if some pair could not."""
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
    return _hold_all(state, held, new, reason, f"{what}: {cause.sentence()}", unable=False)


def _hold_all(
    state: RoundState,
    held: Held,
    nodes: Sequence[WorldNode],
    reason: str,
    instead: str = "",
    other: str = "",
    unable: bool = True,
) -> Finding | None:
    """Hold these nodes out from now on; None if there are too many, or one alone has the state."""
    for node in nodes:
        held = held_out.hold(held, node.node, node.name, reason, other, unable=unable)
    every = frozenset(node.node for node in nodes)
    out = [one for one in held if one.node in every and one.seconds]
    if len(out) < len(nodes) or _would_lose_state(state, held, every):
        return None
    longest = max(out, key=lambda one: one.seconds).span()
    named = names_of(state, [node.node for node in nodes])
    return Finding(held, every, f"continuing without {named} for {longest}", instead)


def _would_lose_state(state: RoundState, held: Held, out: frozenset[str]) -> bool:
    """Return whether the newest state in memory would be held out with these nodes."""
    return only_holder(candidates(state), held, out | state.out) in out


def _unable(rules: RoundRules, state: RoundState, held: Held, failure: Failure) -> Finding | None:
    """Hold out nodes that lack something the program needs, such as a module. Others may have
    it. The failure is noted, so that the next nodes that lack it end the job
    (`restart_policy.judge`)."""
    nodes = failed_alike(state, failure)
    if not failure.incurable or not nodes or not enough_without(rules, state, nodes | state.out):
        return None
    found = [node for node in the_world(state).nodes if node.node in nodes]
    return _hold_all(state, held, found, failure.message)


def _pairs(
    state: RoundState, cause: Failure, others: Iterable[Failure], *, early: bool
) -> list[Unconnected]:
    """The pairs of nodes that could not talk to each other, if that ended the generation.

    A worker may lose its peer because that one has found such a pair, and be taken for the cause.
    Once a world has trained, failed connections may be the script's own: only silence counts.
    """
    if not unconnected.is_unconnected(cause) and not root_cause.waited_for_others(cause):
        return []
    told = [one for one in (cause, *others) if early or unconnected.got_no_answer(one)]
    return unconnected.pairs(the_world(state), told)


def _unconnected(
    rules: RoundRules, state: RoundState, held: Held, cause: Failure, found: Sequence[Unconnected]
) -> Finding | None:
    """Continue without a node whose workers could not talk to others; name the pair in any case."""
    if not found:
        return None
    said = "; ".join(pair.words() for pair in found[:NAMES_SHOWN])
    node, other = unconnected.worst(found, _pairs_known(state, held))
    excused = {one.node for one in held if one.other == node.node}
    out = (state.out - excused) | {node.node}
    if not enough_without(rules, state, out):
        return Finding(held, sentence=said)
    instead = f"{said}: {cause.sentence()}"
    finding = _hold_all(state, held, [node], said, instead, other)
    return finding or Finding(held, sentence=said)


def _pairs_known(state: RoundState, held: Held) -> set[frozenset[str]]:
    """Pairs that agents suspect now, and those that nodes are held out for."""
    members = the_world(state).members
    doubted = {
        frozenset((node, other))
        for node, present in state.members.items()
        for other in present.member.doubts
        if node in members and other in members
    }
    return doubted | {frozenset((one.node, one.other)) for one in held if one.other}


def _failing_start(
    rules: RoundRules, state: RoundState, held: Held, cause: Failure, names: Set[str]
) -> Finding | None:
    """Count a start that failed on one node of several."""
    world = the_world(state)
    found = [node for node in world.nodes if node.name in names and node.node in state.members]
    if len(names) > 1 or not found or world.count == 1:
        return None
    node = found[0]
    reason = f"its workers keep failing at start: {cause.message}"
    held = held_out.note_failure(held, node.node, node.name, reason, unable=True)
    return _counted(rules, state, held, found, "keeps failing at start", cause.sentence())


def _lost(rules: RoundRules, state: RoundState, held: Held) -> Finding:
    """Count nodes that were lost without notice."""
    world = the_world(state)
    lost = [node for node in world.nodes if node.node in state.lost]
    if not lost or 2 * len(lost) > world.count or follows_later_host(state):
        return Finding(held)
    for node in lost:
        if node.node in state.unreachable:
            reason = "other nodes could not reach it"
            held = held_out.hold(held, node.node, node.name, reason, unable=True)
        else:
            held = held_out.note_failure(held, node.node, node.name, "it keeps failing")
    return _counted(rules, state, held, lost, "keeps failing")


def _counted(
    rules: RoundRules,
    state: RoundState,
    held: Held,
    nodes: Iterable[WorldNode],
    what: str,
    instead: str = "",
) -> Finding:
    """Hold out the nodes that have failed too often, if the others can continue without them."""
    counted = {node.node for node in nodes}
    out = [one for one in held if one.node in counted and one.seconds]
    gone = frozenset(one.node for one in out)
    enough = bool(out) and enough_without(rules, state, gone | state.out)
    if not enough or _would_lose_state(state, held, gone):
        return Finding(held_out.end_all_but(held, state.out))
    said = []
    for one in out:
        why = f"{one.name} {what}"
        if one.node in state.unreachable:
            why = f"other nodes could not reach {one.name}"
        said.append(f"{why}: continuing without it for {one.span()}")
    return Finding(held, gone, "; ".join(said), instead)
