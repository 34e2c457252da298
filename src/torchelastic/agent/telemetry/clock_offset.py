"""Event times by the leader's clock, and the pace at which an agent ships events. Pure.

No clock is trusted: an agent notes by its own clock when it sent something, the leader by its own
when that arrived. The difference is the clock offset plus the travel time. The least difference of
a connection is the best estimate and never too small: no event is dated earlier than it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchelastic.events.record import Record

#: Beyond this many nodes, each ships its events more rarely and in smaller batches.
FULL_RATE_NODES = 64
#: Beyond this many nodes, only the leader ships events that are the same on all nodes.
SHIP_SHARED_NODES = 256
SHARED_EVENTS = frozenset({"world-formed", "waiting", "leader-found"})

#: Seconds that events wait to be shipped together, and bytes of a batch.
LINGER, LONGEST_LINGER = 0.3, 5.0
BATCH, SMALLEST_BATCH = 64 * 1024, 16 * 1024
#: A longer line is not shipped.
LONGEST_LINE = 1024 * 1024
#: Seconds per node over which agents spread their first contact with a new leader.
SPREAD = 0.005


class Offset:
    """The offset from an agent's clock to the leader's, for one connection."""

    def __init__(self) -> None:
        self._least: float | None = None
        self._latest = float("-inf")

    def note(self, sent: float, received: float) -> None:
        """Note a message: sent by the agent's clock, received by the leader's."""
        took = received - sent
        self._least = took if self._least is None else min(self._least, took)

    def at(self, mono: float) -> float:
        """An event's time by the leader's clock; it never goes backwards."""
        assert self._least is not None, "no message has been timed yet"
        self._latest = max(self._latest, mono + self._least)
        return self._latest


def linger(nodes: int) -> float:
    """Seconds that events wait to be shipped, in a job of `nodes` nodes."""
    return min(LINGER * max(1.0, nodes / FULL_RATE_NODES), LONGEST_LINGER)


def batch_size(nodes: int) -> int:
    """Bytes of a batch: those of all nodes may be on their way at once."""
    return max(int(BATCH / max(1.0, nodes / FULL_RATE_NODES)), SMALLEST_BATCH)


def is_shipped(kind: str, nodes: int, *, leads: bool) -> bool:
    """True if events of this type are shipped to the leader."""
    return leads or nodes <= SHIP_SHARED_NODES or kind not in SHARED_EVENTS


def next_batch(
    records: Iterable[Record], offset: Offset, nodes: int, *, leads: bool
) -> tuple[float, bytes]:
    """The next batch of these records (at least one): the time of the last record it covers, and
    the lines as the leader writes them, which may be empty."""
    lines: list[bytes] = []
    weight, upto, size = 0, 0.0, batch_size(nodes)
    for record in records:
        line = b""
        if is_shipped(record.type, nodes, leads=leads):
            line = record.heard_at(offset.at(record.mono)).line().encode() + b"\n"
        if lines and weight + len(line) > size:
            break
        upto = record.mono
        if line and len(line) <= LONGEST_LINE:
            lines.append(line)
            weight += len(line)
    return upto, b"".join(lines)
