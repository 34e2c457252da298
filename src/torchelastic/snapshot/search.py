"""The search for this rank's pieces of a version, on this node and others.

A piece that is damaged or of another training is *unusable*. A piece that could not be fetched just
now (a busy agent, a broken connection, a node without memory) is *absent*: the search tries again,
on another holder if there is one, and does not conclude that the piece is lost.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from torchelastic.errors import SnapshotError
from torchelastic.snapshot import reshard
from torchelastic.snapshot.agent_client import FETCH_PATIENCE, SnapshotAgent
from torchelastic.snapshot.dtensors import Sharded
from torchelastic.snapshot.layout import SHARED, Held, Memory, Version, own
from torchelastic.snapshot.reshard import Assembly
from torchelastic.snapshot.restore_plan import Nodes, Outcome, Said, source
from torchelastic.snapshot.shards import Piece, Shards
from torchelastic.snapshot.state_tree import Stored, Tree
from torchelastic.tensors import rank_private

log = logging.getLogger(__name__)

#: Up to this size, verify a snapshot's checksum before loading it. For larger ones that takes
#: longer than loading: verify it in the background, before the next commit.
CHECKED_FIRST = 32 << 20
#: How often to request a piece before it counts as absent, and the seconds in between.
TRIES, PAUSE = 3, 0.5


#: The outcome of a failed search, and the reason.
Wrong = tuple[Outcome, str]


class Absent(SnapshotError):
    """A piece could not be fetched now."""


@dataclass
class Found:
    """A version's pieces that this rank found. The memories stay open until it is loaded."""

    shared: Stored
    held: Held
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


class Searcher:
    """Searches for one rank, in one world."""

    def __init__(
        self,
        agent: SnapshotAgent | None,
        tree: Tree,
        shards: Shards,
        rank: int,
        here: str,
        nodes: Nodes,
    ) -> None:
        self._agent, self._tree, self._shards = agent, tree, shards
        self._rank, self._here, self._nodes = rank, here, nodes

    def search(self, version: Version) -> tuple[Found | None, Said]:
        """Return this rank's pieces of a version, and its report to the others. Collective if there
        are shards."""
        memories: list[Memory] = []
        found: Found | None = None
        wrong: Wrong | None = None
        try:
            found = self._shared(version, memories)
        except SnapshotError as error:
            wrong = _wrong(error)
        if self._shards.any:
            lacking = self._add_shards(found, version, memories)
            wrong = wrong or lacking
        if wrong is None and found is not None:
            return found, Said(Outcome.FOUND, self._here, found.is_doubted)
        for memory in memories:
            memory.close()
        outcome, sentence = wrong or (Outcome.ABSENT, "")
        failed = "fetch" if outcome is Outcome.ABSENT else "use"
        log.warning("This rank cannot %s the snapshot of step %d: %s", failed, version[1], sentence)
        return None, Said(outcome, self._here, sentence=sentence)

    def own(self, version: Version) -> rank_private.Private | None:
        """Return this rank's private state at that version. If it is lost, log a warning and return
        None: the shared state is still usable."""
        memories: list[Memory] = []
        try:
            if source(self._nodes, self._here, own(self._rank), version) is None:
                return None
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

    def _shared(self, version: Version, memories: list[Memory]) -> Found:
        held = self._held(SHARED, version, memories)
        stored = self._tree.read(held.skeleton, held.data)
        targets = self._shards.targets(stored.sharded(), self._tree.sharded())
        return Found(stored, held, memories, targets)

    def _add_shards(
        self, found: Found | None, version: Version, memories: list[Memory]
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
        shards = reshard.find(targets, self._rank, self._nodes, version, opened)
        if found is not None:
            found.shards = shards
        if absent:
            return absent[0]
        if shards is None:
            return Outcome.UNUSABLE, "some of its shards cannot be used"
        return None

    def _held(self, piece: str, version: Version, memories: list[Memory]) -> Held:
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
        for tried in range(TRIES):
            name = source(self._nodes, self._here, piece, version, tried)
            if name is None or self._agent is None:
                break
            if tried:
                time.sleep(PAUSE)
            try:
                peer = "" if name == self._here else self._nodes[name].peer
                return self._agent.open(piece, version, peer)
            except SnapshotError as error:
                wrong = str(error)
            if time.monotonic() > began + FETCH_PATIENCE:
                break
        raise Absent(wrong)


def _wrong(error: SnapshotError) -> Wrong:
    """Return outcome and text only: the error's traceback would keep its memories alive."""
    outcome = Outcome.ABSENT if isinstance(error, Absent) else Outcome.UNUSABLE
    return outcome, str(error)
