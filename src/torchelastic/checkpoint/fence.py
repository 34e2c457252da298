"""Who may write into a directory of checkpoints, and which of them are void. Pure.

Each world that writes checkpoints takes the fence, with a token of its own. Whoever finds another's
token there has been replaced, and what it was writing is dropped. The world also says its base, the
step it begins from: what was stored before of any later step is void, since those steps are done
again, with other samples perhaps.

A fence whose checksum is wrong is rebuilt from the checkpoints: where a later one is of an earlier
step, a world has done those steps again. What a world has voided that stored nothing itself is good
again then, and whoever is about to write takes the fence anew, unless a later world has written.
"""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class World:
    """Where a world began: checkpoints up to `sequence` of steps beyond `base` are void."""

    sequence: int
    base: int


@dataclass(frozen=True)
class Fence:
    """The one who writes now, and what came to nothing before."""

    token: str = ""
    #: The job, and which start of it, where that is known.
    run: str = ""
    start: str = ""
    generation: int = -1
    worlds: tuple[World, ...] = ()
    #: Made by `rebuilt`; never stored.
    is_rebuilt: bool = False


class Verdict(enum.Enum):
    MINE = "go on"
    #: A world that is over has come late and taken it.
    RETAKE = "take it back"
    VOID = "give up"


def judge(fence: Fence, mine: Fence) -> Verdict:
    """Whether the writer `mine` may still commit."""
    if fence.is_rebuilt:
        return Verdict.VOID if is_late(fence, mine) else Verdict.RETAKE
    if fence.token == mine.token:
        return Verdict.MINE
    if is_same_start(fence, mine) and fence.generation < mine.generation:
        return Verdict.RETAKE
    return Verdict.VOID


def is_late(fence: Fence, mine: Fence) -> bool:
    """Whether a later world has taken it already, so that `mine` must not.

    Where starts are not known it may also be a job that was started anew: its turn has come.
    """
    return bool(mine.start) and is_same_start(fence, mine) and fence.generation > mine.generation


def is_same_start(fence: Fence, mine: Fence) -> bool:
    """Whether generations can be compared: a job that is started anew counts from 0 again."""
    return (fence.run, fence.start) == (mine.run, mine.start)


def taken(fence: Fence, mine: Fence, *, sequence: int, base: int | None) -> Fence:
    """The fence once `mine` has it; `sequence` is the last one there, `base` where it begins."""
    if base is None:
        return replace(mine, worlds=fence.worlds)
    world = World(sequence, base)
    # What an earlier world says is said again by one with a base that is not later.
    kept = tuple(one for one in fence.worlds if one.base < base)
    return replace(mine, worlds=(*kept, world))


def is_void(sequence: int, step: int | None, worlds: Sequence[World]) -> bool:
    return step is not None and any(sequence <= w.sequence and step > w.base for w in worlds)


def rebuilt(stored: Sequence[tuple[int, int | None]], newest: Fence) -> Fence:
    """A fence instead of a damaged one. `stored` are all checkpoints, sequence and step, in any
    order; `newest` says who has written the last of them."""
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
    """The fence there is, if any; `ValueError` where it is damaged. Files of releases that wrote no
    checksum have five entries at most."""
    if data is None:
        return Fence()
    try:
        found = json.loads(data)
        crc = found.pop("crc", None)
        if found.keys() - asdict(Fence()).keys() or (crc is not None and crc != _crc(found)):
            raise ValueError("the checksum does not match")
        worlds = tuple(World(int(w["sequence"]), int(w["base"])) for w in found["worlds"])
        token, run, start = (str(found.get(name, "")) for name in ("token", "run", "start"))
        return Fence(token, run, start, int(found["generation"]), worlds)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a fence: {data!r:.80}") from error


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
