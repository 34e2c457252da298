"""Opening the store of a job, whichever rendezvous it is, and leaving it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from torchelastic.clock import Clock
from torchelastic.config import DEFAULT_ETCD_PORT, ETCD_BACKENDS, parse_endpoint, parse_endpoints
from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.embedded.joining import host_or_join
from torchelastic.rendezvous.embedded.server import EmbeddedServer
from torchelastic.rendezvous.etcd import EtcdStore, clear_remains, start_afresh
from torchelastic.rendezvous.etcd_settings import EtcdSettings
from torchelastic.rendezvous.parameters import check_backend
from torchelastic.rendezvous.store import Store

logger = logging.getLogger(__name__)

#: Seconds to clear away what the last node leaves in etcd.
CLEARING = 2.0


async def open_store(
    backend: str,
    endpoint: str,
    run_id: str,
    options: Mapping[str, str],
    *,
    timeout: float | None,
    clock: Clock,
    is_host: bool | None = None,
) -> tuple[Store, EmbeddedServer | None]:
    """A connection to the store of a job, and the store itself where it is hosted here.

    Waits up to `timeout` seconds (None: for ever) for the store to be there. `options` are those
    of `--rdzv-conf` or of a rendezvous URL. Raises `RendezvousLost`, `RendezvousRefused` or
    `ConfigError`.
    """
    check_backend(backend, options)
    if backend in ETCD_BACKENDS:
        return await _open_etcd(endpoint, run_id, options, timeout, clock), None
    host, port = parse_endpoint(endpoint)
    return await host_or_join(host, port, run_id, timeout=timeout, clock=clock, is_host=is_host)


async def close_store(store: Store, server: EmbeddedServer | None, *, others: float = 0.0) -> None:
    """Leave; a host gives the other nodes up to `others` seconds to go first."""
    if isinstance(store, EtcdStore):
        await _clear_etcd(store)
    await store.close()
    if server is not None:
        if others:
            await server.wait_alone(others)
        await server.close()


async def _open_etcd(
    endpoint: str, run_id: str, options: Mapping[str, str], timeout: float | None, clock: Clock
) -> EtcdStore:
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


async def _clear_etcd(store: EtcdStore) -> None:
    """Go, and clear away what is left if nobody else is there."""

    async def leave() -> None:
        await store.end_lease()
        await clear_remains(store)

    try:
        await asyncio.wait_for(leave(), CLEARING)
    except (RendezvousError, asyncio.TimeoutError) as error:
        # Not worth waiting for: whoever takes the same id next finds it, and clears it away.
        logger.debug("what the job leaves in etcd was not looked at: %r", error)
