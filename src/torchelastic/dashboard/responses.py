"""What a request gets. Pure: nothing of a user's text is in what is made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchelastic.dashboard.access import Door
from torchelastic.dashboard.job_state import Picture
from torchelastic.dashboard.static_files import File
from torchelastic.transport import http
from torchelastic.transport.http import Request

#: With every answer: the page may load what lies beside it, and nothing else may load the page.
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
    400: "This is no request.",
    401: "Open the address with the token that `torchelastic` printed when it started.",
    403: "This page is for browsers of this machine: call it localhost, or give it a token.",
    404: "There is nothing here.",
    405: "This page can only be read.",
    503: "Too many look at this job already: close some tabs.",
}
_MORE = {
    401: {"WWW-Authenticate": "Bearer"},
    405: {"Allow": "GET, HEAD"},
    503: {"Retry-After": "10"},
}


@dataclass(frozen=True)
class Reply:
    """An answer that is known at once."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    fields: Mapping[str, str] | None = None

    def to_bytes(self, *, body: bool = True) -> bytes:
        """As it is sent; without `body` for who asks for the head only."""
        whole = http.response(
            self.status, self.body, self.content_type, {**FIELDS, **(self.fields or {})}
        )
        return whole if body else whole[: whole.index(b"\r\n\r\n") + 4]


#: To who asks for the head of a stream only.
STREAM = Reply(200, b"", "text/event-stream")

#: What is not known at once: the picture as it is now, and all that follow.
Wanted = Literal["picture", "pictures"]
_WANTED: dict[str, Wanted] = {"/picture.json": "picture", "/events": "pictures"}


def answer(request: Request | None, door: Door, files: Mapping[str, File]) -> Reply | Wanted:
    """What a request gets. Who is not let in learns nothing, not even what there is."""
    if request is None:
        return refusal(400)
    if request.get("sec-fetch-site") == "cross-site" and request.path != "/":
        return refusal(403)  # another site's script would take up a place, if nothing more
    match door.judge(request):
        case "wrong host":
            return refusal(403)
        case "no token":
            return refusal(401)
        case "has token":
            return _welcome(request, door)
    if request.method not in ("GET", "HEAD"):
        return refusal(405)
    if request.path in files:
        file = files[request.path]
        return Reply(200, file.body, file.content_type)
    return _WANTED.get(request.path) or refusal(404)


def refusal(status: int) -> Reply:
    """An answer to who does not get it: what to do instead."""
    return Reply(status, f"{_HELP[status]}\n".encode(), fields=_MORE.get(status))


def picture(made: Picture | None) -> Reply:
    """The picture as it is now, if one could be made."""
    if made is None:
        return Reply(503, b"The logs of this job cannot be read: the page's own log says why.\n")
    return Reply(200, made.body, "application/json")


def stream_head(*, packed: bool) -> bytes:
    """The beginning of the pictures that follow."""
    fields = {"Content-Type": STREAM.content_type, **FIELDS}
    return http.head(200, fields | ({"Content-Encoding": "gzip"} if packed else {}))


def takes_gzip(request: Request) -> bool:
    """Whether who asks unpacks what is packed."""
    names = (part.partition(";")[0].strip() for part in request.get("accept-encoding").split(","))
    return "gzip" in names


def _welcome(request: Request, door: Door) -> Reply:
    """The token becomes a cookie, and leaves the address.

    Not by a redirection: a browser that came by a link on another site would not send a strict
    cookie with the request that follows it. `Refresh` is a step of the page's own, and leaves no
    entry in the history either.
    """
    if request.method not in ("GET", "HEAD") or request.path != "/":
        return refusal(404)
    fields = {"Set-Cookie": door.cookie(), "Refresh": "0; url=/"}
    return Reply(200, b"One moment.\n", fields=fields)
