"""When to save. Pure. The checkpoint interval: a number of steps, a time, or automatic.

The automatic interval is Daly's refinement of Young's rule: if a checkpoint costs C and the mean
time between failures is M, the best interval is about sqrt(2 C M). A longer one loses more work to
a failure, a shorter one costs more than failures do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from torchelastic.errors import ConfigError

AUTO = "auto"
#: Assumed mean time between failures before any failure was seen, in seconds.
ASSUMED_TIME_BETWEEN_FAILURES = 4 * 3600.0
#: Background writes take memory, cores and network from the training: this fraction of the write
#: time counts as lost. Otherwise a checkpoint that never blocks would cost nothing.
BACKGROUND_COST = 0.02
#: The shortest automatic interval in seconds, because a measured cost of 0 is unreliable.
SHORTEST_INTERVAL = 10.0

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Every:
    """The interval between checkpoints: exactly one of the three."""

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False


def parse(every: int | str | None) -> Every | None:
    """Parse `500` (steps), `"90s"`, `"10m"`, `"2h"`, `"auto"`; None: only on request."""
    if every is None:
        return None
    if every == AUTO:
        return Every(auto=True)
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return Every(steps=every)
    found = _SECONDS.fullmatch(every) if isinstance(every, str) else None
    if found is None or float(found[1]) <= 0:
        raise ConfigError(
            f"every is {every!r}: use a number of steps, a time like '90s', '10m' or '2h', "
            "or 'auto'."
        )
    return Every(seconds=float(found[1]) * _UNITS[found[2]])


def best_interval(cost: float, between_failures: float) -> float:
    """Seconds from the end of one checkpoint to the beginning of the next (Daly 2006)."""
    if cost >= 2 * between_failures:
        return between_failures
    ratio = cost / (2 * between_failures)
    young = math.sqrt(2 * cost * between_failures)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def between_failures(elapsed: float, failures: int) -> float:
    """Estimate the mean time between failures; the assumed one counts as one failure."""
    return (elapsed + ASSUMED_TIME_BETWEEN_FAILURES) / (failures + 1)


@dataclass(frozen=True)
class Measured:
    """The measurements that the automatic interval is computed from."""

    #: Seconds that training waited for one checkpoint.
    blocked: float
    #: Seconds until it was in storage.
    written: float
    #: Seconds that the job has been observed, and the failures in that time.
    elapsed: float
    failures: int

    @property
    def cost(self) -> float:
        """Seconds of training that one checkpoint takes, hidden or not."""
        return self.blocked + BACKGROUND_COST * self.written


def automatic(measured: Measured) -> float:
    """Seconds between checkpoints; never less than storage needs for one."""
    mean = between_failures(measured.elapsed, measured.failures)
    return max(best_interval(measured.cost, mean), measured.written, SHORTEST_INTERVAL)


@dataclass(frozen=True)
class CheckpointSchedule:
    """The schedule of the next checkpoint. Immutable: each method returns the next pace."""

    every: Every
    #: When the last one was begun, by a monotonic clock, and its step.
    last: float
    step: int
    #: The last two steps that `at` was called with; it may skip steps.
    asked: tuple[int, int]
    #: The interval, if it is a time.
    seconds: float = SHORTEST_INTERVAL

    @classmethod
    def begin(cls, every: Every, step: int, now: float) -> CheckpointSchedule:
        return cls(every, now, step, (step, step), every.seconds or SHORTEST_INTERVAL)

    def back_at(self, step: int) -> CheckpointSchedule:
        """Count steps from this one on; time goes on."""
        return replace(self, step=step, asked=(step, step))

    def at(self, step: int) -> CheckpointSchedule:
        """Move to this step."""
        last, _ = self.asked
        if step == last:
            return self
        return replace(self, asked=(step, last if step > last else step - 1))

    def is_due(self, now: float) -> bool:
        step, before = self.asked
        if self.every.steps is not None:
            return step > self.step and step // self.every.steps > before // self.every.steps
        return now - self.last >= self.seconds

    def began(self, step: int, now: float) -> CheckpointSchedule:
        return replace(self, last=now, step=step)

    def learned(self, measured: Measured) -> CheckpointSchedule:
        """Update the interval from the measurements, if it is automatic."""
        return replace(self, seconds=automatic(measured)) if self.every.auto else self


# --- before this worker leaves --------------------------------------------------------------------

#: Allowance over the time of the last checkpoint: other workers may be saving too.
MARGIN = 1.5


def decide_before_leaving(
    *, grace: float | None, expected: float | None, step: int, saved: int | None
) -> tuple[bool, str]:
    """Return whether to save with `grace` seconds left (None: unknown), and why. A checkpoint takes
    `expected` seconds (None: never measured), `step` steps are committed, and `saved` of them are
    in storage.
    """
    if saved is not None and saved >= step:
        return False, f"the checkpoint of step {step} is already in storage"
    if grace is None or expected is None or expected * MARGIN <= grace:
        return True, f"saving a checkpoint of step {step} first"
    return (
        False,
        f"no checkpoint of step {step}: it takes {expected:.1f} s, and {grace:.1f} s are left",
    )
