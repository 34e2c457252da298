"""`@record`: write the exception that ends a function to the error file for the launcher.

Python workers do not need it: their traceback is always reported. It is for a main function that
starts processes itself, and for a script that a `--no-python` program runs.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import logging
import os
import shutil
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from torchelastic import env
from torchelastic.launcher.process_failure import ChildFailedError
from torchelastic.worker import error_file

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class ErrorHandler:
    """Writes to the file in `TORCHELASTIC_ERROR_FILE`, if set.

    Subclasses can be passed to `record`.
    """

    def initialize(self) -> None:
        """Print stacks if native code crashes. Called before the function."""
        try:
            faulthandler.enable(all_threads=True)
        except (io.UnsupportedOperation, RuntimeError, ValueError) as error:
            # stderr has no file descriptor: a notebook, a closed stream
            logger.debug("Cannot print stacks on a crash: %s", error)

    def record_exception(self, error: BaseException) -> None:
        """Write the exception to the error file."""
        text = "".join(traceback.format_exception(error))
        path = env.get("TORCHELASTIC_ERROR_FILE")
        if path:
            self._attempt(lambda: error_file.write(path, f"{type(error).__name__}: {error}", text))

    def copy_error_file(self, child_error_file: str) -> None:
        """Copy a child's error file to ours."""
        path = env.get("TORCHELASTIC_ERROR_FILE")
        if path and not os.path.exists(path):
            self._attempt(lambda: shutil.copyfile(child_error_file, path))

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:  # must not hide the exception that is being recorded
            logger.warning("Could not write the error file: %s", error)


def get_error_handler() -> ErrorHandler:
    """Return the default handler of `record`."""
    return ErrorHandler()


@overload
def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R]: ...


@overload
def record(
    fn: None = None, error_handler: ErrorHandler | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def record(fn: Any = None, error_handler: ErrorHandler | None = None) -> Any:
    """Decorate a program's main function: write its exception to the error file as well.

    For a `ChildFailedError` the child's error is recorded instead. `sys.exit(0)` inside the
    function counts as returning None.
    """
    handler = error_handler or get_error_handler()
    if fn is None:
        return lambda function: _recorded(function, handler)
    return _recorded(fn, handler)


def _recorded(fn: Callable[P, R], handler: ErrorHandler) -> Callable[P, R | None]:
    @functools.wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as end:
            if end.code in (None, 0):
                return None
            raise
        except ChildFailedError as error:
            _record_child(error, handler)
            raise
        except Exception as error:
            handler.record_exception(error)
            raise

    return recorded


def _record_child(error: ChildFailedError, handler: ErrorHandler) -> None:
    _, failure = error.get_first_failure()
    if os.path.isfile(failure.error_file):
        handler.copy_error_file(failure.error_file)
    else:  # it left none, or left it on another machine
        handler.record_exception(error)
