"""The rendezvous handler of 0.2: an object that a node asks for its rank in each world."""

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
    """The rendezvous of a node, for a launcher that starts the workers itself."""

    @abc.abstractmethod
    def get_backend(self) -> str:
        """The name this handler is registered by."""

    @abc.abstractmethod
    def next_rendezvous(self) -> tuple[Store, int, int]:
        """Wait for a world with this node; return its store, this node's rank, the node count.

        Call it again only when no worker of the last world is left here. Raises
        `RendezvousClosedException`, `RendezvousTimeoutException` or `RendezvousNonRetryableError`.
        """

    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Return True if the job has ended for all nodes."""

    @abc.abstractmethod
    def set_closed(self) -> None:
        """End the job for all nodes."""

    @abc.abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return more than 0 if the workers must be stopped for another world."""

    @abc.abstractmethod
    def get_run_id(self) -> str:
        """The job's id."""

    @abc.abstractmethod
    def shutdown(self) -> bool:
        """Leave the job; return False if there was an error."""
