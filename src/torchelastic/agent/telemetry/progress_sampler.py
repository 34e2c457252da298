"""The progress sampler: reports the workers' progress about once a second while it changes.

Workers write their steps to status pages and the script's metrics to metric tables, without a
system call; the agent reads them. It does so less often the longer the generation lasts and the
more nodes there are, so that the log does not fill up with steps that went well.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchelastic.agent.workers.handed_memory import Reported
from torchelastic.clock import Clock
from torchelastic.events.types import CheckpointStored, Progress, WeightsHashed
from torchelastic.worker import orders
from torchelastic.worker.optimizer_steps import UNKNOWN
from torchelastic.worker.status_page import ShownStatus
from torchelastic.worker_counters import stalls

#: Seconds between two looks: at first, and at most.
SHORTEST, LONGEST = 1.0, 60.0
#: The interval is the generation's age over `AGE_DIVISOR`, at most `LONGEST_BY_AGE`; with more
#: than `FULL_RATE_NODES` nodes it is longer in proportion.
AGE_DIVISOR, LONGEST_BY_AGE = 600.0, 15.0
FULL_RATE_NODES = 32

#: What workers achieve: progress, checkpoints in storage, and hashes of the weights.
Seen = Progress | CheckpointStored | WeightsHashed
#: Receives what the workers of a generation achieve.
Tell = Callable[[int, Seen], None]


def interval(age: float, nodes: int) -> float:
    """Seconds until the next look, in a generation that is `age` seconds old."""
    by_age = min(max(age / AGE_DIVISOR, SHORTEST), LONGEST_BY_AGE)
    return min(by_age * max(1.0, nodes / FULL_RATE_NODES), LONGEST)


def progress_of(
    shown: Iterable[ShownStatus], reported: Sequence[Reported] = ()
) -> dict[int, Progress]:
    """By generation: the combined progress of a node's workers."""
    ones = list(shown)
    stepping = {(one.generation, one.rank) for one in ones}
    others = [one for one in reported if (one.generation, one.rank) not in stepping]
    by_generation: dict[int, list[ShownStatus]] = {}
    for one in sorted((*ones, *map(_without_steps, others)), key=lambda one: one.rank):
        if one.generation >= 0:
            by_generation.setdefault(one.generation, []).append(one)
    return {
        generation: _progress(ones, metrics_of(generation, reported))
        for generation, ones in by_generation.items()
    }


def metrics_of(generation: int, reported: Iterable[Reported]) -> dict[str, float | None]:
    """The new values of this generation's metrics. Each comes from the worker with the lowest rank,
    so that it is always the same one. Infinity and NaN become None: JSON lacks them."""
    metrics: dict[str, float | None] = {}
    known: set[str] = set()
    for one in sorted(reported, key=lambda one: one.rank):
        if one.generation == generation:
            news = one.fresh - known
            metrics |= {
                name: value if math.isfinite(value) else None
                for name, value in one.metrics.items()
                if name in news
            }
            known |= set(one.metrics)
    return metrics


def _without_steps(one: Reported) -> ShownStatus:
    """The status of a worker that has no status page: it reports no steps."""
    return ShownStatus(one.generation, one.rank, -1, 0.0, (0.0,) * len(stalls.KINDS))


def _progress(ones: Sequence[ShownStatus], metrics: Mapping[str, float | None]) -> Progress:
    sums = [round(sum(parts), 6) for parts in zip(*(one.stalled for one in ones), strict=True)]
    shares = [one.share for one in ones]
    return Progress(
        ranks=[one.rank for one in ones],
        steps=[one.step for one in ones],
        at=[round(one.at, 6) for one in ones],
        stalls={kind: total for kind, total in zip(stalls.KINDS, sums, strict=True) if total},
        own=[round(one.own, 6) for one in ones],
        metrics=metrics,
        samples=max(one.samples for one in ones),
        before=_before([one.before for one in ones if one.step >= 0]),
        shares=shares if min(shares) >= 0 else (),
    )


def _before(told: Sequence[int | None]) -> int | None:
    """The common value; workers that differ do not train in step, so then the least."""
    known = [before for before in told if before is not None]
    if len(known) < len(told) or not known:
        return None
    return known[0] if len(set(known)) == 1 else min(UNKNOWN, *known)


class ProgressSampler:
    """Samples the status pages and metric tables of one node."""

    def __init__(self, tell: Tell, clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        #: The statuses that have been reported.
        self._told: set[ShownStatus] = set()
        #: The last checkpoint, and the last hash, that have not been reported; their generations.
        self._waiting: dict[type[Seen], tuple[int, Seen]] = {}
        self._generation = -1
        self._began = clock.now()
        self._nodes = 1

    def turn_to(self, generation: int, nodes: int) -> None:
        """A world begins."""
        if generation > self._generation:
            self._generation, self._nodes, self._began = generation, nodes, self._clock.now()

    def stored(self, generation: int, rank: int, stored: orders.Stored) -> None:
        """Note a stored checkpoint. The next look reports the last one only: a script that stores
        one with every step must not fill the log. So it is with the hashes of their weights."""
        at = round(self._clock.now(), 6)
        event = CheckpointStored(
            rank, stored.step, at=at, seconds=round(stored.seconds, 6), size=stored.size
        )
        self._waiting[CheckpointStored] = generation, event

    def hashed(self, generation: int, rank: int, hashed: orders.Hashed) -> None:
        event = WeightsHashed(rank, hashed.step, hashed.sha256, hashed.final)
        self._waiting[WeightsHashed] = generation, event

    def look(self, shown: Iterable[ShownStatus], reported: Sequence[Reported] = ()) -> None:
        """Report what is new. Also called when workers stop: the next generation overwrites the
        status page."""
        seen = set(shown)
        news = {one.generation for one in seen - self._told}
        news |= {one.generation for one in reported if metrics_of(one.generation, reported)}
        for generation, progress in progress_of(seen, reported).items():
            if generation in news:
                self._tell(generation, progress)
        self._told = seen
        for generation, event in self._waiting.values():
            self._tell(generation, event)
        self._waiting = {}

    async def run(self, look: Callable[[], None]) -> None:
        """Call `look` at intervals for as long as the agent runs."""
        while True:
            await asyncio.sleep(interval(self._clock.now() - self._began, self._nodes))
            look()
