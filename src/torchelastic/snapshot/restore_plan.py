"""The restore plan: the state that all ranks resume from, and where each node gets it. Pure.

Every rank gets the same inventories and computes the same plan, so no rank has to be asked.

    bases     the restorable versions in memory, the best first
    choices   those, the newest checkpoint and the script's own state, by step, in order of trial
    agreed    the common action after all ranks have looked for one of them

When a world settles on an older version, all later steps are void. So a version that exists but
cannot be fetched now ends the generation; only a version that is proven useless is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchelastic.snapshot.layout import SHARED, Version, is_shard, own, shard
from torchelastic.snapshot.messages import Holding


@dataclass(frozen=True)
class Node:
    """One node's holdings, as reported by one of its workers."""

    #: Its agent's address for other agents; empty: none.
    peer: str
    holdings: tuple[Holding, ...]
    #: The rank that writes this node's shared state: its lowest.
    first: int

    def holds(self, piece: str, version: Version) -> bool:
        return any(held.piece == piece and held.version == version for held in self.holdings)


#: All nodes of the world, by name.
Nodes = Mapping[str, Node]


@dataclass(frozen=True)
class Storage:
    """The newest valid checkpoint, if it is beyond this step."""

    beyond: int = -1


@dataclass(frozen=True)
class Own:
    """The state that the script has loaded itself, with this many steps done."""

    step: int


Choice = Version | Storage | Own


def choices(versions: Sequence[Version], stored: int | None, start: int = 0) -> list[Choice]:
    """Return the candidates in order of trial. If `start` is not 0, the script has loaded the state
    of that step itself: older candidates are left out, and its own comes last (`own_checkpoints`).
    """
    tried = _by_step(versions, stored)
    if not start:
        return tried
    newer: list[Choice] = []
    for one in tried:
        if isinstance(one, Storage):
            newer.append(Storage(max(one.beyond, start - 1)))
        elif not isinstance(one, Own) and one[1] >= start:
            newer.append(one)
    return [*dict.fromkeys(newer), Own(start)]


def _by_step(versions: Sequence[Version], stored: int | None) -> list[Choice]:
    """Order the candidates by step. `stored` is the newest checkpoint's step, None if there is none
    or it is not known. It comes before older versions in memory, and again last of all, since the
    newest may turn out to be damaged.
    """
    fresher = [index for index, version in enumerate(versions) if version[1] >= (stored or 0)]
    at = len(versions) if stored is None else max(fresher, default=-1) + 1
    if at == len(versions):
        return [*versions, Storage()]
    beyond = max(step for _, step in versions[at:])
    return [*versions[:at], Storage(beyond), *versions[at:], Storage()]


def bases(nodes: Nodes, size: int, *, sharded: bool = False) -> list[Version]:
    """Return the versions that a world of this size can restore: the best first, then fallbacks.

    The best is the freshest version whose shared state and shards every node can get; state that
    is not `sharded` needs only one holder, since ranks can send it to each other. If ranks were
    killed when only some had committed a step, the others' random states are of the step before.
    Then the version before is as good: the step was in flight for them, and repeating it gives the
    same bits. Nothing further back is preferred for being complete: all ranks had finished those
    steps. Nor in a world of another size, which would repeat the step with different samples.
    """
    shared = _shared(nodes, sharded)
    found = [
        one for one in shared if not lost_shards(nodes, one) and not _is_done_again(one, shared)
    ]
    recent = [version for version in found[:2] if version[0] == found[0][0]]
    whole = [
        version
        for version in recent
        if _size_at(nodes, version) == size and not lacking(nodes, version, size)
    ]
    return [*whole, *(version for version in found if version not in whole)]


def _shared(nodes: Nodes, sharded: bool) -> list[Version]:
    """Return the versions whose shared state every rank can get, the freshest first."""
    held = {
        held.version for node in nodes.values() for held in node.holdings if held.piece == SHARED
    }
    usable = (one for one in held if not sharded or is_reachable(nodes, SHARED, one))
    return sorted(usable, reverse=True)


def _is_done_again(version: Version, others: Iterable[Version]) -> bool:
    """Return whether a later generation has committed that step again."""
    return any(other[0] > version[0] and other[1] <= version[1] for other in others)


def without_shards(nodes: Nodes) -> list[Version]:
    """Return versions that only lost shards keep from being bases, the freshest first."""
    return [version for version in _shared(nodes, True) if lost_shards(nodes, version)]


def shards_of(nodes: Nodes, version: Version) -> list[str]:
    """Return the shard pieces that the world of this version wrote; empty if unsharded."""
    sizes = [
        held.size
        for node in nodes.values()
        for held in node.holdings
        if held.version == version and is_shard(held.piece)
    ]
    return [shard(rank) for rank in range(max(sizes, default=0))]


def lost_shards(nodes: Nodes, version: Version) -> list[str]:
    """Return the shard pieces that not every node can get."""
    return [piece for piece in shards_of(nodes, version) if not is_reachable(nodes, piece, version)]


def tellers(nodes: Nodes, version: Version) -> dict[str, int]:
    """Return, by shard piece, a rank whose node holds it and which sends its index to all."""
    found = {}
    for piece in shards_of(nodes, version):
        if holders := holding(nodes, piece, version):
            found[piece] = nodes[holders[0]].first
    return found


def lacking(nodes: Nodes, version: Version, size: int) -> list[int]:
    """Return the ranks of a world of this size whose own piece of a version is lost.

    A rank that did not exist in the world of that version lacks nothing.
    """
    ranks = range(min(size, _size_at(nodes, version)))
    return [rank for rank in ranks if not is_reachable(nodes, own(rank), version)]


def _size_at(nodes: Nodes, version: Version) -> int:
    """Return the size of the world that wrote a version."""
    sizes = [
        held.size for node in nodes.values() for held in node.holdings if held.version == version
    ]
    return max(sizes, default=0)


def is_reachable(nodes: Nodes, piece: str, version: Version) -> bool:
    """Return whether every node has it, or can fetch it from one that has."""
    holders = [node for node in nodes.values() if node.holds(piece, version)]
    return any(node.peer for node in holders) or len(holders) == len(nodes) > 0


def holding(nodes: Nodes, piece: str, version: Version) -> list[str]:
    """Return the nodes that hold it, in the order of their ranks."""
    return [name for name in _ordered(nodes) if nodes[name].holds(piece, version)]


def source(nodes: Nodes, here: str, piece: str, version: Version, tried: int = 0) -> str | None:
    """Return the node to get a piece from: this one, or else one that differs between the nodes
    that lack it, and between attempts."""
    if nodes[here].holds(piece, version):
        return here
    holders = holding(nodes, piece, version)
    reachable = [name for name in holders if nodes[name].peer]
    turn = [name for name in _ordered(nodes) if name not in holders].index(here) + tried
    return reachable[turn % len(reachable)] if reachable else None


def _ordered(nodes: Nodes) -> Iterable[str]:
    return sorted(nodes, key=lambda name: nodes[name].first)


# --- once all have looked -------------------------------------------------------------------------


class Outcome(Enum):
    """The outcome of a rank's search for its pieces of a version."""

    FOUND = "found"
    #: It seems to exist, but this rank could not get it.
    ABSENT = "absent"
    #: It is damaged, or of another training.
    UNUSABLE = "unusable"


@dataclass(frozen=True)
class Said:
    """A rank's report of its search to the others."""

    outcome: Outcome
    node: str
    #: Whether the bytes it found must still be checked.
    is_doubted: bool = False
    #: What is wrong.
    sentence: str = ""

    def to_json(self) -> list[Any]:
        return [self.outcome.value, self.node, self.is_doubted, self.sentence]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Said:
        return cls(Outcome(told[0]), *told[1:])


class Agreement(Enum):
    #: All ranks have it, or those that have it send it to the others.
    LOAD = "load"
    #: No rank can ever use it.
    PASS_OVER = "pass over"
    TRY_AGAIN = "try again"


def agreed(said: Sequence[Said], holding: Collection[str], *, sharded: bool) -> Agreement:
    """Decide what all ranks do with a version whose shared state these nodes hold.

    Every rank needs its own part of sharded state. Of unsharded state one copy is enough; if no
    rank found it, it is useless only if it is bad on every node that holds it.
    """
    outcomes = [one.outcome for one in said]
    if all(one is Outcome.FOUND for one in outcomes):
        return Agreement.LOAD
    if sharded:
        absent = any(one is Outcome.ABSENT for one in outcomes)
        return Agreement.TRY_AGAIN if absent else Agreement.PASS_OVER
    if any(one is Outcome.FOUND for one in outcomes):
        return Agreement.LOAD
    bad = all(one.outcome is Outcome.UNUSABLE for one in said if one.node in holding)
    return Agreement.PASS_OVER if bad else Agreement.TRY_AGAIN


def absence(version: Version, said: Sequence[Said]) -> str:
    """Return the message for a generation that ends because a version is absent."""
    rank, first = next((r, one) for r, one in enumerate(said) if one.outcome is Outcome.ABSENT)
    return (
        f"Step {version[1]} is in memory, but rank {rank} could not fetch it: "
        f"{first.sentence.rstrip('.')}. The snapshot is kept; the next generation tries again."
    )


def finders(said: Sequence[Said]) -> list[int]:
    """Return the ranks that have found it."""
    return [rank for rank, one in enumerate(said) if one.outcome is Outcome.FOUND]


def checkers(said: Sequence[Said]) -> list[int]:
    """Return the ranks that check unverified bytes, one per node."""
    first: dict[str, int] = {}
    for rank in finders(said):
        if said[rank].is_doubted:
            first.setdefault(said[rank].node, rank)
    return list(first.values())
