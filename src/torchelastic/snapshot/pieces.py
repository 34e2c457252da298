"""Finds what a rank needs of a version in the memories of the nodes, and assembles shards.

A piece that is damaged or of another training is *unusable*. A piece that could not be fetched just
now (a busy agent, a broken connection, a node without memory) is *absent*: we ask again, another
holder if there is one, and do not conclude that the piece is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic.errors import SnapshotError
from torchelastic.snapshot.agent_client import FETCH_TIMEOUT, SnapshotRequests
from torchelastic.snapshot.layout import SHARED, Memory, SealedVersion, Version, own, shard
from torchelastic.snapshot.search import Nodes, Outcome, SearchReport, lost_shards, source, tellers
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
from torchelastic.tensors.shard_layout import Index, Lost, Take, takes

log = logging.getLogger(__name__)

#: Up to this size, verify a snapshot's checksum before loading it. For larger ones that takes
#: longer than loading: verify it in the background, before the next commit.
CHECKED_FIRST = 32 << 20
#: Requests for a piece before it counts as absent, and the seconds between two.
FETCH_TRIES, FETCH_PAUSE = 3, 0.5

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
    #: Whether its bytes must still be checked.
    is_doubted: bool
    shards: Assembly | None = None

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


class Searcher:
    """Searches for one rank, on the node `here` of a world."""

    def __init__(
        self,
        agent: SnapshotRequests | None,
        tree: Tree,
        rank: int,
        here: str,
        nodes: Nodes,
        *,
        shards: Shards | None = None,
        piece: str = SHARED,
    ) -> None:
        """`piece` has the tree, but for its sharded tensors, if a script has `shards`."""
        self._agent, self._tree, self._shards, self._piece = agent, tree, shards, piece
        self._rank, self._here, self._nodes = rank, here, nodes

    def search(self, version: Version) -> tuple[FoundPieces | None, SearchReport]:
        """Return this rank's pieces of a version, and its report to the others. Collective if there
        are shards."""
        memories: list[Memory] = []
        found: FoundPieces | None = None
        wrong: Wrong | None = None
        try:
            found = self._tree_of(version, memories)
        except SnapshotError as error:
            wrong = _wrong(error)
        if self._shards is not None and self._shards.any:
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
            held = self._verified(own(self._rank), version, memories)
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

    def _tree_of(self, version: Version, memories: list[Memory]) -> FoundPieces:
        # Shared pieces are checked later if they are large.
        limit = CHECKED_FIRST if self._piece == SHARED else None
        held = self._verified(self._piece, version, memories, limit)
        stored = self._tree.read(held.skeleton, held.data)
        targets: Sharded = {}
        if self._shards is not None:
            live = self._tree.flatten_lasting().sharded
            targets = self._shards.targets(stored.sharded(), live)
        is_doubted = limit is not None and len(held.data) > limit
        return FoundPieces(stored, held, memories, targets, is_doubted)

    def _add_shards(
        self, found: FoundPieces | None, version: Version, memories: list[Memory]
    ) -> Wrong | None:
        """Collective: find this rank's parts of sharded state, or return what is wrong."""
        absent: list[Wrong] = []

        def opened(piece: str) -> Piece:
            try:
                held = self._verified(piece, version, memories)
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

    def _verified(
        self, piece: str, version: Version, memories: list[Memory], limit: int | None = None
    ) -> SealedVersion:
        """Return a piece from any node; verified unless it is larger than `limit`."""
        memory = self._opened(piece, version)
        memories.append(memory)
        held = memory.find(version)
        later = limit is not None and held is not None and len(held.data) > limit
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
