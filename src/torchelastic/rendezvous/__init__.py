"""Agent process: how the nodes of a job agree on a world. The names here are those of 0.2.

leader             turns member records into worlds; one node leads at a time
decide             the leader's decision: the next world, or when to look again; pure
  forming            forms the next world, or states what the job waits for
  choosing           which nodes and workers are in it; replicas: and where
  restart_policy     the restart budget, and equal failures; root_cause: the first failure
  suspects           nodes that caused the end; held_out: how long they are left out
round_state        the leader's knowledge, and its changes; pure
state_check        whether all workers have the same state; pure
majority           votes: which node may host the store next, and which nodes may continue; pure
world, store       the records in the store, and the five operations it needs
job_settings       settings that all nodes of a job must share
backend_parameters torchrun's and 0.2's rendezvous parameters, and a rendezvous in one line
membership/        this node in the job: session, record, lease, suspicion
embedded/, etcd/   the two stores; witness/: one more vote for even electorates
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.compat.rendezvous_api import (
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
    from torchelastic.compat import rendezvous_api

    return getattr(rendezvous_api, name)
