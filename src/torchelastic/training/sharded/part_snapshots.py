"""Snapshots of a worker's part of a sharded state, for a training with one replica.

With several replicas a lost part comes from a worker with the same coordinates. With one, each
worker copies its part into its agent's memory behind the training (`snapshot.writer`): all that it
would send to such a worker, and its private state. Part p is the piece `shard:p`.

A version is useless unless all workers have it, so all begin the same ones. They vote in the
joint all-reduce of each step (`sharding`); the step that follows a vote is kept, or not, by all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchelastic.snapshot.agent_client import SnapshotRequests
from torchelastic.snapshot.layout import Version
from torchelastic.snapshot.messages import Outdated
from torchelastic.snapshot.state_tree import Lasting, Stored, Tree
from torchelastic.snapshot.writer import ShardStatus, Writer, WriterPlace
from torchelastic.tensors.dtensors import local_or_whole
from torchelastic.tensors.tensor_bytes import SMALL, Flat
from torchelastic.training.sharded.shard_tree import to_shards
from torchelastic.worker_counters import stalls

if TYPE_CHECKING:
    from torchelastic.training.session import Session


class PartTree(Tree):
    """This worker's part of a state: DTensors are replaced by their local parts."""

    def __init__(self, *arguments: Any, load: Callable[[dict[str, Any]], None]) -> None:
        """`load` loads a part in the form in which workers send it (`shard_tree`)."""
        super().__init__(*arguments)
        self._load = load
        self._watched: tuple[object, Sequence[torch.Tensor]] = (None, ())

    def flatten(self, lasting: Lasting) -> Flat:
        flat = super().flatten(lasting)
        if self._watched[0] is not flat.lasting:
            # A write through a DTensor moves its own count of writes, not that of the local tensor.
            tensors = [one for one in self._values() if isinstance(one, torch.Tensor)]
            large = [one for one in tensors if local_or_whole(one).nbytes >= SMALL]
            self._watched = flat.lasting, large
        return replace(flat, watched=self._watched[1])

    def put(self, whole: Sequence[Mapping[str, Any]]) -> None:
        lasting, passing = whole
        modules = zip(lasting["parameters"], passing["buffers"], strict=True)
        optimizers = zip(lasting["state"], passing["groups"], strict=True)
        self._load(
            {
                "model": [{"parameters": some, "buffers": more} for some, more in modules],
                "optimizer": [{"state": state, "groups": groups} for state, groups in optimizers],
                **passing["rest"],
            }
        )

    def _lasting(self) -> dict[str, Any]:
        tree: dict[str, Any] = to_shards(super()._lasting())
        return tree


class PartSnapshots:
    """Writes this worker's part of a state into its agent's memory, and loads it again."""

    def __init__(
        self,
        tree: PartTree,
        before_read: Callable[[], None],
        before_load: Callable[[], None],
        before_seal: Callable[[float], bool] | None,
    ) -> None:
        """`before_read` and `before_load` are called before the state is read and overwritten.
        `before_seal` is called in a thread before a snapshot counts, with the most seconds to wait;
        it returns False on timeout."""
        self.tree, self._before_seal = tree, before_seal
        self._before_read, self._before_load = before_read, before_load
        self._writer: Writer | None = None
        #: The writer of an earlier world, which may not have sealed its last snapshot yet.
        self._ended: Writer | None = None
        #: Returns whether the world that follows has several replicas.
        self._is_growing: Callable[[], bool] = lambda: False
        #: The agent that may free its memory after the next step.
        self._freed_by: SnapshotRequests | None = None
        #: Whether all workers keep the step that is under way.
        self._is_wanted = False

    def begin(self, world: Session, replica: int) -> None:
        """Write snapshots in this world, if it is one replica."""
        if world.agent is None:
            return
        if world.size > replica:
            self._freed_by = world.agent
            return
        self.wait_until_sealed()
        self._is_growing = lambda: world.next_size() > replica
        place = WriterPlace(world.rank, world.size, world.generation, False, world.freshest)
        # No wait for memory: another replica may be about to join.
        self._writer = Writer(world.agent, place, self._before_seal, memory_timeout=0.0)

    def end(self) -> None:
        """Stop reading the state. The last snapshot is sealed while the next world is entered."""
        writer, self._writer, self._freed_by = self._writer, None, None
        if writer is not None:
            writer.close(wait=False)
            self._ended = writer

    def wait_until_sealed(self) -> None:
        """Wait until the last snapshot of an earlier world is sealed."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.finish()

    def vote(self) -> int | None:
        """Return this worker's vote on the step under way; None if the world has no snapshots."""
        if self._writer is None:
            return None
        # A snapshot would only delay the replica that is about to take every part from here.
        return int(ShardStatus.PENDING if self._is_growing() else self._writer.shard_status())

    def decide(self, least: int) -> None:
        """Take in the lowest vote of all workers."""
        assert self._writer is not None
        self._is_wanted = self._writer.may_begin(ShardStatus(least))

    def before_write(self) -> None:
        """Wait until the part is copied: it is about to change."""
        if self._writer is not None:
            self._writer.before_write()

    def committed(self, version: Version) -> None:
        """Begin a snapshot of this version, if all workers do. With several replicas, all of them
        have taken part in this step: what is in memory from earlier is not needed."""
        if self._writer is not None and self._is_wanted:
            with stalls.Counted("snapshot"):
                self._before_read()
                flat = self.tree.flatten(self.tree.flatten_lasting())
                self._writer.publish(version, None, None, flat)
        elif self._freed_by is not None:
            self._freed_by.tell(Outdated(version))
            self._freed_by = self._ended = None

    def load(self, stored: Stored) -> None:
        """Load a part that was found in memory."""
        self._before_load()
        self.tree.load(stored, {})
