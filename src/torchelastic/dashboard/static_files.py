"""The files of the page, read once: no request can name a path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

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


def load() -> dict[str, StaticFile]:
    """Return all files by request path."""
    found: dict[str, StaticFile] = {}
    for entry in resources.files("torchelastic.dashboard").joinpath("static").iterdir():
        content_type = _TYPES.get(f".{entry.name.rpartition('.')[2]}")
        if content_type is not None and entry.is_file():
            path = "/" if entry.name == "index.html" else f"/static/{entry.name}"
            found[path] = StaticFile(content_type, entry.read_bytes())
    return found
