"""The hang watchdog for scripts: watches their commits, or else the steps of their optimizers.

No thread answers for such a worker, so it is judged by what all ranks of the world are doing. After
`--progress-timeout` a worker is killed if it is frozen, or missing from a collective in which
others wait. A learned limit applies to frozen workers only: what a script does between two commits,
such as an evaluation, may take any time.

Of a script that commits nothing, only optimizer steps are known. They kill no worker: the watchdog
reports once, after the given or learned limit, which rank keeps the others waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torchelastic.agent.watch.hang_report import HangReport
from torchelastic.agent.watch.hang_watchdog import WorkerPace, limit_for, verdict
from torchelastic.agent.watch.stack_reader import is_frozen
from torchelastic.agent.workers.step_counts import CountedSteps
from torchelastic.events.analysis.hangs import HangDiagnosis, RankActivity

#: Seconds between two looks.
LOOK = 1.0


class WatchedScripts(Protocol):
    """The part of `WorkerPool` used here."""

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
    """Watches the workers of one node's script, until they call `torchelastic.train`."""

    workers: WatchedScripts
    report: HangReport
    #: As for `HangWatchdog`.
    limit: float | None = None
    _paces: dict[int, WorkerPace] = field(default_factory=dict)
    #: The last report, and since when there was no progress.
    _said: tuple[str, float] = ("", 0.0)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Watch for as long as a script runs."""
        while not is_over():
            await asyncio.sleep(LOOK)
            overdue = [] if self.workers.stopping else self._overdue()
            if overdue:
                await self._judge(overdue)

    def _overdue(self) -> list[int]:
        """Local ranks whose time is up and that have not been judged yet."""
        return [rank for rank in self.workers.alive if self._is_overdue(rank)]

    def _is_overdue(self, local_rank: int) -> bool:
        seen, pid = self._seen(local_rank), self.workers.pid(local_rank)
        if seen is None or pid is None:
            return False
        pace = self._paces.setdefault(local_rank, WorkerPace())
        pace.saw(*seen)
        frozen = is_frozen(pid)
        if self.limit is None and not frozen and self._may_be_ended(local_rank):
            return False
        limit = limit_for(pace, self.limit, frozen=frozen)
        return limit is not None and time.monotonic() > pace.entered_at + limit and not pace.told

    def _seen(self, local_rank: int) -> tuple[int, int, float, int] | None:
        """The worker's progress, as `WorkerPace.saw` takes it."""
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
        activities = {doing.rank: doing for doing in found.activities}
        mine = {local: activities.get(self.workers.rank(local)) for local in overdue}
        still = {local: doing for local, doing in mine.items() if self._is_overdue(local)}
        if not still or found.generation != self.workers.generation(min(still)):
            return
        judged = self.report.diagnose(found)
        causes = {local: doing for local, doing in still.items() if is_cause(doing, judged)}
        ended = {local: doing for local, doing in causes.items() if self._may_be_ended(local)}
        said = (judged.text, self._paces[min(still)].entered_at)
        # A worker that waits for no rank and commits nothing may have finished training.
        hangs = judged.waited or any(map(self._may_be_ended, still))
        ours = not judged.missing and hangs and 0 in {self.workers.rank(each) for each in still}
        if ended or ((causes or ours) and said != self._said):
            self.report.tell(found)
            self._said = said
        if judged.sure:  # otherwise look again: more may be visible then
            for local in still:
                self._paces[local].told = judged.text  # until it makes progress
        for local, doing in ended.items():
            if doing is not None:
                since = self._paces[local].words(time.monotonic())
                self.workers.kill(local, f"{since}: {_verdict(doing, judged)}", doing.stack)


def _verdict(doing: RankActivity, judged: HangDiagnosis) -> str:
    missing = judged.text if doing.rank in judged.missing else ""
    return verdict("frozen" if doing.frozen else "working", doing.stack, missing)


def is_cause(doing: RankActivity | None, judged: HangDiagnosis) -> bool:
    """True if this rank keeps the others waiting."""
    return doing is not None and (doing.frozen or (judged.waited and doing.rank in judged.missing))
