"""The nodes that the next world waits for after the end of the last one, and those that the job
drops. Pure.

    a member of the last world         the next world
    reports that its workers are gone  may include it
    knows that the world is over       waits for it
    does not, for a lease              is formed without it, if another one is gone: a step needs
    (`patience`)                       all; otherwise waits until its lease ends (etcd only)
    refuses connections                is formed without it; then its lease is ended (etcd only)

No world is formed without a node that alone may have the newest state
(`choosing.holders_left_out`).
"""

from __future__ import annotations

from torchelastic.rendezvous import connectivity, root_cause, suspects
from torchelastic.rendezvous.choosing import holders_left_out
from torchelastic.rendezvous.round_state import (
    RoundRules,
    RoundState,
    follows_later_host,
    the_world,
    to_claim,
)
from torchelastic.rendezvous.world import World

#: Seconds in which an agent that runs has reported that it knows of the end of a world.
REPORT_TIME = 1.0


def busy_nodes(state: RoundState) -> list[str]:
    """The members of the last world that still have workers of it."""
    world = the_world(state)
    return [node.node for node in world.nodes if _is_busy(state, node.node, world.generation)]


def _is_busy(state: RoundState, node: str, generation: int) -> bool:
    """Return whether a node is a member, stays, and still has workers of the old generation.

    The leader waits for a leaving node only if no node stays or its vote is needed: after one node
    has stopped, the others of the world cannot make a step without it.
    """
    present = state.members.get(node)
    if present is None or present.member.gone >= generation or follows_later_host(state):
        return False
    if node in state.refused:
        return False
    if not present.member.leaving:
        return True
    stays = any(
        other.node in state.members and not state.members[other.node].member.leaving
        for other in the_world(state).nodes
    )
    return not stays or to_claim(state) is None


def patience(rules: RoundRules, state: RoundState, busy: list[str]) -> float:
    """Seconds after the end of a world in which these nodes must report that they know of it.

    Not much, if others have not heard from them for a lease already.
    """
    silent = {
        other
        for node in the_world(state).nodes
        if (present := state.members.get(node.node)) is not None
        for other in present.member.silent
    }
    return min(rules.lease, REPORT_TIME) if silent.issuperset(busy) else rules.lease


def may_go_without(rules: RoundRules, state: RoundState, busy: list[str]) -> bool:
    """Return whether the next world need not wait any longer for these nodes: their agents have not
    even reported that they know of the world's end, and another node's workers are gone."""
    world = the_world(state)
    members = [
        state.members[node.node].member for node in world.nodes if node.node in state.members
    ]
    is_gone = any(member.gone >= world.generation for member in members)
    knows = any(state.members[node].member.stopping >= world.generation for node in busy)
    return rules.probes and is_gone and not knows


def calls_for_probe(rules: RoundRules, state: RoundState, world: World) -> bool:
    """Return whether the end of a world makes all members probe each other: its nodes may not reach
    each other."""
    if not rules.probes or world.phase != "over" or world.probe > world.generation:
        return False
    if connectivity.silent_pairs(state) or state.contested & world.members:
        return True
    if any(suspects.is_unconnected(failure) for failure in state.failures):
        return True
    # A newcomer is blamed for a world that fails before its first step, unless there is a cut.
    has_new = any(node.new for node in world.nodes) and suspects.failed_early(state)
    return has_new and any(map(root_cause.waited_for_others, state.failures))


def is_probing(state: RoundState) -> bool:
    """Return whether nodes of the last world still find out which others they can reach."""
    return any(
        present.member.probed < connectivity.required_probe(state, node.node)
        for node in the_world(state).nodes
        if (present := state.members.get(node.node)) is not None
        and not present.member.leaving
        and node.node not in state.refused
    )


def to_drop(rules: RoundRules, state: RoundState) -> tuple[str, ...]:
    """The members whose machines refuse connections, and without which no state is lost: the nodes
    of the running world have it, or these members have none.

    Others that are free may lose it at any time, and a firewall may refuse in the name of all.
    """
    world = state.world
    refused = state.refused & state.members.keys()
    if not refused or (world is not None and world.phase == "over"):
        return ()
    training = world.members if world is not None and world.is_under_way else frozenset[str]()
    needed = holders_left_out(rules, state, training)
    return tuple(sorted(refused.difference(training, needed)))
