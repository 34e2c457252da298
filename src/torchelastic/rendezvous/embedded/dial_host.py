"""The endpoints of the job, one of which may be this node's own, and connections to the host of the
store: at an endpoint, or at addresses that others named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace

from torchelastic.clock import Clock
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.election import LONGEST_PAUSE
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


logger = logging.getLogger(__name__)

#: Seconds for a host that others named to answer. For the host that this node has just given up:
#: this many times the search pause, because peers may name it shortly before they give it up too.
HOST_TIMEOUT, RETRY_FACTOR = 1.0, 5.0
#: Whether a store is that of a run which has ended, and not to be joined.
IsOver = Callable[[EmbeddedStore], Awaitable[bool]]


class _EndpointIsOurs(Exception):
    """The name of the endpoint now resolves to this machine."""


async def wait_for_host(
    endpoints: OwnEndpoint,
    known: Iterable[Endpoint],
    *,
    term: int,
    timeout: float | None,
    clock: Clock,
    is_over: IsOver,
    say: Callable[[str], None],
) -> EmbeddedStore | None:
    """Wait for a host at the endpoints, or at agents that may know it; None if an endpoint turns
    out to be this machine's."""

    others = [*known]

    async def look() -> None:
        await endpoints.look()
        if endpoints.ours is not None:
            raise _EndpointIsOurs

    try:
        while True:
            store = await EmbeddedStore.connect(
                [*endpoints.places, *others],
                term=term,
                timeout=timeout,
                clock=clock,
                meanwhile=look,
                say=say,
            )
            if not await is_over(store):
                return store
            await asyncio.sleep(LONGEST_PAUSE)
            await look()
    except _EndpointIsOurs:
        return None


async def dial(
    places: Iterable[Endpoint],
    *,
    given_up: Collection[str],
    pause: float,
    term: int,
    lease: tuple[str, float],
    clock: Clock,
    is_over: IsOver,
) -> EmbeddedStore | None:
    """Connect to the first of these places that is a host; None if none is. `given_up` are the
    addresses of the last host, `pause` the seconds between two searches."""
    retry = min(RETRY_FACTOR * pause, HOST_TIMEOUT)
    for place in places:
        try:
            store = await EmbeddedStore.connect(
                [place],
                term=term,
                timeout=retry if str(place) in given_up else HOST_TIMEOUT,
                lease=lease,
                clock=clock,
            )
        except (RendezvousLost, RendezvousRefused) as error:
            logger.debug("no host at %s: %s", place, error)
            continue
        if not await is_over(store):
            return store
    return None
