"""The bandwidth limit of copies: a token bucket. Pure: the caller passes the time."""

from __future__ import annotations

#: Seconds of the rate that may be saved up and spent at once (the burst).
BURST = 0.1


class Bucket:
    """A token bucket that limits bytes to a rate."""

    def __init__(self, rate: float) -> None:
        """`rate` in bytes per second; 0 means no limit."""
        self._rate = rate
        self._has = rate * BURST
        self._at: float | None = None

    def take(self, size: int, now: float) -> float:
        """Take this many bytes; return the seconds to wait before sending them.

        >>> bucket = Bucket(1000)
        >>> bucket.take(100, 0.0), bucket.take(500, 0.0), bucket.take(100, 1.0)
        (0.0, 0.5, 0.0)
        """
        if not self._rate:
            return 0.0
        since = now - self._at if self._at is not None else 0.0
        self._at = now
        # May be negative: an earlier caller has taken future bytes, and waits for them.
        self._has = min(self._has + since * self._rate, self._rate * BURST) - size
        return max(0.0, -self._has / self._rate)
