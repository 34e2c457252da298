"""Agent process: how the nodes of a job agree on a world. The names here are those of 0.2.

leader             turns member records into worlds; one node leads at a time
script_round       decides what comes next, pure; in_process_round: the same for resident workers
round_state        what the leader knows, pure
forming            chooses the next world, or says what the job waits for; pure
restart_policy     whether a job continues after a failure, pure; root_cause: who failed first
held_out           nodes that keep failing; suspects: which ones; unconnected: pairs of nodes; pure
majority           votes: who may host the store next, and who may continue; pure
world, store       what travels through the store, and the five verbs it needs
job_settings       what all nodes of a job must have in common
backend_parameters torchrun's and 0.2's rendezvous parameters; url: a rendezvous in one line
membership/        this node in the job: session, record, lease, failover, suspicion
embedded/, etcd/   the two stores; witness/: one more vote for even electorates
"""

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
