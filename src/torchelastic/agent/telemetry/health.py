"""The answers to health probes (`--health-port`). Pure: a request and the node's state in.

`/livez` shows only that the agent's loop runs: restarting agents whose training is slow or waits
would end jobs that recover by themselves. `/readyz` shows that this node has a place in the current
generation.
"""

from __future__ import annotations

from torchelastic.rendezvous.world import World
from torchelastic.transport import http
from torchelastic.transport.http import Request

LIVE, READY = "/livez", "/readyz"


def response(request: Request | None, node: str, world: World | None, *, leaving: bool) -> bytes:
    """Return the whole answer. Anyone may ask: it says nothing that helps an attacker."""
    if request is None:
        return http.response(400)
    if request.path not in (LIVE, READY):
        return http.response(404)
    if request.method != "GET":
        return http.response(405, fields={"Allow": "GET"})
    why = why_not_ready(node, world, leaving=leaving) if request.path == READY else ""
    return http.response(503 if why else 200, (why or "ok").encode() + b"\n")


def why_not_ready(node: str, world: World | None, *, leaving: bool) -> str:
    """Return why this node has no place in the current generation; empty: it has."""
    if leaving:
        return "leaving the job"
    if world is None or world.phase == "waiting":
        return "waiting for enough nodes"
    if world.place(node) is None:
        return f"waiting beside generation {world.generation}"
    if not world.is_under_way:
        return f"generation {world.generation} is over"
    return ""
