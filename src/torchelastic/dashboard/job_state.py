"""The state of the job, encoded once for all viewers.

    {"now", "live", "node", "leader", "whole", "view": JobView.to_json(),
     "log": [{"wall", "node", "type", "text"}, …]}

`node` is the node of this dashboard, `leader` the leader if known, and `whole` is true if the logs
here have events of every node of the world: only the leader's node has them all.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.events import words
from torchelastic.events.analysis.find_job import JobLogs
from torchelastic.events.analysis.live_view import LiveView
from torchelastic.events.analysis.view import JobView
from torchelastic.events.record import Record

#: Sent on an idle stream: proxies drop silent connections.
STILL_HERE = b": still here\n\n"
#: Sent before packed frames: the head of a gzip file.
PACKED_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
#: Seconds after which the state of a running job is made again without new events: time passes.
_AGAIN = 5.0


@dataclass(frozen=True)
class JobState:
    """One state of the job: as JSON, and as an event of a stream, plain and packed."""

    number: int
    live: bool
    body: bytes
    frame: bytes
    packed: bytes

    @classmethod
    def of(cls, number: int, data: Any, *, live: bool) -> JobState:
        body = encoded(data)
        frame = b"event: picture\nid: %d\ndata: %s\n\n" % (number, body)
        return cls(number, live, body, frame, packed(frame))


class StateReader:
    """Reads a job's logs as they grow. Used by one thread at a time; `close` it."""

    def __init__(
        self, logs: JobLogs, node: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._logs, self._node, self._clock = logs, node, clock
        self._live: LiveView | None = None
        self._made = float("-inf")
        self.latest: JobState | None = None

    def look(self) -> JobState:
        """Return the current state; the same object if nothing changed."""
        if self._live is None:
            self._live = LiveView(self._logs)
        now = self._clock()
        news = self._live.read()
        alive = self._live.alive
        old = self.latest
        if old is None or news or alive != old.live or (alive and now - self._made > _AGAIN):
            seen = self._live.view(now)
            data = state_of(seen, self._live.latest(), now, live=alive, agent=self._node)
            number = 1 if old is None else old.number + 1
            self.latest, self._made = JobState.of(number, data, live=alive), now
        assert self.latest is not None
        return self.latest

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None


def state_of(
    seen: JobView,
    latest: Sequence[tuple[str, Record]],
    now: float,
    *,
    live: bool,
    agent: str | None,
) -> dict[str, Any]:
    """Return all that the page shows; `latest` are the last events with their nodes' names."""
    nodes = list(seen.nodes.values())
    return {
        "now": now,
        "live": live,
        "node": next((node.name for node in nodes if agent and node.agent == agent), None),
        "leader": next((node.name for node in nodes if node.leader), None),
        "whole": _is_whole(seen),
        "view": seen.to_json(),
        "log": [
            {
                "wall": record.wall,
                "node": name,
                "type": record.type,
                "text": words.sentence(record),
            }
            for name, record in latest
        ],
    }


def _is_whole(seen: JobView) -> bool:
    """Return True if there are events of every node of the last world, named or not."""
    if not seen.worlds:
        return True
    last = seen.worlds[-1]
    heard = {name for name, node in seen.nodes.items() if node.agent is not None}
    return heard.issuperset(last.nodes) and len(heard) >= last.count


def encoded(data: Any) -> bytes:
    """Encode as JSON for browsers: NaN and infinity, which a log may hold, become null."""
    try:
        return _dumped(data)
    except ValueError:
        return _dumped(_finite(data))


def packed(frame: bytes) -> bytes:
    """Return a part of a gzip stream that can be unpacked without the parts before it.

    So it is packed once for all viewers, even those that skip states.
    """
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(frame) + packer.flush(zlib.Z_FULL_FLUSH)


def _dumped(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
