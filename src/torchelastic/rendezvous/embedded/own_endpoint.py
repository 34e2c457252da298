"""The address where an agent listens: its own endpoint, if there is one, or another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from torchelastic.clock import Clock
from torchelastic.transport.addresses import bind_endpoint, is_own_endpoint, listen_beside
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.listener import Listener

#: Seconds between two looks at whether an endpoint is ours after all.
LOOK_AGAIN = 1.0


class OwnEndpoint:
    """The endpoints of a job, one of which may be ours."""

    def __init__(
        self,
        places: Sequence[Endpoint],
        listener: Listener,
        *,
        clock: Clock,
        is_host: bool | None,
        own: tuple[str, int] | None = None,
    ) -> None:
        """`own`: ours, where several agents of a job share an address."""
        self.places = list(places)
        #: The one that this agent listens at.
        self.ours: Endpoint | None = None
        self._listener = listener
        self._clock = clock
        self._is_host, self._own = is_host, own
        self._next_look = 0.0

    async def listen(self, known: int = 0) -> None:
        """Listen at the own endpoint or elsewhere: at the port where others know this node from its
        last agent, if there was one and the port is free."""
        await self.look()
        if not self._listener.port:
            first = self.places[0]
            await self._listener.listen(listen_beside(first.host, first.port, known))

    async def look(self, *, again: bool = False) -> None:
        """Listen at the endpoint that is this machine's, if there is one and its port is free.

        Called while no host answers: in a starting cluster, a machine's name may resolve to it only
        after its agent has started. Checks once in a while, or if `again`.
        """
        if self.ours is not None or (self._clock.now() < self._next_look and not again):
            return
        self._next_look = self._clock.now() + LOOK_AGAIN
        for index, place in enumerate(self.places):
            if not await self._is_own(place):
                continue
            if not self._listener.port or self._listener.port != place.port:
                sockets = bind_endpoint(place.host, place.port, is_host=True)
                if sockets is None:
                    continue
                place = replace(place, port=await self._listener.listen(sockets))
            self.ours = self.places[index] = place
            return

    async def _is_own(self, place: Endpoint) -> bool:
        if self._own is not None:
            return self._own == (place.host, place.port)
        if self._is_host is not None:
            return self._is_host
        # In a thread: the name service may take its time.
        return await asyncio.to_thread(is_own_endpoint, place.host)
