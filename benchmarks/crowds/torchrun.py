"""Nodes of torchrun's dynamic rendezvous over the c10d store, many in one process, a thread each.

Each has a connection and a handler of its own, made as torchrun makes them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

from benchmarks.crowds.channel import GO, LEASE, Share, tell

#: Seconds nothing may take: who measures decides when it has taken too long.
NEVER = 3600


class Crowd:
    """The handlers of this process."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._handlers: list[DynamicRendezvousHandler] = []
        self._ranks: list[int] = []
        self._lock = threading.Lock()

    def join(self) -> None:
        tell("joining", at=time.monotonic())
        for _ in range(self._share.agents):
            threading.Thread(target=self._attend).start()

    def _attend(self) -> None:
        try:
            self._join_one()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # the others would wait for ever

    def _join_one(self) -> None:
        parameters = _parameters(self._share)
        backend, store = create_backend(parameters)
        if self._share.hosts:
            tell("up")
        handler = create_handler(store, backend, parameters)
        found = handler.next_rendezvous()
        with self._lock:
            self._handlers.append(handler)  # kept: without its handler a node would be gone
            self._ranks.append(found.rank)
            if len(self._ranks) == self._share.agents:
                size = found.world_size
                tell("world", at=time.monotonic(), generation=0, size=size, ranks=self._ranks)


def _parameters(share: Share) -> RendezvousParameters:
    return RendezvousParameters(
        "c10d",
        share.endpoint,
        share.job,
        share.least,
        share.most,
        "127.0.0.1",
        is_host=str(share.hosts).lower(),
        join_timeout=NEVER,
        read_timeout=NEVER,
        # Each is a compare-and-set of the whole state: fewer are faster.
        keep_alive_interval=LEASE,
    )


def main() -> None:
    share = Share.from_command_line()
    if not share.hosts:
        gc.disable()  # as for our agents
    crowd = Crowd(share)
    tell("ready")
    for line in sys.stdin:
        if line.strip() == GO:
            crowd.join()


if __name__ == "__main__":
    main()
