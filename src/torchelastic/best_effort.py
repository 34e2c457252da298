"""Guards for code that only observes: its failure is reported once and ignored.

`observing` guards a few lines, `quiet` all public methods of a class; tasks have `side_tasks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import traceback
from collections.abc import Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=type)

#: Reported failures; repetitions are logged at DEBUG.
_reported: set[str] = set()


def described(error: BaseException) -> str:
    """`ValueError: boom (sampling.py, line 12)`."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    return f"{text} ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})"


@contextlib.contextmanager
def observing(what: str) -> Iterator[None]:
    """Log and swallow an exception; `what` names the action that failed."""
    try:
        yield
    except Exception as error:
        level = logging.DEBUG if what in _reported else logging.WARNING
        _reported.add(what)
        logger.log(level, "%s failed; the job is not affected: %s.", what, described(error))
        logger.debug("%s failed", what, exc_info=True)


def quiet(cls: T) -> T:
    """Make the public methods of a class return None instead of raising."""
    for name, method in list(vars(cls).items()):
        if not name.startswith("_") and inspect.isfunction(method):
            setattr(cls, name, _quiet(method, f"{cls.__name__}.{name}"))
    return cls


def _quiet(method: Any, what: str) -> Any:
    if asyncio.iscoroutinefunction(method):

        @functools.wraps(method)
        async def later(*args: Any, **kwargs: Any) -> Any:
            with observing(what):
                return await method(*args, **kwargs)

        return later

    @functools.wraps(method)
    def now(*args: Any, **kwargs: Any) -> Any:
        with observing(what):
            return method(*args, **kwargs)

    return now
