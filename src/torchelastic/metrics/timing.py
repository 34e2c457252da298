"""Metrics for the duration and outcome of calls."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

from torchelastic.metrics.streams import DEFAULT_GROUP, getStream

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
