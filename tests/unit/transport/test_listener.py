"""Who is let in, and to whom they are handed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.unit.rendezvous.embedded_support import JOB, serving, story
from torchelastic.clock import SystemClock
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.embedded import bind_endpoint
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint, connect_to_host
from torchelastic.transport.link import Link
from torchelastic.transport.listener import Listener


@contextlib.asynccontextmanager
async def receiving(answer: frames.Message | None = None) -> AsyncIterator[Listener]:
    """A reception whose handler of the store answers as told, or that has no handler."""
    listener = Listener(JOB)

    def handle(link: Link, _: frames.Hello) -> None:
        assert answer is not None
        link.send(answer)
        link.close()

    if answer is not None:
        listener.serve(frames.STORE, handle)
    sockets = bind_endpoint("127.0.0.1", 0)
    assert sockets is not None
    await listener.listen(sockets)
    try:
        yield listener
    finally:
        await listener.close()


async def call(port: int, timeout: float = 10.0) -> frames.Welcome:
    link, welcome, _ = await connect_to_host(
        [Endpoint("127.0.0.1", port, JOB)], None, timeout=timeout, clock=SystemClock()
    )
    link.abort()
    return welcome


@story
async def test_a_purpose_nobody_serves_is_refused():
    async with receiving() as listener:
        with pytest.raises(RendezvousRefused, match="This agent does not serve 'store'"):
            await call(listener.port)


@story
async def test_client_of_the_wrong_agent_is_redirected_to_the_host():
    async with serving() as host:
        # The first address is nobody's: the next one is asked.
        places = ["127.0.0.1:1", f"127.0.0.1:{host.port}"]
        async with receiving(frames.Elsewhere(places, 1)) as other:
            assert (await call(other.port)).protocol == frames.PROTOCOL


@story
async def test_agents_that_name_each_other_are_asked_once_in_an_attempt():
    places: list[str] = []
    answer = frames.Elsewhere(places, 1)
    async with receiving(answer) as one, receiving(answer) as other:
        places += [f"127.0.0.1:{agent.port}" for agent in (one, other)]
        with pytest.raises(RendezvousLost, match="no node hosts the rendezvous yet"):
            await call(one.port, timeout=0.05)
