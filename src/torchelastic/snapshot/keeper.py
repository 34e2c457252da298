"""Run + keep: holds a script's state in its agent's memory: when it is committed, and how it ends.

    restore   `restore.Restoration`: brings all ranks to the freshest state
    commit    `writer`: copies the state beside the training; of sharded state, all ranks vote
    leave     `leave`: before this node goes, what only it has is brought to safety

A worker without an agent has no snapshots: it counts steps, and loads checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torchelastic import checkpoint, env, faults
from torchelastic.checkpoint.manager import Saved
from torchelastic.checkpoint.saving import store_for_shards
from torchelastic.snapshot.agent_client import AgentClient
from torchelastic.snapshot.layout import Version
from torchelastic.snapshot.leave import LeaveAlone, LeaveTogether, MakeContent
from torchelastic.snapshot.messages import Settled
from torchelastic.snapshot.own_checkpoints import checked
from torchelastic.snapshot.plain_parameters import PlainParameters, is_compared
from torchelastic.snapshot.restore import Kept, Restoration
from torchelastic.snapshot.search import NOTHING
from torchelastic.snapshot.shards import Shards
from torchelastic.snapshot.state_tree import Tree
from torchelastic.snapshot.writer import ShardStatus, Writer, WriterPlace
from torchelastic.tensors import agreement, rank_private
from torchelastic.tensors.buffers import Buffers
from torchelastic.worker import orders
from torchelastic.worker.backward_waits import BackwardWaits
from torchelastic.worker_counters import stalls

log = logging.getLogger(__name__)

#: A leaving rank of sharded state subtracts this from its vote. All ranks wait this many seconds
#: for its shards to be kept, and copied to other nodes.
LEAVING_VOTE, LEAVE_COPY_TIMEOUT = 10, 20.0


class Keeper:
    """Restores and commits one state, in one worker of one generation."""

    def __init__(
        self,
        state: Saved,
        tree: Tree,
        buffers: Buffers,
        optimizers: Sequence[Optimizer],
        agent: AgentClient | None,
        *,
        shards: Shards,
        stored: MakeContent,
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
        self._state, self._tree, self._shards, self._agent = state, tree, shards, agent
        self._private = rank_private.PrivateStateReader(buffers).read
        self._plain = PlainParameters(tree.modules)
        #: The commits of this generation.
        self._commits = 0
        #: The group that votes on whether to snapshot shards; None: the default group.
        self._voters: ProcessGroup | None = None
        self.rank, self.size = agreement.place()
        self._kept = Kept(state, tree, buffers, shards, agent, self.rank, self.size)
        self.generation = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._first = False
        #: How this rank leaves with state that is not sharded.
        self._leave_alone: LeaveAlone | None = None
        if agent is not None and not shards.any:
            self._leave_alone = LeaveAlone(
                agent, tree, stored, self.generation, lambda: self._committed
            )
        #: How this rank leaves with sharded state, and whether any rank does.
        self._leave = LeaveTogether(agent, self.rank)
        self._someone_leaves = self._is_one_node = False
        self._node = ""
        self._writer: Writer | None = None
        self._committed: Version = NOTHING
        #: The last restore, until the first commit after it.
        self._restored: Restoration | None = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_write)
        if agent is None:
            log.info("This process has no agent to hold snapshots: commit() only counts steps.")

    def _before_write(self, *_: object) -> None:
        if self._waits is not None:
            self._waits.before_write()
        if self._writer is not None:
            self._writer.before_write()

    def committing(self) -> AbstractContextManager[object]:
        """Return a context for a commit; it is never entered once this worker leaves alone."""
        return nullcontext() if self._leave_alone is None else self._leave_alone.commit

    # --- commit ----------------------------------------------------------------------------------

    @property
    def is_comparing(self) -> bool:
        """Whether the next commit compares plain parameters."""
        return self.size > 1 and is_compared(self._commits + 1)

    def check(self, step: int) -> None:
        """Raise `ValueError` unless this step may be committed. Collective in the first commits."""
        if (self.generation, step) <= self._committed:
            raise ValueError(
                f"Cannot commit step {step} after step {self._committed[1]}: commit each step "
                "once, in order."
            )
        is_comparing = self.is_comparing
        self._commits += 1
        if is_comparing:
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
        self._shards.reshard()
        own, grace = rank_private.pack(self._private()), self._leave.grace
        checkpoint.save_before_leaving(self._state, step, self.generation, grace, own=own)

    def save_at_end(self, step: int) -> None:
        """Collective: store the state before the job ends."""
        own = None
        if self._shards.any:
            self._shards.reshard()
            own = rank_private.pack(self._private())
        if self._shards.any or self.rank == 0:
            checkpoint.save_before_leaving(self._state, step, self.generation, own=own)
        agreement.all_of_them(True)  # an error of a rank ends the others

    def _keep(self, writer: Writer, version: Version) -> None:
        if self._restored is not None:
            self._restored.check(writer)
            self._restored = None
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
        if self._shards.any:
            store_for_shards()
            self._shards.reshard()
            self._voters = agreement.quick_group()
        taken = self._steps_taken() if self._committed == NOTHING else 0
        self._restored = restored = Restoration(self._kept)
        base = restored.run(start, taken, self._plain.find())
        self._first = restored.nodes[restored.node].first == self.rank
        self._node, self._is_one_node = restored.node, len(restored.nodes) == 1
        return base

    def _end_writing(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._restored is not None:
            self._restored.close()

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
        if self._restored is not None and self._restored.unchecked is not None:
            self._writer.check(self._restored.unchecked.held)
        if self._leave_alone is not None:
            if self._first:
                self._leave_alone.listen()
        elif not self._is_one_node or store_for_shards() is not None:
            self._leave.listen()
