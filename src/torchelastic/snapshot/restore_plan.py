"""Which state all ranks go on from, and where each node gets it. Pure.

Every rank is handed the same inventories and comes to the same answer, so nobody has to be asked.

    bases     the versions in memory that can be gone on from, the best first
    choices   those, the newest checkpoint and what the script has loaded itself, by step: what is
              tried, one after the other
    agreed    once all ranks have looked for one of them, what all do

What was done since a version is void as soon as the world has settled on an older one. So one that
is there, and could only not be had now, ends the generation; only what is shown to be of no use is
passed over.
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


@dataclass(frozen=True)
class Storage:
    """The newest checkpoint that is sound, if it is of a step beyond this one."""

    beyond: int = -1


@dataclass(frozen=True)
class Own:
    """What the script has loaded itself, of so many steps."""

    step: int


Choice = Version | Storage | Own


def choices(versions: Sequence[Version], stored: int | None, start: int = 0) -> list[Choice]:
    """What is tried, in this order. The script has loaded the state of step `start` itself, if that
    is not 0: what is older is not tried, and last comes its own (`keeping_start`).
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
    """`stored` is the step of the newest checkpoint, None if there is none or it is not known. It
    comes before whatever in memory is older, and last of all again, since the newest may turn out
    to be damaged.
    """
    fresher = [index for index, version in enumerate(versions) if version[1] >= (stored or 0)]
    at = len(versions) if stored is None else max(fresher, default=-1) + 1
    if at == len(versions):
        return [*versions, Storage()]
    beyond = max(step for _, step in versions[at:])
    return [*versions[:at], Storage(beyond), *versions[at:], Storage()]


def bases(nodes: Nodes, size: int, *, sharded: bool = False) -> list[Version]:
    """What to go on from, in a world of this size: the best first, then what to fall back to.

    The freshest version whose shared state, and all of whose shards, every node can get; of state
    that is not `sharded` it is enough that one has it, since ranks can send it to each other. But
    where ranks were killed while some had committed a step and others had not, the latter's random
    states are those of the step before: the version before is as good then, since that step was in
    flight for them, and redoing it leads to the same bits. Further back nothing is preferred for
    being whole: those steps were finished by all. Nor in a world of another size, which would redo
    the step with other samples for each rank.
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
    """Versions whose shared state every rank can get, the freshest first."""
    held = {
        held.version for node in nodes.values() for held in node.holdings if held.piece == SHARED
    }
    usable = (one for one in held if not sharded or is_reachable(nodes, SHARED, one))
    return sorted(usable, reverse=True)


def _is_done_again(version: Version, others: Iterable[Version]) -> bool:
    """Whether a later generation has committed that step: a node that was away has not heard."""
    return any(other[0] > version[0] and other[1] <= version[1] for other in others)


def without_shards(nodes: Nodes) -> list[Version]:
    """Versions that were bases if shards of them were not lost, the freshest first."""
    return [version for version in _shared(nodes, True) if lost_shards(nodes, version)]


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
        if holders := holding(nodes, piece, version):
            found[piece] = nodes[holders[0]].first
    return found


def lacking(nodes: Nodes, version: Version, size: int) -> list[int]:
    """The ranks of a world of this size whose own piece of a version is lost.

    A rank that the world of that version did not have lacks nothing.
    """
    ranks = range(min(size, _size_at(nodes, version)))
    return [rank for rank in ranks if not is_reachable(nodes, own(rank), version)]


def _size_at(nodes: Nodes, version: Version) -> int:
    """The size of the world that wrote a version."""
    sizes = [
        held.size for node in nodes.values() for held in node.holdings if held.version == version
    ]
    return max(sizes, default=0)


def is_reachable(nodes: Nodes, piece: str, version: Version) -> bool:
    """Whether every node has it, or can fetch it from one that has."""
    holders = [node for node in nodes.values() if node.holds(piece, version)]
    return any(node.peer for node in holders) or len(holders) == len(nodes) > 0


def holding(nodes: Nodes, piece: str, version: Version) -> list[str]:
    """The nodes that hold it, in the order of their ranks."""
    return [name for name in _ordered(nodes) if nodes[name].holds(piece, version)]


def source(nodes: Nodes, here: str, piece: str, version: Version, tried: int = 0) -> str | None:
    """The node to get a piece from: this one, or another, not the same one for all who lack it, nor
    for who has tried before."""
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
    """What has become of a rank's search for its pieces of a version."""

    FOUND = "found"
    #: It is there, for all that is known; but this rank has not got it.
    ABSENT = "absent"
    #: It is damaged, or of another training.
    UNUSABLE = "unusable"


@dataclass(frozen=True)
class Said:
    """What a rank tells the others of its search."""

    outcome: Outcome
    node: str
    #: Whether the bytes that it has found have yet to be checked.
    is_doubted: bool = False
    #: What is wrong.
    sentence: str = ""

    def to_json(self) -> list[Any]:
        return [self.outcome.value, self.node, self.is_doubted, self.sentence]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Said:
        return cls(Outcome(told[0]), *told[1:])


class Verdict(Enum):
    #: All ranks have it, or those who have it send it to the others.
    LOAD = "load"
    #: Nobody can ever use it.
    PASS_OVER = "pass over"
    TRY_AGAIN = "try again"


def agreed(said: Sequence[Said], holding: Collection[str], *, sharded: bool) -> Verdict:
    """What all ranks do with a version whose shared state these nodes hold.

    Of what is sharded, each needs its own part. Otherwise one that has it is enough; and where no
    rank has, it is bad only if it is on every node that holds it.
    """
    outcomes = [one.outcome for one in said]
    if all(one is Outcome.FOUND for one in outcomes):
        return Verdict.LOAD
    if sharded:
        absent = any(one is Outcome.ABSENT for one in outcomes)
        return Verdict.TRY_AGAIN if absent else Verdict.PASS_OVER
    if any(one is Outcome.FOUND for one in outcomes):
        return Verdict.LOAD
    bad = all(one.outcome is Outcome.UNUSABLE for one in said if one.node in holding)
    return Verdict.PASS_OVER if bad else Verdict.TRY_AGAIN


def absence(version: Version, said: Sequence[Said]) -> str:
    """Why this generation ends, and what then."""
    rank, first = next((r, one) for r, one in enumerate(said) if one.outcome is Outcome.ABSENT)
    return (
        f"Step {version[1]} is in memory, but rank {rank} could not fetch it: "
        f"{first.sentence.rstrip('.')}. The snapshot is kept; the next generation tries again."
    )


def finders(said: Sequence[Said]) -> list[int]:
    """The ranks that have found it."""
    return [rank for rank, one in enumerate(said) if one.outcome is Outcome.FOUND]


def checkers(said: Sequence[Said]) -> list[int]:
    """The ranks that check what is doubted: one for all of its node."""
    first: dict[str, int] = {}
    for rank in finders(said):
        if said[rank].is_doubted:
            first.setdefault(said[rank].node, rank)
    return list(first.values())
