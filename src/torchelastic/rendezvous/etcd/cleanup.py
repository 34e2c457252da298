"""Removal of a finished job's keys from etcd: a closed world.

The world stays for nodes that are slow to see it, but not forever: the next job with the same id
would take it for its own end. The last node to leave removes it; if that one was killed, the first
node of the next job does. A job whose nodes were all killed is not closed: it continues, generation
and budget included, when nodes come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from torchelastic.errors import RendezvousRefused
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.store import Item
from torchelastic.rendezvous.world import PART_PREFIX, WORLD_KEY

log = logging.getLogger(__name__)


async def clear_remains(store: EtcdStore) -> bool:
    """Delete the keys of a job if it is closed, or never started, and has no node."""
    listing = await store.get("")
    world = listing.items.get(WORLD_KEY)
    if world is not None and not _is_closed(world):
        return False
    modified = 0 if world is None else world.modified
    return await store.forget_job(WORLD_KEY, modified, PART_PREFIX)


async def start_afresh(store: EtcdStore, timeout: float | None) -> None:
    """Before joining, wait for a closed job with this id to end, and remove it.

    It is not the job we want to join: that one has not started yet. Its nodes are about to go;
    waits for them up to `timeout` seconds (None: forever).
    """
    try:
        await asyncio.wait_for(_see_off(store), timeout)
    except asyncio.TimeoutError:
        raise RendezvousRefused(
            "An earlier job with the same --rdzv-id is closed, but some of its nodes are still "
            f"running after {timeout:g} s: stop them, or use another id."
        ) from None


async def _see_off(store: EtcdStore) -> None:
    while True:
        listing = await store.get("")
        world = listing.items.get(WORLD_KEY)
        if world is None or not _is_closed(world):
            return
        if await store.forget_job(WORLD_KEY, world.modified, PART_PREFIX):
            return
        log.info("an earlier job with the same id is ending; waiting for its nodes to exit")
        async with contextlib.aclosing(store.watch("", after=listing.revision)) as changes:
            await anext(changes)


def _is_closed(world: Item) -> bool:
    return world.value.get("phase") == "closed"
