"""What the workers' own logs say: which worlds trained, when, and when nobody did.

Pure: lines in, facts out. A *world* here is what its rank 0 named when its process group was up,
so two worlds that train at the same time are told apart whatever their launcher calls them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any


@dataclass(frozen=True)
class Step:
    """One step of one worker."""

    world: int
    size: int
    generation: int
    rank: int
    pid: int
    number: int
    began: float
    finished: float

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Step:
        return cls(
            world=line["world"],
            size=line["size"],
            generation=line["generation"],
            rank=line["rank"],
            pid=line["pid"],
            number=line["step"],
            began=line["began"],
            finished=line["t"],
        )


@dataclass(frozen=True)
class Finish:
    """A step that every rank of its world has finished."""

    world: int
    size: int
    number: int
    time: float


@dataclass
class Span:
    """From the beginning of a world's first step to the end of its last one, by any rank."""

    world: int
    size: int
    began: float
    ended: float
    generations: set[int] = field(default_factory=set)
    #: The pid of each rank.
    pids: dict[int, int] = field(default_factory=dict)
    #: Ranks that two processes had.
    doubled: set[int] = field(default_factory=set)

    def add(self, step: Step) -> None:
        if self.pids.get(step.rank, step.pid) != step.pid:
            self.doubled.add(step.rank)
        self.began = min(self.began, step.began)
        self.ended = max(self.ended, step.finished)
        self.generations.add(step.generation)
        self.pids[step.rank] = step.pid

    def overlaps(self, other: Span) -> bool:
        return self.began < other.ended and other.began < self.ended

    def to_json(self, origin: float) -> dict[str, Any]:
        """Times in seconds since `origin`."""
        return {
            "size": self.size,
            "generations": sorted(self.generations),
            "began": round(self.began - origin, 4),
            "ended": round(self.ended - origin, 4),
        }


class History:
    """All steps of one job, gathered as they are read."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.finishes: list[Finish] = []
        self.spans: dict[int, Span] = {}
        self._open: dict[tuple[int, int], dict[int, float]] = {}

    def add_line(self, text: str) -> None:
        line = json.loads(text)
        if line["event"] == "step":
            self.add(Step.from_line(line))

    def add(self, step: Step) -> None:
        self.steps.append(step)
        span = self.spans.setdefault(
            step.world, Span(step.world, step.size, step.began, step.finished)
        )
        span.add(step)
        key = (step.world, step.number)
        ranks = self._open.setdefault(key, {})
        ranks[step.rank] = step.finished
        if len(ranks) == step.size:
            del self._open[key]
            self.finishes.append(Finish(step.world, step.size, step.number, max(ranks.values())))

    def first_finish(
        self, *, after: float, size: int | None = None, not_in: Iterable[int] = ()
    ) -> Finish | None:
        """The first step all ranks of a (new) world of `size` finished `after` that time."""
        known = set(not_in)
        found = (
            finish
            for finish in self.finishes
            if finish.time > after
            and finish.world not in known
            and (size is None or finish.size == size)
        )
        return min(found, key=lambda finish: finish.time, default=None)

    def trained_for(self, size: int, now: float, recent: float = 0.5) -> float:
        """Seconds that the world of `size` training right now has trained; 0 if there is none."""
        last = max(self.finishes, key=lambda finish: finish.time, default=None)
        if last is None or last.size != size or now - last.time > recent:
            return 0.0
        return last.time - self.spans[last.world].began

    def latest(self) -> Span:
        """The world that finished a step last."""
        return self.spans[max(self.finishes, key=lambda finish: finish.time).world]

    def step_seconds(self, world: int) -> float:
        """The median time between two finished steps of a world: an ordinary step."""
        times = [finish.time for finish in self.finishes if finish.world == world]
        gaps = [later - earlier for earlier, later in pairwise(sorted(times))]
        return statistics.median(gaps) if gaps else 0.0

    def overlapping(self, known: Iterable[int] = ()) -> list[tuple[Span, Span]]:
        """Pairs of worlds of which one made a step before the other had made its last one.

        Pairs of two `known` worlds are left out.
        """
        spans = sorted(self.spans.values(), key=lambda span: span.began)
        old = set(known)
        return [
            (one, other)
            for one, other in combinations(spans, 2)
            if one.overlaps(other) and not {one.world, other.world} <= old
        ]

    def doubled(self) -> list[Span]:
        """Worlds in which two processes had the same rank: two worlds of one number."""
        return [span for span in self.spans.values() if span.doubled]

    def largest_gap(self, begin: float, end: float) -> float:
        """The longest time around [begin, end] in which no world finished a step.

        A gap that reaches over an edge counts whole: nobody trained beyond the edge either.
        """
        times = sorted(finish.time for finish in self.finishes)
        gaps = [
            later - earlier for earlier, later in pairwise(times) if later > begin and earlier < end
        ]
        return max(gaps, default=0.0)
