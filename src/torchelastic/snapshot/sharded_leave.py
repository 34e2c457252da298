"""Run + keep with sharded state: brings the shards to safety before some ranks leave.

Every rank has shards that others need, so all ranks take part, at their next commit. Until then,
the other nodes must not learn of the leave: they would stop at once.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.background.saving import store_for_shards
from torchelastic.errors import SnapshotError
from torchelastic.snapshot.agent_client import SnapshotAgent
from torchelastic.snapshot.layout import Version, is_shard, shard
from torchelastic.tensors import agreement
from torchelastic.worker.orders import Leave

log = logging.getLogger(__name__)

#: Seconds that the other ranks of a leaving node wait for their own order, and that a rank waits to
#: be released.
ORDER_TIMEOUT = 5.0
#: Seconds in which other nodes may be told to leave, too, when the whole job is stopped.
STOP_OF_ALL_NODES = 1.0


# --- who fetches what: pure -----------------------------------------------------------------------


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


# --- the leave ------------------------------------------------------------------------------------


class ShardedLeave:
    """The leave of one worker, in one generation."""

    def __init__(self, agent: SnapshotAgent | None, rank: int) -> None:
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
        if self._leaves(node):
            self._ordered.wait(ORDER_TIMEOUT)  # it has come to another rank already
        elif store_for_shards() is not None:
            self._ordered.wait(max(began + STOP_OF_ALL_NODES - time.monotonic(), 0.0))
        if not kept or not self._hand_over(version):
            self._save(version[1], save)
        if self._order is not None:
            self._report_saved()
            if not self._released.wait(ORDER_TIMEOUT):
                self._exit(self._order)

    def _leaves(self, node: str) -> bool:
        """Collective: return whether a rank of this node has its order to leave."""
        return [node, True] in agreement.gather([node, self.is_ordered])

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
        mine = [one for one in fetched if one.rank == self._rank]
        return agreement.all_of_them(all([self._fetch(one, version) for one in mine])) and not lost

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
