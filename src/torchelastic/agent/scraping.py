"""What a scraper asks for, and whether it gets that. Pure: bytes in, a decision out."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

#: Bytes that a request may have before its end.
LONGEST = 8192
PATH = "/metrics"

#: What is said beside a status.
_WORDS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
}


@dataclass(frozen=True)
class Request:
    """The part of a request that matters here."""

    method: str
    path: str
    accept: str = ""
    authorization: str = ""


def parse(head: bytes) -> Request | None:
    """What is asked for; None where it makes no sense."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.lower()] = value.strip()
    path = words[1].partition("?")[0]
    return Request(words[0], path, fields.get("accept", ""), fields.get("authorization", ""))


def status_for(request: Request | None, token: bytes | None) -> int:
    """What to answer. Who is not let in learns nothing, not even what there is."""
    if request is None:
        return 400
    if token is not None and not _proves(request.authorization, token):
        return 401
    if request.path != PATH:
        return 404
    return 200 if request.method == "GET" else 405


def _proves(authorization: str, token: bytes) -> bool:
    scheme, _, given = authorization.partition(" ")
    told = given.strip().encode("latin-1", errors="replace")
    # How long it takes tells nothing of the token.
    return scheme.lower() == "bearer" and hmac.compare_digest(told, token)


def response(status: int, body: bytes = b"", content_type: str = "text/plain") -> bytes:
    """The whole answer; the connection ends after it."""
    body = body or f"{_WORDS[status]}\n".encode()
    lines = [
        f"HTTP/1.1 {status} {_WORDS[status]}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if status == 401:
        lines.append("WWW-Authenticate: Bearer")
    if status == 405:
        lines.append("Allow: GET")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
