"""Run + keep: saves the committed state to storage before this worker leaves with its node.

The agent sends the order on the channel, before it sends any signal. A thread then copies the last
snapshot and writes it as a checkpoint. Meanwhile the training thread may be anywhere: in a
collective that never ends because others have left, or unwinding from one that failed. It is
blocked at its next commit, so that no step is committed that is not in storage.

    agent   Leave(15, deadline)               to the worker that writes its node's shared state
    agent   Leave(15, deadline, saves=True)   the leader chose this node, of all that leave, to save
    worker  saves, if there is enough time, and sends itself the signal

We do not wait long for the leader's choice: an extra checkpoint does no harm, a missing one does.
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
from torchelastic.errors import EXIT_SIGNAL_BASE, SnapshotError
from torchelastic.snapshot.agent_client import SnapshotAgent
from torchelastic.snapshot.keeper import NOTHING, Keeper
from torchelastic.snapshot.layout import SHARED, Memory, SealedVersion, Version
from torchelastic.snapshot.state_tree import Tree
from torchelastic.tensors import tensor_tree
from torchelastic.worker import shared_signals
from torchelastic.worker.orders import Leave

log = logging.getLogger(__name__)

#: Seconds to wait for the leader's choice of who saves, for a commit in progress, and for the last
#: snapshot to be sealed.
CHOICE_TIMEOUT, COMMIT_TIMEOUT, SEAL_TIMEOUT = 2.0, 1.0, 5.0
#: Attempts to copy a snapshot: if it is overwritten meanwhile, the next one is copied.
COPY_TRIES = 3

#: Makes a checkpoint's content from the lasting and the passing half of a state, and its step.
Stored = Callable[[Mapping[str, Any], Mapping[str, Any], int], dict[str, Any]]


@dataclass(frozen=True)
class Copy:
    """A copy of a state to save: the content of its checkpoint."""

    tree: dict[str, Any]
    step: int

    def _stored(self) -> dict[str, Any]:
        return self.tree

    def save(self, stream: IO[bytes]) -> None:
        torch.save(self.tree, stream)

    def load(self, stream: IO[bytes]) -> None:
        raise TypeError("A copy of a state can be saved, not loaded.")


class Departure:
    """Saves the state when the worker that writes its node's shared state must leave."""

    def __init__(self, agent: SnapshotAgent, tree: Tree, stored: Stored, keeper: Keeper) -> None:
        self._agent, self._tree, self._stored, self._keeper = agent, tree, stored, keeper
        #: Held during a commit; never released once this worker leaves.
        self.commit = threading.Lock()
        self._prepared = False
        #: The signal does not end this process any more.
        self._shielded = False
        self._lock = threading.Lock()
        self._order: Leave | None = None
        self._decided = threading.Event()

    def prepare(self) -> None:
        """Listen for the order to leave, once it is known which worker writes shared state."""
        there_is_storage = checkpoint.get_checkpoint_manager() is not None
        if there_is_storage and self._keeper.writes_whole_state and not self._prepared:
            self._prepared = True
            self._agent.listen(self.told)
            self._shielded = bool(shared_signals.ignore_while(lambda: True))

    def told(self, order: Leave) -> None:
        """Handle the agent's order. The first begins the departure, the second decides who saves.
        Any thread."""
        with self._lock:
            first, self._order = self._order is None, order
        if order.saves is not None:
            self._decided.set()
        if first:
            # Not a daemon, as the thread that is told is: if the script fails meanwhile, the
            # interpreter waits for it.
            threading.Thread(target=self._leave, name="torchelastic-leave", daemon=False).start()

    def _leave(self) -> None:
        self.commit.acquire(timeout=COMMIT_TIMEOUT)
        self._decided.wait(CHOICE_TIMEOUT)
        assert self._order is not None
        order = self._order
        try:
            if order.saves is not False:
                self._save(order.deadline)
        except Exception:  # in any case, the worker must leave
            log.exception("Leaving: could not save the state to checkpoint storage.")
        if self._shielded:
            os._exit(EXIT_SIGNAL_BASE + order.signum)
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
        """Copy the freshest snapshot, if possible that of the last commit."""
        self._wait_for_seal()
        for _ in range(COPY_TRIES):
            version = self._freshest()
            if version == NOTHING:
                raise SnapshotError("this node has no snapshot.")
            memory = self._agent.open(SHARED, version, "")
            try:
                held = memory.find(version)
                if held is not None and (copy := self._copy_of(memory, held)) is not None:
                    return copy
            finally:
                memory.close()
        raise SnapshotError("the snapshot was overwritten during the read, or is damaged.")

    def _wait_for_seal(self) -> None:
        """Wait until the writer thread has sealed the last snapshot."""
        (_, step), deadline = self._keeper.committed, time.monotonic() + SEAL_TIMEOUT
        while time.monotonic() < deadline and self._freshest()[1] < step:
            time.sleep(0.01)

    def _freshest(self) -> Version:
        """Return the freshest version held, or `NOTHING`."""
        held = self._agent.inventory().holdings
        return max((one.version for one in held if one.piece == SHARED), default=NOTHING)

    def _copy_of(self, memory: Memory, held: SealedVersion) -> Copy | None:
        """Return a copy, or None if it is damaged or was overwritten meanwhile."""
        stored = self._tree.read(held.skeleton, held.data)
        tensors = stored.tensors(lambda spec: replace(spec, device="cpu").empty())
        if not held.is_whole() or not memory.still_holds(held):
            return None
        count = len(stored.lasting_specs)
        lasting = tensor_tree.restore(stored.lasting, tensors[:count])
        passing = tensor_tree.restore(stored.passing, tensors[count:])
        step = held.version[1]
        return Copy(self._stored(lasting, passing, step), step)
