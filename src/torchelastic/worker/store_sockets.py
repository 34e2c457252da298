"""Keep-alive probes on the connections to torch's store.

A worker that waits for a key sends nothing. If a firewall has reset the other end of its connection
meanwhile, it waits for as long as a collective may take, ten minutes or more, although the store
answers everybody else. With probes, the store's machine answers that there is no such connection,
and the wait fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Seconds between two probes, and without any answer until the connection is given up. The agents
#: notice earlier that a machine is silent.
PROBE_INTERVAL, SILENCE_LIMIT = 5, 60
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_INTERVAL),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_INTERVAL),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_LIMIT // PROBE_INTERVAL),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_LIMIT * 1000),
)
#: Seconds after which a connection is probed that is still being made: it waits for an answer, too.
_CONNECT_TIME = 1.0
_MODULE = "torch.distributed.rendezvous"


def connect(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a TCPStore, `make(host, port, ...)`, whose connections are probed."""
    port = kwargs["port"] if "port" in kwargs else args[1]
    made = threading.Event()

    def probe_meanwhile() -> None:
        while not made.wait(_CONNECT_TIME):
            _probe(port)

    with contextlib.suppress(RuntimeError):  # no thread is left: probed when it is made
        threading.Thread(target=probe_meanwhile, name="store-sockets", daemon=True).start()
    try:
        return make(*args, **kwargs)
    finally:
        made.set()
        _probe(port)


def _probe(port: int) -> None:
    for connection in _connections(port):
        for level, option, value in _OPTIONS:
            connection.setsockopt(level, option, value)


def _connections(port: int) -> Iterator[socket.socket]:
    """This process's connections to this port, as duplicates: torch does not expose its own."""
    for name in os.listdir("/proc/self/fd"):
        with (
            contextlib.suppress(OSError),  # closed meanwhile, or not a connected socket
            socket.socket(fileno=_duplicate(int(name))) as found,
        ):
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and found.getpeername()[1] == port:
                yield found


def _duplicate(descriptor: int) -> int:
    """Duplicate a socket; raises `OSError` if it is none."""
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        raise OSError("not a socket")
    return os.dup(descriptor)


# --- in a worker ---------------------------------------------------------------------------------

_is_decided = True


def attach() -> None:
    """Probe the store's connections once torch is imported (`look`)."""
    global _is_decided
    _is_decided = False
    look()


def look() -> None:
    """Check if torch's rendezvous is imported. Called at every import, in any thread."""
    global _is_decided
    if _is_decided:
        return
    module: Any = sys.modules.get(_MODULE)
    if hasattr(module, "TCPStore"):
        _is_decided = True
        store_class = module.TCPStore

        def TCPStore(*args: Any, **kwargs: Any) -> Any:
            return connect(store_class, *args, **kwargs)

        module.TCPStore = TCPStore
