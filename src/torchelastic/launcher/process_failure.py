"""Failures of a process and of a group of processes, with the API of torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from torchelastic.agent import failure_report
from torchelastic.errors import TorchElasticError
from torchelastic.events.failure import Failure, signal_name
from torchelastic.worker import error_file
from torchelastic.worker.error_file import ErrorRecord

NOT_AVAILABLE = "<N/A>"


@dataclass
class ProcessFailure:
    """One process that failed, with the content of its error file."""

    local_rank: int
    pid: int
    #: The exit code, or minus the signal number, as in `subprocess`.
    exitcode: int
    #: `<N/A>` when the process left none.
    error_file: str
    #: The content of the error file: `{"message": …}`.
    error_file_data: dict[str, Any] = field(init=False)
    #: A sentence, or with a traceback `{"message": …, "extraInfo": {"py_callstack": …, …}}`.
    message: str | dict[str, Any] = field(init=False)
    #: Seconds since 1970 on the machine of the process.
    timestamp: int = field(init=False)
    #: The agent's record of it; None for a process without an agent.
    known: Failure | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        told = error_file.read(self.error_file)
        if told is None:
            self.error_file = NOT_AVAILABLE
        self._adopt(told)

    def _adopt(self, told: ErrorRecord | None) -> None:
        record = told or ErrorRecord(failure_report.exit_words(self.exitcode))
        self.timestamp = record.timestamp or int(time.time())
        self.message = record.message
        if record.traceback:
            extra = {"py_callstack": record.traceback, "timestamp": str(self.timestamp)}
            self.message = {"message": record.message, "extraInfo": extra}
        self.error_file_data = {"message": self.message if told else "<NONE>"}

    @classmethod
    def from_failure(cls, failure: Failure) -> ProcessFailure:
        """Convert the agent's record. The error file may be on another machine: it is not read."""
        made = cls(failure.local_rank, failure.pid, failure.exitcode, "")
        made._adopt(ErrorRecord(failure.message, failure.traceback, int(failure.wall_time)))
        made.error_file = failure.error_file or NOT_AVAILABLE
        made.known = failure
        return made

    def to_failure(self, rank: int) -> Failure:
        """Convert to the agent's record."""
        if self.known is not None:
            return self.known
        told = error_file.parse({"message": self.message}) or ErrorRecord(str(self.message))
        return Failure(
            generation=0,
            node=socket.gethostname(),
            rank=rank,
            local_rank=self.local_rank,
            pid=self.pid,
            exitcode=self.exitcode,
            message=told.message,
            traceback=told.traceback,
            error_file=self.error_file,
            wall_time=self.timestamp,
        )

    def signal_name(self) -> str:
        """`SIGKILL`, or `<N/A>` when the process ended by itself."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The time of the failure, for people: `2026-01-31_12:00:00`."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


class ChildFailedError(TorchElasticError):
    """Processes failed: all of them by rank, and which was the first."""

    def __init__(
        self,
        name: str,
        failures: Mapping[int, ProcessFailure],
        *,
        first: int | None = None,
        reason: str = "",
    ) -> None:
        """`first` is the rank whose failure caused the others, if known."""
        if not failures:
            raise ValueError("A ChildFailedError needs at least one failure.")
        self.name = name
        self.failures = dict(failures)
        self.reason = reason
        self._first = first
        super().__init__(self.format_msg())

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank and the failure that caused the others.

        If it is unknown, the one with the earliest timestamp: a guess if clocks differ.
        """
        rank = self._first
        if rank is None:
            rank = min(self.failures, key=lambda rank: self.failures[rank].timestamp)
        return rank, self.failures[rank]

    def format_msg(self) -> str:
        """The block of text that names every failure."""
        first, cause = self.get_first_failure()
        others = [self.failures[rank].to_failure(rank) for rank in self.failures if rank != first]
        title = f"{self.name} FAILED: {self.reason}" if self.reason else f"{self.name} FAILED"
        return failure_report.failures_block(title, cause.to_failure(first), others)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self.name, self.failures, self._first, self.reason)


def _remake(
    name: str, failures: dict[int, ProcessFailure], first: int | None, reason: str
) -> ChildFailedError:
    """Create the error when unpickling: exceptions cannot pass keywords themselves."""
    return ChildFailedError(name, failures, first=first, reason=reason)
