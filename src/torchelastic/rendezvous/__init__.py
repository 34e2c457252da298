"""How the nodes of a job agree on a world. The names here are those of release 0.2."""

from torchelastic.rendezvous.handler import (
    RendezvousClosedException,
    RendezvousException,
    RendezvousHandler,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
from torchelastic.rendezvous.parameters import RendezvousParameters
from torchelastic.rendezvous.registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerFactory,
    create_handler,
    get_rendezvous_handler,
    register,
)

__all__ = [
    "RendezvousClosedException",
    "RendezvousException",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerFactory",
    "RendezvousNonRetryableError",
    "RendezvousParameters",
    "RendezvousTimeoutException",
    "create_handler",
    "get_rendezvous_handler",
    "register",
]
