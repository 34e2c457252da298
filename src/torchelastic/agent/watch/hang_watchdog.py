"""The hang watchdog: finds workers that make no progress, or do not leave a world that is over.

When one worker hangs, its whole world waits for it. So a worker whose time is up is asked what it
does: if it waits for others, it is innocent; if it does not answer or is busy elsewhere, it is the
cause. It is killed and treated as lost. If all wait, in different collectives, none is to blame:
their world ends, and the next one takes the step again. A worker that has the only copy of the
state when its world is over gets more time (`last_copy`).

No thread answers for the worker of a script, so it is judged by what all ranks of the world are
doing. After `--progress-timeout` without a commit it is killed if it is frozen, or missing from a
collective in which others wait. A learned limit applies to frozen workers only: what a script does
between two commits, such as an evaluation, may take any time. Of a script that commits nothing,
only optimizer steps are known. They kill no worker: the watchdog reports once, after the given or
learned limit, which rank keeps the others waiting.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from torchelastic.agent.lifecycle.in_process import InProcessState, Status
from torchelastic.agent.lifecycle.last_copy import LiveCopy, is_usable, may_be_killed
from torchelastic.agent.lifecycle.machine import State
from torchelastic.agent.watch.inspector import WorldActivity
from torchelastic.agent.watch.stack_reader import NOTHING, answered, is_frozen
from torchelastic.agent.workers.pool import WorkerPool
from torchelastic.best_effort import observing
from torchelastic.events import types as events
from torchelastic.events.analysis.hangs import (
    HangDiagnosis,
    RankActivity,
    diagnose,
    event_of,
    first_in_line,
    where,
)
from torchelastic.side_tasks import TaskSet
from torchelastic.system import devices
from torchelastic.worker import orders

logger = logging.getLogger(__name__)

#: The limit where none is given: ten times the longest step, at least 600 seconds.
LEARNED_FACTOR, LEARNED_FLOOR = 10.0, 600.0
#: Entering a world and its first step build, load and compile things: the limit of each is this
#: many times longer. Not for a frozen process.
FIRST_STEP_FACTOR = 10.0
#: Seconds before its time is up at which a worker is asked and all ranks are inspected.
BEFOREHAND = 0.3
#: Seconds a worker has to answer.
ANSWER_TIMEOUT = 0.05
#: Seconds after "the generation is over" in which a worker that waits for others must be free.
FREED_TIMEOUT = 0.1
#: Seconds to wait for the only copy of the state, where no limit is given.
ONLY_COPY_TIMEOUT = 600.0
#: A hang in which all ranks wait in the same collective is reported after this many times the
#: limit; no rank is killed.
ALL_WAIT = 2.0
#: Seconds between two looks.
LOOK = 1.0
#: Seconds a replacement leaves the CPUs to survivors of a failure, and between two looks.
RECOVERY_TIMEOUT, RECOVERY_LOOK = 1.0, 0.005
#: Seconds for which the last findings about all ranks are reused.
FRESH = 5.0

Doing = Literal["waiting", "stuck", "working", "silent", "frozen"]


@dataclass
class WorkerPace:
    """The progress of one worker."""

    generation: int = -1
    first_step: int = -1
    step: int = -1
    entered_at: float = 0.0
    #: The generation it has been entering since `entered_at`; -1: it is in a step.
    entering: int = -1
    longest: float = 0.0
    steps: int = 0
    #: The report about its hang there, and when it was made; empty: none yet.
    told: str = ""
    told_at: float = 0.0

    def saw(self, generation: int, step: int, at: float, first: int) -> None:
        """Note the step it has entered; `first` is the generation's first step."""
        self.first_step = first
        if generation != self.generation:
            self.generation, self.steps = generation, 0
        elif step > self.step:
            self.longest = max(self.longest, (at - self.entered_at) / (step - self.step))
            self.steps += 1
        if (step, at) != (self.step, self.entered_at):
            self.told = ""
        self.step, self.entered_at, self.entering = step, at, -1

    def set_out(self, generation: int, at: float) -> None:
        """Note that it was told to enter a world and has not entered a step there."""
        if (generation, at) != (self.entering, self.entered_at):
            self.told = ""
        self.entering, self.entered_at = generation, at

    def words(self, now: float) -> str:
        """Describe how long it has made no progress. Every failure names the step."""
        way = f" on the way into generation {self.entering}" if self.entering >= 0 else ""
        return f"no progress for {now - self.entered_at:.1f} s{way}"


def limit_for(pace: WorkerPace, given: float | None, *, frozen: bool = False) -> float | None:
    """Seconds the worker's step, or its way into the world, may take; None: no limit."""
    if given == 0:
        return None
    learned = max(LEARNED_FLOOR, LEARNED_FACTOR * pace.longest)
    limit = learned if given is None else given
    slow = pace.entering >= 0 or pace.step == pace.first_step
    return limit * FIRST_STEP_FACTOR if slow and not frozen else limit


def verdict(doing: Doing, stack: str, missing: str) -> str:
    """Describe what a hung worker does, and which ranks wait for it (`missing`)."""
    at = where(stack)
    if doing == "frozen":  # `missing` says so, too
        return missing or "it is frozen (stopped by a signal or a debugger)"
    if doing == "silent":
        does = f"it does not answer{f', in {at}' if at else ''}"
    else:
        does = f"it is in {at}" if at else "it is busy outside any collective"
    return f"{does}; {missing}" if missing else does


class HangReport:
    """Looks at all ranks of the world before one is killed, and reports the findings."""

    def __init__(
        self, look: Callable[[], Awaitable[WorldActivity]], tell: Callable[[int, events.Hang], None]
    ) -> None:
        self._look, self._tell = look, tell
        self._looking: asyncio.Task[WorldActivity] | None = None
        self._began = 0.0
        self._told: WorldActivity | None = None

    def begin(self) -> asyncio.Task[WorldActivity]:
        """Start looking, unless that has just been done."""
        if self._looking is None or time.monotonic() - self._began > FRESH:
            self._began = time.monotonic()
            self._looking = asyncio.ensure_future(self._look_safely())
        return self._looking

    async def _look_safely(self) -> WorldActivity:
        """Look; an error here must not end the job."""
        try:
            return await self._look()
        except Exception:
            logger.exception("Could not find out what the ranks are doing.")
            return WorldActivity()

    async def found(self, generation: int) -> WorldActivity:
        """Return the findings for this world, within seconds."""
        found = await asyncio.shield(self.begin())
        if found.generation >= generation:
            return found
        self._looking = None  # the last findings are from an earlier world
        return await asyncio.shield(self.begin())

    def diagnose(self, found: WorldActivity) -> HangDiagnosis:
        return diagnose(found.activities, found.unheard)

    def tell(self, found: WorldActivity) -> None:
        """Report the findings, once."""
        if found is not self._told and found.activities:
            self._told = found
            self._tell(found.generation, event_of(found.activities, found.unheard))

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()


@dataclass
class HangWatchdog:
    """The hang watchdog of one node."""

    workers: WorkerPool
    report: HangReport
    #: `--progress-timeout`: seconds, 0 for none, None to learn it.
    limit: float | None = None
    #: Asks whether another node can continue after a generation; and logs what the job waits for.
    others_can_go_on: Callable[[int], Awaitable[bool]] | None = None
    say: Callable[[str], None] = logger.warning
    _paces: dict[int, WorkerPace] = field(default_factory=dict)
    _tasks: TaskSet = field(default_factory=TaskSet)

    #: The last report about a script, and since when there was no progress.
    _said: tuple[str, float] = ("", 0.0)

    async def run(self, state: Callable[[], State]) -> None:
        """Watch for as long as the agent runs."""
        try:
            await self.watch_script(lambda: isinstance(state(), InProcessState))
            while isinstance(now := state(), InProcessState):
                training = now.having(Status.TRAINING)
                due = [at for rank in training if (at := await self._look(rank)) is not None]
                await asyncio.sleep(min(max(0.0, min(due, default=LOOK)), LOOK))
        except asyncio.CancelledError:
            self._tasks.cancel()
            raise

    # --- in-process workers ----------------------------------------------------------------------

    async def _look(self, local_rank: int) -> float | None:
        """Judge one worker if its time is up; return the seconds until the next look."""
        left = self._time_left(local_rank)
        if left is None or left > BEFOREHAND:
            return None if left is None else left - BEFOREHAND
        doing = await self._ask(local_rank)
        if doing in ("waiting", "stuck"):
            await self._judge_all(local_rank)
            return LOOK
        self.report.begin()
        if left > 0 and (left := self._time_left(local_rank)) is not None and left > 0:
            return left
        await self._end(local_rank, doing)
        return None

    async def _end(self, local_rank: int, doing: Doing) -> None:
        """Report what all ranks do, and kill the worker."""
        found = await self.report.found(self.workers.generation(local_rank))
        if doing == "silent":  # a busy machine may have kept its thread from answering
            doing = await self._ask(local_rank)
        left = self._time_left(local_rank)
        if left is None or left > 0 or doing in ("waiting", "stuck"):
            return  # it has made progress, or waits for others
        rank, stack, missing = self.workers.rank(local_rank), NOTHING, ""
        with observing("Explaining a hang"):
            self.report.tell(found)
            stack = next((one.stack for one in found.activities if one.rank == rank), NOTHING)
            judged = self.report.diagnose(found)
            missing = judged.text if rank in judged.missing else ""
        does = verdict(doing, stack, missing)
        since = self._paces[local_rank].words(time.monotonic())
        self.workers.kill(local_rank, f"{since}: {does}", stack)

    async def _judge_all(self, local_rank: int) -> None:
        """Report, once and by one agent, that all ranks wait and none is missing. End a world whose
        ranks wait in different collectives and are still there when they are looked at again."""
        pace = self._paces[local_rank]
        found = await self.report.found(self.workers.generation(local_rank))
        judged = self.report.diagnose(found)
        left, now = self._time_left(local_rank), time.monotonic()
        if judged.missing or not found.activities or left is None or left > BEFOREHAND:
            return
        if self.workers.rank(local_rank) != first_in_line(found.activities):
            return
        if judged.deadlock and judged.text == pace.told:
            if now > pace.told_at + FRESH:
                pace.told_at = math.inf  # once
                self.workers.fail(local_rank, f"{pace.words(now)}: {judged.text}", alive=True)
            return
        limit = limit_for(pace, self.limit)
        is_late = limit is not None and now > pace.entered_at + ALL_WAIT * limit
        if judged.deadlock or (not pace.told and is_late):
            self.report.tell(found)
            pace.told, pace.told_at = judged.text, now

    def _time_left(self, local_rank: int) -> float | None:
        seen = self.workers.progress(local_rank)
        pid = self.workers.pid(local_rank)
        if seen is None or pid is None:
            return None
        pace = self._paces.setdefault(local_rank, WorkerPace())
        generation = self.workers.generation(local_rank)
        if generation == seen[0]:
            pace.saw(*seen, self.workers.first_step(local_rank))
        elif (since := self.workers.entering_since(local_rank)) is not None:
            pace.set_out(generation, since)
        else:
            return None  # it has reported that it does not enter
        limit = limit_for(pace, self.limit, frozen=is_frozen(pid))
        return None if limit is None else pace.entered_at + limit - time.monotonic()

    async def recovered(self, state: Callable[[], InProcessState]) -> None:
        """Wait until a replacement does not hold up the survivors of a failure: each worker that
        trains has a CPU, one has committed a step in a later world, or none can form yet."""
        failed, cpus = state().generation, devices.cpus()
        begun: int | None = None
        deadline = time.monotonic() + RECOVERY_TIMEOUT
        while time.monotonic() < deadline:
            now = state()
            training = now.having(Status.TRAINING)
            waits = now.world is not None and now.world.phase == "waiting"
            if waits or len(training) <= cpus:
                return
            for local_rank in training:
                generation, step, _ = self.workers.progress(local_rank) or (-1, -1, 0.0)
                if generation > failed and begun is not None and step > begun:
                    return
                if generation > failed and begun is None:
                    begun = step
            await asyncio.sleep(RECOVERY_LOOK)

    # --- scripts ---------------------------------------------------------------------------------

    async def watch_script(self, is_over: Callable[[], bool]) -> None:
        """Watch for as long as a script runs, until its workers call `torchelastic.train`."""
        while not is_over():
            await asyncio.sleep(LOOK)
            if self.workers.stopping:
                continue
            overdue = [rank for rank in self.workers.alive if self._is_overdue(rank)]
            if overdue:
                await self._judge_scripts(overdue)
        self._paces.clear()

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

    async def _judge_scripts(self, overdue: list[int]) -> None:
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
                missing = judged.text if doing.rank in judged.missing else ""
                does = verdict("frozen" if doing.frozen else "working", doing.stack, missing)
                self.workers.kill(local, f"{since}: {does}", doing.stack)

    # --- the last resort -------------------------------------------------------------------------

    def told_over(self, local_rank: int, *, finished: bool = False) -> None:
        """Check that a worker leaves a generation that is over; kill it if it does not.

        With `finished` the training is done, and no world continues from its state.
        """
        self._tasks.start(self._see_freed(local_rank, finished), "see-freed")

    async def _see_freed(self, local_rank: int, finished: bool) -> None:
        pid, generation = self.workers.pid(local_rank), self.workers.generation(local_rank)
        began, pause, stuck, said = time.monotonic(), FREED_TIMEOUT, 0, False

        def is_there() -> bool:
            """True if the process lives and is still in that world."""
            here = self.workers.pid(local_rank), self.workers.generation(local_rank)
            return here == (pid, generation) and not self.workers.has_stopped(local_rank)

        while pid is not None and is_there():
            await asyncio.sleep(pause)
            if not is_there():
                return
            doing = await self._ask(local_rank)
            waited = time.monotonic() - began
            # Twice: on a busy machine the freed thread may not have run yet.
            stuck += doing == "stuck"
            if doing != "frozen" and stuck < 2:
                continue
            spared = not finished and not await self._may_be_killed(local_rank, waited)
            if not is_there():
                return
            if not spared:
                why = f"not free {waited * 1000:.0f} ms after its world was over ({doing})"
                self.workers.kill(local_rank, why, over=True)
                return
            if waited >= LOOK:  # before that, others may just not be ready yet
                said = said or self._say_waiting(local_rank, doing, pid)
                pause = LOOK

    async def _may_be_killed(self, local_rank: int, waited: float) -> bool:
        own, limit = self._copy(local_rank), self._only_copy_timeout(local_rank)
        others = [self._copy(rank) for rank in self.workers.alive if rank != local_rank]
        if may_be_killed(own, others, elsewhere=False, waited=waited, limit=limit):
            return True
        elsewhere = False
        if self.others_can_go_on is not None:
            elsewhere = await self.others_can_go_on(own.generation)
        return may_be_killed(own, others, elsewhere=elsewhere, waited=waited, limit=limit)

    def _only_copy_timeout(self, local_rank: int) -> float:
        pace = self._paces.get(local_rank, WorkerPace())
        return limit_for(pace, self.limit, frozen=True) or ONLY_COPY_TIMEOUT

    def _say_waiting(self, local_rank: int, doing: Doing, pid: int) -> bool:
        step, limit = self._copy(local_rank).step, self._only_copy_timeout(local_rank)
        wake = f" To resume it: kill -CONT {pid}." if doing == "frozen" else ""
        self.say(
            f"Rank {self.workers.rank(local_rank)} is {doing} and has the only copy of the state "
            f"after {step} steps: the job waits for it, at most {limit:g} s.{wake}"
        )
        return True

    def can_go_on(self, generation: int) -> bool:
        """True if a worker here has the state of a generation that is over, and is free."""
        return any(is_usable(self._copy(rank), generation) for rank in self.workers.alive)

    def _copy(self, local_rank: int) -> LiveCopy:
        generation = self.workers.generation(local_rank)
        shown = self.workers.doing(local_rank, generation)
        return LiveCopy(
            generation=generation,
            step=shown.step if shown is not None else None,
            stopped=self.workers.has_stopped(local_rank),
            frozen=is_frozen(self.workers.pid(local_rank)),
            doomed=self.workers.last_stack(local_rank) is not None,
        )

    # --- asking ----------------------------------------------------------------------------------

    async def _ask(self, local_rank: int) -> Doing:
        """Ask a worker what it is doing."""
        if is_frozen(self.workers.pid(local_rank)):
            return "frozen"
        pong = await answered(self.workers, local_rank, ANSWER_TIMEOUT)
        return "silent" if pong is None else _doing(pong)


def _doing(pong: orders.Pong) -> Doing:
    if pong.waiting:
        return "stuck" if pong.aborted else "waiting"
    return "working"


def is_cause(doing: RankActivity | None, judged: HangDiagnosis) -> bool:
    """True if this rank keeps the others waiting."""
    return doing is not None and (doing.frozen or (judged.waited and doing.rank in judged.missing))
