"""Requests and answers as bytes."""

import pytest

from torchelastic.transport import http
from torchelastic.transport.http import Request, bears, is_loopback, parse, response, same

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
