"""What 0.2 calls a rendezvous: one object by which a node asks for its place, again and again."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from torchelastic.errors import (
    RendezvousClosedException,
    RendezvousError,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

#: 0.2's name for the base of what a handler raises.
RendezvousException = RendezvousError

__all__ = [
    "RendezvousClosedException",
    "RendezvousException",
    "RendezvousHandler",
    "RendezvousNonRetryableError",
    "RendezvousTimeoutException",
]


class RendezvousHandler(abc.ABC):
    """A node's way to a world, for a launcher that starts the workers itself."""

    @abc.abstractmethod
    def get_backend(self) -> str:
        """The name this handler is registered by."""

    @abc.abstractmethod
    def next_rendezvous(self) -> tuple[Store, int, int]:
        """Wait for a world with this node in it: its store, this node's rank, how many nodes.

        Calling it again says that no worker of the last world is left here. Raises
        `RendezvousClosedException`, `RendezvousTimeoutException` or `RendezvousNonRetryableError`.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Whether the job has ended for all nodes."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """More than 0 when the workers are to be stopped and another world to be asked for."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """The job's id."""

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Be done with the job; whether that went well."""
