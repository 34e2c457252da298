"""Virtual loops and the network between them: what TCP does to an application, in no time."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.virtual_loop import Scheduler
from tests.simulation.virtual_network import ProcessLoop, VirtualMachine, VirtualNetwork

PORT = 7


class Peer(asyncio.BufferedProtocol):
    """Notes what happens to one end of a connection."""

    def __init__(self) -> None:
        self.room = bytearray(4)
        self.heard = b""
        self.ended: list[Exception | None] = []

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return self.room

    def buffer_updated(self, nbytes):
        self.heard += bytes(self.room[:nbytes])

    def connection_lost(self, exc):
        self.ended.append(exc)


class Pair:
    """Two processes on two machines, and a connection from the first to the second."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.network = VirtualNetwork(self.scheduler, latency=0.01)
        machines = [VirtualMachine(self.network, address) for address in ("10.0.0.1", "10.0.0.2")]
        self.loops = [ProcessLoop(self.scheduler, machine) for machine in machines]
        self.near, self.far, self.error = Peer(), Peer(), None
        listener = machines[1].listen(2, "0.0.0.0", PORT)
        self.loops[1].create_task(
            self.loops[1].create_server(lambda: self.far, sock=listener), name="listen"
        )

    def connect(self) -> None:
        self.loops[0].create_task(self._connect(), name="connect")
        self.scheduler.run_until(self.scheduler.now + 0.1)

    async def _connect(self) -> None:
        try:
            await self.loops[0].create_connection(lambda: self.near, "10.0.0.2", PORT)
        except OSError as error:
            self.error = error

    def cut(self, *, reset: bool = False) -> None:
        self.network.cut("10.0.0.1", "10.0.0.2", reset=reset)

    def wait(self, seconds: float) -> None:
        self.scheduler.run_until(self.scheduler.now + seconds)


@pytest.fixture
def pair():
    made = Pair()
    made.connect()
    assert made.near.transport is not None
    yield made
    made.scheduler.close(made.loops)


def test_bytes_arrive_in_order_after_the_latency(pair):
    pair.near.transport.write(b"hello, ")
    pair.near.transport.write(b"world")
    pair.wait(0.005)
    assert pair.far.heard == b""
    pair.wait(0.01)
    assert pair.far.heard == b"hello, world"


def test_dropped_bytes_arrive_when_the_cut_is_mended(pair):
    pair.cut()
    pair.near.transport.write(b"late")
    pair.wait(5.0)
    assert pair.far.heard == b""
    pair.network.mend("10.0.0.1", "10.0.0.2")
    pair.wait(4.0)
    assert (pair.far.heard, pair.near.ended, pair.far.ended) == (b"late", [], [])


def test_the_kernel_gives_a_connection_up_in_the_end(pair):
    pair.cut()
    pair.wait(16.0)
    assert [type(error) for error in pair.near.ended + pair.far.ended] == [TimeoutError] * 2


def test_a_firewall_that_resets_ends_a_connection_at_once(pair):
    pair.cut(reset=True)
    pair.near.transport.write(b"x")
    pair.wait(0.1)
    assert [type(error) for error in pair.near.ended] == [ConnectionResetError]
    assert pair.far.ended == []


def test_a_frozen_process_hears_everything_when_it_is_thawed(pair):
    pair.loops[1].freeze()
    pair.near.transport.write(b"wait")
    pair.wait(60.0)
    assert (pair.far.heard, pair.near.ended) == (b"", [])
    pair.loops[1].thaw()
    pair.wait(0.1)
    assert pair.far.heard == b"wait"


def test_the_peers_of_a_killed_process_see_it(pair):
    pair.loops[1].kill()
    pair.wait(0.1)
    assert (pair.near.ended, pair.far.ended) == ([None], [])
    pair.connect()
    assert isinstance(pair.error, ConnectionRefusedError)


def test_a_connection_through_a_cut_is_made_when_it_is_mended():
    pair = Pair()
    pair.cut()
    pair.connect()
    pair.wait(2.0)
    assert pair.error is None
    assert not hasattr(pair.near, "transport")
    pair.network.mend("10.0.0.1", "10.0.0.2")
    pair.wait(3.0)
    assert pair.near.transport is not None
    pair.scheduler.close(pair.loops)


def test_virtual_hours_take_no_time():
    scheduler = Scheduler()
    loop = ProcessLoop(scheduler, VirtualMachine(VirtualNetwork(scheduler), "10.0.0.1"))
    slept: list[float] = []

    async def sleep() -> None:
        for _ in range(3):
            await asyncio.sleep(3600.0)
            slept.append(asyncio.get_running_loop().time())
        slept.append(await asyncio.to_thread(lambda: 1.0))

    loop.create_task(sleep())
    scheduler.run_until(4 * 3600.0)
    assert slept == [3600.0, 7200.0, 10800.0, 1.0]
