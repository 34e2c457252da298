"""What a scraper gets: decided from the bytes it sends."""

import pytest

from torchelastic.agent import scraping
from torchelastic.agent.scraping import Request, parse, response, status_for

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("head", "request_"),
    [
        (b"GET /metrics HTTP/1.1", Request("GET", "/metrics")),
        (b"GET /metrics?x=1 HTTP/1.0\r\nHost: a", Request("GET", "/metrics")),
        (
            b"GET / HTTP/1.1\r\nACCEPT: text/plain\r\nAuthorization:  Bearer x ",
            Request("GET", "/", "text/plain", "Bearer x"),
        ),
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


@pytest.mark.parametrize(
    ("asked", "token", "status"),
    [
        (None, None, 400),
        (Request("GET", "/metrics"), None, 200),
        (Request("GET", "/"), None, 404),
        (Request("POST", "/metrics"), None, 405),
        (Request("GET", "/metrics"), TOKEN, 401),
        (Request("GET", "/"), TOKEN, 401),
        (Request("GET", "/metrics", "", "Bearer 0123456789abcdef"), TOKEN, 200),
        (Request("GET", "/metrics", "", "bearer 0123456789abcdef"), TOKEN, 200),
        (Request("GET", "/metrics", "", "Bearer 0123456789abcdeX"), TOKEN, 401),
        (Request("GET", "/metrics", "", "Bearer \x80"), TOKEN, 401),
        (Request("GET", "/metrics", "", "Basic 0123456789abcdef"), TOKEN, 401),
        (Request("GET", "/metrics", "", "Bearer "), TOKEN, 401),
        (Request("DELETE", "/metrics", "", "Bearer 0123456789abcdef"), TOKEN, 405),
    ],
)
def test_who_gets_what(asked, token, status):
    assert status_for(asked, token) == status


def test_answers():
    page = response(200, b"x 1\n", "text/plain; version=1")
    head, _, body = page.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=1\r\n")
    assert b"Content-Length: 4" in head
    assert body == b"x 1\n"
    assert b"WWW-Authenticate: Bearer" in response(401)
    assert b"Allow: GET" in response(405)
    for status in (400, 404):
        assert response(status).startswith(f"HTTP/1.1 {status} ".encode())
    assert scraping.LONGEST >= 4096
