"""Decide whether a scraper gets the metrics. Pure: a request in, a status out."""

from __future__ import annotations

from torchelastic.transport import http
from torchelastic.transport.http import Request

PATH = "/metrics"

_FIELDS = {401: {"WWW-Authenticate": "Bearer"}, 405: {"Allow": "GET"}}


def status_for(request: Request | None, token: bytes | None) -> int:
    """The HTTP status of the answer. A rejected client does not even learn which paths exist.

    Without a token only this machine may ask, and only by a loopback name, as for the dashboard.
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
    """The complete answer to a rejected request."""
    return http.response(status, fields=_FIELDS.get(status))
