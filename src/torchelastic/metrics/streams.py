"""Metric streams: named values in groups, each group with its handler; calls that are timed."""

from __future__ import annotations

import functools
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar, overload

from torchelastic.metrics.reporting import report

DEFAULT_GROUP = "torchelastic"


class MetricData(NamedTuple):
    """One value; `timestamp` is wall clock time in seconds."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricHandler(ABC):
    """Receives metric values. Called by `put_metric`: a slow handler slows down training."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None: ...


class ConsoleMetricHandler(MetricHandler):
    """One line on stdout for each value."""

    def emit(self, metric_data: MetricData) -> None:
        when, group, name, value = metric_data
        print(f"[{when}][{group}]: {name}={value}", flush=True)


class NullMetricHandler(MetricHandler):
    """Ignores values."""

    def emit(self, metric_data: MetricData) -> None:
        return None


class MetricStream:
    """The values of one group, and their handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Pass a value to the handler, and report it to the job."""
        report(metric_name, metric_value)
        self.send(metric_name, metric_value)

    def send(self, metric_name: str, metric_value: float) -> None:
        """Pass a value to the handler only."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_default: MetricHandler = NullMetricHandler()
_handlers: dict[str, MetricHandler] = {}


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler of one group, or the default handler."""
    global _default
    if group is None:
        _default = handler
    else:
        _handlers[group] = handler


def getStream(group: str) -> MetricStream:  # 0.1's name
    return MetricStream(group, _handlers.get(group, _default))


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    """Pass a value to the group's handler; in a worker, also report it to the job."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """The older order of arguments."""
    warnings.warn(
        "publish_metric is deprecated: use put_metric(metric_name, metric_value, metric_group).",
        DeprecationWarning,
        stacklevel=2,
    )
    put_metric(metric_name, metric_value, metric_group)


@dataclass
class MetricsConfig:
    """Unused settings of 0.2."""

    params: dict[str, str] = field(default_factory=dict)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing; kept for callers of 0.1."""


# --- the duration and outcome of calls -----------------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")


@overload
def prof(fn: Callable[P, R], group: str = ...) -> Callable[P, R]: ...


@overload
def prof(fn: None = ..., group: str = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def prof(fn: Callable[P, R] | None = None, group: str = DEFAULT_GROUP) -> object:
    """Count and time every call of a function: `@prof` or `@prof(group="agent")`.

    `<name>.success` or `<name>.failure` is 1, `<name>.duration.ms` the time it took; the name is
    `Class.function`, or `module.function` outside a class.
    """
    if fn is None:
        return functools.partial(prof, group=group)
    return _timed(fn, _name_of(fn), group)


def profile(group: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The older form of `prof`, which uses only the function name."""
    warnings.warn("profile is deprecated: use prof.", DeprecationWarning, stacklevel=2)
    return lambda fn: _timed(fn, fn.__name__, group if group is not None else DEFAULT_GROUP)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Milliseconds since a time of `time.time()`."""
    return int((time.time() - start_time_in_seconds) * 1000)


def _timed(fn: Callable[P, R], name: str, group: str) -> Callable[P, R]:
    @functools.wraps(fn)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        began = time.monotonic()
        outcome = "failure"
        try:
            result = fn(*args, **kwargs)
            outcome = "success"
            return result
        finally:
            took = int((time.monotonic() - began) * 1000)
            stream = getStream(group)
            # Not reported to the job: its few metrics are for values like the loss.
            stream.send(f"{name}.{outcome}", 1)
            stream.send(f"{name}.duration.ms", took)

    return timed


def _name_of(fn: Callable[..., object]) -> str:
    if "." in fn.__qualname__ or not fn.__module__:
        return fn.__qualname__
    return f"{fn.__module__.rpartition('.')[2]}.{fn.__qualname__}"
