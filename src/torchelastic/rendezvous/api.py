"""A module name of 0.2's, with the names that torch has given its exceptions since."""

from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.handler import (
    RendezvousClosedException,
    RendezvousException,
    RendezvousHandler,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
from torchelastic.rendezvous.parameters import RendezvousParameters
from torchelastic.rendezvous.registry import RendezvousHandlerCreator, RendezvousHandlerFactory

__all__ = [
    "RendezvousClosedError",
    "RendezvousClosedException",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousException",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerFactory",
    "RendezvousNonRetryableError",
    "RendezvousParameters",
    "RendezvousTimeoutError",
    "RendezvousTimeoutException",
]

RendezvousClosedError = RendezvousClosedException
RendezvousTimeoutError = RendezvousTimeoutException
RendezvousConnectionError = RendezvousNonRetryableError
