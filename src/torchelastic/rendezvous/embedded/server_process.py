"""The process around a `RendezvousService`: its sockets, its signals, its end."""

from __future__ import annotations

import asyncio
import signal

from torchelastic.config import LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.errors import ConfigError
from torchelastic.rendezvous.embedded.service import RendezvousService
from torchelastic.transport import credentials
from torchelastic.transport.addresses import bind_endpoint

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(config: LaunchConfig, endpoint: str, state_file: str | None) -> None:
    """Serve until a signal asks to stop.

    `config` has the credentials, and the job's id if only one job is served. Raises `ConfigError`
    for invalid settings, `RendezvousLost` when the state file fails.
    """
    asyncio.run(_run(config, endpoint, state_file))


async def _run(config: LaunchConfig, endpoint: str, state_file: str | None) -> None:
    stop = asyncio.Event()
    for signum in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    host, port = parse_endpoint(endpoint)
    shown = credentials.load(config)
    # First: clients of the last server already have a port to wait at.
    sockets = bind_endpoint(host, port, is_host=True)
    if sockets is None:
        raise ConfigError(
            f"Cannot serve at {endpoint}: another process uses the port, or this machine does "
            "not have that address. Choose another --endpoint."
        )
    try:
        service = RendezvousService(
            job=config.run_id or None,
            credentials=shown,
            state_file=state_file,
            on_failure=stop.set,
        )
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    port = await service.listen(sockets)
    jobs = f"job '{config.run_id}'" if config.run_id else "any job"
    # For users, and for scripts that asked for port 0.
    print(f"Serving the rendezvous of {jobs} at {format_endpoint(host, port)}.", flush=True)
    await stop.wait()
    await service.close()
    if service.failure is not None:
        raise service.failure
