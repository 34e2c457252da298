"""Whether a scraper gets what it asks for. Pure: a request in, a decision out."""

from __future__ import annotations

from torchelastic.transport import http
from torchelastic.transport.http import Request

PATH = "/metrics"

_FIELDS = {401: {"WWW-Authenticate": "Bearer"}, 405: {"Allow": "GET"}}


def status_for(request: Request | None, token: bytes | None) -> int:
    """What to answer. Who is not let in learns nothing, not even what there is.

    Without a token this machine alone is let in, and called by its own name: as at the page's door.
    """
    if request is None:
        return 400
    if token is None and not http.is_loopback(request.get("host")):
        return 403
    if token is not None and not http.bears(request.get("authorization"), token):
        return 401
    if request.path != PATH:
        return 404
    return 200 if request.method == "GET" else 405


def refusal(status: int) -> bytes:
    """The whole answer to who does not get it."""
    return http.response(status, fields=_FIELDS.get(status))
