"""A function call in another process, and its result. Both are passed as files."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchelastic.config import Entry
from torchelastic.errors import ConfigError
from torchelastic.worker.bootstrap import write_call


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function in messages."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else repr(function)


def function_entry(path: Path, function: Callable[..., Any], args: Sequence[Any]) -> Entry:
    """Pickle a call to `path`, for a worker to run."""
    if _is_nowhere(function):
        raise ConfigError(
            f"{function_name(function)} is defined in an interactive session, so workers cannot "
            "import it: move it into a file and import it from there."
        )
    try:
        write_call(str(path), function, args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Could not pickle {function_name(function)} or its arguments ({error}): use a "
            "function at the top level of a module, and arguments that can be pickled."
        ) from error
    return Entry("function", str(path))


def _is_nowhere(function: Callable[..., Any]) -> bool:
    """Return True for a function in a `__main__` without a file: a notebook, `python -c`."""
    main = sys.modules["__main__"]
    in_main = getattr(function, "__module__", None) == "__main__"
    return in_main and main.__spec__ is None and not hasattr(main, "__file__")


def read_result(path: str) -> Any:
    """Return the result of the function; None if it called `sys.exit(0)` instead."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    return pickle.loads(data)
