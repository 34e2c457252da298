"""`--metrics-address`: serve Prometheus metrics over HTTP.

Scrapers must not slow the job down: the page is made in a thread, at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from torchelastic.agent.telemetry import metrics_request
from torchelastic.agent.telemetry.short_answers import BACKLOG, Background, ShortAnswers
from torchelastic.config import LaunchConfig, format_endpoint, parse_endpoint
from torchelastic.errors import ConfigError
from torchelastic.events.log import EventLog
from torchelastic.events.record import Record
from torchelastic.metrics import prometheus
from torchelastic.metrics.job_metrics import JobMetrics
from torchelastic.transport import http, http_socket
from torchelastic.transport.addresses import loopback_addresses
from torchelastic.transport.credentials import read_secret

logger = logging.getLogger(__name__)

#: Seconds for which a page is reused.
FRESH = 1.0


class MetricsServer:
    """Create it first, so that a bad configuration is rejected early; then open it."""

    def __init__(self, config: LaunchConfig) -> None:
        self._host, self._port = parse_endpoint(config.metrics_address)
        self._token = _load_token(config)
        self._metrics: JobMetrics | None = JobMetrics()
        self._server = ShortAnswers(self._response)
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
        self._server.open(listener, background, "metrics")
        host, port = listener.getsockname()[:2]
        say(f"metrics at http://{format_endpoint(host, port)}{metrics_request.PATH}")

    async def close(self) -> None:
        await self._server.close()

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
