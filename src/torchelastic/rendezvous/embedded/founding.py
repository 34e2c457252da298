"""Decide whether a node without a world may start the job: not while nodes of the running job look
for their host, and not beside the host of a run that has ended."""

from __future__ import annotations

import logging
import math
from collections.abc import Set

from torchelastic.clock import Clock
from torchelastic.errors import RendezvousLost
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.election import OTHERS_CONTINUE
from torchelastic.rendezvous.embedded.votes import VoteRequest
from torchelastic.rendezvous.world import WORLD_KEY

logger = logging.getLogger(__name__)


class Founding:
    """What one node has heard of other runs of its job, and of nodes that can continue one."""

    def __init__(self, job: str, clock: Clock, lease: float, *, joins_closed: bool) -> None:
        """`joins_closed`: a new node joins a job that has ended, and ends, too."""
        self._job = job
        self._clock = clock
        self._lease = lease
        self._joins_closed = joins_closed
        self._told_of_end = False
        #: When a node with a world of this job, which has lost its host, last asked for a vote.
        self._asked_at = -math.inf
        #: Nodes that saw the end of their run of the job, as other agents say.
        self.ended: Set[str] = frozenset()

    @property
    def is_allowed(self) -> bool:
        """Whether no node with a world of this job has asked for a vote for a lease's time. Its
        workers may have the only copy of the newest state."""
        return self._clock.now() - self._asked_at >= self._lease

    def asked_by(self, candidate: VoteRequest, address: str) -> bool:
        """Note a request for a vote; return whether the candidate can continue the job: its agent
        has been in a world since it started."""
        if candidate.resumed or candidate.generation < 0:
            return False
        if self.is_allowed:
            logger.warning(
                "the node at %s has generation %d of job '%s' and has lost its host: %s",
                address,
                candidate.generation,
                self._job,
                OTHERS_CONTINUE,
            )
        self._asked_at = self._clock.now()
        return True

    async def is_over(self, store: EmbeddedStore) -> bool:
        """Return whether a host that a new node has found belongs to a run that has ended; then
        disconnect, because that host waits for its clients to exit."""
        if self._joins_closed:
            return False
        try:
            world = (await store.get(WORLD_KEY)).items.get(WORLD_KEY)
        except RendezvousLost:
            world = None
        else:
            if world is None or world.value.get("phase") != "closed":
                return False
        if world is not None and not self._told_of_end:
            self._told_of_end = True
            logger.info(
                "the last run of job '%s' has ended; waiting for its host at %s to exit",
                self._job,
                store.place,
            )
        await store.close()
        return True
