"""Resharding: ranks find the shards they need in the pieces of another world.

In an unchanged world, a rank finds all it needs in its own piece. If one rank does not, all ranks
exchange the contents of their pieces, and each opens those that it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic.errors import SnapshotError
from torchelastic.snapshot import exchange, shards
from torchelastic.snapshot.dtensors import Sharded, box_of
from torchelastic.snapshot.layout import Version, shard
from torchelastic.snapshot.restore_plan import Nodes, shards_of, tellers
from torchelastic.snapshot.shard_boxes import Index, Take, takes
from torchelastic.snapshot.shards import Piece

log = logging.getLogger(__name__)

Opener = Callable[[str], Piece]


@dataclass(frozen=True)
class Assembly:
    """The pieces and boxes that a rank loads its shards from."""

    takes: list[Take]
    pieces: Mapping[str, Piece]
    targets: Sharded

    def copy(self) -> None:
        shards.copy(self.takes, self.pieces, self.targets)


def find(
    targets: Sharded | None, rank: int, nodes: Nodes, version: Version, opener: Opener
) -> Assembly | None:
    """Collective: find this rank's shards of these tensors; return None, with a warning, if some
    are missing. `targets` is None on a rank that has already failed; it still takes part."""
    needs = {name: box_of(one) for name, one in (targets or {}).items()}
    pieces = _Pieces(opener)
    found = _in_own(needs, rank, nodes, version, pieces) if targets is not None else None
    if not exchange.all_of_them(found is not None):
        found = _in_all(needs, rank, nodes, version, pieces)
    if found is None or targets is None:
        return None
    return Assembly(found, pieces.opened, targets)


def _in_own(
    needs: Index, rank: int, nodes: Nodes, version: Version, pieces: _Pieces
) -> list[Take] | None:
    """Find everything in the piece of the same rank; None if that is not enough."""
    mine = shard(rank)
    if mine not in shards_of(nodes, version) or not pieces.can_open(mine):
        return None
    found, lost = takes(needs, [(mine, pieces.opened[mine].boxes)])
    return None if lost else found


def _in_all(
    needs: Index, rank: int, nodes: Nodes, version: Version, pieces: _Pieces
) -> list[Take] | None:
    """Collective: find everything in the pieces of all ranks."""
    mine = shard(rank)
    indexes = _tell_each_other(rank, nodes, version, pieces)
    ordered = sorted(indexes.items(), key=lambda item: item[0] != mine)
    found, lost = takes(needs, ordered)
    if lost:
        log.warning("Step %d: no surviving shard holds some parts of %s.", version[1], lost[0])
        return None
    wanted = dict.fromkeys(take.piece for take in found)
    return found if all([pieces.can_open(piece) for piece in wanted]) else None


def _tell_each_other(
    rank: int, nodes: Nodes, version: Version, pieces: _Pieces
) -> dict[str, Index]:
    """Collective: return every piece's index, sent by one rank whose node holds it."""
    mine = [piece for piece, teller in tellers(nodes, version).items() if teller == rank]
    told: dict[str, Any] = {
        piece: shards.index_to_json(pieces.opened[piece].boxes)
        for piece in mine
        if pieces.can_open(piece)
    }
    return {
        piece: shards.index_from_json(index)
        for said in exchange.gather(told)
        for piece, index in said.items()
    }


class _Pieces:
    """Pieces, each opened once."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self.opened: dict[str, Piece] = {}

    def can_open(self, piece: str) -> bool:
        """Open a piece; log a warning and return False if that fails."""
        if piece not in self.opened:
            try:
                self.opened[piece] = self._opener(piece)
            except SnapshotError as error:
                log.warning("This rank cannot use '%s': %s", piece, error)
                return False
        return True
