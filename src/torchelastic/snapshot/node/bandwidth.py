"""How fast copies may go: a bucket of bytes that fills at a rate. Pure: it is told the time."""

from __future__ import annotations

#: Seconds of the rate that may be saved up, and spent at once.
BURST = 0.1


class Bucket:
    """Holds back what exceeds a rate, however it is asked for."""

    def __init__(self, rate: float) -> None:
        """`rate` in bytes per second; 0 holds nothing back."""
        self._rate = rate
        self._has = rate * BURST
        self._at: float | None = None

    def take(self, size: int, now: float) -> float:
        """Take so many bytes; returns the seconds to wait before they are sent.

        >>> bucket = Bucket(1000)
        >>> bucket.take(100, 0.0), bucket.take(500, 0.0), bucket.take(100, 1.0)
        (0.0, 0.5, 0.0)
        """
        if not self._rate:
            return 0.0
        since = now - self._at if self._at is not None else 0.0
        self._at = now
        # May be below nothing: who came before has taken what is to come, and waits for it.
        self._has = min(self._has + since * self._rate, self._rate * BURST) - size
        return max(0.0, -self._has / self._rate)
