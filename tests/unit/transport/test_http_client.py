"""The HTTP that etcd speaks, and what else may answer at a port."""

import asyncio
import contextlib

import pytest

from tests.unit.rendezvous.embedded_support import run, within
from torchelastic.errors import WireError
from torchelastic.transport.http_client import (
    Head,
    HttpConnection,
    fetch,
    parse_chunk_size,
    parse_head,
)


@contextlib.asynccontextmanager
async def talking_to(*answers):
    """A connection to a server that gives these answers, one for each request, and then ends."""

    async def serve(reader, writer):
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            for part in answer if isinstance(answer, tuple) else (answer,):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = await HttpConnection.open("localhost", port)
    try:
        yield connection
    finally:
        connection.abort()
        server.close()
        await server.wait_closed()


def posted(*answers):
    async def story():
        async with talking_to(*answers) as connection:
            for _ in answers:
                results.append(await within(5, connection.post("/p", b"{}", {"X": "y"})))
            usable.append(connection.is_usable)

    results, usable = [], []
    run(story())
    return results, usable[0]


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN,
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\nA: b\r\n\r\n",
        tuple(bytes([byte]) for byte in PLAIN),
    ],
)
def test_a_connection_is_used_again(answer):
    results, _ = posted(answer, PLAIN)
    assert results[0][1] in (b"abc", b"")
    assert results[1] == (200, b"abc")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
    ],
)
def test_a_connection_that_ends_is_not(answer):
    assert posted(answer) == ([(200, b"abc")], False)


def test_lines_come_one_by_one_however_they_are_cut():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = (
        b"4\r\none\n\r\n",
        b"2\r\ntw\r\n",
        b"b\r\no\nthree\nfou\r\n",
        b"2\r\nr\n\r\n0\r\n\r\n",
    )

    async def story():
        async with talking_to((head, *chunks)) as connection:
            assert await within(5, connection.begin("/p", b"{}", {})) == 200
            lines = [await within(5, connection.next_line()) for _ in range(4)]
            assert lines == [b"one", b"two", b"three", b"four"]
            with pytest.raises(EOFError):
                await within(5, connection.next_line())
            assert not connection.is_usable

    run(story())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", EOFError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", EOFError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab", EOFError),
        (b"SSH-2.0-OpenSSH\r\n\r\n", WireError),
        (b"\x15\x03\x01\x00\x02\x02\x16\n\n", WireError),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200, WireError),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000, WireError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", WireError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", WireError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", WireError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n", WireError),
    ],
)
def test_http_client_refuses_an_invalid_answer(answer, error):
    with pytest.raises(error):
        posted(answer)


def test_heads():
    assert parse_head(b"HTTP/1.1 200 OK", [b"content-length: 3"]) == Head(200, False, 3, False)
    head = parse_head(b"HTTP/1.1 200", [b"Transfer-Encoding:chunked", b"X:"])
    assert head == Head(200, True, None, False)
    assert parse_chunk_size(b"1F ; a=b") == 31


@pytest.mark.parametrize("ticks", range(6))
def test_a_request_that_is_cancelled_when_its_answer_comes_is_cancelled(ticks, monkeypatch):
    async def story():
        refused = asyncio.Event()

        async def refuse(*_):
            await refused.wait()
            raise ConnectionRefusedError

        monkeypatch.setattr(HttpConnection, "open", refuse)
        asking = asyncio.ensure_future(fetch("GET", "http://localhost", {}, 60.0))
        await asyncio.sleep(0.01)
        refused.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        is_cancelled = asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled() == is_cancelled
        assert is_cancelled or isinstance(asking.exception(), ConnectionRefusedError)

    run(story())
