"""The search for the freshest state, of `restore` in a script and of `train`: one for both.

    candidates  all ranks tell each other what their nodes hold in memory, and rank 0 the newest
                checkpoint's step; all compute the same order (`choices`)
    look        each rank looks for what it needs of a version, and reports the outcome
    agree       all decide the same from all reports (`agreed`)
                    all can have it                   load it
                    it exists, but was not received   an error: the next generation tries again
                    it is useless                     the next candidate
    load        from memory, or the checkpoint if it is beyond the versions that come later

A state has one or more pieces. Of one piece (replicated state) a single copy is enough, because the
ranks that found it send it to all others. Of a sharded state every rank needs its own. `bases` are
the versions that a script can restore, `whole_versions` those of which a replica of `train` has
every part. The collectives are in `search_together` and in what implements `Searched`: a rank
enters them because of what all have told each other, never because of what it alone remembers.

When a world resumes from an older version, all later steps are void. So a version that exists but
cannot be fetched now ends the generation; only a version that is proven useless is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torchelastic.errors import SnapshotError
from torchelastic.snapshot.layout import SHARED, Version, is_shard, own, shard
from torchelastic.snapshot.messages import InventoryItem, NodeInventory

#: The version at which a new training begins; from a checkpoint of step s it is (-1, s).
NOTHING: Version = (-1, 0)

# --- the candidates: pure -------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One node's holdings, as reported by one of its workers."""

    #: Its agent's address for other agents; empty: none.
    peer: str
    holdings: tuple[InventoryItem, ...]
    #: The rank that writes this node's shared state: its lowest.
    first: int

    def holds(self, piece: str, version: Version) -> bool:
        return any(held.piece == piece and held.version == version for held in self.holdings)


#: All nodes of the world, by name.
Nodes = Mapping[str, Node]


@dataclass(frozen=True)
class StoredCheckpoint:
    """The newest valid checkpoint, if it is beyond this step."""

    beyond: int = -1


Choice = Version | StoredCheckpoint


def choices(versions: Sequence[Version], stored: int | None, start: int = 0) -> list[Choice]:
    """Return the candidates in order of trial. If `start` is not 0, the script has loaded the state
    of that step itself (`own_checkpoints`), and older candidates are left out.
    """
    tried = _by_step(versions, stored)
    if not start:
        return tried
    newer: list[Choice] = []
    for one in tried:
        if isinstance(one, StoredCheckpoint):
            newer.append(StoredCheckpoint(max(one.beyond, start - 1)))
        elif one[1] >= start:
            newer.append(one)
    return [*dict.fromkeys(newer)]


def _by_step(versions: Sequence[Version], stored: int | None) -> list[Choice]:
    """Order the candidates by step. `stored` is the newest checkpoint's step, None if there is none
    or it is not known. It comes before older versions in memory, and again last of all, since the
    newest may turn out to be damaged.
    """
    fresher = [index for index, version in enumerate(versions) if version[1] >= (stored or 0)]
    at = len(versions) if stored is None else max(fresher, default=-1) + 1
    if at == len(versions):
        return [*versions, StoredCheckpoint()]
    beyond = max(step for _, step in versions[at:])
    return [*versions[:at], StoredCheckpoint(beyond), *versions[at:], StoredCheckpoint()]


def bases(nodes: Nodes, size: int, *, sharded: bool = False) -> list[Version]:
    """Return the versions that a world of this size can restore: the best first, then fallbacks.

    The best is the freshest version whose shared state every node can get; state that is not
    `sharded` needs only one holder, since ranks can send it to each other. Lost pieces of sharded
    state exclude no version: other ranks may have written the same shards (HSDP). If ranks were
    killed when only some had committed a step, the others' random states are of the step before.
    Then the version before is as good: the step was in flight for them, and repeating it gives the
    same bits. Nothing further back is preferred for being complete: all ranks had finished those
    steps. Nor in a world of another size, which would repeat the step with different samples.
    """
    shared = _shared(nodes, sharded)
    found = [
        one
        for one in shared
        if (sharded or not lost_shards(nodes, one)) and not _is_done_again(one, shared)
    ]
    recent = [version for version in found[:2] if version[0] == found[0][0]]
    whole = [
        version
        for version in recent
        if _size_at(nodes, version) == size and not lacking(nodes, version, size)
    ]
    return [*whole, *(version for version in found if version not in whole)]


def whole_versions(nodes: Nodes, parts: int) -> list[Version]:
    """Return the versions of which these nodes have every part of a replica of `train`, the
    freshest first."""
    held = {
        held.version for node in nodes.values() for held in node.holdings if is_shard(held.piece)
    }
    whole = (
        version
        for version in held
        if all(is_reachable(nodes, shard(part), version) for part in range(parts))
    )
    return sorted(whole, reverse=True)


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
    """Return versions of which shards are lost, the freshest first."""
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
    """Return, by shard piece that every node can get, a rank that sends its index to all."""
    return {
        piece: nodes[holding(nodes, piece, version)[0]].first
        for piece in shards_of(nodes, version)
        if is_reachable(nodes, piece, version)
    }


def lacking(nodes: Nodes, version: Version, size: int) -> list[int]:
    """Return the ranks of a world of this size whose own piece of a version is lost.

    A rank that did not exist in the world of that version lacks nothing.
    """
    ranks = range(min(size, _size_at(nodes, version)))
    return [rank for rank in ranks if not is_reachable(nodes, own(rank), version)]


def own_version(nodes: Nodes, rank: int, version: Version, here: str) -> Version | None:
    """Return which own piece a rank on the node `here` restores with a version: of the same one or,
    if the rank was stopped before it had written that, of the latest before it."""
    if rank >= _size_at(nodes, version):
        return None
    found = {
        held.version
        for node in nodes.values()
        for held in node.holdings
        if held.piece == own(rank) and held.version <= version and held.version[1] <= version[1]
    }
    return max((one for one in found if source(nodes, here, own(rank), one)), default=None)


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


# --- once all have looked: pure -------------------------------------------------------------------


class Outcome(Enum):
    """The outcome of a rank's search for its pieces of a version."""

    FOUND = "found"
    #: It seems to exist, but this rank could not get it.
    ABSENT = "absent"
    #: It is damaged, or of another training.
    UNUSABLE = "unusable"


@dataclass(frozen=True)
class SearchReport:
    """A rank's report of its search to the others."""

    outcome: Outcome
    node: str
    #: Whether the bytes it found must still be checked.
    is_doubted: bool = False
    #: The reason of a failure.
    sentence: str = ""

    def to_json(self) -> list[Any]:
        return [self.outcome.value, self.node, self.is_doubted, self.sentence]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> SearchReport:
        return cls(Outcome(told[0]), *told[1:])


class Agreement(Enum):
    #: All ranks have it, or those that have it send it to the others.
    LOAD = "load"
    #: No rank can ever use it.
    PASS_OVER = "pass over"
    TRY_AGAIN = "try again"


def agreed(said: Sequence[SearchReport], holding: Collection[str], *, sharded: bool) -> Agreement:
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


def absence(version: Version, said: Sequence[SearchReport]) -> str:
    """Return the message for a generation that ends because a version is absent."""
    rank, first = next((r, one) for r, one in enumerate(said) if one.outcome is Outcome.ABSENT)
    return (
        f"Step {version[1]} is in memory, but rank {rank} could not fetch it: "
        f"{first.sentence.rstrip('.')}. The snapshot is kept; the next generation tries again."
    )


def uselessness(said: Sequence[SearchReport]) -> str:
    """Return why a version is useless, in the words of the first rank that cannot use it."""
    for rank, one in enumerate(said):
        if one.outcome is Outcome.UNUSABLE:
            return f"rank {rank} cannot use the newest ({one.sentence.rstrip('.')})"
    return "no rank can use the newest"


def finders(said: Sequence[SearchReport]) -> list[int]:
    """Return the ranks that have found it."""
    return [rank for rank, one in enumerate(said) if one.outcome is Outcome.FOUND]


def checkers(said: Sequence[SearchReport]) -> list[int]:
    """Return the ranks that check unverified bytes, one per node."""
    first: dict[str, int] = {}
    for rank in finders(said):
        if said[rank].is_doubted:
            first.setdefault(said[rank].node, rank)
    return list(first.values())


# --- the search: collective -----------------------------------------------------------------------

#: Sends a value to all ranks; returns every rank's.
Gather = Callable[[Any], list[Any]]


class Searched(Protocol):
    """A state that is searched for, on one rank. Every method is called on all ranks together."""

    def look(self, version: Version) -> SearchReport:
        """Look for what this rank needs of a version in memory."""

    def load(self, version: Version, said: Sequence[SearchReport]) -> None:
        """Load what was found; send it to ranks that found nothing."""

    def drop(self) -> None:
        """Close what was found."""

    def from_storage(self, beyond: int) -> int | None:
        """Load the newest checkpoint if it is beyond this step; return its step."""


def tell_each_other(
    gather: Gather, inventory: NodeInventory, *facts: Any, all_of_it: bool = True
) -> tuple[Nodes, list[list[Any]]]:
    """Collective: return what all nodes hold, and each rank's facts."""
    holdings = [
        [held.piece, *held.version, held.bytes, held.rank, held.size]
        for held in inventory.holdings
        if all_of_it
    ]
    said = gather([inventory.node, inventory.peer, holdings, facts])
    return nodes_of(said), [one[3] for one in said]


def nodes_of(said: Sequence[Any]) -> Nodes:
    """Return the nodes of a world from each rank's report: node, agent's address, holdings."""
    found: dict[str, Node] = {}
    for rank, (name, peer, held, *_) in enumerate(said):
        holdings = tuple(
            InventoryItem(piece, (generation, step), size, writer, world)
            for piece, generation, step, size, writer, world in held
        )
        known = found.get(name)
        if known is None or (holdings and not known.holdings):
            found[name] = Node(peer, holdings, known.first if known is not None else rank)
    return found


def search_together(
    tried: Iterable[Choice], state: Searched, gather: Gather, nodes: Nodes, *, sharded: bool
) -> tuple[Version | None, str]:
    """Collective: bring all ranks to the first of these that they can load; return its version,
    and why the newest that was passed over is useless."""
    useless = ""
    for choice in tried:
        if isinstance(choice, StoredCheckpoint):
            if (step := state.from_storage(choice.beyond)) is not None:
                return (NOTHING[0], step), useless
            continue
        report = state.look(choice)
        said = [SearchReport.from_json(one) for one in gather(report.to_json())]
        verdict = agreed(said, holding(nodes, SHARED, choice), sharded=sharded)
        if verdict is Agreement.LOAD:
            state.load(choice, said)
            return choice, useless
        state.drop()
        if verdict is Agreement.TRY_AGAIN:
            raise SnapshotError(absence(choice, said))
        useless = useless or uselessness(said)
    return None, useless
