"""Log lines about what a leader sees and decides, for nodes without an event log."""

from __future__ import annotations

import logging

from torchelastic.rendezvous.restart_policy import Kind
from torchelastic.rendezvous.world import Member, World

logger = logging.getLogger("torchelastic")


class LogObserver:
    """A `LeaderObserver` that logs."""

    def became_leader(self) -> None:
        logger.debug("this node is the leader")

    def node_joined(self, member: Member) -> None:
        logger.info("%s joined", member.name)

    def node_lost(self, name: str, reason: str) -> None:
        logger.info("%s is lost: %s", name, reason)

    def node_leaving(self, member: Member) -> None:
        logger.info("%s is leaving (%s)", member.name, member.leaving)

    def decided(self, world: World, kind: Kind | None) -> None:
        logger.debug("decided: generation %d %s (%s)", world.generation, world.phase, kind)

    def without_host(self, sentence: str) -> None:
        logger.warning("%s", sentence)

    def say(self, sentence: str) -> None:
        logger.info("%s", sentence)
