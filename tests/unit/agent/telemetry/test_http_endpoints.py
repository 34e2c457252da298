"""The answers of the agent's HTTP endpoints, by table: health probes, and who gets the metrics."""

import pytest

from tests.unit.agent.lifecycle.test_script import world
from torchelastic.agent.telemetry.http_endpoints import (
    health_answer,
    metrics_refusal,
    metrics_status,
    why_not_ready,
)
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
