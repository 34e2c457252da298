"""The agent's HTTP endpoints: the answers by table, and metrics over real sockets."""

import asyncio
import socket
import sys

import pytest

from tests.unit.agent.cast import in_loop
from tests.unit.agent.test_script import world
from torchelastic.agent.telemetry import http_endpoints
from torchelastic.agent.telemetry.http_endpoints import (
    MetricsServer,
    health_answer,
    metrics_refusal,
    metrics_status,
    why_not_ready,
)
from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig
from torchelastic.errors import ConfigError
from torchelastic.events.log import EventLog
from torchelastic.events.types import Note, WorldFormed
from torchelastic.metrics import prometheus
from torchelastic.transport.http import Request


@pytest.mark.parametrize(
    ("seen", "leaving", "why"),
    [
        (None, False, "waiting for enough nodes"),
        (world(0, "waiting", nodes=""), False, "waiting for enough nodes"),
        (world(3, "waiting"), False, "waiting for enough nodes"),
        (world(3, "agreeing"), False, ""),
        (world(3, "running"), False, ""),
        (world(3, "pausing"), False, ""),
        (world(3, "over"), False, "generation 3 is over"),
        (world(3, "closed"), False, "generation 3 is over"),
        (world(3, "running", nodes="bc"), False, "waiting beside generation 3"),
        (world(3, "running"), True, "leaving the job"),
    ],
)
def test_node_with_place_in_generation_is_ready(seen, leaving, why):
    assert why_not_ready("a", seen, leaving=leaving) == why
    answer = health_answer(Request("GET", "/readyz"), "a", seen, leaving=leaving)
    assert answer.startswith(b"HTTP/1.1 503 " if why else b"HTTP/1.1 200 ")
    assert answer.endswith(f"\r\n\r\n{why or 'ok'}\n".encode())
    # The training is none of its business.
    alive = health_answer(Request("GET", "/livez"), "a", seen, leaving=leaving)
    assert alive.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (None, b"400"),
        (Request("GET", "/"), b"404"),
        (Request("GET", "/metrics"), b"404"),
        (Request("POST", "/livez"), b"405"),
    ],
)
def test_other_requests_to_health_port_are_rejected(request_, status):
    answer = health_answer(request_, "a", world(), leaving=False)
    assert answer.split()[1] == status


# --- metrics -------------------------------------------------------------------------------------

TOKEN = b"0123456789abcdef"


def here(method="GET", path="/metrics", host="127.0.0.1:9400"):
    return Request(method, path, fields={"host": host})


def shown(authorization, method="GET"):
    return Request(method, "/metrics", fields={"authorization": authorization})


@pytest.mark.parametrize(
    ("asked", "token", "status"),
    [
        (None, None, 400),
        (here(), None, 200),
        (here(host="localhost:9400"), None, 200),
        (here(host="evil.example", path="/"), None, 403),
        (Request("GET", "/metrics"), None, 403),
        (here(path="/"), None, 404),
        (here("POST"), None, 405),
        (Request("GET", "/"), TOKEN, 401),
        (shown("bearer 0123456789abcdef"), TOKEN, 200),
        (shown("Bearer 0123456789abcdeX"), TOKEN, 401),
        (shown("Bearer \x80"), TOKEN, 401),
        (shown("Basic 0123456789abcdef"), TOKEN, 401),
        (shown("Bearer "), TOKEN, 401),
        (shown("Bearer 0123456789abcdef", "DELETE"), TOKEN, 405),
    ],
)
def test_scraper_is_admitted_by_token_or_loopback_name(asked, token, status):
    assert metrics_status(asked, token) == status


def test_rejected_scraper_learns_how_to_ask():
    assert b"WWW-Authenticate: Bearer" in metrics_refusal(401)
    assert b"Allow: GET" in metrics_refusal(405)
    assert metrics_refusal(404).startswith(b"HTTP/1.1 404 Not Found\r\n")


# --- Metrics over real sockets, scrapers of every kind --------------------------------------------


GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def all_the_time_they_need(monkeypatch):
    """A busy machine must not look like a slow scraper."""
    monkeypatch.setattr(http_endpoints, "REQUEST_TIMEOUT", 600.0)


class Running:
    """An endpoint that is open, in the loop of a test."""

    def __init__(self, tmp_path, **config):
        self.endpoint = MetricsServer.wanted(
            LaunchConfig(**{"metrics_address": "127.0.0.1:0", **config})
        )
        self.log = EventLog(tmp_path / "events.jsonl", job="j", node="n", clock=SystemClock())
        self.said = []
        self.tasks = []

    async def __aenter__(self):
        self.endpoint.follow(self.log)
        await self.endpoint.open(self.background, self.said.append)
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.endpoint.close()
        self.log.close()

    def background(self, work, name):
        self.tasks.append(asyncio.create_task(work()))

    async def connect(self):
        port = int(self.said[0].removesuffix("/metrics").rpartition(":")[2])
        return await asyncio.open_connection("127.0.0.1", port)

    async def ask(self, request=GET):
        reader, writer = await self.connect()
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await writer.wait_closed()
        return answer


def formed(generation):
    formed = WorldFormed(nodes=["a"], size=2, store="", reason="", restarts_used=0)
    return {"event": formed, "generation": generation}


@pytest.mark.needs("prometheus_client")
@in_loop
async def test_a_scraper_sees_what_has_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(http_endpoints, "FRESH", -1.0)
    async with Running(tmp_path) as it:
        assert it.said[0].startswith("metrics at http://127.0.0.1:")
        it.log.emit(**formed(3))
        first = await it.ask()
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\ntorchelastic_generation 3.0\n" in first
        it.log.emit(**formed(4))
        assert b"\ntorchelastic_generation 4.0\n" in await it.ask()
        assert b" 403 " in await it.ask(GET.replace(b"localhost", b"evil.example"))
        assert b" 400 " in await it.ask(b"nonsense\r\n\r\n")
        assert b" 400 " in await it.ask(b"x" * 9000)


@pytest.mark.needs("prometheus_client")
@in_loop
async def test_a_port_that_is_taken_costs_the_metrics_and_not_the_job(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with Running(tmp_path, metrics_address=f"127.0.0.1:{port}") as it:
            assert it.said == [
                f"no metrics at 127.0.0.1:{port}: Address already in use; the job continues "
                "without them. Choose another --metrics-address."
            ]
            it.log.emit(Note("the job goes on"))


@pytest.mark.needs("prometheus_client")
def test_other_machines_need_a_token_and_this_one_needs_none():
    assert MetricsServer.wanted(LaunchConfig()) is None, "it is off unless asked for"
    for host in ("127.0.0.1", "localhost", "[::1]", "127.1.2.3"):
        assert MetricsServer.wanted(LaunchConfig(metrics_address=f"{host}:9400")) is not None
    sentence = "can be reached from other machines: give --metrics-to"
    for host in ("0.0.0.0", "[::]", "192.0.2.1", "node1"):
        with pytest.raises(ConfigError, match=sentence):
            MetricsServer.wanted(LaunchConfig(metrics_address=f"{host}:9400"))


@pytest.mark.needs("prometheus_client")
def test_a_file_that_has_no_token_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    for name, sentence in (
        ("short", "--metrics-token-file .*A secret must have 16 to 4096 bytes"),
        ("no", "Cannot read --metrics-token-file"),
    ):
        token = str(tmp_path / name)
        config = LaunchConfig(metrics_address="0.0.0.0:0", metrics_token_file=token)
        with pytest.raises(ConfigError, match=sentence):
            MetricsServer.wanted(config)


@pytest.mark.needs("prometheus_client")
@in_loop
async def test_without_the_library_the_job_runs_without_metrics(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with Running(tmp_path) as it:
        it.log.emit(**formed(0))
        assert it.said == [prometheus.missing()]
        assert it.tasks == []
