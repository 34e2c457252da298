"""A node of ours under a launcher of somebody else's: `torchrun --rdzv-backend=torchelastic`.

guest_state.py  what such a node makes of the worlds it hears of, pure
guest.py        the node: a thread that is a member of the job, while the launcher has the workers
stores.py       what the launchers say to each other in the store of a generation
parameters.py   what the launcher was told about the rendezvous, as a job of ours, pure
handler.py      torch's `RendezvousHandler` over a guest
old_handler.py  that of release 0.2

torch finds this package by its entry point in the group `torchrun.handlers`. It runs in torchrun's
process, so it may import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: what makes the handler of a job."""
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    # Here, not above: torchrun calls every entry point, whichever backend it is to use.
    from torchelastic.torchrun.handler import create_handler

    return create_handler(params)
