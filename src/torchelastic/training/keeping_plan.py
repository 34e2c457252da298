"""Which snapshot all ranks go on from, and where each node gets it. Pure.

Every rank is handed the same inventories and comes to the same answer, so nobody has to be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchelastic.snapshot.layout import SHARED, Version, own
from torchelastic.snapshot.messages import Holding


@dataclass(frozen=True)
class Node:
    """What one node holds, as one of its workers has told."""

    #: Where its agent is reached by others; empty: nowhere.
    peer: str
    holdings: tuple[Holding, ...]
    #: The rank that writes what is shared on this node: the lowest there.
    first: int

    def holds(self, piece: str, version: Version) -> bool:
        return any(held.piece == piece and held.version == version for held in self.holdings)


#: By name, of all nodes of the world.
Nodes = Mapping[str, Node]


def bases(nodes: Nodes, size: int) -> list[Version]:
    """What to go on from, in a world of this size: the best first, then what to fall back to.

    The freshest version whose shared state every node can get. But where ranks were killed while
    some had committed a step and others had not, the latter's random states are those of the step
    before: the version before is as good then, since that step was in flight for them, and redoing
    it leads to the same bits. Further back nothing is preferred for being whole: those steps were
    finished by all.
    """
    found = sorted(
        {
            held.version
            for node in nodes.values()
            for held in node.holdings
            if held.piece == SHARED and is_reachable(nodes, SHARED, held.version)
        },
        reverse=True,
    )
    recent = [version for version in found[:2] if version[0] == found[0][0]]
    whole = [version for version in recent if not lacking(nodes, version, size)]
    return [*whole, *(version for version in found if version not in whole)]


def lacking(nodes: Nodes, version: Version, size: int) -> list[int]:
    """The ranks of a world of this size whose own piece of a version is lost.

    A rank that the world of that version did not have lacks nothing.
    """
    sizes = [
        held.size for node in nodes.values() for held in node.holdings if held.version == version
    ]
    ranks = range(min(size, max(sizes, default=0)))
    return [rank for rank in ranks if not is_reachable(nodes, own(rank), version)]


def is_reachable(nodes: Nodes, piece: str, version: Version) -> bool:
    """Whether every node has it, or can fetch it from one that has."""
    holders = [node for node in nodes.values() if node.holds(piece, version)]
    return any(node.peer for node in holders) or len(holders) == len(nodes) > 0


def source(nodes: Nodes, here: str, piece: str, version: Version) -> str | None:
    """The node to get a piece from: this one, or another, not the same one for all who lack it."""
    if nodes[here].holds(piece, version):
        return here
    holders = [name for name in _ordered(nodes) if nodes[name].holds(piece, version)]
    reachable = [name for name in holders if nodes[name].peer]
    turn = [name for name in _ordered(nodes) if name not in holders].index(here)
    return reachable[turn % len(reachable)] if reachable else None


def _ordered(nodes: Nodes) -> Iterable[str]:
    return sorted(nodes, key=lambda name: nodes[name].first)
