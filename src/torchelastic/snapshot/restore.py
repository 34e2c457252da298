"""Restoring: the version that all ranks resume from, where each node gets it, and the search.

Every rank gets the same inventories and computes the same plan, so no rank has to be asked:

    bases     the restorable versions in memory, the best first
    choices   those, the newest checkpoint and the script's own state, by step, in order of trial
    agreed    the common action after all ranks have looked for one of them (`Searcher`)

When a world resumes from an older version, all later steps are void. So a version that exists but
cannot be fetched now ends the generation; only a version that is proven useless is skipped.

A piece that is damaged or of another training is *unusable*. A piece that could not be fetched just
now (a busy agent, a broken connection, a node without memory) is *absent*: the search tries again,
on another holder if there is one, and does not conclude that the piece is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torchelastic.errors import SnapshotError
from torchelastic.snapshot.agent_client import FETCH_TIMEOUT, SnapshotHolder
from torchelastic.snapshot.layout import (
    SHARED,
    Memory,
    SealedVersion,
    Version,
    is_shard,
    own,
    shard,
)
from torchelastic.snapshot.messages import InventoryItem
from torchelastic.snapshot.shard_boxes import Index, Lost, Take, takes
from torchelastic.snapshot.shards import (
    Piece,
    Sharded,
    Shards,
    assemble,
    index_from_json,
    index_of,
    index_to_json,
)
from torchelastic.snapshot.state_tree import Stored, Tree
from torchelastic.tensors import agreement, rank_private

log = logging.getLogger(__name__)

#: Up to this size, verify a snapshot's checksum before loading it. For larger ones that takes
#: longer than loading: verify it in the background, before the next commit.
CHECKED_FIRST = 32 << 20
#: Requests for a piece before it counts as absent, and the seconds between two.
FETCH_TRIES, FETCH_PAUSE = 3, 0.5


# --- the plan: pure -------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Own:
    """The state that the script has loaded itself, with this many steps done."""

    step: int


Choice = Version | StoredCheckpoint | Own


def choices(versions: Sequence[Version], stored: int | None, start: int = 0) -> list[Choice]:
    """Return the candidates in order of trial. If `start` is not 0, the script has loaded the state
    of that step itself: older candidates are left out, and its own comes last (`own_checkpoints`).
    """
    tried = _by_step(versions, stored)
    if not start:
        return tried
    newer: list[Choice] = []
    for one in tried:
        if isinstance(one, StoredCheckpoint):
            newer.append(StoredCheckpoint(max(one.beyond, start - 1)))
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


# --- once all have looked -------------------------------------------------------------------------


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


# --- the search -----------------------------------------------------------------------------------

#: The outcome of a failed search, and the reason.
Wrong = tuple[Outcome, str]


class Absent(SnapshotError):
    """A piece could not be fetched now."""


@dataclass
class FoundPieces:
    """A version's pieces that this rank found. The memories stay open until it is loaded."""

    shared: Stored
    held: SealedVersion
    memories: list[Memory]
    #: The sharded tensors, and where their parts are.
    targets: Sharded
    shards: Assembly | None = None

    @property
    def is_doubted(self) -> bool:
        """Whether its bytes must still be checked."""
        return len(self.held.data) > CHECKED_FIRST

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


class PieceReader:
    """Opens pieces in the memories of a world's nodes, for a worker on the node `here`."""

    def __init__(self, agent: SnapshotHolder | None, here: str, nodes: Nodes) -> None:
        self._agent, self._here, self._nodes = agent, here, nodes

    def held(self, piece: str, version: Version, memories: list[Memory]) -> SealedVersion:
        """Return a piece from any node; verified unless it is large and shared."""
        memory = self._opened(piece, version)
        memories.append(memory)
        held = memory.find(version)
        later = piece == SHARED and held is not None and len(held.data) > CHECKED_FIRST
        if held is None or not (later or held.is_whole()):
            raise SnapshotError(f"the snapshot of '{piece}' is damaged")
        return held

    def _opened(self, piece: str, version: Version) -> Memory:
        began, wrong = time.monotonic(), "no node that holds it can be reached"
        for tried in range(FETCH_TRIES):
            name = source(self._nodes, self._here, piece, version, tried)
            if name is None or self._agent is None:
                break
            if tried:
                time.sleep(FETCH_PAUSE)
            try:
                peer = "" if name == self._here else self._nodes[name].peer
                return self._agent.open(piece, version, peer)
            except SnapshotError as error:
                wrong = str(error)
            if time.monotonic() > began + FETCH_TIMEOUT:
                break
        raise Absent(wrong)


class Searcher:
    """Searches for one rank, in one world."""

    def __init__(
        self,
        agent: SnapshotHolder | None,
        tree: Tree,
        shards: Shards,
        rank: int,
        here: str,
        nodes: Nodes,
    ) -> None:
        self._held = PieceReader(agent, here, nodes).held
        self._tree, self._shards = tree, shards
        self._rank, self._here, self._nodes = rank, here, nodes

    def search(self, version: Version) -> tuple[FoundPieces | None, SearchReport]:
        """Return this rank's pieces of a version, and its report to the others. Collective if there
        are shards."""
        memories: list[Memory] = []
        found: FoundPieces | None = None
        wrong: Wrong | None = None
        try:
            found = self._shared(version, memories)
        except SnapshotError as error:
            wrong = _wrong(error)
        if self._shards.any:
            lacking = self._add_shards(found, version, memories)
            wrong = wrong or lacking
        if wrong is None and found is not None:
            return found, SearchReport(Outcome.FOUND, self._here, found.is_doubted)
        for memory in memories:
            memory.close()
        outcome, sentence = wrong or (Outcome.ABSENT, "")
        failed = "fetch" if outcome is Outcome.ABSENT else "use"
        log.warning("This rank cannot %s the snapshot of step %d: %s", failed, version[1], sentence)
        return None, SearchReport(outcome, self._here, sentence=sentence)

    def own(self, version: Version) -> rank_private.Private | None:
        """Return this rank's private state at that version. If it is damaged, log a warning and
        return None: the shared state is still usable."""
        memories: list[Memory] = []
        try:
            held = self._held(own(self._rank), version, memories)
            return rank_private.unpack(bytes(held.data))
        except SnapshotError as error:
            log.warning(
                "This rank's per-rank state of step %d is lost (%s). Its random number generators "
                "keep the state that the script gave them.",
                version[1],
                str(error),
            )
            return None
        finally:
            for memory in memories:
                memory.close()

    def _shared(self, version: Version, memories: list[Memory]) -> FoundPieces:
        held = self._held(SHARED, version, memories)
        stored = self._tree.read(held.skeleton, held.data)
        targets = self._shards.targets(stored.sharded(), self._tree.flatten_lasting().sharded)
        return FoundPieces(stored, held, memories, targets)

    def _add_shards(
        self, found: FoundPieces | None, version: Version, memories: list[Memory]
    ) -> Wrong | None:
        """Collective: find this rank's parts of sharded state, or return what is wrong."""
        absent: list[Wrong] = []

        def opened(piece: str) -> Piece:
            try:
                held = self._held(piece, version, memories)
            except Absent as error:
                absent.append(_wrong(error))
                raise
            return Piece.read(self._tree.form, held.skeleton, held.data)

        targets = found.targets if found is not None else None
        shards, wrong = find_shards(targets, self._rank, self._nodes, version, opened)
        if found is not None:
            found.shards = shards
        if absent:
            return absent[0]
        return None if shards is not None else (Outcome.UNUSABLE, wrong)


def _wrong(error: SnapshotError) -> Wrong:
    """Return outcome and text only: the error's traceback would keep its memories alive."""
    outcome = Outcome.ABSENT if isinstance(error, Absent) else Outcome.UNUSABLE
    return outcome, str(error)


# --- shards in the pieces of another world --------------------------------------------------------

# In an unchanged world, a rank finds all it needs in its own piece. If one rank does not, all ranks
# exchange the contents of their pieces, and each opens those that it needs.

Opener = Callable[[str], Piece]


@dataclass(frozen=True)
class Assembly:
    """The pieces and boxes that a rank loads its shards from."""

    takes: list[Take]
    pieces: Mapping[str, Piece]
    targets: Sharded

    def copy(self) -> None:
        assemble(self.takes, self.pieces, self.targets)


def find_shards(
    targets: Sharded | None, rank: int, nodes: Nodes, version: Version, opener: Opener
) -> tuple[Assembly | None, str]:
    """Collective: find this rank's shards of these tensors; return None and the reason if some are
    missing. `targets` is None on a rank that has already failed; it still takes part."""
    needs = index_of(targets or {})
    pieces = _Pieces(opener)
    found = _in_own(needs, rank, nodes, version, pieces) if targets is not None else None
    if not agreement.all_of_them(found is not None):
        found, lost = _in_all(needs, rank, nodes, version, pieces)
        if lost:
            gone = [f"'{piece}' is lost" for piece in lost_shards(nodes, version)]
            return None, "; ".join([f"no memory has {lost[0]}", *gone, *pieces.wrong.values()])
    if found is None or targets is None:
        return None, "; ".join(pieces.wrong.values())
    return Assembly(found, pieces.opened, targets), ""


def _in_own(
    needs: Index, rank: int, nodes: Nodes, version: Version, pieces: _Pieces
) -> list[Take] | None:
    """Find everything in the piece of the same rank; None if that is not enough."""
    mine = shard(rank)
    if mine not in tellers(nodes, version) or not pieces.can_open(mine):
        return None
    found, lost = takes(needs, [(mine, pieces.opened[mine].index)])
    return None if lost else found


def _in_all(
    needs: Index, rank: int, nodes: Nodes, version: Version, pieces: _Pieces
) -> tuple[list[Take] | None, list[Lost]]:
    """Collective: find everything in the pieces of all ranks; also return what is in none."""
    mine = shard(rank)
    indexes = _tell_each_other(rank, nodes, version, pieces)
    ordered = sorted(indexes.items(), key=lambda item: item[0] != mine)
    found, lost = takes(needs, ordered)
    wanted = dict.fromkeys(take.piece for take in found)
    usable = not lost and all([pieces.can_open(piece) for piece in wanted])
    return (found if usable else None), lost


def _tell_each_other(
    rank: int, nodes: Nodes, version: Version, pieces: _Pieces
) -> dict[str, Index]:
    """Collective: return every piece's index, sent by one rank whose node holds it."""
    mine = [piece for piece, teller in tellers(nodes, version).items() if teller == rank]
    told: dict[str, Any] = {
        piece: index_to_json(pieces.opened[piece].index) for piece in mine if pieces.can_open(piece)
    }
    return {
        piece: index_from_json(index)
        for said in agreement.gather(told)
        for piece, index in said.items()
    }


class _Pieces:
    """Pieces, each opened once."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self.opened: dict[str, Piece] = {}
        #: By piece, why it could not be opened.
        self.wrong: dict[str, str] = {}

    def can_open(self, piece: str) -> bool:
        """Open a piece; log a warning and return False if that fails."""
        if piece not in self.opened and piece not in self.wrong:
            try:
                self.opened[piece] = self._opener(piece)
            except SnapshotError as error:
                log.warning("This rank cannot use '%s': %s", piece, error)
                self.wrong[piece] = str(error)
        return piece in self.opened
