"""Open and close the store of a job at etcd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from torchelastic.clock import Clock
from torchelastic.config import DEFAULT_ETCD_PORT, parse_endpoints
from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.etcd.cleanup import clear_remains, start_afresh
from torchelastic.rendezvous.etcd.etcd_store import EtcdStore
from torchelastic.rendezvous.etcd.settings import EtcdSettings

logger = logging.getLogger(__name__)

#: Seconds to clear away what the last node leaves in etcd.
CLEARING = 2.0


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
        await start_afresh(store, timeout)
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
        await clear_remains(store)

    try:
        await asyncio.wait_for(leave(), CLEARING)
    except (RendezvousError, asyncio.TimeoutError) as error:
        # Not worth waiting for: whoever takes the same id next finds it, and clears it away.
        logger.debug("could not clean up the job's keys in etcd: %r", error)
