"""When it was by the leader's clock, and how an agent paces what it tells the leader. Pure.

No clock is trusted: an agent notes by its own when it has sent something, the leader by its own
when that came. The difference is what the clocks differ by plus the time it took on the way. The
least difference of a connection is the nearest to the truth, and is never too small: an event is
never said to be earlier than it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchelastic.events.record import Record

#: Up to so many nodes everything is told at once; beyond, each tells more rarely and less.
FEW = 64
#: Beyond so many, what all agents would say alike is told by the leader only.
MANY = 256
SAID_BY_ALL = frozenset({"world-formed", "waiting", "leader-found"})

#: Seconds that lines wait for others to be told with, and bytes that are told at a time.
LINGER, LONGEST_LINGER = 0.3, 5.0
BATCH, SMALLEST_BATCH = 64 * 1024, 16 * 1024
#: A line longer than this is not told.
LONGEST_LINE = 1024 * 1024
#: Seconds for each node over which all turn to a new leader, who has other things to do first.
SPREAD = 0.005


class Offset:
    """What to add to an agent's times to have the leader's, over one connection."""

    def __init__(self) -> None:
        self._least: float | None = None
        self._latest = float("-inf")

    def note(self, sent: float, heard: float) -> None:
        """Something sent then, by the agent's clock, was heard then, by the leader's."""
        took = heard - sent
        self._least = took if self._least is None else min(self._least, took)

    def at(self, mono: float) -> float:
        """An event's time by the leader's clock; what came later is not made earlier."""
        assert self._least is not None, "no message has been timed yet"
        self._latest = max(self._latest, mono + self._least)
        return self._latest


def linger(nodes: int) -> float:
    """Seconds that lines wait, in a job of so many nodes."""
    return min(LINGER * max(1.0, nodes / FEW), LONGEST_LINGER)


def batch_size(nodes: int) -> int:
    """Bytes to tell at a time: those of all nodes may be on their way at once."""
    return max(int(BATCH / max(1.0, nodes / FEW)), SMALLEST_BATCH)


def is_told(kind: str, nodes: int, *, leads: bool) -> bool:
    """Whether the leader is told of events of a type."""
    return leads or nodes <= MANY or kind not in SAID_BY_ALL


def portion(
    records: Iterable[Record], offset: Offset, nodes: int, *, leads: bool
) -> tuple[float, bytes]:
    """What is told at a time of these records, of which there are some: the time of the last that
    it covers, and the lines as the leader writes them, which may be none."""
    lines: list[bytes] = []
    weight, upto, size = 0, 0.0, batch_size(nodes)
    for record in records:
        line = b""
        if is_told(record.type, nodes, leads=leads):
            line = record.heard_at(offset.at(record.mono)).line().encode() + b"\n"
        if lines and weight + len(line) > size:
            break
        upto = record.mono
        if line and len(line) <= LONGEST_LINE:
            lines.append(line)
            weight += len(line)
    return upto, b"".join(lines)
