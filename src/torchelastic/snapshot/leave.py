"""Run + keep: before this worker's node goes, the newest committed state is brought to safety.

The agent sends the order on the channel, before it sends any signal. What is not in the memory of a
node that stays is saved to storage, if there is enough time (`checkpoint.save_before_leaving`, as
in `train`). Who can do that depends on what each rank has.

Replicated state (`LeaveAlone`): the worker that writes its node's shared state saves it. A thread
copies the last snapshot: the training thread may be anywhere, in a collective that never ends
because others have left, or unwinding from one that failed. It is blocked at its next commit, so
that no step is committed that is not in storage.

    agent    Leave(15, deadline)               to that worker
    agent    Leave(15, deadline, saves=True)   the leader chose this node to save
    worker   saves, if there is enough time, and sends itself the signal

We do not wait long for the leader's choice: an extra checkpoint does no harm, a missing one does.

Sharded state (`LeaveTogether`): every rank has shards that others need, so all ranks take part, at
their next commit. Until then, the other nodes must not learn of the leave: they would stop at once.

    agent    Leave(15, deadline)                to every worker of the node that leaves
    ranks    vote in the next commit; all learn that some leave, and keep that very step
             wait for copies on other nodes; other nodes may be told to leave, too
             nodes that stay fetch the pieces that only leaving nodes hold
             if some are still on leaving nodes only: all save a checkpoint
    worker   Saved                              also after half of the time without a commit
    agent    announces the leave: the other nodes go on without this one
    agent    Leave(15, deadline, saves=False)   the worker sends itself the signal
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import torch

from torchelastic import checkpoint
from torchelastic.checkpoint.saving import store_for_shards
from torchelastic.errors import EXIT_SIGNAL_BASE, SnapshotError
from torchelastic.snapshot.agent_client import AgentClient
from torchelastic.snapshot.layout import (
    SHARED,
    Memory,
    SealedVersion,
    Version,
    is_shard,
    shard,
)
from torchelastic.snapshot.search import NOTHING
from torchelastic.snapshot.state_tree import Tree
from torchelastic.tensors import agreement, tensor_tree
from torchelastic.worker.leaving import ignore_while
from torchelastic.worker.orders import Leave

log = logging.getLogger(__name__)

# --- replicated state: this worker alone ----------------------------------------------------------

#: Seconds to wait for the leader's choice of who saves, for a commit in progress, and for the last
#: snapshot to be sealed.
CHOICE_TIMEOUT, COMMIT_TIMEOUT, SEAL_TIMEOUT = 2.0, 1.0, 5.0
#: Attempts to copy a snapshot: if it is overwritten meanwhile, the next one is copied.
COPY_TRIES = 3

#: Makes a checkpoint's content from the lasting and the passing half of a state, and its step.
MakeContent = Callable[[Mapping[str, Any], Mapping[str, Any], int], dict[str, Any]]


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


class LeaveAlone:
    """The leave of the worker that writes its node's shared state."""

    def __init__(
        self,
        agent: AgentClient,
        tree: Tree,
        stored: MakeContent,
        generation: int,
        committed: Callable[[], Version],
    ) -> None:
        """`committed` returns the last version that was committed or restored."""
        self._agent, self._tree, self._stored = agent, tree, stored
        self._generation, self._committed = generation, committed
        #: Held during a commit; never released once this worker leaves.
        self.commit = threading.Lock()
        self._listens = False
        #: The signal does not end this process any more.
        self._shielded = False
        self._lock = threading.Lock()
        self._order: Leave | None = None
        self._decided = threading.Event()

    def listen(self) -> None:
        """Listen for the order to leave, if there is storage."""
        if checkpoint.get_checkpoint_manager() is not None and not self._listens:
            self._listens = True
            self._agent.listen(self.told)
            self._shielded = bool(ignore_while(lambda: True))

    def told(self, order: Leave) -> None:
        """Handle the agent's order. The first begins the leave, the second decides who saves. Any
        thread."""
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
        checkpoint.save_before_leaving(copy, copy.step, self._generation, grace)

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
        (_, step), deadline = self._committed(), time.monotonic() + SEAL_TIMEOUT
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


# --- sharded state: who fetches what: pure --------------------------------------------------------


@dataclass(frozen=True)
class RankReport:
    """The message of a rank to the others."""

    node: str
    leaves: bool
    #: The address of its agent for others; empty: none.
    peer: str
    #: The pieces of the version on its node.
    held: Sequence[str]


@dataclass(frozen=True)
class Handover:
    """A piece that a rank of a node that stays fetches from one that leaves."""

    piece: str
    rank: int
    peer: str


def handovers(said: Sequence[RankReport]) -> tuple[list[Handover], list[str]]:
    """Return which rank fetches which piece, and the pieces that no node that stays can have."""
    leaving = {one.node for one in said if one.leaves}
    staying: dict[str, int] = {}
    for rank, one in enumerate(said):
        if one.node not in leaving:
            staying.setdefault(one.node, rank)
    safe = {piece for one in said if one.node in staying for piece in one.held}
    found: list[Handover] = []
    lost = []
    for piece in map(shard, range(len(said))):
        peers = [one.peer for one in said if piece in one.held and one.peer]
        if piece in safe:
            continue
        if not staying or not peers:
            lost.append(piece)
        else:
            ranks = list(staying.values())
            found.append(Handover(piece, ranks[len(found) % len(ranks)], peers[0]))
    return found, lost


# --- sharded state: all ranks together ------------------------------------------------------------

#: Seconds that the other ranks of a leaving node wait for their own order, and that a rank waits to
#: be released.
ORDER_TIMEOUT = 5.0
#: Seconds in which other nodes may be told to leave, too, when the whole job is stopped.
STOP_OF_ALL_NODES = 1.0


class LeaveTogether:
    """The leave of one worker of a sharded state, in one generation."""

    def __init__(self, agent: AgentClient | None, rank: int) -> None:
        self._agent, self._rank = agent, rank
        self._order: Leave | None = None
        self._ordered, self._released = threading.Event(), threading.Event()
        self._listens = False
        self._timer: threading.Timer | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether this worker has its order to leave."""
        return self._order is not None

    @property
    def grace(self) -> float | None:
        """The seconds until this worker is killed; None if it stays, or nobody knows."""
        if self._order is None or self._order.deadline is None:
            return None
        return self._order.deadline - time.monotonic()

    def listen(self) -> None:
        """Listen for the order to leave."""
        if self._agent is not None and not self._listens:
            self._listens = True
            self._agent.listen(self.told, together=True)

    def told(self, order: Leave) -> None:
        """Handle the agent's orders, in any thread. The first comes before others learn of it, with
        the second this process ends."""
        if order.saves is not None:
            self._exit(order)
            return
        self._order = order
        self._ordered.set()
        if (grace := self.grace) is not None:  # there may be no commit in time
            self._timer = threading.Timer(max(grace, 0.0) / 2, self._report_saved)
            self._timer.daemon = True
            self._timer.start()

    def bring_to_safety(
        self, node: str, version: Version, keep: Callable[[], bool], save: Callable[[], None]
    ) -> None:
        """Collective: leave nothing on leaving nodes only. `keep` keeps the version in memory, and
        returns whether all ranks have; `save` saves a checkpoint."""
        began = time.monotonic()
        kept = keep()
        if [node, True] in agreement.gather([node, self.is_ordered]):  # a rank of this node leaves
            self._ordered.wait(ORDER_TIMEOUT)  # the order has come to another rank already
        elif store_for_shards() is not None:
            self._ordered.wait(max(began + STOP_OF_ALL_NODES - time.monotonic(), 0.0))
        if not kept or not self._hand_over(version):
            self._save(version[1], save)
        if self._order is not None:
            self._report_saved()
            if not self._released.wait(ORDER_TIMEOUT):
                self._exit(self._order)

    def _hand_over(self, version: Version) -> bool:
        """Collective: make nodes that stay fetch what only leaving nodes hold; return whether they
        have everything then."""
        assert self._agent is not None
        here = self._agent.inventory()
        held = [
            one.piece for one in here.holdings if one.version == version and is_shard(one.piece)
        ]
        said = agreement.gather([here.node, self.is_ordered, here.peer, held])
        fetched, lost = handovers([RankReport(*one) for one in said])
        mine = [self._fetch(one, version) for one in fetched if one.rank == self._rank]
        return agreement.all_of_them(all(mine)) and not lost

    def _fetch(self, one: Handover, version: Version) -> bool:
        assert self._agent is not None
        try:
            self._agent.open(one.piece, version, one.peer).close()
        except SnapshotError as error:
            log.warning("Could not fetch '%s' from a node that leaves: %s", one.piece, error)
            return False
        return True

    def _save(self, step: int, save: Callable[[], None]) -> None:
        if store_for_shards() is not None:
            save()
        elif self.is_ordered:
            log.warning(
                "Leaving: no node that stays has all shards of step %d, and there is no "
                "CheckpointStore to save them. The others continue from an earlier step.",
                step,
            )

    def _report_saved(self) -> None:
        """Tell the agent that nothing more will be saved: it announces the leave."""
        if self._timer is not None:
            self._timer.cancel()
        if self._agent is not None:
            self._agent.saved()

    def _exit(self, order: Leave) -> None:
        os.kill(os.getpid(), order.signum)
        self._released.set()
