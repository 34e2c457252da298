"""Who is slow, and what that costs the others. Pure: what workers have done in, findings out.

All ranks of a synchronous job take equally long for a step: who is quick waits for who is slow.
What tells them apart is their own time, without the waiting (`Progress.own`). It is compared in
rounds: a round is over when every rank has shown at least one more step, so all are compared over
about the same steps, and a world of thousands costs one look at each of them in a round.

    a round         own seconds per step of each rank, against the usual one: the median; of two
                    ranks, or where half of all are slow, the lower of the two in the middle
    slow            more than `threshold` times the usual, by so much that it matters, and no slower
                    than the others from step to step: who is does not keep them waiting
    a straggler     slow for some rounds in a row, with some steps in them
    over            not slow for as long
    summed up       what it has cost in all, when its generation is over

A single long step, for an evaluation or a checkpoint on one rank, makes nobody a straggler.
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

#: So many steps after the first one that is shown do not count: libraries warm up in them.
WARM_UP = 3
#: It takes so many rounds in a row, and so many steps in them, to be called slow, or not any more.
ROUNDS, STEPS = 3, 5
#: Less than so many seconds, and less than this share of a step, matters to nobody.
LEAST, SHARE = 0.002, 0.05
#: Ranks go in step as long as none takes more than so many times as long as is usual: others do not
#: wait for one that does.
IN_STEP = 1.25
#: Said again when a step, or all of them together, cost so many times what was said.
WORSE, DOUBLED = 1.5, 2.0
#: A round is also over when a rank has spoken so often, and more than half of all have: one node
#: that cannot tell must not hide another one.
PATIENCE = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rank that is slow, or is not any more."""

    rank: int
    #: The id of its node's agent.
    node: str
    step: int
    #: Own seconds per step lately: its own, and the usual ones.
    pace: float
    usual: float
    #: Seconds of this generation that others have waited for it, and for any such rank.
    cost: float
    lost: float
    over: bool = False
    #: It was found before.
    again: bool = False
    #: The last that is said of it in its generation, which is over.
    last: bool = False

    @property
    def excess(self) -> float:
        return self.pace - self.usual

    def event(self, name: str) -> Straggler:
        """As it is told; `name` is that of the node."""
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
        paces = f"{own} of its own per step, where {usual} is usual"
        if self.last:
            return f"{where} was slow to the end: {paces}; {waited}"
        return f"{where} is slow: {paces}; {waited} so far"


class _Point(NamedTuple):
    """A rank has entered a step: when, and how much of its own time it has spent until then."""

    step: int
    at: float
    own: float


class _Window(NamedTuple):
    """A rank in one round."""

    steps: int
    own: float
    #: What it would have been at the usual pace.
    usual: float


@dataclass
class _Rank:
    """What is known of a rank in this generation."""

    node: str
    #: Where the round has begun, and the latest.
    begin: _Point
    last: _Point
    #: How often it has spoken in this round.
    spoken: int = 0
    #: The last rounds, and for how many rounds and steps it has been as it is now.
    recent: deque[_Window] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    slow: bool = False
    rounds: int = 0
    steps: int = 0
    cost: float = 0.0
    #: What was said of it, while it is a straggler.
    told: Finding | None = None

    @property
    def has_moved(self) -> bool:
        return self.last.step > self.begin.step

    @property
    def is_settled(self) -> bool:
        """It has been slow, or not, for long enough to say so."""
        return self.rounds >= ROUNDS and self.steps >= STEPS

    def end_round(self, usual: float, in_step: float, threshold: float) -> float:
        """Seconds it has cost in the round that is over, of which are known now: usual seconds of
        its own for a step, and the most that ranks in step take for one with all waiting."""
        steps, seconds = self.last.step - self.begin.step, self.last.at - self.begin.at
        own = max(0.0, self.last.own - self.begin.own)
        window = _Window(steps, own, usual * steps)
        excess = window.own - window.usual
        matters = excess > max(LEAST * steps, SHARE * seconds)
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
        elif self.told is None:
            self.cost = 0.0  # that was no straggler

    def finding(self, rank: int, lost: float) -> Finding:
        steps = sum(window.steps for window in self.recent)
        return Finding(
            rank=rank,
            node=self.node,
            step=self.last.step,
            pace=sum(window.own for window in self.recent) / steps,
            usual=sum(window.usual for window in self.recent) / steps,
            cost=self.cost,
            lost=lost,
            over=not self.slow,
            again=self.slow and self.told is not None,
        )


class Stragglers:
    """Of one generation after the other."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: slow is who takes so many times as long as usual."""
        self._threshold = threshold
        self.turn_to(-1, 0)

    def turn_to(self, generation: int, size: int) -> None:
        """A world begins, with so many workers."""
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
    def named(self) -> Mapping[int, Finding]:
        """By rank: what was said last of those who are stragglers now."""
        return {number: rank.told for number, rank in self._ranks.items() if rank.told is not None}

    def feed(self, generation: int, node: str, progress: Progress) -> list[Finding]:
        """What a node says of its workers; what follows from it."""
        if generation != self._generation:
            return []
        spoken = 0
        points = zip(progress.steps, progress.at, progress.own, strict=False)
        for rank, point in zip(progress.ranks, points, strict=False):
            spoken = max(spoken, self._take(rank, node, _Point._make(point)))
        is_late = spoken >= PATIENCE and 2 * self._moved > self._size
        if self._moved >= self._size or is_late:
            return self._end_round()
        return []

    def sum_up(self) -> list[Finding]:
        """The generation is over: what those who are stragglers have cost by now, where it is more
        than was said; once, however often that is asked."""
        found = []
        for number, rank in self._ranks.items():
            if rank.told is not None and rank.cost > rank.told.cost:
                finding = rank.finding(number, self._lost)
                rank.told = replace(finding, over=False, again=True, last=True)
                found.append(rank.told)
        return found

    def _take(self, number: int, node: str, point: _Point) -> int:
        """How often this rank has spoken in this round."""
        if point.step < 0:
            return 0
        self._first = min(self._first, point.step)
        if point.step < self._first + WARM_UP:
            return 0
        rank = self._ranks.setdefault(number, _Rank(node, point, point))
        if point.step <= rank.last.step:
            return rank.spoken
        self._moved += not rank.has_moved
        rank.last = point
        rank.spoken += 1
        return rank.spoken

    def _end_round(self) -> list[Finding]:
        moved = {number: rank for number, rank in self._ranks.items() if rank.has_moved}
        self._moved = 0
        usual = median_low(map(_pace, moved.values()))
        in_step = IN_STEP * median_low(map(_whole_pace, moved.values()))
        costs = {
            number: rank.end_round(usual, in_step, self._threshold)
            for number, rank in moved.items()
        }
        self._count(costs)
        return [finding for number, rank in moved.items() if (finding := self._judge(number, rank))]

    def _count(self, costs: Mapping[int, float]) -> None:
        """What all have lost is what the slowest has cost; of a new one, from its beginning."""
        before = [number for number in costs if self._ranks[number].told is not None]
        new = [number for number in costs if self._is_new(self._ranks[number])]
        if before:
            self._lost += max(costs[number] for number in (*before, *new))
        elif new:
            self._lost += max(self._ranks[number].cost for number in new)

    @staticmethod
    def _is_new(rank: _Rank) -> bool:
        return rank.told is None and rank.slow and rank.is_settled

    def _judge(self, number: int, rank: _Rank) -> Finding | None:
        """What is to be said of a rank after a round, if anything."""
        if not rank.is_settled or (rank.told is None and not rank.slow):
            return None
        found = rank.finding(number, self._lost)
        if rank.told is not None and rank.slow and not _is_news(rank.told, found):
            return None
        rank.told = found if rank.slow else None
        if not rank.slow:
            rank.cost = 0.0
        return found


def _pace(rank: _Rank) -> float:
    return max(0.0, rank.last.own - rank.begin.own) / (rank.last.step - rank.begin.step)


def _whole_pace(rank: _Rank) -> float:
    """With the waiting."""
    return (rank.last.at - rank.begin.at) / (rank.last.step - rank.begin.step)


def _is_news(told: Finding, now: Finding) -> bool:
    return now.excess > WORSE * told.excess or now.cost >= DOUBLED * told.cost
