"""Which of a job's endpoints an agent takes for its own."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.ports import free_port
from torchelastic.clock import SystemClock
from torchelastic.rendezvous.embedded.own_endpoint import OwnEndpoint
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.listener import Listener


@pytest.mark.parametrize(
    ("own", "taken", "ours"), [(None, None, 0), (None, 0, 1), (1, None, 1), (1, 0, 1), (1, 1, None)]
)
def test_an_agent_listens_at_its_own_endpoint_or_at_the_first_free_one(own, taken, ours):
    """Both are of this machine; `own` and `taken` are their numbers, None for none."""
    places = [Endpoint("127.0.0.1", free_port(), "job") for _ in range(2)]
    named = None if own is None else (places[own].host, places[own].port)

    async def found() -> Endpoint | None:
        listener = Listener("job")
        made = OwnEndpoint(places, listener, clock=SystemClock(), is_host=None, own=named)
        try:
            await made.listen()
            assert listener.port
            return made.ours
        finally:
            await listener.close()

    with socket.socket() as other:
        if taken is not None:
            other.bind((places[taken].host, places[taken].port))
            other.listen()
        assert asyncio.run(found()) == (None if ours is None else places[ours])
