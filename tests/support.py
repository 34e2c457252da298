"""Shared by all tests: waiting for a condition, never for a time; and a clock that tests move."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

#: How many times as many seeds and examples as in the suite: `scripts/soak` sets it.
SOAK = int(os.environ.get("SOAK", "1"))


def ending_with_us(command: Sequence[str]) -> list[str]:
    """The command, killed by the kernel when this process ends, whatever ends it.

    The kernel does that when the thread ends that has started it: only the main one lasts.
    """
    if threading.current_thread() is not threading.main_thread():
        return [*command]
    return ["setpriv", "--pdeathsig", "KILL", "--", *command]


def poll_for(probe: Callable[[], T], *, what: str, timeout: float = 60.0) -> T:
    """Call `probe` until it returns something true; fail, naming `what`, after `timeout` s."""
    begun = time.monotonic()
    while True:
        found = probe()
        if found:
            return found
        waited = time.monotonic() - begun
        if waited > timeout:
            raise AssertionError(f"not seen within {timeout:g} s: {what}")
        # What takes long is looked for less often: most probes read files, on a busy machine.
        time.sleep(0.005 if waited < 0.5 else 0.02)


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
