"""The commit marker: the last file written, which makes a checkpoint valid. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

NAME = "commit.json"
FORMAT = "torchelastic checkpoint 1"


@dataclass(frozen=True)
class File:
    """The size of a file, and the CRC-32 of its bytes."""

    size: int
    crc: int


@dataclass(frozen=True)
class History:
    """The history of a start of a job, when a checkpoint is written."""

    #: Seconds that it has been observed, and the worlds that ended in that time.
    seconds: float = 0.0
    ended: int = 0


@dataclass(frozen=True)
class Marker:
    """The metadata of a checkpoint."""

    #: Steps committed; None if unknown.
    step: int | None = None
    generation: int | None = None
    files: Mapping[str, File] = field(default_factory=dict)
    #: The start of the job that wrote it, and its history by then.
    start: str = ""
    history: History = History()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def to_json(marker: Marker) -> bytes:
    files = {name: [file.size, file.crc] for name, file in sorted(marker.files.items())}
    return json.dumps(
        {
            "format": FORMAT,
            "step": marker.step,
            "generation": marker.generation,
            "files": files,
            "start": marker.start,
            "history": asdict(marker.history),
        },
        indent=1,
    ).encode()


def from_json(data: bytes) -> Marker | None:
    """Parse a marker; None if it is not one."""
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            return None
        files = {name: File(int(size), int(crc)) for name, (size, crc) in found["files"].items()}
        history = History(**found.get("history", {}))
        numbers = _number(found["step"]), _number(found["generation"])
        return Marker(*numbers, files, str(found.get("start", "")), history)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _number(value: object) -> int | None:
    if value is None or isinstance(value, int):
        return value
    raise TypeError(value)


def torn(marker: Marker, sizes: Mapping[str, int]) -> str | None:
    """Describe the first missing or truncated file; None if all sizes match."""
    for name, file in marker.files.items():
        if name not in sizes:
            return f"'{name}' is missing"
        if sizes[name] != file.size:
            return f"'{name}' has {sizes[name]} bytes instead of {file.size}"
    return None
