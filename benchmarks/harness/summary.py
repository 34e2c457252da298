"""Statistics of repeated measurements. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Repetitions of one measurement; those that failed have no time but are counted."""

    times: tuple[float, ...]
    failed: int = 0

    @property
    def count(self) -> int:
        return len(self.times) + self.failed

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.times) < 2:
            return self.times[0], self.times[0]
        first, _, third = statistics.quantiles(self.times, n=4, method="inclusive")
        return first, third


def summarize(times: Sequence[float | None]) -> Summary:
    """`None` stands for a repetition that failed."""
    return Summary(
        tuple(time for time in times if time is not None),
        sum(time is None for time in times),
    )


@dataclass(frozen=True)
class RatioInterval:
    """Geometric mean of paired ratios and its 95 % interval."""

    ratio: float
    low: float
    high: float
    pairs: int


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> RatioInterval:
    """The ratio first/second of paired measurements, by Student's t on the logarithms."""
    logs = [math.log(first / second) for first, second in pairs]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return RatioInterval(math.exp(mean), 0.0, math.inf, len(logs))
    half = student_t(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return RatioInterval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def growth_exponent(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of the power law nearest to the points: least squares on the logarithms."""
    sizes, values = ([math.log(each) for each in column] for column in zip(*points, strict=True))
    return statistics.linear_regression(sizes, values).slope


def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution, for probabilities of one half and above."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(freedom * math.pi)

    def density(angle: float) -> float:
        # t = sqrt(freedom) * tan(angle) makes the integral finite.
        return scale * math.sqrt(freedom) * math.cos(angle) ** (freedom - 1)

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + _integral(density, middle) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _integral(function: Callable[[float], float], end: float, parts: int = 200) -> float:
    """Simpson's rule from 0 to `end`."""
    width = end / parts
    weights = (1 if i in (0, parts) else 4 if i % 2 else 2 for i in range(parts + 1))
    return sum(weight * function(i * width) for i, weight in enumerate(weights)) * width / 3
