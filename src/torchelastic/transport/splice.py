"""Connect workers that look for torch's store at the agent's port to the current one.

torchrun's static rendezvous has torch's store at `--master-port`, and scripts use that port
directly: `init_process_group("tcp://localhost:29500")`. Here an agent listens there, and every
generation has its own store: a client that uses torch's protocol is connected to that one.
"""

from __future__ import annotations

import asyncio

from torchelastic.config import parse_endpoint
from torchelastic.transport.link import notice_lost_peers

#: The first bytes of a client of torch's store: a query of type 0 and a number that names the
#: protocol. As the length of a frame of ours, they would be far beyond the limit of a greeting.
TORCH_STORE = b"\x00\xce\xf7\x85\x3c"


class _End(asyncio.Protocol):
    """One of two connections: everything it receives is sent to the other one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End = self
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        notice_lost_peers(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)
        if self.other.transport is not None:
            self.other.transport.close()


def splice(near: asyncio.Transport, first: bytes, address: str) -> asyncio.Task[None]:
    """Connect a transport, of which `first` has been read, with the store at `address`.

    The task ends with the connections; they end when it is cancelled.
    """
    ours, theirs = _End(), _End()
    ours.other, theirs.other = theirs, ours
    ours.transport = near
    near.pause_reading()
    near.set_protocol(ours)
    return asyncio.create_task(_run(ours, theirs, first, address), name="a worker at its store")


async def _run(ours: _End, theirs: _End, first: bytes, address: str) -> None:
    assert ours.transport is not None
    try:
        host, port = parse_endpoint(address)
        await asyncio.get_running_loop().create_connection(lambda: theirs, host, port)
        ours.data_received(first)
        ours.transport.resume_reading()
        await asyncio.wait({ours.over, theirs.over})
    except OSError:
        pass  # the store is gone: its client learns that from the end of the connection
    finally:
        for end in (ours, theirs):
            if end.transport is not None:
                end.transport.abort()
