"""Who hangs among workers of a script: by what it commits, or else by the steps of its optimizer.

No thread answers for such a worker, so it is judged by what all ranks of the world are doing. Ended
is who is frozen, or missing from a collective in which others wait; and not before the limit that
was given. A limit that is learned counts for frozen ones alone: what a script does between two
commits, an evaluation for one, may take any time.

Of a script that commits nothing the steps of its optimizer are known. Nobody is ended by these: it
is told, once, who keeps the others waiting, after the limit that was given or is learned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torchelastic.agent.watch.hang_report import HangReport
from torchelastic.agent.watch.hang_watchdog import Pace, limit_for, verdict
from torchelastic.agent.watch.stack_reader import is_frozen
from torchelastic.agent.workers.step_counts import CountedSteps
from torchelastic.events.analysis.hangs import Doing, Judgement

#: Seconds between two looks.
LOOK = 1.0


class Watched(Protocol):
    """What is needed of `agent.workers.Workers`."""

    stopping: bool

    @property
    def alive(self) -> tuple[int, ...]: ...

    def pid(self, local_rank: int) -> int | None: ...

    def generation(self, local_rank: int) -> int: ...

    def progress(self, local_rank: int) -> tuple[int, int, float] | None: ...

    def first_step(self, local_rank: int) -> int: ...

    @property
    def counted(self) -> CountedSteps: ...

    def kill(self, local_rank: int, why: str, stack: str = "") -> None: ...

    def rank(self, local_rank: int) -> int: ...


@dataclass
class ScriptHangWatchdog:
    """Watches the workers of one node, until they turn out to be resident."""

    workers: Watched
    report: HangReport
    #: As for `HangWatchdog`.
    limit: float | None = None
    _paces: dict[int, Pace] = field(default_factory=dict)
    #: What was told last, and since when nothing had gone on.
    _said: tuple[str, float] = ("", 0.0)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """For as long as a script is run."""
        while not is_over():
            await asyncio.sleep(LOOK)
            overdue = [] if self.workers.stopping else self._overdue()
            if overdue:
                await self._judge(overdue)

    def _overdue(self) -> list[int]:
        """Local ranks whose time is up and that have not been judged since."""
        return [rank for rank in self.workers.alive if self._is_overdue(rank)]

    def _is_overdue(self, local_rank: int) -> bool:
        seen, pid = self._seen(local_rank), self.workers.pid(local_rank)
        if seen is None or pid is None:
            return False
        pace = self._paces.setdefault(local_rank, Pace())
        pace.saw(*seen)
        frozen = is_frozen(pid)
        if self.limit is None and not frozen and self._may_be_ended(local_rank):
            return False
        limit = limit_for(pace, self.limit, frozen=frozen)
        return limit is not None and time.monotonic() > pace.entered_at + limit and not pace.told

    def _seen(self, local_rank: int) -> tuple[int, int, float, int] | None:
        """What it was seen to do in its generation, as `Pace.saw` takes it."""
        if (seen := self._committed(local_rank)) is not None:
            return (*seen, self.workers.first_step(local_rank))
        counted = self.workers.counted.seen(local_rank)
        ours = counted is not None and counted[0] == self.workers.generation(local_rank)
        return counted if ours else None

    def _committed(self, local_rank: int) -> tuple[int, int, float] | None:
        seen = self.workers.progress(local_rank)
        ours = seen is not None and seen[0] == self.workers.generation(local_rank)
        return seen if ours else None

    def _may_be_ended(self, local_rank: int) -> bool:
        return self._committed(local_rank) is not None

    async def _judge(self, overdue: list[int]) -> None:
        found = await self.report.found(self.workers.generation(min(overdue)))
        doings = {doing.rank: doing for doing in found.doings}
        mine = {local: doings.get(self.workers.rank(local)) for local in overdue}
        still = {local: doing for local, doing in mine.items() if self._is_overdue(local)}
        if not still or found.generation != self.workers.generation(min(still)):
            return
        judged = self.report.judge(found)
        causes = {local: doing for local, doing in still.items() if is_cause(doing, judged)}
        ended = {local: doing for local, doing in causes.items() if self._may_be_ended(local)}
        said = (judged.text, self._paces[min(still)].entered_at)
        # Who waits for nobody, and commits nothing, may have trained enough.
        hangs = judged.waited or any(map(self._may_be_ended, still))
        ours = not judged.missing and hangs and 0 in {self.workers.rank(each) for each in still}
        if ended or ((causes or ours) and said != self._said):
            self.report.tell(found)
            self._said = said
        if judged.sure:  # otherwise all are looked at again: more may be seen then
            for local in still:
                self._paces[local].told = judged.text  # until it gets on
        for local, doing in ended.items():
            if doing is not None:
                since = self._paces[local].words(time.monotonic())
                self.workers.kill(local, f"{since}: {_verdict(doing, judged)}", doing.stack)


def _verdict(doing: Doing, judged: Judgement) -> str:
    missing = judged.text if doing.rank in judged.missing else ""
    return verdict("frozen" if doing.frozen else "working", doing.stack, missing)


def is_cause(doing: Doing | None, judged: Judgement) -> bool:
    """Whether this is who keeps the others waiting."""
    return doing is not None and (doing.frozen or (judged.waited and doing.rank in judged.missing))
