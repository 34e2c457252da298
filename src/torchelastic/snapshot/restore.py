"""`restore` in a script: the candidates of the search, and how each kind is loaded.

All ranks exchange what their nodes hold, and rank 0 adds the newest checkpoint's step. `search`
brings all to the first candidate that can be loaded:

    from memory   a rank loads its pieces, and its parts of sharded tensors from all ranks' pieces;
                  ranks that found nothing of unsharded state receive it
    from storage  rank 0 reads a checkpoint and sends it to all; of shards, each reads its own
    none newer    the script has loaded a later step itself: keep that (`own_checkpoints`)
    none at all   step 0; but an error if there are snapshots, and none can be used
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torchelastic import checkpoint, env
from torchelastic.checkpoint.manager import Saved
from torchelastic.errors import CheckpointError, SnapshotError
from torchelastic.snapshot.agent_client import AgentClient
from torchelastic.snapshot.layout import Version
from torchelastic.snapshot.messages import NodeInventory
from torchelastic.snapshot.own_checkpoints import Loaded, different_starts, unsaid_start
from torchelastic.snapshot.pieces import FoundPieces, Searcher
from torchelastic.snapshot.plain_parameters import different_forms
from torchelastic.snapshot.search import (
    NOTHING,
    Nodes,
    SearchReport,
    bases,
    checkers,
    choices,
    finders,
    lacking,
    own_version,
    search_together,
    tell_each_other,
    without_shards,
)
from torchelastic.snapshot.shards import Shards
from torchelastic.snapshot.state_tree import Tree
from torchelastic.snapshot.writer import Writer
from torchelastic.tensors import agreement, rank_private, rng, transfer
from torchelastic.tensors.buffers import Buffers

log = logging.getLogger(__name__)

#: Seconds to look for the newest checkpoint when there are snapshots in memory.
STORAGE_TIMEOUT = 10.0


@dataclass(frozen=True)
class Kept:
    """The state that a script keeps, on this rank."""

    state: Saved
    tree: Tree
    buffers: Buffers
    shards: Shards
    agent: AgentClient | None
    rank: int
    size: int


class Restoration:
    """One `restore` on one rank. What sends or receives is called on all ranks together."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        #: This rank's node, and what all nodes hold.
        self.node = ""
        self.nodes: Nodes = {}
        self._found: FoundPieces | None = None
        #: Whether the restored snapshot must still be checked; and its place, if this rank checks.
        self._is_doubted = False
        self.unchecked: FoundPieces | None = None

    def run(self, start: int | None, taken: int, plain: tuple[str, str]) -> Version | None:
        """Collective: return the version that all have now, or None if there is none.

        `start` is the script's, `taken` are the steps that its state has taken, `plain` its number
        of plain parameters.
        """
        sharded, kept = self._kept.shards.any, self._kept
        stored, loaded = self._tell_each_other(start, taken, plain)
        self._searcher = Searcher(
            kept.agent, kept.tree, kept.rank, self.node, self.nodes, shards=kept.shards
        )
        versions = bases(self.nodes, kept.size, sharded=sharded)
        tried = choices(versions, stored, loaded.step)
        base, useless = search_together(tried, self, agreement.gather, self.nodes, sharded=sharded)
        if base is not None:
            if base[0] == NOTHING[0] and loaded.unsaid and kept.rank == 0:
                log.warning(
                    "The checkpoint of step %d replaced the state that the script loaded before "
                    "restore(). To keep whichever is newer, pass the number of steps that state "
                    "has done: restore(start=...).",
                    base[1],
                )
            return base
        if loaded.step:
            self._share_loaded(loaded)
            return (NOTHING[0], loaded.step)
        lost = without_shards(self.nodes)
        _refuse_to_begin_anew(versions or lost, useless or "some of their shards are lost")
        if loaded.unsaid:
            raise unsaid_start(loaded.unsaid)
        return None

    def _tell_each_other(
        self, start: int | None, taken: int, plain: tuple[str, str]
    ) -> tuple[int | None, Loaded]:
        """Collective: return the newest checkpoint's step (if rank 0 knows it), and what the script
        loaded on each rank."""
        tree, rank = self._kept.tree, self._kept.rank
        inventory = NodeInventory(0, (), node=f"rank {rank}")
        if self._kept.agent is not None:
            # No answer is an error: without this agent's snapshots all ranks would go back.
            inventory = self._kept.agent.inventory()
        # With --virtual-local-rank all are 0, and report the same.
        speaks = env.get("LOCAL_RANK", "0") == "0"
        facts = [newest_stored() if rank == 0 else None, start, taken, [tree.form, *plain]]
        self.node = inventory.node
        self.nodes, told = tell_each_other(agreement.gather, inventory, *facts, all_of_it=speaks)
        (stored, *_), starts, takens, forms = zip(*told, strict=True)
        if any(form != forms[0] for form in forms):
            raise different_forms(agreement.gather([*tree.form_lines, plain]))
        return stored, Loaded(starts, takens)

    # --- from memory -----------------------------------------------------------------------------

    def look(self, version: Version) -> SearchReport:
        self._found, report = self._searcher.search(version)
        return report

    def drop(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            found.close()

    def load(self, version: Version, said: Sequence[SearchReport]) -> None:
        found, finding, checking = self._found, finders(said), checkers(said)
        if found is not None:
            if found.shards is not None:
                found.shards.copy()
                found.shards = None
            self._kept.tree.load(found.shared, found.targets)
        if len(finding) < self._kept.size:
            self._share(finding)
        self._kept.buffers.find()
        self._is_doubted = bool(checking)
        if self._kept.rank in checking:
            self.unchecked, self._found = found, None
        self.drop()
        self._load_own(version)
        log.info("Resuming from step %d, found in memory.", version[1])

    def _load_own(self, version: Version) -> None:
        nodes, rank, buffers = self.nodes, self._kept.rank, self._kept.buffers
        at = own_version(nodes, rank, version, self.node)
        own = self._searcher.own(at) if at is not None else None
        if own is not None and at == version:
            rank_private.restore(own, buffers)
        elif own is not None:
            # The buffers of that step are older than those of another rank, which are loaded.
            rng.restore(own.random)
        if rank == 0:
            lost = lacking(nodes, version, self._kept.size)
            late = [one for one in lost if own_version(nodes, one, version, self.node)]
            _tell_lacking(version[1], late, [one for one in lost if one not in late])

    def check(self, writer: Writer) -> None:
        """Collective, before the first commit: raise if the restored snapshot is damaged on any
        node, so that no rank commits a step made from it."""
        if not self._is_doubted:
            return
        whole = self.unchecked is None or writer.is_whole(self.unchecked.held)
        self.close()
        said = agreement.gather(whole)
        if damaged := [str(rank) for rank, well in enumerate(said) if not well]:
            raise SnapshotError(
                "The restored snapshot is damaged on the node of rank "
                f"{', '.join(damaged)}. It was dropped there; the next generation restores "
                "another one."
            )

    def close(self) -> None:
        """Forget the doubt, and close the snapshot that was to be checked."""
        found, self.unchecked = self.unchecked, None
        self._is_doubted = False
        if found is not None:
            found.close()

    # --- from storage, or from the script --------------------------------------------------------

    def from_storage(self, beyond: int) -> int | None:
        if self._kept.shards.any:
            return self._shards_from_storage(beyond)
        step: int | None = None
        wrong = ""
        if self._kept.rank == 0 and checkpoint.get_checkpoint_manager() is not None:
            try:
                step = checkpoint.load_latest(self._kept.state, beyond=beyond)
            except CheckpointError as error:
                wrong = str(error)
            except Exception as error:  # of any storage; the others wait for an answer
                wrong = f"Checkpoints cannot be read: {error!r}."
        step, wrong = agreement.gather([step, wrong])[0]
        if wrong:
            raise CheckpointError(wrong)
        if step is not None and self._kept.size > 1:
            self._share([0])
        return step

    def _shards_from_storage(self, beyond: int) -> int | None:
        step: int | None = None
        wrong = ""
        try:
            loaded = checkpoint.load_together(self._kept.state, beyond=beyond)
        except CheckpointError as error:
            wrong = str(error)
        else:
            step, left = loaded if loaded is not None else (None, None)
            self._kept.buffers.find()
            if left is not None:
                rank_private.restore(rank_private.unpack(left), self._kept.buffers)
        if sentences := [one for one in agreement.gather(wrong) if one]:
            raise CheckpointError(sentences[0])
        return step

    def _share_loaded(self, loaded: Loaded) -> None:
        """Collective: use the state that the script loaded; send it to ranks without it."""
        if len(loaded.ranks) < self._kept.size:
            different = different_starts(loaded)
            if self._kept.shards.any:
                raise CheckpointError(
                    f"{different}. The state is sharded: load the same step on all ranks."
                )
            if self._kept.rank == 0:
                log.warning(
                    "%s. All ranks receive the state of rank %d.", different, loaded.ranks[0]
                )
            self._share(loaded.ranks)
        self._kept.buffers.find()
        log.info("Resuming from step %d, loaded by the script.", loaded.step)

    def _share(self, holders: Sequence[int]) -> None:
        """Collective: send the state of these ranks, which is the same, to all others."""
        kept, has_it = self._kept, self._kept.rank in holders
        world: Any = SimpleNamespace(rank=kept.rank, size=kept.size, received=0)
        mine = kept.tree.whole()
        received = transfer.share(
            world, mine if has_it else None, holders=holders, into=None if has_it else mine
        )
        if not has_it:
            kept.tree.put(received)


def newest_stored() -> int | None:
    """Return the newest checkpoint's step, or None. With snapshots in memory the search has a
    timeout: hung storage must not block a restore."""
    if checkpoint.get_checkpoint_manager() is None:
        return None
    asked: Future[int | None] = Future()

    def look() -> None:
        try:
            asked.set_result(checkpoint.newest_step())
        except Exception as error:  # of any storage
            asked.set_exception(error)

    threading.Thread(target=look, name="torchelastic-storage", daemon=True).start()
    try:
        return asked.result(STORAGE_TIMEOUT)
    except Exception as error:
        log.warning(
            "Checkpoint storage did not respond (%r); using the snapshot in memory, assumed to be "
            "newer than any checkpoint.",
            error,
        )
        return None


def _refuse_to_begin_anew(unusable: Sequence[Version], why: str) -> None:
    """Raise if snapshots exist: training must not silently begin again at step 0."""
    if unusable:
        raise SnapshotError(
            f"Snapshots up to step {unusable[0][1]} exist, but {why}, and there is no checkpoint. "
            "To start from scratch, end the job and start it again. To resume from your own "
            "checkpoint, load it and call restore(start=...)."
        )


def _tell_lacking(step: int, late: Sequence[int], lost: Sequence[int]) -> None:
    """Log which ranks have no random states of this step, but earlier ones, or none at all."""
    if late:
        log.warning(
            "Ranks %s have no random states of step %d: they were stopped before they had kept "
            "them, or their copy is older. They continue with their latest ones.",
            ", ".join(map(str, late)),
            step,
        )
    if lost:
        log.warning(
            "The per-rank state of ranks %s at step %d is lost. Their random number generators "
            "keep the state that the script gave them.",
            ", ".join(map(str, lost)),
            step,
        )
