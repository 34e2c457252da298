"""Time as an argument: decisions get `now`, objects a `Clock`, which tests set by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock. No machine's wall clock is ever compared with another's."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()
