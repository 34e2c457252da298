"""Run + keep: holds a script's state in its agent's memory, and restores it after a restart.

    restore   all ranks exchange what their nodes hold, rank 0 the newest checkpoint's step;
              `restore.choices` orders the candidates by step
              each rank looks for its pieces of a candidate (`restore.Searcher`) and reports the
              outcome; it takes its parts of sharded tensors from all ranks' pieces
              all found theirs: all load. Of unsharded state one copy is enough: it is sent
              it exists, but could not be fetched: an error, and the next generation tries again
              no rank can use it: all try the next candidate
              rank 0 reads a checkpoint and sends it to all
              the script has loaded a later step itself: keep that (`own_checkpoints`)
              snapshots exist, none usable, and no checkpoint: an error, not step 0
    commit    `writer`

A worker without an agent has no snapshots: it counts steps, and loads checkpoints.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torchelastic import checkpoint, env, faults
from torchelastic.checkpoint.background.saving import store_for_shards
from torchelastic.checkpoint.manager import Saved
from torchelastic.errors import CheckpointError, SnapshotError
from torchelastic.snapshot.agent_client import SnapshotAgent
from torchelastic.snapshot.layout import SHARED, Version
from torchelastic.snapshot.messages import InventoryItem, NodeInventory, Settled
from torchelastic.snapshot.own_checkpoints import Loaded, checked, different_starts, unsaid_start
from torchelastic.snapshot.plain_parameters import PlainParameters, different_forms, is_compared
from torchelastic.snapshot.restore import (
    Agreement,
    FoundPieces,
    Node,
    Nodes,
    Own,
    Searcher,
    SearchReport,
    StoredCheckpoint,
    absence,
    agreed,
    bases,
    checkers,
    choices,
    finders,
    holding,
    lacking,
    own_version,
    uselessness,
    without_shards,
)
from torchelastic.snapshot.sharded_leave import ShardedLeave
from torchelastic.snapshot.shards import Shards
from torchelastic.snapshot.state_tree import Tree
from torchelastic.snapshot.writer import ShardStatus, Writer, WriterPlace
from torchelastic.tensors import agreement, rank_private, rng, transfer
from torchelastic.tensors.buffers import Buffers
from torchelastic.worker import orders
from torchelastic.worker.backward_waits import BackwardWaits
from torchelastic.worker_counters import stalls

log = logging.getLogger(__name__)

#: Seconds to look for the newest checkpoint when there are snapshots in memory.
STORAGE_TIMEOUT = 10.0
#: A leaving rank of sharded state subtracts this from its vote. All ranks wait this many seconds
#: for its shards to be kept, and copied to other nodes.
LEAVING_VOTE, LEAVE_COPY_TIMEOUT = 10, 20.0
#: The version at which a new training begins.
NOTHING: Version = (-1, 0)


class Keeper:
    """Restores and commits one state, in one worker of one generation."""

    def __init__(
        self,
        state: Saved,
        tree: Tree,
        buffers: Buffers,
        optimizers: Sequence[Optimizer],
        agent: SnapshotAgent | None,
        *,
        shards: Shards,
        before_seal: Callable[[float], bool] | None = None,
        waits: BackwardWaits | None = None,
        steps_taken: Callable[[], int] = lambda: 0,
    ) -> None:
        """`before_seal` is called in a thread before a snapshot counts, with the most seconds to
        wait; it returns False on timeout. `waits` counts the time spent waiting for other ranks,
        `steps_taken` the state's steps before the first `restore`."""
        faults.load()
        self._steps_taken = steps_taken
        self._before_seal, self._waits = before_seal, waits
        self._state, self._tree, self._buffers, self._agent = state, tree, buffers, agent
        self._private = rank_private.PrivateStateReader(buffers).read
        self._shards = shards
        self._plain = PlainParameters(tree.modules)
        #: The commits of this generation.
        self._commits = 0
        #: The group that votes on whether to snapshot shards; None: the default group.
        self._voters: ProcessGroup | None = None
        self.rank, self.size = agreement.place()
        self.generation = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._first = False
        #: For sharded state: how this rank leaves, and whether any rank does.
        self._leave = ShardedLeave(agent, self.rank)
        self._someone_leaves = self._is_one_node = False
        self._node = ""
        self._writer: Writer | None = None
        self._committed: Version = NOTHING
        #: Why the newest snapshot could not be restored.
        self._useless = ""
        #: Whether the restored snapshot must still be checked; and its place, if this rank checks.
        self._doubted = False
        self._unchecked: FoundPieces | None = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_write)
        if agent is None:
            log.info("This process has no agent to hold snapshots: commit() only counts steps.")

    def _before_write(self, *_: object) -> None:
        if self._waits is not None:
            self._waits.before_write()
        if self._writer is not None:
            self._writer.before_write()

    @property
    def committed(self) -> Version:
        """The last version that was committed or restored."""
        return self._committed

    @property
    def writes_whole_state(self) -> bool:
        """Whether this worker writes its node's shared state, and there is no other state."""
        return self._first and not self._shards.any

    # --- commit ----------------------------------------------------------------------------------

    def check(self, step: int) -> None:
        """Raise `ValueError` unless this step may be committed. Collective in the first commits."""
        if (self.generation, step) <= self._committed:
            raise ValueError(
                f"Cannot commit step {step} after step {self._committed[1]}: commit each step "
                "once, in order."
            )
        self._commits += 1
        if self.size > 1 and is_compared(self._commits):
            with stalls.Counted("snapshot"):
                self._shards.reshard()
                self._plain.check()

    def commit(self, step: int) -> None:
        """Publish the state after `step` steps, which `check` has allowed."""
        self._committed = version = (self.generation, step)
        if self._waits is not None:
            self._waits.committed()
        if faults.planned:
            faults.position(rank=self.rank, step=step, generation=self.generation)
        if self._agent is not None and self._writer is not None:
            with stalls.Counted("snapshot"):
                self._keep(self._writer, version)
            self._agent.progress(version, self.rank)
        if not self._someone_leaves:
            self._save_if_due(step)

    def _save_if_due(self, step: int) -> None:
        """Save a checkpoint if due: rank 0 alone, or all ranks together if sharded."""
        if not self._shards.any:
            if self.rank == 0 and checkpoint.is_due(step):
                checkpoint.save(self._state, step, self.generation)
        elif checkpoint.is_due(step, together=True):
            self._save_together(step)

    def _save_together(self, step: int) -> None:
        self._shards.reshard()
        own = rank_private.pack(self._private())
        checkpoint.save_together(self._state, step, self.generation, own)

    def _save_before_leaving(self, step: int) -> None:
        """Collective: save sharded state now, if there is enough time on all ranks."""
        if agreement.all_of_them(checkpoint.can_be_saved(step, self._leave.grace)):
            checkpoint.wait()
            self._save_together(step)
            checkpoint.wait()
            agreement.all_of_them(True)  # rank 0 has made one checkpoint of all parts, or given up

    def _keep(self, writer: Writer, version: Version) -> None:
        self._resolve_doubt(writer)
        if not self._shards.any or self._all_may_begin(writer):
            self._publish(writer, version)
        if self._someone_leaves:
            self._leave.bring_to_safety(
                self._node,
                version,
                lambda: not self._is_one_node and self._keep_for_others(writer, version),
                lambda: self._save_before_leaving(version[1]),
            )

    def _keep_for_others(self, writer: Writer, version: Version) -> bool:
        """Collective: keep this very step, and wait until it has its copies."""
        grace = self._leave.grace
        seconds = LEAVE_COPY_TIMEOUT if grace is None else min(LEAVE_COPY_TIMEOUT, grace / 3)
        deadline = time.monotonic() + seconds
        if not self._all_settled(writer, deadline):
            return False
        self._publish(writer, version)
        settled = self._all_settled(writer, deadline)
        return agreement.all_of_them(settled and writer.holds_shards(version))

    def _all_settled(self, writer: Writer, deadline: float) -> bool:
        """Collective: wait until no rank's shards are pending; return whether they may be written
        again."""
        while True:
            status: int = writer.shard_status()
            if status == ShardStatus.PENDING and time.monotonic() > deadline:
                status = min(ShardStatus) - 1
            least = agreement.least(status, self._voters)
            if least != ShardStatus.PENDING:
                return least > ShardStatus.NEVER and writer.may_begin(ShardStatus(least))
            time.sleep(0.01)

    def _publish(self, writer: Writer, version: Version) -> None:
        self._shards.reshard()
        flat = shards = None
        if writer.keeps_shared or self._shards.any:
            lasting = self._tree.flatten_lasting()
            if writer.keeps_shared:
                flat = self._tree.flatten(lasting)
            if self._shards.any:
                shards = self._shards.flatten(self._tree.form, lasting.sharded)
        writer.publish(version, flat, rank_private.pack(self._private()), shards)

    def _all_may_begin(self, writer: Writer) -> bool:
        """Collective: decide whether to begin a version of the shards, the same on all ranks."""
        status = writer.shard_status()
        least = agreement.least(status - LEAVING_VOTE * self._leave.is_ordered, self._voters)
        self._someone_leaves = least < min(ShardStatus)
        return not self._someone_leaves and writer.may_begin(ShardStatus(least))

    def _resolve_doubt(self, writer: Writer) -> None:
        """Collective, once: raise if the restored snapshot is damaged on any node, so that no rank
        commits a step made from it."""
        if not self._doubted:
            return
        self._doubted = False
        found, self._unchecked = self._unchecked, None
        whole = found is None or writer.is_whole(found.held)
        if found is not None:
            found.close()
        said = agreement.gather(whole)
        if damaged := [str(rank) for rank, well in enumerate(said) if not well]:
            raise SnapshotError(
                "The restored snapshot is damaged on the node of rank "
                f"{', '.join(damaged)}. It was dropped there; the next generation restores "
                "another one."
            )

    # --- restore ---------------------------------------------------------------------------------

    def restore(self, start: int | None = None) -> int | None:
        """Bring all ranks to the freshest state; return its step, or None if there is none."""
        start = checked(start)
        checkpoint.before_write()
        with stalls.Counted("restore"):
            base = self._restore(start)
        self._begin(base or NOTHING)
        if self._agent is not None and self.rank == 0 and (base is None or base[0] < 0):
            # A script that passes `start` has its own checkpoints.
            stored = start is not None or checkpoint.get_checkpoint_manager() is not None
            self._agent.begins(orders.Begins(self.generation, base[1] if base else 0, stored))
        return base[1] if base is not None else None

    def _restore(self, start: int | None) -> Version | None:
        """Collective: return the version that all have now, or None if there is none."""
        self._end_writing()
        self._useless = ""
        if self._shards.any:
            self._prepare_shards()
        here, nodes, stored, loaded = self._tell_each_other(start)
        self._first = nodes[here].first == self.rank
        self._node, self._is_one_node = here, len(nodes) == 1
        searcher = Searcher(self._agent, self._tree, self._shards, self.rank, here, nodes)
        versions = bases(nodes, self.size, sharded=self._shards.any)
        for choice in choices(versions, stored, loaded.step):
            match choice:
                case Own(step):
                    self._from_script(loaded)
                    return (NOTHING[0], step)
                case StoredCheckpoint(beyond):
                    if (found := self._from_checkpoint(beyond)) is not None:
                        self._warn_if_replaced(loaded, found)
                        return (NOTHING[0], found)
                case _:
                    if self._from_memory(choice, nodes, searcher):
                        return choice
        lost = without_shards(nodes)
        _refuse_to_begin_anew(versions or lost, self._useless or "some of their shards are lost")
        if loaded.unsaid:
            raise unsaid_start(loaded.unsaid)
        return None

    def _end_writing(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._unchecked is not None:
            self._unchecked.close()
        self._doubted, self._unchecked = False, None

    def _begin(self, base: Version) -> None:
        """Begin this generation at the version that all ranks have."""
        self._committed = max(self._committed, (self.generation, base[1]))
        if self.rank == 0:
            checkpoint.entered(self.generation, base[1])
        if self._agent is None:
            return
        self._agent.tell(Settled(base, self.generation))
        self._agent.progress((self.generation, base[1]), self.rank)
        place = WriterPlace(self.rank, self.size, self.generation, self._first, base)
        self._writer = Writer(self._agent, place, self._before_seal)
        if self._unchecked is not None:
            self._writer.check(self._unchecked.held)
        if self._shards.any and (not self._is_one_node or store_for_shards() is not None):
            self._leave.listen()

    def _prepare_shards(self) -> None:
        store_for_shards()
        self._shards.reshard()
        self._voters = agreement.quick_group()

    def _tell_each_other(self, start: int | None) -> tuple[str, Nodes, int | None, Loaded]:
        """Collective: return this node's name, what all nodes hold, the newest checkpoint's step
        (if rank 0 knows it), and what the script loaded on each rank."""
        holdings = self._inventory()
        # With --virtual-local-rank all are 0, and report the same.
        speaks = env.get("LOCAL_RANK", "0") == "0"
        stored = newest_stored() if self.rank == 0 else None
        taken = self._steps_taken() if self._committed == NOTHING else 0
        plain = self._plain.find()
        known = [stored, start, taken, [self._tree.form, *plain]]
        said = agreement.gather([*told(holdings, all_of_it=speaks), known])
        _, starts, takens, forms = zip(*(one[3] for one in said), strict=True)
        if any(form != forms[0] for form in forms):
            said = agreement.gather([*self._tree.form_lines, plain])
            raise different_forms(said)
        return holdings.node, nodes_of(said), said[0][3][0], Loaded(starts, takens)

    def _inventory(self) -> NodeInventory:
        # No answer is an error: without this agent's snapshots all ranks would go back.
        if self._agent is not None:
            return self._agent.inventory()
        return NodeInventory(0, (), node=f"rank {self.rank}")

    # --- from memory -----------------------------------------------------------------------------

    def _from_memory(self, version: Version, nodes: Nodes, searcher: Searcher) -> bool:
        """Collective: load a version; return False if no rank can use it."""
        found, mine = searcher.search(version)
        said = [SearchReport.from_json(one) for one in agreement.gather(mine.to_json())]
        verdict = agreed(said, holding(nodes, SHARED, version), sharded=self._shards.any)
        if verdict is Agreement.LOAD:
            self._load(found, said)
            self._load_own(version, nodes, searcher)
            log.info("Resuming from step %d, found in memory.", version[1])
            return True
        if found is not None:
            found.close()
        if verdict is Agreement.TRY_AGAIN:
            raise SnapshotError(absence(version, said))
        self._useless = self._useless or uselessness(said)
        return False

    def _load(self, found: FoundPieces | None, said: Sequence[SearchReport]) -> None:
        """Collective: load from memory on ranks that found it, and send it to all others."""
        if found is not None:
            if found.shards is not None:
                found.shards.copy()
                found.shards = None
            self._tree.load(found.shared, found.targets)
        finding, checking = finders(said), checkers(said)
        if len(finding) < self.size:
            self._share(finding)
        self._buffers.find()
        self._doubted = bool(checking)
        if found is not None and self.rank in checking:
            self._unchecked = found
        elif found is not None:
            found.close()

    def _load_own(self, version: Version, nodes: Nodes, searcher: Searcher) -> None:
        at = own_version(nodes, self.rank, version, self._node)
        own = searcher.own(at) if at is not None else None
        if own is not None and at == version:
            rank_private.restore(own, self._buffers)
        elif own is not None:
            # The buffers of that step are older than those of another rank, which are loaded.
            rng.restore(own.random)
        if self.rank == 0:
            lost = lacking(nodes, version, self.size)
            late = [rank for rank in lost if own_version(nodes, rank, version, self._node)]
            _tell_lacking(version[1], late, [rank for rank in lost if rank not in late])

    # --- from the script -------------------------------------------------------------------------

    def _from_script(self, loaded: Loaded) -> None:
        """Collective: use the state that the script loaded; send it to ranks without it."""
        if len(loaded.ranks) < self.size:
            different = different_starts(loaded)
            if self._shards.any:
                raise CheckpointError(
                    f"{different}. The state is sharded: load the same step on all ranks."
                )
            if self.rank == 0:
                log.warning(
                    "%s. All ranks receive the state of rank %d.", different, loaded.ranks[0]
                )
            self._share(loaded.ranks)
        self._buffers.find()
        log.info("Resuming from step %d, loaded by the script.", loaded.step)

    def _warn_if_replaced(self, loaded: Loaded, step: int) -> None:
        if loaded.unsaid and self.rank == 0:
            log.warning(
                "The checkpoint of step %d replaced the state that the script loaded before "
                "restore(). To keep whichever is newer, pass the number of steps that state has "
                "done: restore(start=...).",
                step,
            )

    # --- from storage ----------------------------------------------------------------------------

    def _from_checkpoint(self, beyond: int) -> int | None:
        """Collective: load the newest checkpoint if it is beyond this step; return its step.

        Rank 0 reads it and sends it: storage need not be shared. But each rank reads its own part
        of sharded state.
        """
        if self._shards.any:
            return self._shards_from_checkpoint(beyond)
        step: int | None = None
        wrong = ""
        if self.rank == 0 and checkpoint.get_checkpoint_manager() is not None:
            try:
                step = checkpoint.load_latest(self._state, beyond=beyond)
            except CheckpointError as error:
                wrong = str(error)
            except Exception as error:  # of any storage; the others wait for an answer
                wrong = f"Checkpoints cannot be read: {error!r}."
        step, wrong = agreement.gather([step, wrong])[0]
        if wrong:
            raise CheckpointError(wrong)
        if step is not None and self.size > 1:
            self._share([0])
        return step

    def _shards_from_checkpoint(self, beyond: int) -> int | None:
        step: int | None = None
        wrong = ""
        try:
            loaded = checkpoint.load_together(self._state, beyond=beyond)
        except CheckpointError as error:
            wrong = str(error)
        else:
            step, left = loaded if loaded is not None else (None, None)
            self._buffers.find()
            if left is not None:
                rank_private.restore(rank_private.unpack(left), self._buffers)
        if sentences := [one for one in agreement.gather(wrong) if one]:
            raise CheckpointError(sentences[0])
        return step

    def _share(self, holders: Sequence[int]) -> None:
        """Collective: send the state of these ranks, which is the same, to all others."""
        world: Any = SimpleNamespace(rank=self.rank, size=self.size, received=0)
        mine, has_it = self._tree.whole(), self.rank in holders
        received = transfer.share(
            world, mine if has_it else None, holders=holders, into=None if has_it else mine
        )
        if not has_it:
            self._tree.put(received)


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


def told(inventory: NodeInventory, *, all_of_it: bool = True) -> list[Any]:
    """Return a rank's report of what its node holds: node, agent address, holdings."""
    holdings = [
        [held.piece, *held.version, held.bytes, held.rank, held.size]
        for held in inventory.holdings
        if all_of_it
    ]
    return [inventory.node, inventory.peer, holdings]


def nodes_of(said: Sequence[Any]) -> dict[str, Node]:
    """Return the nodes of a world from each rank's report."""
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
