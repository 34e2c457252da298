"""Run + keep: before this worker leaves with its node, the committed state goes to storage.

The agent says so on the channel, before it sends a signal to anybody. A thread then takes a copy of
the last snapshot and writes it as a checkpoint, while the one that trains may be anywhere: in a
collective that never ends because others have gone, or unwinding from one that has failed. It is
held up at its next commit, so that no step is committed that is not in storage.

    agent   Leave(15, deadline)               to the worker that writes what is shared on its node
    agent   Leave(15, deadline, saves=True)   one node of all that leave writes: the leader chose it
    worker  writes, if the time is enough, and sends itself the signal

Which one that is is not waited for long: a checkpoint too many does no harm, one too few does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

import torch

from torchelastic import checkpoint
from torchelastic.errors import SnapshotError
from torchelastic.snapshot.agent_client import Holder
from torchelastic.snapshot.keeper import NOTHING, Keeper
from torchelastic.snapshot.kept_tree import Tree
from torchelastic.snapshot.layout import SHARED, Held, Memory, Version
from torchelastic.tensors import tensor_tree
from torchelastic.worker.orders import Leave

log = logging.getLogger(__name__)

#: How long it is waited for the leader to choose who writes, for a step that is being committed,
#: and for the snapshot of the last one to be sealed.
VERDICT, COMMIT, SEAL = 2.0, 1.0, 5.0
#: A snapshot may be overwritten while it is copied; then the next one is.
TRIES = 3

#: Makes what a checkpoint holds of the lasting and the passing half of a state, and of its step.
Stored = Callable[[Mapping[str, Any], Mapping[str, Any], int], dict[str, Any]]


@dataclass(frozen=True)
class Copy:
    """A state to be saved: what a checkpoint of it holds."""

    tree: dict[str, Any]
    step: int

    def _stored(self) -> dict[str, Any]:
        return self.tree

    def save(self, stream: IO[bytes]) -> None:
        torch.save(self.tree, stream)

    def load(self, stream: IO[bytes]) -> None:
        raise TypeError("A copy of a state can be saved, not loaded.")


class Departure:
    """How the worker that writes shared state on its node leaves."""

    def __init__(self, holder: Holder, tree: Tree, stored: Stored, keeper: Keeper) -> None:
        self._holder, self._tree, self._stored, self._keeper = holder, tree, stored, keeper
        #: Held during a commit; and for good once this worker leaves.
        self.commit = threading.Lock()
        self._prepared = False
        self._lock = threading.Lock()
        self._order: Leave | None = None
        self._decided = threading.Event()

    def prepare(self) -> None:
        """Once it is known who writes what is shared: listen for the word to leave."""
        there_is_storage = checkpoint.get_checkpoint_manager() is not None
        if there_is_storage and self._keeper.writes_whole_state and not self._prepared:
            self._prepared = True
            self._holder.listen(self.told)

    def told(self, order: Leave) -> None:
        """By the agent; the first time it begins, the second time it is decided. Any thread."""
        with self._lock:
            first, self._order = self._order is None, order
        if order.saves is not None:
            self._decided.set()
        if first:
            # No daemon: should the script fail meanwhile, the interpreter waits for it.
            threading.Thread(target=self._leave, name="torchelastic-leave").start()

    def _leave(self) -> None:
        self.commit.acquire(timeout=COMMIT)
        self._decided.wait(VERDICT)
        assert self._order is not None
        order = self._order
        try:
            if order.saves is not False:
                self._save(order.deadline)
        except Exception:  # whatever it is, the worker has to go
            log.exception("Leaving: could not save the state to checkpoint storage.")
        os.kill(os.getpid(), order.signum)

    def _save(self, deadline: float | None) -> None:
        try:
            copy = self._copy()
        except SnapshotError as error:
            log.warning("Leaving without a checkpoint: there is no snapshot to save: %s", error)
            return
        grace = None if deadline is None else deadline - time.monotonic()
        checkpoint.save_before_leaving(copy, copy.step, self._keeper.generation, grace)

    # --- the last snapshot -----------------------------------------------------------------------

    def _copy(self) -> Copy:
        """Of the freshest state that is kept; if possible of the last one committed."""
        self._wait_for_seal()
        for _ in range(TRIES):
            version = self._freshest()
            if version == NOTHING:
                raise SnapshotError("this node has no snapshot.")
            memory = self._holder.open(SHARED, version, "")
            try:
                held = memory.find(version)
                if held is not None and (copy := self._copy_of(memory, held)) is not None:
                    return copy
            finally:
                memory.close()
        raise SnapshotError("the snapshot was overwritten during the read, or is damaged.")

    def _wait_for_seal(self) -> None:
        """The thread that writes snapshots may have the last one in hand."""
        (_, step), deadline = self._keeper.committed, time.monotonic() + SEAL
        while time.monotonic() < deadline and self._freshest()[1] < step:
            time.sleep(0.01)

    def _freshest(self) -> Version:
        """`NOTHING` if there is none."""
        held = self._holder.inventory().holdings
        return max((one.version for one in held if one.piece == SHARED), default=NOTHING)

    def _copy_of(self, memory: Memory, held: Held) -> Copy | None:
        """None if it is not whole, or was not any more when it had been copied."""
        stored = self._tree.read(held.skeleton, held.data)
        tensors = stored.tensors(lambda spec: replace(spec, device="cpu").empty())
        if not held.is_whole() or not memory.still_holds(held):
            return None
        count = len(stored.lasting_specs)
        lasting = tensor_tree.restore(stored.lasting, tensors[:count])
        passing = tensor_tree.restore(stored.passing, tensors[count:])
        step = held.version[1]
        return Copy(self._stored(lasting, passing, step), step)
