"""Who hangs among workers of a script that keeps its state: it shows on its slate what it commits.

No thread answers for such a worker, so it is judged by what all ranks of the world are doing. Ended
is who is frozen, or missing from a collective in which others wait; and not before the limit that
was given. A limit that is learned counts for frozen ones alone: what a script does between two
commits, an evaluation for one, may take any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torchelastic.agent.hang_report import HangReport
from torchelastic.agent.stacks import is_frozen
from torchelastic.agent.vigil import Pace, limit_for, verdict
from torchelastic.events.hangs import Doing, Judgement

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

    def kill(self, local_rank: int, why: str, stack: str = "") -> None: ...

    def rank(self, local_rank: int) -> int: ...


@dataclass
class ScriptVigil:
    """Watches the workers of one node, until they turn out to be resident."""

    workers: Watched
    report: HangReport
    #: As for `Vigil`.
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
        seen, pid = self.workers.progress(local_rank), self.workers.pid(local_rank)
        if seen is None or pid is None or seen[0] != self.workers.generation(local_rank):
            return False
        pace = self._paces.setdefault(local_rank, Pace())
        pace.saw(*seen, self.workers.first_step(local_rank))
        frozen = is_frozen(pid)
        if self.limit is None and not frozen:
            return False
        limit = limit_for(pace, self.limit, frozen=frozen)
        return limit is not None and time.monotonic() > pace.entered_at + limit and not pace.told

    async def _judge(self, overdue: list[int]) -> None:
        found = await self.report.found(self.workers.generation(min(overdue)))
        doings = {doing.rank: doing for doing in found.doings}
        mine = {local: doings.get(self.workers.rank(local)) for local in overdue}
        still = {local: doing for local, doing in mine.items() if self._is_overdue(local)}
        if not still or found.generation != self.workers.generation(min(still)):
            return
        judged = self.report.judge(found)
        causes = {local: doing for local, doing in still.items() if is_cause(doing, judged)}
        said = (judged.text, self._paces[min(still)].entered_at)
        ours = not judged.missing and 0 in {self.workers.rank(local) for local in still}
        if causes or (ours and said != self._said):
            self.report.tell(found)
            self._said = said
        if judged.sure:  # otherwise all are looked at again: more may be seen then
            for local in still:
                self._paces[local].told = judged.text  # until it gets on
        for local, doing in causes.items():
            if doing is not None:
                since = self._paces[local].words(time.monotonic())
                self.workers.kill(local, f"{since}: {_verdict(doing, judged)}", doing.stack)


def _verdict(doing: Doing, judged: Judgement) -> str:
    missing = judged.text if doing.rank in judged.missing else ""
    return verdict("frozen" if doing.frozen else "working", doing.stack, missing)


def is_cause(doing: Doing | None, judged: Judgement) -> bool:
    """Whether this is who keeps the others waiting."""
    return doing is not None and (doing.frozen or (judged.waited and doing.rank in judged.missing))
