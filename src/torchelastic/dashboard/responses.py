"""The response to each request, and the files of the page. None contains users' text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from torchelastic.dashboard.access import AccessControl
from torchelastic.dashboard.job_state import JobState
from torchelastic.transport import http
from torchelastic.transport.http import Request

#: Headers of every response: the page may load only its own files, and cannot be framed.
FIELDS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

_HELP = {
    400: "Invalid request.",
    401: "Token required: open the address that `torchelastic` printed when it started.",
    403: "Only browsers on this machine may open this page: use localhost, or set a token.",
    404: "Not found.",
    405: "This page is read-only.",
    503: "Too many viewers of this job: close some tabs.",
}
_MORE = {
    401: {"WWW-Authenticate": "Bearer"},
    405: {"Allow": "GET, HEAD"},
    503: {"Retry-After": "10"},
}


@dataclass(frozen=True)
class Reply:
    """A complete response."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    fields: Mapping[str, str] | None = None

    def to_bytes(self, *, body: bool = True) -> bytes:
        """Encode the response; without `body` for a HEAD request."""
        whole = http.response(
            self.status, self.body, self.content_type, {**FIELDS, **(self.fields or {})}
        )
        return whole if body else whole[: whole.index(b"\r\n\r\n") + 4]


#: The response to a HEAD request for the stream.
STREAM = Reply(200, b"", "text/event-stream")

#: Requests for the state of the job: once, or as a stream.
Wanted = Literal["state", "stream"]
_WANTED: dict[str, Wanted] = {"/picture.json": "state", "/events": "stream"}


def answer(
    request: Request | None, access: AccessControl, files: Mapping[str, StaticFile]
) -> Reply | Wanted:
    """Return the response to a request. A refused client learns nothing, not even what exists."""
    if request is None:
        return refusal(400)
    if request.get("sec-fetch-site") == "cross-site" and request.path != "/":
        return refusal(403)  # a script of another site would at least use up a connection
    match access.judge(request):
        case "wrong host":
            return refusal(403)
        case "no token":
            return refusal(401)
        case "has token":
            return _welcome(request, access)
    if request.method not in ("GET", "HEAD"):
        return refusal(405)
    if request.path in files:
        file = files[request.path]
        return Reply(200, file.body, file.content_type)
    return _WANTED.get(request.path) or refusal(404)


def refusal(status: int) -> Reply:
    """Return a refusal that says what to do instead."""
    return Reply(status, f"{_HELP[status]}\n".encode(), fields=_MORE.get(status))


def state(made: JobState | None) -> Reply:
    """Return the current state of the job, if it could be read."""
    if made is None:
        return Reply(503, b"Cannot read the logs of this job: see the log of the dashboard.\n")
    return Reply(200, made.body, "application/json")


def stream_head(*, packed: bool) -> bytes:
    """Return the head of the stream response."""
    fields = {"Content-Type": STREAM.content_type, **FIELDS}
    return http.head(200, fields | ({"Content-Encoding": "gzip"} if packed else {}))


def takes_gzip(request: Request) -> bool:
    """Return True if the client accepts gzip."""
    names = (part.partition(";")[0].strip() for part in request.get("accept-encoding").split(","))
    return "gzip" in names


def _welcome(request: Request, access: AccessControl) -> Reply:
    """Move the token from the address into a cookie.

    Not with a redirect: a browser that followed a link from another site would not send a strict
    cookie with the redirected request. `Refresh` is a navigation by the page itself, and leaves no
    history entry either.
    """
    if request.method not in ("GET", "HEAD") or request.path != "/":
        return refusal(404)
    fields = {"Set-Cookie": access.cookie(), "Refresh": "0; url=/"}
    return Reply(200, b"One moment.\n", fields=fields)


# --- the files of the page, read once: no request can name a path --------------------------------

#: Content types by suffix; files with others are not served.
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@dataclass(frozen=True)
class StaticFile:
    """A file as sent."""

    content_type: str
    body: bytes


def load_files() -> dict[str, StaticFile]:
    """Return all files by request path."""
    found: dict[str, StaticFile] = {}
    for entry in resources.files("torchelastic.dashboard").joinpath("static").iterdir():
        content_type = _TYPES.get(f".{entry.name.rpartition('.')[2]}")
        if content_type is not None and entry.is_file():
            path = "/" if entry.name == "index.html" else f"/static/{entry.name}"
            found[path] = StaticFile(content_type, entry.read_bytes())
    return found
