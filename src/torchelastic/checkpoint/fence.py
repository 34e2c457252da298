"""Who may write into a directory of checkpoints, and which of them are void. Pure.

Each world that writes checkpoints takes the fence, with a token of its own. Whoever finds another's
token there has been replaced, and what it was writing is dropped. The world also says its base, the
step it begins from: what was stored before of any later step is void, since those steps are done
again, with other samples perhaps.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class World:
    """Where a world began: checkpoints up to `sequence` of steps beyond `base` are void."""

    sequence: int
    base: int


@dataclass(frozen=True)
class Fence:
    """The one who writes now, and what came to nothing before."""

    token: str = ""
    run: str = ""
    generation: int = -1
    worlds: tuple[World, ...] = ()


class Verdict(enum.Enum):
    MINE = "go on"
    #: A world that is over has come late and taken it.
    RETAKE = "take it back"
    VOID = "give up"


def judge(fence: Fence, mine: Fence) -> Verdict:
    """Whether the writer `mine` may still commit.

    Generations are compared within one run only; a run that is started anew counts from 0 again,
    but then nobody of the old one is left who would ask.
    """
    if fence.token == mine.token:
        return Verdict.MINE
    if fence.run == mine.run and fence.generation < mine.generation:
        return Verdict.RETAKE
    return Verdict.VOID


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


def to_json(fence: Fence) -> bytes:
    return json.dumps(asdict(fence)).encode()


def from_json(data: bytes | None) -> Fence:
    """What is no fence stands for none: it only ever makes a writer take it anew."""
    try:
        found = json.loads(data or b"{}")
        worlds = tuple(World(int(w["sequence"]), int(w["base"])) for w in found["worlds"])
        return Fence(str(found["token"]), str(found["run"]), int(found["generation"]), worlds)
    except (ValueError, KeyError, TypeError):
        return Fence()
