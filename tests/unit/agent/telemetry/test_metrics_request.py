"""What a scraper gets: decided from what it asks for."""

import pytest

from torchelastic.agent.telemetry.metrics_request import refusal, status_for
from torchelastic.transport.http import Request

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
def test_who_gets_what(asked, token, status):
    assert status_for(asked, token) == status


def test_who_gets_nothing_learns_how_to_ask():
    assert b"WWW-Authenticate: Bearer" in refusal(401)
    assert b"Allow: GET" in refusal(405)
    assert refusal(404).startswith(b"HTTP/1.1 404 Not Found\r\n")
