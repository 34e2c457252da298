"""Open and close the store of a job at etcd.

A closed world stays there for nodes that are slow to see it, but not forever: the next job with the
same id would take it for its own end. The last node to leave removes it; if that node was killed,
the first node of the next job does. A job whose nodes were all killed is not closed: it continues,
with its generation and budget, when nodes come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from torchelastic.clock import Clock
from torchelastic.config import DEFAULT_ETCD_PORT, parse_endpoints
from torchelastic.errors import RendezvousError, RendezvousRefused
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd.settings import EtcdSettings
from torchelastic.rendezvous.store import Item
from torchelastic.rendezvous.world import PART_PREFIX, WORLD_KEY

logger = logging.getLogger(__name__)

#: Seconds for the last node to remove the job's keys.
CLEANUP_TIMEOUT = 2.0


async def open_store(
    endpoint: str,
    run_id: str,
    options: Mapping[str, str],
    *,
    timeout: float | None,
    clock: Clock,
) -> EtcdStore:
    """Connect to the store of a job at etcd.

    Waits up to `timeout` seconds (None: forever) for etcd. `options` are those of `--rdzv-conf` or
    of a rendezvous URL. Raises `RendezvousLost`, `RendezvousRefused` or `ConfigError`.
    """
    store = await EtcdStore.connect(
        parse_endpoints(endpoint, DEFAULT_ETCD_PORT),
        run_id,
        timeout=timeout,
        settings=EtcdSettings.of(options),
        clock=clock,
    )
    try:
        await remove_closed_job(store, timeout)
    except BaseException:
        await store.close()
        raise
    return store


async def close_store(store: EtcdStore) -> None:
    """Leave; the last node removes the job's keys."""
    await _clear_etcd(store)
    await store.close()


async def _clear_etcd(store: EtcdStore) -> None:
    """Close the store, and remove the job's keys if no other node is left."""

    async def leave() -> None:
        await store.end_lease()
        await remove_if_finished(store)

    try:
        await asyncio.wait_for(leave(), CLEANUP_TIMEOUT)
    except (RendezvousError, asyncio.TimeoutError) as error:
        # Not worth waiting for: the next job with this id finds the keys, and removes them.
        logger.debug("could not clean up the job's keys in etcd: %r", error)


# --- keys of a finished job ----------------------------------------------------------------------


async def remove_if_finished(store: EtcdStore) -> bool:
    """Delete the keys of a job if it is closed, or never started, and has no node."""
    listing = await store.get("")
    world = listing.items.get(WORLD_KEY)
    if world is not None and not _is_closed(world):
        return False
    modified = 0 if world is None else world.modified
    return await store.forget_job(WORLD_KEY, modified, PART_PREFIX)


async def remove_closed_job(store: EtcdStore, timeout: float | None) -> None:
    """Before joining, wait for the nodes of a closed job with this id to exit, and remove its keys.

    It is not the job to join: that one has not started yet. Waits up to `timeout` seconds (None:
    forever).
    """
    try:
        await asyncio.wait_for(_wait_for_exit(store), timeout)
    except asyncio.TimeoutError:
        raise RendezvousRefused(
            "An earlier job with the same --rdzv-id is closed, but some of its nodes are still "
            f"running after {timeout:g} s: stop them, or use another id."
        ) from None


async def _wait_for_exit(store: EtcdStore) -> None:
    while True:
        listing = await store.get("")
        world = listing.items.get(WORLD_KEY)
        if world is None or not _is_closed(world):
            return
        if await store.forget_job(WORLD_KEY, world.modified, PART_PREFIX):
            return
        logger.info("an earlier job with the same id is ending; waiting for its nodes to exit")
        async with contextlib.aclosing(store.watch("", after=listing.revision)) as changes:
            await anext(changes)


def _is_closed(world: Item) -> bool:
    return world.value.get("phase") == "closed"
