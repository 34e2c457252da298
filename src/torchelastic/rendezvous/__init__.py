"""Agent process: how the nodes of a job agree on a world. The names here are those of 0.2."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.compat.release02.rendezvous_api import (
        RendezvousClosedException,
        RendezvousException,
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousHandlerFactory,
        RendezvousNonRetryableError,
        RendezvousParameters,
        RendezvousTimeoutException,
        create_handler,
        get_rendezvous_handler,
        register,
    )

#: Loaded when first used: nothing else here needs them.
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


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'torchelastic.rendezvous' has no attribute '{name}'")
    from torchelastic.compat.release02 import rendezvous_api

    return getattr(rendezvous_api, name)
