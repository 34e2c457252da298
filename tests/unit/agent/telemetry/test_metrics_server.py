"""The agent's metrics over HTTP: real sockets, scrapers of every kind."""

import asyncio
import socket
import sys

import pytest

from tests.unit.agent.support import in_loop
from torchelastic.agent.telemetry import http_endpoints
from torchelastic.agent.telemetry.http_endpoints import MetricsServer
from torchelastic.clock import SystemClock
from torchelastic.config import LaunchConfig
from torchelastic.errors import ConfigError
from torchelastic.events.log import EventLog
from torchelastic.events.types import Note, WorldFormed
from torchelastic.metrics import prometheus

pytestmark = pytest.mark.needs("prometheus_client")

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


def world(generation):
    formed = WorldFormed(nodes=["a"], size=2, store="", reason="", restarts_used=0)
    return {"event": formed, "generation": generation}


@in_loop
async def test_a_scraper_sees_what_has_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(http_endpoints, "FRESH", -1.0)
    async with Running(tmp_path) as it:
        assert it.said[0].startswith("metrics at http://127.0.0.1:")
        it.log.emit(**world(3))
        first = await it.ask()
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\ntorchelastic_generation 3.0\n" in first
        it.log.emit(**world(4))
        assert b"\ntorchelastic_generation 4.0\n" in await it.ask()
        assert b" 403 " in await it.ask(GET.replace(b"localhost", b"evil.example"))
        assert b" 400 " in await it.ask(b"nonsense\r\n\r\n")
        assert b" 400 " in await it.ask(b"x" * 9000)


@in_loop
async def test_a_page_is_made_once_however_often_it_is_asked_for(tmp_path, monkeypatch):
    made = []
    render = http_endpoints.prometheus.render
    monkeypatch.setattr(
        http_endpoints.prometheus, "render", lambda *args: made.append(1) or render(*args)
    )
    monkeypatch.setattr(http_endpoints, "FRESH", 600.0)
    async with Running(tmp_path) as it:
        assert len(set(await asyncio.gather(*(it.ask() for _ in range(5))))) == 1
    assert len(made) == 1


@in_loop
async def test_silent_connections_give_way_to_new_scraper(tmp_path):
    """Many more silent connections than there is room for."""
    async with Running(tmp_path) as it:
        silent = [await it.connect() for _ in range(http_endpoints.MOST_CONNECTIONS)]
        while len(it.endpoint._talks) < http_endpoints.MOST_CONNECTIONS:
            await asyncio.sleep(0.001)
        assert b" 200 " in await it.ask()
        assert await silent[0][0].read() == b"", "the oldest was shown out"
        for _, writer in silent:
            writer.close()


@in_loop
async def test_slow_scraper_is_disconnected(tmp_path, monkeypatch):
    monkeypatch.setattr(http_endpoints, "REQUEST_TIMEOUT", 0.05)
    async with Running(tmp_path) as it:
        reader, writer = await it.connect()
        writer.write(GET[:20])
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


@in_loop
async def test_the_token_is_asked_for(tmp_path):
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    async with Running(tmp_path, metrics_token_file=str(path)) as it:
        assert b" 401 " in await it.ask()
        shown = GET[:-2] + b"Authorization: Bearer 0123456789abcdef\r\n\r\n"
        assert b" 200 " in await it.ask(shown)


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


@in_loop
async def test_a_mistake_in_the_counting_does_not_end_the_job(tmp_path, caplog, monkeypatch):
    async with Running(tmp_path) as it:
        monkeypatch.setattr(it.endpoint._metrics, "feed", lambda record: 1 / 0)
        it.log.emit(Note("one"))
        it.log.emit(Note("two"))
        assert b" 200 " in await it.ask()
    assert caplog.text.count("no longer served") == 1


def test_other_machines_need_a_token_and_this_one_needs_none():
    assert MetricsServer.wanted(LaunchConfig()) is None, "it is off unless asked for"
    for host in ("127.0.0.1", "localhost", "[::1]", "127.1.2.3"):
        assert MetricsServer.wanted(LaunchConfig(metrics_address=f"{host}:9400")) is not None
    sentence = "can be reached from other machines: give --metrics-to"
    for host in ("0.0.0.0", "[::]", "192.0.2.1", "node1"):
        with pytest.raises(ConfigError, match=sentence):
            MetricsServer.wanted(LaunchConfig(metrics_address=f"{host}:9400"))


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


@in_loop
async def test_without_the_library_the_job_runs_without_metrics(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with Running(tmp_path) as it:
        it.log.emit(**world(0))
        assert it.said == [prometheus.missing()]
        assert it.tasks == []
