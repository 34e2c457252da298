"""Torch's own store, found at the port of a static rendezvous."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tests.ports import free_port
from tests.unit.agent.support import in_loop
from tests.unit.rendezvous.cast import story, within
from tests.unit.transport.listener_support import stranger
from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig
from torchelastic.rendezvous.membership.backend import meet
from torchelastic.rendezvous.world import WORLD_KEY
from torchelastic.transport.listener import TORCH_STORE

PATIENCE = 20.0


def one_node(backend: str) -> LaunchConfig:
    endpoint = f"127.0.0.1:{free_port()}"
    return LaunchConfig(run_id="job", rdzv_backend=backend, rdzv_endpoint=endpoint)


def client(port: int) -> TCPStore:
    patience = timedelta(seconds=PATIENCE)
    return TCPStore("127.0.0.1", port, is_master=False, timeout=patience)


@in_loop  # torch keeps descriptors open for as long as it likes
async def test_a_script_that_has_the_port_written_down_meets_the_store_of_its_generation():
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in "12"]
    config = one_node("static")
    node = await meet(config, "a", SystemClock(), print)
    try:
        for generation, store in enumerate(stores):
            world = {"generation": generation, "store": f"127.0.0.1:{store.port}"}
            await node.store.put(WORLD_KEY, world)
            port = int(config.rdzv_endpoint.rpartition(":")[2])
            worker = await within(PATIENCE, asyncio.to_thread(client, port))
            value = f"{generation}" + "x" * 1_000_000
            await asyncio.to_thread(worker.set, "key", value)
            # In a thread: this loop is between the two.
            for end in (worker, store):
                found = await within(PATIENCE, asyncio.to_thread(end.get, "key"))
                assert found == value.encode()
    finally:
        await node.close(0.0)


@pytest.mark.parametrize("backend", ["static", "c10d"])
@story
async def test_without_a_world_or_elsewhere_it_is_a_stranger(backend):
    config = one_node(backend)
    node = await meet(config, "a", SystemClock(), print)
    try:
        if backend == "c10d":
            await node.store.put(WORLD_KEY, {"store": config.rdzv_endpoint})
        async with stranger(int(config.rdzv_endpoint.rpartition(":")[2])) as torch:
            torch.say(TORCH_STORE)
            assert await torch.end() == b""
    finally:
        await node.close(0.0)
