"""Meeting at the endpoint: the agent that can bind it hosts the store, the others connect."""

from __future__ import annotations

import asyncio

from torchelastic.clock import Clock, SystemClock
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.server import EmbeddedServer, bind_endpoint

#: Seconds between two looks at whether the endpoint is ours after all.
LOOK_AGAIN = 1.0


class _LateHost:
    """Becomes the host as soon as it can."""

    def __init__(self, host: str, port: int, job: str, clock: Clock, is_host: bool | None) -> None:
        self.port = port
        self.server: EmbeddedServer | None = None
        self._host = host
        self._job = job
        self._clock = clock
        self._is_host = is_host
        self._next_look = clock.now()

    async def look(self) -> None:
        if self.server is not None or self._clock.now() < self._next_look:
            return
        self._next_look = self._clock.now() + LOOK_AGAIN
        # In a thread: the name service may take its time.
        sockets = await asyncio.to_thread(
            bind_endpoint, self._host, self.port, is_host=self._is_host
        )
        if sockets is not None:
            self.server = EmbeddedServer(self._job, clock=self._clock)
            self.port = await self.server.start(sockets)


async def host_or_join(
    host: str,
    port: int,
    job: str,
    *,
    timeout: float | None,
    clock: Clock | None = None,
    is_host: bool | None = None,
) -> tuple[EmbeddedStore, EmbeddedServer | None]:
    """A connection to the store of a job, and the store itself if it is hosted here.

    While nobody answers, it is asked again whether this node is the host: in a cluster that is
    starting, a machine's name may come to mean that machine only after its agent has started.
    Raises as `EmbeddedStore.connect` does.
    """
    clock = clock or SystemClock()
    hosting = _LateHost(host, port, job, clock, is_host)
    await hosting.look()
    try:
        store = await EmbeddedStore.connect(
            host, hosting.port, job, timeout=timeout, clock=clock, meanwhile=hosting.look
        )
    except BaseException:
        if hosting.server is not None:
            await hosting.server.close()
        raise
    return store, hosting.server
