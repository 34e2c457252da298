"""Straggler detection: which ranks are slow, and what that costs the others. Pure.

All ranks of a synchronous job take equally long for a step, because fast ranks wait for slow ones.
Their own time, without waiting (`Progress.own`), tells them apart. It is compared in rounds: a
round ends when every rank has shown at least one more step, so that all are compared over about
the same steps, and a world of thousands of ranks costs one look at each rank per round.

    a round         own seconds per step of each rank, against the usual: the median; with two
                    ranks, or if half of them are slow, the lower of the two middle values
    slow            more than `threshold` times the usual, by enough to matter, and in step with
                    the others: they do not wait for a rank that is not
    a straggler     slow for some rounds in a row, with some steps in them
    over            not slow for as long
    summed up       its total cost, when its generation has ended

A single long step, such as an evaluation or a checkpoint on one rank, makes no straggler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import NamedTuple

from torchelastic.events import words
from torchelastic.events.types import Progress, Straggler

#: The first steps do not count: libraries warm up in them.
WARM_UP_STEPS = 3
#: Rounds in a row, and steps in them, before a rank is called slow, or no longer slow.
ROUNDS_TO_REPORT, STEPS_TO_REPORT = 3, 5
#: An excess below this many seconds, or below this share of a step, does not matter.
EXCESS_SECONDS, EXCESS_SHARE = 0.002, 0.05
#: A rank is in step with the others if a step takes it at most this many times the usual time: the
#: others do not wait for one that takes longer.
IN_STEP_FACTOR = 1.25
#: Report again when the excess per step, or the total cost, has grown by this factor.
PACE_GROWTH, COST_GROWTH = 1.5, 2.0
#: A round also ends when a rank has reported this often, and more than half of all ranks have: one
#: node that cannot report must not hide another straggler.
REPORTS_PER_ROUND_LIMIT = 4


@dataclass(frozen=True, kw_only=True)
class StragglerReport:
    """A rank that is slow, or no longer slow."""

    rank: int
    #: The id of its node's agent.
    node: str
    step: int
    #: Recent seconds per step without waiting: of this rank, and the median.
    pace: float
    usual: float
    #: Seconds that others waited in this generation: for this rank, and for any straggler.
    cost: float
    lost: float
    over: bool = False
    #: It was reported before.
    again: bool = False
    #: The last finding of this rank in its generation, which has ended.
    last: bool = False

    @property
    def excess(self) -> float:
        return self.pace - self.usual

    def event(self, name: str) -> Straggler:
        """Return the event; `name` is the name of the node."""
        return Straggler(
            rank=self.rank,
            seconds_per_step=round(self.pace, 6),
            usual=round(self.usual, 6),
            cost=round(self.cost, 6),
            text=self._text(f"rank {self.rank} on {name}"),
            name=name,
            step=self.step,
            lost=round(self.lost, 6),
            over=self.over,
            again=self.again,
        )

    def _text(self, where: str) -> str:
        waited = f"the others have waited {words.seconds(self.cost)} for it"
        if self.over:
            return f"{where} keeps up again; {waited}"
        own, usual = words.seconds(self.pace), words.seconds(self.usual)
        paces = f"{own} per step without waiting, median {usual}"
        if self.last:
            return f"{where} stayed slow until the generation ended: {paces}; {waited}"
        return f"{where} is slow: {paces}; {waited} so far"


class _Point(NamedTuple):
    """A rank entered a step: when, and how much time without waiting it had spent until then."""

    step: int
    at: float
    own: float


class _Window(NamedTuple):
    """A rank in one round."""

    steps: int
    own: float
    #: The time it would have taken at the usual pace.
    usual: float


@dataclass
class _Rank:
    """One rank in this generation."""

    node: str
    #: Where the round began, and the latest point.
    begin: _Point
    last: _Point
    #: How often it has reported in this round.
    spoken: int = 0
    #: The last rounds, and for how many rounds and steps it has been as it is now.
    recent: deque[_Window] = field(default_factory=lambda: deque(maxlen=ROUNDS_TO_REPORT))
    slow: bool = False
    rounds: int = 0
    steps: int = 0
    cost: float = 0.0
    #: The last finding, while it is a straggler.
    reported: StragglerReport | None = None

    @property
    def has_moved(self) -> bool:
        return self.last.step > self.begin.step

    @property
    def is_certain(self) -> bool:
        """It has been slow, or not, for long enough to say so."""
        return self.rounds >= ROUNDS_TO_REPORT and self.steps >= STEPS_TO_REPORT

    def end_round(self, usual: float, in_step: float, threshold: float) -> float:
        """Close the round and return the seconds that this rank cost in it.

        `usual`: median seconds per step without waiting. `in_step`: the most that a rank in step
        with the others takes for a step, waiting included.
        """
        steps, seconds = self.last.step - self.begin.step, self.last.at - self.begin.at
        own = max(0.0, self.last.own - self.begin.own)
        window = _Window(steps, own, usual * steps)
        excess = window.own - window.usual
        matters = excess > max(EXCESS_SECONDS * steps, EXCESS_SHARE * seconds)
        waited_for = seconds <= in_step * steps
        self._note(window, slow=matters and waited_for and own > threshold * window.usual)
        self.begin, self.spoken = self.last, 0
        return excess if self.slow else 0.0

    def _note(self, window: _Window, *, slow: bool) -> None:
        if slow != self.slow:
            self.slow, self.rounds, self.steps = slow, 0, 0
        self.rounds += 1
        self.steps += window.steps
        self.recent.append(window)
        if slow:
            self.cost += window.own - window.usual
        elif self.reported is None:
            self.cost = 0.0  # that was no straggler

    def finding(self, rank: int, lost: float) -> StragglerReport:
        steps = sum(window.steps for window in self.recent)
        return StragglerReport(
            rank=rank,
            node=self.node,
            step=self.last.step,
            pace=sum(window.own for window in self.recent) / steps,
            usual=sum(window.usual for window in self.recent) / steps,
            cost=self.cost,
            lost=lost,
            over=not self.slow,
            again=self.slow and self.reported is not None,
        )


class Stragglers:
    """The stragglers of the current generation."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: a rank is slow if it takes this many times the usual time."""
        self._threshold = threshold
        self.turn_to(-1, 0)

    def turn_to(self, generation: int, size: int) -> None:
        """Start again with a new world of `size` workers."""
        self._generation, self._size = generation, size
        self._first: float = math.inf
        self._ranks: dict[int, _Rank] = {}
        #: Ranks that have moved in this round.
        self._moved = 0
        self._lost = 0.0

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def named(self) -> Mapping[int, StragglerReport]:
        """The last finding of each current straggler, by rank."""
        return {
            number: rank.reported
            for number, rank in self._ranks.items()
            if rank.reported is not None
        }

    def feed(self, generation: int, node: str, progress: Progress) -> list[StragglerReport]:
        """Take a node's progress; return the findings that follow."""
        if generation != self._generation:
            return []
        spoken = 0
        points = zip(progress.steps, progress.at, progress.own, strict=False)
        for rank, point in zip(progress.ranks, points, strict=False):
            spoken = max(spoken, self._take(rank, node, _Point._make(point)))
        is_late = spoken >= REPORTS_PER_ROUND_LIMIT and 2 * self._moved > self._size
        if self._moved >= self._size or is_late:
            return self._end_round()
        return []

    def sum_up(self) -> list[StragglerReport]:
        """Return the total cost of each straggler when the generation has ended, if it is more than
        was reported. Later calls return nothing."""
        found = []
        for number, rank in self._ranks.items():
            if rank.reported is not None and rank.cost > rank.reported.cost:
                finding = rank.finding(number, self._lost)
                rank.reported = replace(finding, over=False, again=True, last=True)
                found.append(rank.reported)
        return found

    def _take(self, number: int, node: str, point: _Point) -> int:
        """Take a point; return how often this rank has reported in this round."""
        if point.step < 0:
            return 0
        self._first = min(self._first, point.step)
        if point.step < self._first + WARM_UP_STEPS:
            return 0
        rank = self._ranks.setdefault(number, _Rank(node, point, point))
        if point.step <= rank.last.step:
            return rank.spoken
        self._moved += not rank.has_moved
        rank.last = point
        rank.spoken += 1
        return rank.spoken

    def _end_round(self) -> list[StragglerReport]:
        moved = {number: rank for number, rank in self._ranks.items() if rank.has_moved}
        self._moved = 0
        usual = median_low(map(_pace, moved.values()))
        in_step = IN_STEP_FACTOR * median_low(map(_whole_pace, moved.values()))
        costs = {
            number: rank.end_round(usual, in_step, self._threshold)
            for number, rank in moved.items()
        }
        self._count(costs)
        return [finding for number, rank in moved.items() if (finding := self._judge(number, rank))]

    def _count(self, costs: Mapping[int, float]) -> None:
        """Add up the lost time: the cost of the slowest; for a new straggler, since it began."""
        before = [number for number in costs if self._ranks[number].reported is not None]
        new = [number for number in costs if self._is_new(self._ranks[number])]
        if before:
            self._lost += max(costs[number] for number in (*before, *new))
        elif new:
            self._lost += max(self._ranks[number].cost for number in new)

    @staticmethod
    def _is_new(rank: _Rank) -> bool:
        return rank.reported is None and rank.slow and rank.is_certain

    def _judge(self, number: int, rank: _Rank) -> StragglerReport | None:
        """Return what there is to report of a rank after a round, if anything."""
        if not rank.is_certain or (rank.reported is None and not rank.slow):
            return None
        found = rank.finding(number, self._lost)
        if rank.reported is not None and rank.slow and not _is_news(rank.reported, found):
            return None
        rank.reported = found if rank.slow else None
        if not rank.slow:
            rank.cost = 0.0
        return found


def _pace(rank: _Rank) -> float:
    return max(0.0, rank.last.own - rank.begin.own) / (rank.last.step - rank.begin.step)


def _whole_pace(rank: _Rank) -> float:
    """Waiting included."""
    return (rank.last.at - rank.begin.at) / (rank.last.step - rank.begin.step)


def _is_news(before: StragglerReport, now: StragglerReport) -> bool:
    return now.excess > PACE_GROWTH * before.excess or now.cost >= COST_GROWTH * before.cost
