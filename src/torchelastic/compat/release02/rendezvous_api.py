"""The names of 0.2's `rendezvous`, and those that torch has given its exceptions since."""

from torchelastic.compat.release02.rendezvous_handler import (
    RendezvousClosedException,
    RendezvousException,
    RendezvousHandler,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
from torchelastic.compat.release02.rendezvous_registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerFactory,
    create_handler,
    get_rendezvous_handler,
    register,
)
from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.backend_parameters import RendezvousParameters

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
    "create_handler",
    "get_rendezvous_handler",
    "register",
]

RendezvousClosedError = RendezvousClosedException
RendezvousTimeoutError = RendezvousTimeoutException
RendezvousConnectionError = RendezvousNonRetryableError
