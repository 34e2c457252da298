"""The page's server: real sockets, readers of every kind, pictures made by the test."""

import asyncio
import contextlib
import functools
import json
import logging
import socket
import zlib

import pytest

from torchelastic.dashboard import page_server
from torchelastic.dashboard.access import AccessControl
from torchelastic.dashboard.job_state import JobState
from torchelastic.dashboard.page_server import Server

TOKEN = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A busy machine must not look like a slow reader, and no test waits for a picture."""
    monkeypatch.setattr(page_server, "REQUEST_TIMEOUT", 600.0)
    monkeypatch.setattr(page_server, "LAST", 600.0)
    monkeypatch.setattr(page_server, "PERIOD", 0.0)
    monkeypatch.setattr(page_server, "SHARE", 1.0)


class Source:
    """A job that stands where the test puts it."""

    def __init__(self, padding=""):
        self.step = 0
        self.live = True
        self.asked = 0
        self.padding = padding
        self.broken = False
        self.made = JobState.of(1, {"step": 0, "padding": padding}, live=True)

    def look(self):
        self.asked += 1
        if self.broken:
            raise ValueError("broken")
        if (told := json.loads(self.made.body))["step"] != self.step:
            told["step"] = self.step
            self.made = JobState.of(self.made.number + 1, told, live=self.live)
        return self.made


class Running:
    def __init__(self, source=None):
        self.source = source or Source()
        self.server = Server(self.source, AccessControl(None))

    async def __aenter__(self):
        _, self.port = await self.server.open("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        await self.server.close()

    async def ask(self, path="/", *fields, method="GET"):
        """The whole answer."""
        reader, writer = await self.send(path, *fields, method=method)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            await close(writer)

    async def send(self, path, *fields, method="GET"):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [f"{method} {path} HTTP/1.1", f"Host: localhost:{self.port}", *fields, "", ""]
        writer.write("\r\n".join(lines).encode())
        return reader, writer

    @contextlib.asynccontextmanager
    async def tab(self, *fields):
        """A stream, after its head."""
        reader, writer = await self.send("/events", *fields)
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            yield reader
        finally:
            await close(writer)


async def close(writer):
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def step_of(reader):
    """The step in the next picture."""
    frame = await asyncio.wait_for(reader.readuntil(b"\n\n"), 60)
    assert frame.startswith(b"event: picture\nid: ")
    return json.loads(frame.partition(b"data: ")[2])["step"]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def in_a_loop(test):
    @functools.wraps(test)
    def limited(*args, **given):
        asyncio.run(asyncio.wait_for(test(*args, **given), 100))

    return limited


@in_a_loop
async def test_a_tab_sees_the_picture_at_once_and_then_every_change():
    async with Running() as it, it.tab() as tab:
        assert await step_of(tab) == 0
        for step in range(1, 5):
            it.source.step = step
            assert await step_of(tab) == step


@in_a_loop
async def test_a_browser_gets_it_packed():
    async with Running() as it, it.tab("Accept-Encoding: gzip, deflate") as tab:
        unpacker, told = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), b""
        for step in range(3):
            it.source.step = step
            while b'"step":%d' % step not in told:
                told += unpacker.decompress(await asyncio.wait_for(tab.read(65536), 60))
        assert told.endswith(b"\n\n")


@in_a_loop
async def test_the_page_its_files_and_a_picture():
    async with Running() as it:
        assert b"<!doctype html>" in (await it.ask("/")).lower()
        head, _, body = (await it.ask("/picture.json")).partition(b"\r\n\r\n")
        assert b"Content-Type: application/json" in head
        assert json.loads(body)["step"] == 0
        assert b" 404 " in await it.ask("/server.py")
        assert b" 405 " in await it.ask("/", method="PUT")
        assert b" 403 " in await it.ask("/", "Host: evil.example")
        head = await it.ask("/events", method="HEAD")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream")
        assert head.endswith(b"\r\n\r\n")


@in_a_loop
async def test_a_picture_is_made_once_for_all_and_only_while_somebody_looks(monkeypatch):
    monkeypatch.setattr(page_server, "PERIOD", 600.0)
    monkeypatch.setattr(page_server, "LONGEST", 600.0)
    async with Running() as it, contextlib.AsyncExitStack() as stack:
        assert it.source.asked == 0
        tabs = [await stack.enter_async_context(it.tab()) for _ in range(30)]
        assert [await step_of(tab) for tab in tabs] == [0] * 30
        assert b'"step":0' in await it.ask("/picture.json")
        assert it.source.asked == 1


@in_a_loop
async def test_viewer_that_stops_reading_blocks_no_other_and_skips_states():
    """Pictures that no kernel buffer holds: the next is sent when the last was taken, no other."""
    source = Source(padding="x" * (2 << 20))
    async with Running(source) as it:
        deaf = never_reads(it.port)
        async with it.tab() as tab:
            tab._limit = 8 << 20
            for step in range(6):
                source.step = step
                assert await step_of(tab) == step
        viewers = it.server._viewers.values()
        await until(lambda: any(viewer.streams and viewer.shown == 0 for viewer in viewers))
        steps = await asyncio.to_thread(read_steps, deaf, 5)
        assert len(steps) <= 2, "it was sent the first and the last, and none between"
        deaf.close()


def never_reads(port):
    """A tab whose kernel takes little for it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.connect(("127.0.0.1", port))
    connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection


def read_steps(connection, last):
    """The steps of the pictures up to one."""
    told, steps = b"", []
    connection.settimeout(60)
    while last not in steps:
        told += connection.recv(1 << 20)
        *whole, told = told.split(b"\n\n")
        steps += [json.loads(frame.partition(b"data: ")[2])["step"] for frame in whole if frame]
    return steps


@in_a_loop
async def test_viewer_that_reads_nothing_for_long_is_disconnected(monkeypatch):
    monkeypatch.setattr(page_server, "REQUEST_TIMEOUT", 0.2)
    async with Running(Source(padding="x" * (2 << 20))) as it:
        deaf = never_reads(it.port)
        await until(lambda: it.server._viewers)
        await until(lambda: not it.server._viewers)
        deaf.close()


@in_a_loop
async def test_silence_is_filled(monkeypatch):
    monkeypatch.setattr(page_server, "KEEP_ALIVE", 0.01)
    async with Running() as it, it.tab() as tab:
        while await asyncio.wait_for(tab.readuntil(b"\n\n"), 60) != b": still here\n\n":
            pass


@in_a_loop
async def test_there_is_room_for_so_many_streams_and_the_page_loads_anyway(monkeypatch):
    monkeypatch.setattr(page_server, "MOST_STREAMS", 3)
    monkeypatch.setattr(page_server, "MOST", 5)
    async with Running() as it, contextlib.AsyncExitStack() as stack:
        tabs = [await stack.enter_async_context(it.tab()) for _ in range(3)]
        silent = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(2)]
        await until(lambda: len(it.server._viewers) == 5)
        full = await it.ask("/events")
        assert b" 503 " in full
        assert b"close some tabs" in full
        assert await asyncio.wait_for(silent[0][0].read(), 60) == b"", "the oldest gave way"
        assert b" 200 " in await it.ask("/")
        it.source.step = 1
        for tab in tabs:
            while await step_of(tab) != 1:
                pass
        for _, writer in silent:
            await close(writer)


@in_a_loop
async def test_a_picture_that_cannot_be_made_is_reported_once_and_the_next_is_shown(caplog):
    caplog.set_level(logging.ERROR)
    async with Running() as it:
        it.source.broken = True
        assert b" 503 " in await it.ask("/picture.json")
        assert b" 503 " in await it.ask("/picture.json")
        it.source.broken = False
        async with it.tab() as tab:
            assert await step_of(tab) == 0
    assert caplog.text.count("cannot read the state of the job") == 1


@in_a_loop
async def test_those_who_look_see_the_end():
    async with Running() as it, it.tab() as tab, it.tab() as other:
        assert [await step_of(tab), await step_of(other)] == [0, 0]
        it.server._watched.clear()  # nothing is made by itself from here on
        async with it.server._looking:
            it.source.step, it.source.live = 9, False
        await it.server.last_words()
        await it.server.close()
        assert [await step_of(tab), await step_of(other)] == [9, 9]
        assert await tab.read() == b""


@in_a_loop
async def test_viewer_that_does_not_read_does_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(page_server, "LAST", 0.05)
    async with Running(Source(padding="x" * (2 << 20))) as it:
        deaf = never_reads(it.port)
        await until(lambda: any(viewer.streams for viewer in it.server._viewers.values()))
        await it.server.last_words()
        deaf.close()


# --- where it is ---------------------------------------------------------------------------------


def serve(address, token=None):
    """The lines it has printed before it is asked to end."""
    said = []
    ours, theirs = socket.socketpair()

    def say(url):
        said.append(url)
        theirs.close()

    with ours, theirs:
        asyncio.run(page_server.serve(Source(), address, token, say, until=ours.fileno()))
    return said[0]


def test_page_listens_on_default_port_or_a_free_one(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(page_server, "PAGE_PORT", taken.getsockname()[1])
        with pytest.raises(OSError, match="Address already in use"):
            serve(f"127.0.0.1:{page_server.PAGE_PORT}")  # a port that was asked for is no other
        url = serve("auto")
    assert url.startswith("http://127.0.0.1:")
    assert url.endswith("/")
    assert not url.endswith(f":{page_server.PAGE_PORT}/")


def test_a_token_is_made_up_where_one_is_needed_and_a_given_one_is_used_everywhere():
    assert "token" not in serve("127.0.0.1:0") + serve("localhost:0")
    for address in ("127.0.0.1:0", "0.0.0.0:0"):
        assert serve(address, TOKEN).endswith("/?token=0123456789abcdef")
    urls = {serve("0.0.0.0:0") for _ in range(2)}
    tokens = {url.partition("/?token=")[2] for url in urls}
    assert len(tokens) == 2
    assert all(len(token) >= 32 for token in tokens)
    assert all(url.startswith(f"http://{socket.gethostname()}:") for url in urls)
