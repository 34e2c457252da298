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
    dumps = _by_value(function) if _is_nowhere(function) else pickle.dumps
    try:
        write_call(str(path), function, args, dumps)
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


def _by_value(function: Callable[..., Any]) -> Callable[[Any], bytes]:
    """Return what pickles functions and classes of a notebook with their code."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        name = function_name(function)
        raise ConfigError(
            f"{name} is defined in a notebook or interactive session, where workers cannot import "
            "it: run pip install cloudpickle. Or write the cell to a file with %%writefile "
            f"steps.py as its first line, and use from steps import {name}."
        ) from None
    return cloudpickle.dumps  # type: ignore[no-any-return]


def read_result(path: str) -> Any:
    """Return the result of the function; None if it called `sys.exit(0)` instead."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    return pickle.loads(data)
