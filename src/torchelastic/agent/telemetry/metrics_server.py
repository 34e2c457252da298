"""`--metrics-address`: serve Prometheus metrics over HTTP.

Scrapers must not slow the job down. So connections are taken one by one with a pause in between,
few are open at a time and none for long, the newest replaces the oldest, and the page is made in a
thread, at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial

from torchelastic.agent.telemetry import metrics_request
from torchelastic.config import LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.errors import ConfigError
from torchelastic.events.log import EventLog
from torchelastic.events.record import Record
from torchelastic.metrics import prometheus
from torchelastic.metrics.job_metrics import JobMetrics
from torchelastic.side_tasks import Work
from torchelastic.transport import http, http_socket
from torchelastic.transport.addresses import loopback_addresses
from torchelastic.transport.credentials import read_secret

logger = logging.getLogger(__name__)

#: Connections at a time, and those the kernel queues.
MOST_CONNECTIONS, BACKLOG = 8, 8
#: Seconds between two connections, for one connection, and for which a page is reused.
GAP, PATIENCE, FRESH = 0.02, 5.0, 1.0

Background = Callable[[Work, str], object]


class MetricsServer:
    """Create it first, so that a bad configuration is rejected early; then open it."""

    def __init__(self, config: LaunchConfig) -> None:
        self._host, self._port = parse_endpoint(config.metrics_address)
        self._token = _load_token(config)
        self._metrics: JobMetrics | None = JobMetrics()
        self._listeners: list[socket.socket] = []
        self._talks: dict[asyncio.Task[None], None] = {}
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
        try:
            self._listeners = await self._listen()
        except OSError as error:
            where = format_endpoint(self._host, self._port)
            say(f"no metrics at {where}: {error.strerror or error}")
            return
        for listener in self._listeners:
            background(partial(self._accept, listener), "metrics")
        host, port = self._listeners[0].getsockname()[:2]
        say(f"metrics at http://{format_endpoint(host, port)}{metrics_request.PATH}")

    async def close(self) -> None:
        for talk in list(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _listen(self) -> list[socket.socket]:
        addresses = loopback_addresses(self._host)[:1] or (self._host,)
        return [await http_socket.listen(addresses[0], self._port, BACKLOG)]

    # --- scrapers --------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in http_socket.accepted(listener):
            if len(self._talks) >= MOST_CONNECTIONS:
                next(iter(self._talks)).cancel()  # the oldest
            talk = asyncio.create_task(self._talk(connection), name="scraper")
            self._talks[talk] = None
            talk.add_done_callback(lambda done: self._talks.pop(done))
            await asyncio.sleep(GAP)

    async def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                await asyncio.wait_for(self._answer(connection), PATIENCE)
            except (OSError, asyncio.TimeoutError) as error:
                logger.debug("a scraper disconnected: %r", error)
            except Exception:  # nothing awaits this task
                logger.exception("Could not answer a scraper.")

    async def _answer(self, connection: socket.socket) -> None:
        head = await http_socket.receive_head(connection)
        if head is None:
            return
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, await self._response(http.parse(head)))
        connection.shutdown(socket.SHUT_WR)

    async def _response(self, request: http.Request | None) -> bytes:
        status = metrics_request.status_for(request, self._token)
        if status != 200 or request is None:
            return metrics_request.refusal(status)
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
