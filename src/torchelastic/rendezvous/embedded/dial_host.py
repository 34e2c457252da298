"""Connect a node to the host of the store: where it must be, or at addresses that others named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from torchelastic.clock import Clock
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.election import LONGEST_PAUSE
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.own_endpoint import OwnEndpoint

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
