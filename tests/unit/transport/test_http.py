"""Requests and answers as bytes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.unit.rendezvous.cast import run, within
from torchelastic.errors import WireError
from torchelastic.transport import http
from torchelastic.transport.http import Request, bears, is_loopback, parse, response, same
from torchelastic.transport.http_client import (
    Head,
    HttpConnection,
    fetch,
    parse_chunk_size,
    parse_head,
)

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("head", "request_"),
    [
        (b"GET /metrics HTTP/1.1", Request("GET", "/metrics")),
        (
            b"GET /metrics?x=1&y HTTP/1.0\r\nHost: a",
            Request("GET", "/metrics", "x=1&y", {"host": "a"}),
        ),
        (
            b"GET / HTTP/1.1\r\nACCEPT: text/plain\r\nAuthorization:  Bearer x ",
            Request("GET", "/", "", {"accept": "text/plain", "authorization": "Bearer x"}),
        ),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhost: b", Request("GET", "/", "", {"host": "a, b"})),
        (b"", None),
        (b"GET /metrics", None),
        (b"GET /metrics HTTP/2", None),
        (b"GET  /metrics HTTP/1.1", None),
        (b"\xff\x00\x16\x03\x01 TLS", None),
        (b"\x80 \x81 HTTP/1.1", Request("\x80", "\x81")),
    ],
)
def test_requests(head, request_):
    assert parse(head) == request_


def test_a_field_that_is_not_there_is_empty():
    assert Request("GET", "/").get("host") == ""


def test_http_bearer_token_is_compared():
    assert bears("Bearer 0123456789abcdef", TOKEN)
    assert bears("bearer  0123456789abcdef ", TOKEN)
    wrong = ["Bearer 0123456789abcdeX", "Bearer \x80", "Basic 0123456789abcdef", ""]
    assert [each for each in wrong if bears(each, TOKEN)] == []
    assert not same("\u2028" * 16, TOKEN)  # characters that no byte has


def test_answers():
    page = response(200, b"x 1\n", "text/plain; version=1", {"Cache-Control": "no-store"})
    head, _, body = page.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=1\r\n")
    assert b"Content-Length: 4" in head
    assert b"Cache-Control: no-store" in head
    assert head.endswith(b"Connection: close")
    assert body == b"x 1\n"
    for status, words in http.WORDS.items():
        assert response(status).startswith(f"HTTP/1.1 {status} {words}\r\n".encode())
    assert http.LONGEST >= 4096


OURS = ["localhost", "LOCALHOST:8080", "page.localhost:1", "127.0.0.1", "127.0.0.1:29480"]
OURS += ["127.8.8.8:1", "[::1]", "[::1]:29480"]
OTHERS = ["", ":80", "evil.example", "evil.example:29480", "localhost.evil.example"]
OTHERS += ["127.0.0.1.evil.example", "evil.example, localhost", "localhost, evil.example"]
OTHERS += ["10.0.0.1:29480", "0.0.0.0", "[::]", "localhost@evil.example"]


def test_only_the_loopbacks_own_names_are_its_names():
    assert [host for host in OURS + OTHERS if is_loopback(host)] == OURS


# --- http client ----------------------------------------------------------------------------------

# The HTTP that etcd speaks, and what else may answer at a port.


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
