"""Which members cannot reach each other, and which sides of a cut there are. Pure.

With etcd, nodes that cannot reach each other may all reach the store. Neighbours in the ring notice
first (`Member.silent`): that ends the world, but no membership. Then every member probes the others
(`World.probe`, `Member.unreached`), and probes those that it cannot reach again until it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torchelastic.rendezvous.round_state import REASON_NAMES_LIMIT, RoundState, names_of

#: The most members that each one probes, and the most sides of a cut that are considered.
PROBED_LIMIT = 256
SIDES_LIMIT = 64

Pair = frozenset[str]


def to_probe(members: Iterable[str]) -> list[str]:
    """The members that everyone probes: all, or the same ones of very many."""
    return sorted(members)[:PROBED_LIMIT]


def silent_pairs(state: RoundState) -> list[Pair]:
    """Pairs of nodes of the world, one of which has not heard from the other for a lease.

    Only members of this world count: a node outside it does not need the others.
    """
    world = state.world
    if world is None:
        return []
    found = {
        frozenset((node.node, other)): None
        for node in world.nodes
        if (present := state.members.get(node.node)) is not None
        and present.member.silent_in == world.generation
        for other in present.member.silent
        if world.place(other) is not None and other in state.members and other != node.node
    }
    return list(found)


def cut_pairs(state: RoundState) -> frozenset[Pair]:
    """Pairs of members that cannot reach each other, as either of them found."""
    return frozenset(
        frozenset((node, other))
        for node, present in state.members.items()
        for other in present.member.unreached
        if other in state.members and other != node
    )


def required_probe(state: RoundState, node: str) -> int:
    """The probe that a member must have made to be in the next world; -1: none. The nodes of a
    world watch each other in the ring, until its end shows that some cannot reach each other."""
    world = state.world
    if world is None or not world.nodes:
        return -1
    is_exempt = world.place(node) is not None and world.probe <= world.generation
    return -1 if is_exempt else world.probe


def _apart(cut: Iterable[Pair]) -> dict[str, set[str]]:
    """The nodes that each node cannot reach."""
    apart: dict[str, set[str]] = {}
    for one, other in cut:
        apart.setdefault(one, set()).add(other)
        apart.setdefault(other, set()).add(one)
    return apart


def sides(nodes: Sequence[str], cut: Set[Pair]) -> list[frozenset[str]]:
    """Groups of nodes in which all reach each other, and to which none can be added. Each node is
    in one of them; earlier nodes are preferred.

    >>> [sorted(side) for side in sides("abcde", {frozenset("ad"), frozenset("bd")})]
    [['a', 'b', 'c', 'e'], ['c', 'd', 'e']]
    >>> [sorted(side) for side in sides("ab", set())]
    [['a', 'b']]
    """
    apart = _apart(cut)
    torn = [node for node in nodes if not apart.get(node, set()).isdisjoint(nodes)]
    whole = frozenset(nodes).difference(torn)
    found: dict[frozenset[str], None] = {}
    for seed in torn:
        if len(found) == SIDES_LIMIT or any(seed in side for side in found):
            continue
        side, out = {seed}, set(apart[seed])
        for node in torn:
            if node not in out:
                side.add(node)
                out |= apart[node]
        found[whole | side] = None
    return list(found) or [whole]


def sentence(state: RoundState, pairs: Iterable[Pair]) -> str:
    """Say which nodes cannot reach each other: `node-a, node-b cannot reach node-c`."""
    apart = _apart(pairs)
    groups: dict[frozenset[str], list[str]] = {}
    for node in sorted(apart):
        groups.setdefault(frozenset(apart[node]), []).append(node)
    said: list[str] = []
    told: set[Pair] = set()
    for others, nodes in groups.items():
        about = {frozenset((node, other)) for node in nodes for other in others}
        if not about <= told:
            told |= about
            there = names_of(state, sorted(others))
            said.append(f"{names_of(state, nodes)} cannot reach {there}")
    more = len(said) - REASON_NAMES_LIMIT
    return "; ".join(said[:REASON_NAMES_LIMIT]) + (f" and {more:,} more" if more > 0 else "")
