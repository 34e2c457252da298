"""0.2's `utils`: ports and stores for programs without a rendezvous, and loggers."""

from __future__ import annotations

import logging
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from torchelastic import env
from torchelastic.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

__all__ = ["create_c10d_store", "get_free_port", "get_logger", "get_socket_with_port"]


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> TCPStore:
    """Create a store for `world_size` processes; by default the server waits for the others.

    Without a port the server takes a free one. `retries` and `use_libuv` are ignored: no retry is
    needed, and torch chooses how to serve.
    """
    import torch.distributed as dist  # most users of this module want a port

    if server_port == -1 and world_size > 1:
        raise ConfigError("server_port is required if world_size is more than 1.")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host_name=server_addr,
        port=0 if server_port == -1 else server_port,
        world_size=world_size,
        is_master=is_server,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=wait_for_workers,
    )


def get_free_port() -> int:
    """Return a free port of this machine; another process may take it at any time."""
    with get_socket_with_port() as sock:
        return int(sock.getsockname()[1])


def get_socket_with_port() -> socket.socket:
    """Return a socket that listens on a free port of this machine."""
    try:
        return socket.create_server(("localhost", 0), backlog=1)
    except OSError as error:
        raise RuntimeError(f"localhost has no free port: {error.strerror}.") from error


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger of this name, or of the calling module; the default level is WARNING."""
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(env.get("LOGLEVEL", "WARNING").upper())
    return logger
