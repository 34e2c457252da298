"""The nodes that a job had and used over time, relative to its maximum. Pure."""

from __future__ import annotations

from torchelastic.events import types as events
from torchelastic.events.record import Record
from torchelastic.events.timeline import Timeline


class NodeTime:
    """Integrals over time of the nodes in a world, and of those available."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._most = 0
        self._present: set[str] = set()
        #: Nodes of the world whose names this log does not have.
        self._unnamed = 0
        self._active = 0
        self._since = 0
        self._begun: int | None = None
        self._active_micros = 0
        self._available_micros = 0

    def feed(self, record: Record, now: int) -> None:
        """`now` is the record's time in microseconds; it never goes back."""
        if self._begun is None:
            self._begun = self._since = now
        self._active_micros, self._available_micros = self._until(now)
        self._since = now
        match record.event:
            case events.AgentStarted(max_nodes=most):
                self._most = max(self._most, most)
            case events.Joined(name=name) | events.NodeJoined(name=name):
                self._present.add(name)
            case events.NodeLost(name=name) | events.NodeLeaving(name=name):
                self._present.discard(name)
            case events.GenerationOver() if self._timeline.is_current(record):
                self._active = 0
            case events.Waiting():
                self._active = 0
        if self._timeline.began:
            world = self._timeline.current.world
            self._active = self._timeline.current.nodes
            self._unnamed = self._active - len(world.nodes)
            self._present.update(world.nodes, world.spares)

    def active(self, now: int) -> float | None:
        """Return the mean share of `max` nodes that were in a world; None: unknown yet."""
        return self._share(self._until(now)[0], now)

    def available(self, now: int) -> float | None:
        """Return the mean share of `max` nodes that were available, in a world or not."""
        return self._share(self._until(now)[1], now)

    def _share(self, micros: int, now: int) -> float | None:
        span = now - self._begun if self._begun is not None else 0
        return micros / (span * self._most) if span > 0 and self._most else None

    def _until(self, now: int) -> tuple[int, int]:
        passed = max(0, now - self._since)
        present = max(len(self._present) + self._unnamed, self._active)
        return (
            self._active_micros + passed * min(self._active, self._most),
            self._available_micros + passed * min(present, self._most),
        )
