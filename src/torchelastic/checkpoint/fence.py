"""The fence: which world may write checkpoints, and which checkpoints are void. Pure.

Each world that writes checkpoints takes the fence with its own token. A writer that finds another
token has been replaced, and drops its checkpoint. The world also records its base, the step it
begins from: earlier checkpoints of later steps are void, because those steps are done again,
possibly with other samples.

A fence with a wrong checksum is rebuilt from the checkpoints: if a later one has an earlier step,
a world has redone those steps. Checkpoints voided by a world that stored nothing become valid again
then. The next writer takes the rebuilt fence, unless a later world has written.
"""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class WorldStart:
    """The start of a world: checkpoints up to `sequence` of steps beyond `base` are void."""

    sequence: int
    base: int


@dataclass(frozen=True)
class Fence:
    """The current writer, and the worlds that voided earlier checkpoints."""

    token: str = ""
    #: The job, and the start of it, if known.
    run: str = ""
    start: str = ""
    generation: int = -1
    worlds: tuple[WorldStart, ...] = ()
    #: Made by `rebuilt`; never stored.
    is_rebuilt: bool = False


class WriteVerdict(enum.Enum):
    MINE = "go on"
    #: A world that is over took the fence late.
    RETAKE = "take it back"
    VOID = "give up"


def judge(fence: Fence, mine: Fence) -> WriteVerdict:
    """Decide if the writer `mine` may still commit."""
    if fence.is_rebuilt:
        return WriteVerdict.VOID if is_late(fence, mine) else WriteVerdict.RETAKE
    if fence.token == mine.token:
        return WriteVerdict.MINE
    if is_same_start(fence, mine) and fence.generation < mine.generation:
        return WriteVerdict.RETAKE
    return WriteVerdict.VOID


def is_late(fence: Fence, mine: Fence) -> bool:
    """Return True if a later world has the fence, so that `mine` must not take it.

    If starts are unknown, `mine` may be a newer start of the job, which may take it.
    """
    return bool(mine.start) and is_same_start(fence, mine) and fence.generation > mine.generation


def is_same_start(fence: Fence, mine: Fence) -> bool:
    """Return True if generations are comparable: a new start of a job counts from 0 again."""
    return (fence.run, fence.start) == (mine.run, mine.start)


def taken(fence: Fence, mine: Fence, *, sequence: int, base: int | None) -> Fence:
    """Return the fence after `mine` takes it; `sequence` is the last one there."""
    if base is None:
        return replace(mine, worlds=fence.worlds)
    world = WorldStart(sequence, base)
    # An earlier world is redundant if this one has the same or an earlier base.
    kept = tuple(one for one in fence.worlds if one.base < base)
    return replace(mine, worlds=(*kept, world))


def is_void(sequence: int, step: int | None, worlds: Sequence[WorldStart]) -> bool:
    return step is not None and any(sequence <= w.sequence and step > w.base for w in worlds)


def rebuilt(stored: Sequence[tuple[int, int | None]], newest: Fence) -> Fence:
    """Return a replacement for a damaged fence. `stored` are all checkpoints, sequence and step, in
    any order; `newest` is the writer of the last one."""
    found = newest
    last = -1
    for sequence, step in sorted(stored, key=lambda one: one[0]):
        if step is not None and step <= last:
            found = taken(found, newest, sequence=sequence - 1, base=step - 1)
        last = step if step is not None else last
    return replace(found, is_rebuilt=True)


def to_json(fence: Fence) -> bytes:
    content = asdict(fence)
    del content["is_rebuilt"]
    return json.dumps(content | {"crc": _crc(content)}).encode()


def from_json(data: bytes | None) -> Fence:
    """Parse the fence, if any; `ValueError` if it is damaged."""
    if data is None:
        return Fence()
    try:
        found = json.loads(data)
        if found.pop("crc") != _crc(found):
            raise ValueError("the checksum does not match")
        worlds = tuple(WorldStart(int(w["sequence"]), int(w["base"])) for w in found["worlds"])
        token, run, start = (str(found[name]) for name in ("token", "run", "start"))
        return Fence(token, run, start, int(found["generation"]), worlds)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a fence: {data!r:.80}") from error


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
