"""When a checkpoint is due: every so many steps, every so many seconds, or as often as pays. Pure.

As often as pays is Daly's refinement of Young's rule: a checkpoint that costs C, where failures are
M apart, is best written every sqrt(2 C M) or so. Rarer loses more work to a failure, oftener costs
more than failures do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from torchelastic.errors import ConfigError

AUTO = "auto"
#: Before any failure was seen they are taken to be so far apart, in seconds.
PRIOR = 4 * 3600.0
#: What is written behind the training takes memory, cores and network from it: so much of the time
#: that takes counts as lost. Else one that stops nobody would be followed by the next at once.
HIDDEN = 0.02
#: Automatic intervals are never shorter than this, in seconds: a cost measured as 0 says little.
SHORTEST = 10.0

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Every:
    """How often: exactly one of the three."""

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False


def parse(every: int | str | None) -> Every | None:
    """`500` steps, `"90s"`, `"10m"`, `"2h"`, `"auto"`; None: only when somebody asks."""
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
    """The mean time between failures, as far as it is known: `PRIOR` counts as one of them."""
    return (elapsed + PRIOR) / (failures + 1)


@dataclass(frozen=True)
class Measured:
    """What the automatic interval is chosen from."""

    #: Seconds the training was stopped for one checkpoint.
    blocked: float
    #: Seconds until it was in storage.
    written: float
    #: Seconds the job has been watched for, and the failures in them.
    elapsed: float
    failures: int

    @property
    def cost(self) -> float:
        """Seconds of training that one checkpoint takes, hidden or not."""
        return self.blocked + HIDDEN * self.written


def automatic(measured: Measured) -> float:
    """Seconds between checkpoints; never less than storage needs for one."""
    mean = between_failures(measured.elapsed, measured.failures)
    return max(best_interval(measured.cost, mean), measured.written, SHORTEST)


@dataclass(frozen=True)
class Pace:
    """When the next one is due. A value: each method gives the pace after it."""

    every: Every
    #: When the last one was begun, by any clock that only grows; and of which step it is.
    last: float
    step: int
    #: The last step that was asked about, and the one before: not every step need be.
    asked: tuple[int, int]
    #: Seconds between two, where they are counted in seconds.
    seconds: float = SHORTEST

    @classmethod
    def begin(cls, every: Every, step: int, now: float) -> Pace:
        return cls(every, now, step, (step, step), every.seconds or SHORTEST)

    def at(self, step: int) -> Pace:
        """This step is asked about."""
        last, _ = self.asked
        if step == last:
            return self
        return replace(self, asked=(step, last if step > last else step - 1))

    def is_due(self, now: float) -> bool:
        step, before = self.asked
        if self.every.steps is not None:
            return step > self.step and step // self.every.steps > before // self.every.steps
        return now - self.last >= self.seconds

    def began(self, step: int, now: float) -> Pace:
        return replace(self, last=now, step=step)

    def learned(self, measured: Measured) -> Pace:
        """The interval follows what was measured, if it is automatic."""
        return replace(self, seconds=automatic(measured)) if self.every.auto else self
