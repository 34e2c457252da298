"""Failed workers as torch's exceptions. Imports torch: only for the process that catches them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing import errors as of_torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchelastic.errors import TorchElasticError
from torchelastic.events.failure import Failure


class ChildFailedError(TorchElasticError, of_torch.ChildFailedError):
    """torch's error, in which the nodes have agreed on the first failure."""

    def __init__(
        self,
        name: str,
        failures: Mapping[int, ProcessFailure],
        *,
        first: int | None = None,
        text: str = "",
    ) -> None:
        """`first` is the rank whose failure caused the others; None: unknown, as in torch.

        `text` is the block that names every failure; torch's if it is empty.
        """
        self._first, self._text = first, text
        of_torch.ChildFailedError.__init__(self, name, dict(failures))

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank and the failure that caused the others.

        If it is unknown, the one with the earliest timestamp: a guess if clocks differ.
        """
        if self._first is None:
            return super().get_first_failure()
        return self._first, self.failures[self._first]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The block of text that names every failure."""
        torchs: Any = super().format_msg  # not typed
        return self._text or str(torchs(boarder_delim, section_delim))

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self.name, self.failures, self._first, self._text)


def _remake(
    name: str, failures: dict[int, ProcessFailure], first: int | None, text: str
) -> ChildFailedError:
    """Create the error when unpickling: exceptions cannot pass keywords themselves."""
    return ChildFailedError(name, failures, first=first, text=text)


def process_failure(failure: Failure) -> ProcessFailure:
    """Convert the agents' record of a failure, which may come from another machine."""
    made = ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, "")
    made.timestamp, message = int(failure.wall_time), failure.message
    if failure.traceback:
        extra = {"py_callstack": failure.traceback, "timestamp": str(made.timestamp)}
        message = {"message": failure.message, "extraInfo": extra}  # type: ignore[assignment]
    made.message, made.error_file_data = message, {"message": message}
    if os.path.isfile(failure.error_file):  # else torch's `record` would look for it here
        made.error_file = failure.error_file
    return made
