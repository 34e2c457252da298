"""A worker failure as a recorded fact: it crosses processes and machines as JSON."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from typing import Any


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 77` where the platform has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker that ended otherwise than by success."""

    generation: int
    node: str
    rank: int
    local_rank: int
    pid: int
    #: As `subprocess` has it: the exit code, or minus the signal's number.
    exitcode: int
    #: `RuntimeError: boom` when the worker told; otherwise what its exit says.
    message: str
    traceback: str = ""
    role: str = "default"
    step: int | None = None
    #: It ended after its agent had begun to stop it: whatever it says, it is not the cause.
    stopped: bool = False
    #: The worker lives on: it has rolled back and waits for the next world.
    alive: bool = False
    #: Trying again cannot help: the job ends.
    fatal: bool = False
    error_file: str = ""
    #: Wall clock of the failing node, for people and for `error.json`; never compared.
    wall_time: float = 0.0

    @property
    def told(self) -> bool:
        """Whether the worker itself said what went wrong."""
        return bool(self.traceback)

    def exit_words(self) -> str:
        """`exit code 3` or `SIGKILL`."""
        if self.exitcode < 0:
            return signal_name(-self.exitcode)
        return f"exit code {self.exitcode}"

    def sentence(self) -> str:
        """`rank 3 on node-b (local rank 1, pid 42) at step 17: RuntimeError: boom`, in one line."""
        step = f" at step {self.step}" if self.step is not None else ""
        first_line = self.message.strip().partition("\n")[0]
        return (
            f"rank {self.rank} on {self.node} (local rank {self.local_rank}, pid {self.pid})"
            f"{step}: {first_line}"
        )

    def signature(self) -> tuple[int, str, str]:
        """Equal for two failures with the same cause at the same place, whoever the worker was."""
        frames = [line for line in self.traceback.splitlines() if line.startswith("  File ")]
        return (self.exitcode, self.message, frames[-1].strip() if frames else "")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Failure:
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})
