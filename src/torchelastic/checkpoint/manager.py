"""The interfaces of checkpoints and their managers, and the manager of this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, Protocol

#: The keys of the state and of its step in a checkpoint.
STATE_KEY = "default"
PROGRESS_KEY = "progress"


class Saved(Protocol):
    """The methods of a `State` that a checkpoint needs."""

    def save(self, stream: IO[bytes]) -> None: ...

    def load(self, stream: IO[bytes]) -> None: ...


class Checkpoint(ABC):
    """Named streams that become visible all at once, by `commit`."""

    @abstractmethod
    def open_output_stream(self, key: str) -> IO[bytes]:
        """Open a stream to write to; replaces an earlier stream with the same key."""

    @abstractmethod
    def open_input_stream(self, key: str) -> IO[bytes]:
        """Open a stream to read from; FileNotFoundError or KeyError if the key is unknown."""

    @abstractmethod
    def commit(self) -> None:
        """Make it visible and durable. Further calls do nothing."""

    @abstractmethod
    def discard(self) -> None:
        """Remove it and all its streams."""


class CheckpointManager(ABC):
    """Stores checkpoints. Each has an integer id that grows."""

    @abstractmethod
    def create_checkpoint(self) -> Checkpoint:
        """Create an empty checkpoint that is invisible until it is committed."""

    @abstractmethod
    def get_checkpoint(self, sequence_id: int) -> Checkpoint | None:
        """Return the committed checkpoint with this id; None if there is none."""

    @abstractmethod
    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Return the committed checkpoint with the largest id; None if there is none."""

    @abstractmethod
    def list_checkpoints(self) -> Sequence[Checkpoint]:
        """Return every committed checkpoint, the latest first."""


_manager: CheckpointManager | None = None


def set_checkpoint_manager(manager: CheckpointManager | None) -> None:
    """Set the checkpoint manager of this process; None (the default): no checkpoints."""
    global _manager
    _manager = manager


def get_checkpoint_manager() -> CheckpointManager | None:
    return _manager
