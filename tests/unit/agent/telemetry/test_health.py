"""What health probes are told, by table."""

import pytest

from tests.unit.agent.lifecycle.test_script import world
from torchelastic.agent.telemetry import health
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
def test_a_node_is_ready_while_it_has_a_place_in_the_generation(seen, leaving, why):
    assert health.why_not_ready("a", seen, leaving=leaving) == why
    answer = health.response(Request("GET", "/readyz"), "a", seen, leaving=leaving)
    assert answer.startswith(b"HTTP/1.1 503 " if why else b"HTTP/1.1 200 ")
    assert answer.endswith(f"\r\n\r\n{why or 'ok'}\n".encode())
    # The training is none of its business.
    alive = health.response(Request("GET", "/livez"), "a", seen, leaving=leaving)
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
def test_nothing_else_is_answered(request_, status):
    answer = health.response(request_, "a", world(), leaving=False)
    assert answer.split()[1] == status
