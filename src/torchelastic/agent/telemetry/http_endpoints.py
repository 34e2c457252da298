"""The HTTP endpoints of an agent: metrics (`--metrics-address`) and health (`--health-port`).

Clients must not slow the job down. So connections are accepted one by one with a pause in between,
few are open at a time and none for long, and the newest replaces the oldest. A page of metrics is
made in a thread, at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from torchelastic.agent.lifecycle.machine import State
from torchelastic.config import LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.errors import ConfigError
from torchelastic.events.log import EventLog
from torchelastic.events.record import Record
from torchelastic.metrics import prometheus
from torchelastic.metrics.job_metrics import JobMetrics
from torchelastic.rendezvous.world import World
from torchelastic.side_tasks import TaskSet, Work
from torchelastic.transport import http, http_socket
from torchelastic.transport.addresses import listen_everywhere, loopback_addresses
from torchelastic.transport.credentials import read_secret
from torchelastic.transport.http import Request

logger = logging.getLogger(__name__)

#: Connections at a time, and those the kernel queues.
MOST_CONNECTIONS, BACKLOG = 8, 8
#: Seconds between two connections, and for one connection.
GAP, REQUEST_TIMEOUT = 0.02, 5.0
#: Seconds for which a page is reused.
FRESH = 1.0
#: The paths.
METRICS, LIVE, READY = "/metrics", "/livez", "/readyz"

Background = Callable[[Work, str], object]


class HttpEndpoint(ABC):
    """An HTTP server for short answers."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._talks = TaskSet()

    @abstractmethod
    async def answer(self, request: Request | None) -> bytes:
        """Return the whole answer to a request; None: it was not HTTP."""

    def serve(self, listener: socket.socket, background: Background, name: str) -> None:
        """Serve at a socket that listens, in a side task of this name."""
        self._listener = listener
        background(partial(self._accept, listener), name)

    async def close(self) -> None:
        await self._talks.close()
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in http_socket.accepted(listener):
            if len(self._talks) >= MOST_CONNECTIONS:
                next(iter(self._talks)).cancel()  # the oldest
            self._talks.start(self._talk(connection), "request")
            await asyncio.sleep(GAP)

    async def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                await asyncio.wait_for(self._answer(connection), REQUEST_TIMEOUT)
            except (OSError, asyncio.TimeoutError) as error:
                logger.debug("a client disconnected: %r", error)
            except Exception:  # nothing awaits this task
                logger.exception("Could not answer a request.")

    async def _answer(self, connection: socket.socket) -> None:
        head = await http_socket.receive_head(connection)
        if head is None:
            return
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, await self.answer(http.parse(head)))
        connection.shutdown(socket.SHUT_WR)


# --- metrics -------------------------------------------------------------------------------------


class MetricsServer(HttpEndpoint):
    """Create it first, so that a bad configuration is rejected early; then open it."""

    def __init__(self, config: LaunchConfig) -> None:
        super().__init__()
        self._host, self._port = parse_endpoint(config.metrics_address)
        self._token = _load_token(config)
        self._metrics: JobMetrics | None = JobMetrics()
        self._pages: dict[str, tuple[float, bytes]] = {}
        self._rendering = asyncio.Lock()

    @classmethod
    def wanted(cls, config: LaunchConfig) -> MetricsServer | None:
        """None if it is not configured. Raises `ConfigError` if it is not possible."""
        return cls(config) if config.metrics_address else None

    def follow(self, log: EventLog) -> None:
        """Count events from now on."""
        log.listen(self._happened)

    def _happened(self, record: Record) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.feed(record)
        except Exception:  # a bug in counting must not end the job
            logger.exception("Counting metrics failed; metrics are no longer served.")
            self._metrics = None

    async def open(self, background: Background, say: Callable[[str], None]) -> None:
        """Listen. If the port is taken or a library is missing, the job runs without metrics."""
        if missing := prometheus.missing():
            say(missing)
            return
        address = (loopback_addresses(self._host)[:1] or (self._host,))[0]
        try:
            listener = await http_socket.listen(address, self._port, BACKLOG)
        except OSError as error:
            where = format_endpoint(self._host, self._port)
            say(
                f"no metrics at {where}: {error.strerror or error}; the job continues without "
                "them. Choose another --metrics-address."
            )
            return
        self.serve(listener, background, "metrics")
        host, port = listener.getsockname()[:2]
        say(f"metrics at http://{format_endpoint(host, port)}{METRICS}")

    async def answer(self, request: Request | None) -> bytes:
        status = metrics_status(request, self._token)
        if status != 200 or request is None:
            return metrics_refusal(status)
        return await self._page(prometheus.chosen(request.get("accept")))

    async def _page(self, chosen: str) -> bytes:
        async with self._rendering:
            made, page = self._pages.get(chosen, (float("-inf"), b""))
            if time.monotonic() - made > FRESH:
                families = self._metrics.families(time.time()) if self._metrics else []
                content_type, body = await asyncio.to_thread(prometheus.render, families, chosen)
                page = http.response(200, body, content_type)
                self._pages[chosen] = (time.monotonic(), page)
            return page


_FIELDS = {401: {"WWW-Authenticate": "Bearer"}, 405: {"Allow": "GET"}}


def metrics_status(request: Request | None, token: bytes | None) -> int:
    """The HTTP status of the answer. A rejected client does not even learn which paths exist.

    Without a token only this machine may ask, and only by a loopback name, as for the dashboard.
    """
    if request is None:
        return 400
    if token is None and not http.is_loopback(request.get("host")):
        return 403
    if token is not None and not http.bears(request.get("authorization"), token):
        return 401
    if request.path != METRICS:
        return 404
    return 200 if request.method == "GET" else 405


def metrics_refusal(status: int) -> bytes:
    """The complete answer to a rejected request."""
    return http.response(status, fields=_FIELDS.get(status))


def _load_token(config: LaunchConfig) -> bytes | None:
    """The token a scraper must send; None on a loopback address."""
    path = config.metrics_token_file
    if path is None:
        if not loopback_addresses(parse_endpoint(config.metrics_address)[0]):
            raise ConfigError(
                f"--metrics-address {config.metrics_address} can be reached from other machines: "
                "give --metrics-token-file, a file with the token scrapers must send, or a "
                "loopback address."
            )
        return None
    return read_secret(path, "--metrics-token-file").reveal()


# --- health --------------------------------------------------------------------------------------


class HealthServer(HttpEndpoint):
    """Answers the probes of a platform such as Kubernetes.

    It listens on all addresses of the node, because a kubelet asks at the pod's. The agent's own
    event loop answers, so an answer shows that it turns.
    """

    def __init__(self, port: int, node: str, state: Callable[[], State]) -> None:
        super().__init__()
        self._port, self._node, self._state = port, node, state

    @classmethod
    def wanted(
        cls, config: LaunchConfig, node: str, state: Callable[[], State]
    ) -> HealthServer | None:
        """None if it is not configured."""
        return cls(config.health_port, node, state) if config.health_port is not None else None

    async def open(self, background: Background, say: Callable[[str], None]) -> None:
        """Listen. If the port is taken, probes fail, and the platform says so."""
        try:
            listener = listen_everywhere(self._port)
        except OSError as error:
            say(f"no health probes at port {self._port}: {error.strerror or error}")
            return
        self.serve(listener, background, "health")
        say(f"health probes at port {listener.getsockname()[1]}")

    async def answer(self, request: Request | None) -> bytes:
        state = self._state()
        leaving = bool(state.leaving) or state.is_terminal
        return health_answer(request, self._node, state.world, leaving=leaving)


def health_answer(
    request: Request | None, node: str, world: World | None, *, leaving: bool
) -> bytes:
    """Return the answer to a probe. Anyone may ask: it says nothing that helps an attacker.

    `/livez` shows only that the agent's loop runs: restarting agents whose training is slow or
    waits would end jobs that recover by themselves. `/readyz` shows that this node has a place in
    the current generation.
    """
    if request is None:
        return http.response(400)
    if request.path not in (LIVE, READY):
        return http.response(404)
    if request.method != "GET":
        return http.response(405, fields={"Allow": "GET"})
    why = why_not_ready(node, world, leaving=leaving) if request.path == READY else ""
    return http.response(503 if why else 200, (why or "ok").encode() + b"\n")


def why_not_ready(node: str, world: World | None, *, leaving: bool) -> str:
    """Return why this node has no place in the current generation; empty: it has."""
    if leaving:
        return "leaving the job"
    if world is None or world.phase == "waiting":
        return "waiting for enough nodes"
    if world.place(node) is None:
        return f"waiting beside generation {world.generation}"
    if not world.is_under_way:
        return f"generation {world.generation} is over"
    return ""
