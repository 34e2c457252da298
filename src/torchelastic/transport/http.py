"""A minimal HTTP/1.1: requests in, answers out. Pure.

Read-only, one answer per connection: request bodies are not read, and only streams are kept open.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Most bytes of a request.
LONGEST = 8192

#: The reason phrase of each status.
WORDS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Request:
    """A request; the names of its fields are in lower case."""

    method: str
    path: str
    query: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str:
        """The value of a field; empty if it is missing."""
        return self.fields.get(name, "")


def parse(head: bytes) -> Request | None:
    """Parse a request; None if it is invalid."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip()
        # A field given twice becomes a list, which no field that matters here accepts.
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    path, _, query = words[1].partition("?")
    return Request(words[0], path, query, fields)


def bears(authorization: str, token: bytes) -> bool:
    """Return whether this is `Bearer` and the token, in constant time."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and same(given.strip(), token)


def same(given: str, secret: bytes) -> bool:
    """Return whether two secrets are equal, in constant time."""
    return hmac.compare_digest(given.encode("latin-1", errors="replace"), secret)


def is_loopback(host: str) -> bool:
    """Return whether a `Host` field names this machine by a loopback address or name.

    A foreign web page, in a browser on this machine, may use its own name that resolves to
    127.0.0.1: a server without a token has to check this.

    >>> is_loopback("127.0.0.1:8080"), is_loopback("[::1]"), is_loopback("evil.example:8080")
    (True, True, False)
    """
    name = re.sub(r":[0-9]*$", "", host).lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def head(status: int, fields: Mapping[str, str]) -> bytes:
    """The beginning of an answer; the connection ends after it."""
    lines = [f"HTTP/1.1 {status} {WORDS[status]}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def response(
    status: int,
    body: bytes = b"",
    content_type: str = "text/plain",
    fields: Mapping[str, str] | None = None,
) -> bytes:
    """The whole answer."""
    body = body or f"{WORDS[status]}\n".encode()
    told = {
        "Content-Type": content_type,
        "Content-Length": str(len(body)),
        "X-Content-Type-Options": "nosniff",
        **(fields or {}),
    }
    return head(status, told) + body
