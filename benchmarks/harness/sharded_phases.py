"""Where the time goes until a lost replica is back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.harness.worker_log import Finish, History, Span

#: What ends each phase, in order. The kernel frees the memory of the killed process before anybody
#: sees its end. Until the boundary the others finish the step that they are in: on average half of
#: one. From the last phase one ordinary step is taken off.
PHASES = (
    "the agent sees the death",
    "it asks for a replacement",
    "the replacement's script calls train",
    "the next world is agreed on",
    "the others reach a step boundary",
    "all groups are connected",
    "all shards are there",
    "all have committed a step",
)


def start_of(
    log: Sequence[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]], at: float
) -> tuple[float, float]:
    """When the replacement was asked for, and when its script called `train`; the last of several
    replacements."""
    asked = {
        line["worker_pid"]: line["mono"] - line["seconds"]
        for line in log
        if line["type"] == "standby-started" and line["mono"] >= at
    }
    built = {
        line["pid"]: line["t"]
        for line in lines
        if line["event"] == "built" and line["pid"] in asked
    }
    if not built:
        return at, at
    last = max(built, key=lambda pid: built[pid] - asked[pid])
    return asked[last], built[last]


def phases(
    log: Sequence[Mapping[str, Any]],
    start: tuple[float, float],
    history: History,
    world: Span,
    whole: Finish,
    at: float,
) -> list[float]:
    """Seconds of each phase, from a kill in `world` at that time to the step `whole`."""
    trains = [line for line in log if _is(line, "training", whole.world)]
    alone = [
        each.finished
        for each in history.steps
        if each.finished > at and each.world not in (world.world, whole.world)
    ]
    ends = [
        at,
        min(line["mono"] for line in log if line["type"] == "worker-exited" and line["mono"] >= at),
        *start,
        max(line["mono"] for line in log if _is(line, "world-formed", whole.world)),
        max(alone, default=at),
        max(line["mono"] - line["fetched"] for line in trains),
        max(line["mono"] for line in trains),
        whole.time - history.step_seconds(world.world),
    ]
    return [round(later - earlier, 5) for earlier, later in pairwise(ends)]


def _is(line: Mapping[str, Any], kind: str, generation: int) -> bool:
    return bool(line["type"] == kind and line["generation"] == generation)
