"""A failed job as torch's exception: the same fields, as another process unpickles them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ProcessFailure:
    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: Any = field(default_factory=dict)
    message: Any = ""
    timestamp: int = 0


class ChildFailedError(Exception):
    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        self.name, self.failures = name, failures
        super().__init__(self.format_msg())

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        return min(self.failures.items(), key=lambda item: item[1].timestamp)

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        return f"{self.name} FAILED"
