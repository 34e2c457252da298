"""torchrun's process: our rendezvous for stock torchrun (`--rdzv-backend=torchelastic`).

launcher_node        a member of the job in a thread, while torchrun runs the workers; its store
launcher_node_state  its decisions: when to enter a world, and when to stop; pure
torchrun_flags       torchrun's rendezvous parameters as a LaunchConfig, pure
torch_handler        torch's `RendezvousHandler`; release02_handler: that of 0.2

torch finds this package by its entry point in the group `torchrun.handlers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: return the function that creates the handler of a job."""
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    # Here, not above: torchrun calls every entry point, whichever backend it is to use.
    from torchelastic.compat.torchrun.torch_handler import create_handler

    return create_handler(params)
