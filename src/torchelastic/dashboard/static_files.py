"""The page's own files, read once: no request ever names a path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

#: Of what may lie in `static/`; the rest is not served.
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@dataclass(frozen=True)
class File:
    """A file as it is sent."""

    content_type: str
    body: bytes


def load() -> dict[str, File]:
    """All of them, by the paths at which they are asked for."""
    found: dict[str, File] = {}
    for entry in resources.files("torchelastic.dashboard").joinpath("static").iterdir():
        content_type = _TYPES.get(f".{entry.name.rpartition('.')[2]}")
        if content_type is not None and entry.is_file():
            path = "/" if entry.name == "index.html" else f"/static/{entry.name}"
            found[path] = File(content_type, entry.read_bytes())
    return found
