"""Which snapshot all ranks go on from, and where each node gets it. Pure.

Every rank is handed the same inventories and comes to the same answer, so nobody has to be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchelastic.snapshot.layout import SHARED, Version, is_shard, own, shard
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

    The freshest version whose shared state, and all of whose shards, every node can get. But where
    ranks were killed while some had committed a step and others had not, the latter's random states
    are those of the step before: the version before is as good then, since that step was in flight
    for them, and redoing it leads to the same bits. Further back nothing is preferred for being
    whole: those steps were finished by all.
    """
    found = [version for version in _shared(nodes) if not lost_shards(nodes, version)]
    recent = [version for version in found[:2] if version[0] == found[0][0]]
    whole = [version for version in recent if not lacking(nodes, version, size)]
    return [*whole, *(version for version in found if version not in whole)]


def _shared(nodes: Nodes) -> list[Version]:
    """Versions whose shared state every node can get, the freshest first."""
    held = {
        held.version for node in nodes.values() for held in node.holdings if held.piece == SHARED
    }
    return sorted((one for one in held if is_reachable(nodes, SHARED, one)), reverse=True)


def without_shards(nodes: Nodes) -> list[Version]:
    """Versions that were bases if shards of them were not lost, the freshest first."""
    return [version for version in _shared(nodes) if lost_shards(nodes, version)]


def shards_of(nodes: Nodes, version: Version) -> list[str]:
    """The pieces of shards that the world of this version has written; none where none was."""
    sizes = [
        held.size
        for node in nodes.values()
        for held in node.holdings
        if held.version == version and is_shard(held.piece)
    ]
    return [shard(rank) for rank in range(max(sizes, default=0))]


def lost_shards(nodes: Nodes, version: Version) -> list[str]:
    """Those of them that not every node can get."""
    return [piece for piece in shards_of(nodes, version) if not is_reachable(nodes, piece, version)]


def tellers(nodes: Nodes, version: Version) -> dict[str, int]:
    """By piece of shards, the rank that tells all others what is in it: its node holds it."""
    found = {}
    for piece in shards_of(nodes, version):
        holders = [name for name in _ordered(nodes) if nodes[name].holds(piece, version)]
        if holders:
            found[piece] = nodes[holders[0]].first
    return found


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
