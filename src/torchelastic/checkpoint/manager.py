"""What a checkpoint and a manager of checkpoints are, and which manager this process uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, Protocol

#: Where the state is kept in a checkpoint, and where the step it is of.
STATE_KEY = "default"
PROGRESS_KEY = "progress"


class Saved(Protocol):
    """What of a `State` a checkpoint needs."""

    def save(self, stream: IO[bytes]) -> None: ...

    def load(self, stream: IO[bytes]) -> None: ...


class Checkpoint(ABC):
    """Streams under names, all there or not there at all: `commit` makes them visible."""

    @abstractmethod
    def open_output_stream(self, key: str) -> IO[bytes]:
        """A stream to write to; what was written under the same key before is replaced."""

    @abstractmethod
    def open_input_stream(self, key: str) -> IO[bytes]:
        """A stream to read from; FileNotFoundError or KeyError where there is no such key."""

    @abstractmethod
    def commit(self) -> None:
        """Make it visible, lastingly. Once is enough; more does nothing."""

    @abstractmethod
    def discard(self) -> None:
        """Remove it, and whatever was written of it."""


class CheckpointManager(ABC):
    """Where checkpoints are kept. Each has an integer for an id, a later one a larger one."""

    @abstractmethod
    def create_checkpoint(self) -> Checkpoint:
        """A new, empty checkpoint that nobody sees before it is committed."""

    @abstractmethod
    def get_checkpoint(self, sequence_id: int) -> Checkpoint | None:
        """The committed checkpoint with this id; None where there is none."""

    @abstractmethod
    def get_latest_checkpoint(self) -> Checkpoint | None:
        """The committed checkpoint with the largest id; None where there is none."""

    @abstractmethod
    def list_checkpoints(self) -> Sequence[Checkpoint]:
        """Every committed checkpoint, the latest first."""


_manager: CheckpointManager | None = None


def set_checkpoint_manager(manager: CheckpointManager | None) -> None:
    """The manager this process uses from now on; None, as at the start: no checkpoints."""
    global _manager
    _manager = manager


def get_checkpoint_manager() -> CheckpointManager | None:
    return _manager
