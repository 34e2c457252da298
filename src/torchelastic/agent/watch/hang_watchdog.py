"""Who hangs: a worker that makes no progress for too long, or is not freed when its world is over.

When one worker hangs, all of its world stand still, waiting for it. So a worker whose time is up is
asked before it is judged: one that waits for others is innocent; one that does not answer, or does
something of its own, is the cause. It is killed, and treated as lost. One that alone has the state
when its world is over is waited for (`last_copy`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from torchelastic.agent.lifecycle.in_process import InProcessState, Status
from torchelastic.agent.lifecycle.last_copy import Copy, is_usable, may_be_killed
from torchelastic.agent.watch.hang_report import HangReport
from torchelastic.agent.watch.stack_reader import NOTHING, answered, is_frozen
from torchelastic.agent.workers.pool import WorkerPool
from torchelastic.best_effort import observing
from torchelastic.events.analysis.hangs import where
from torchelastic.worker import orders

logger = logging.getLogger(__name__)

#: Where no limit is given: ten times the longest step, and no less than ten minutes. (Seconds.)
LEARNED_FACTOR, LEARNED_FLOOR = 10.0, 600.0
#: The way into a world and its first step build, load and compile things: each may take so many
#: times the limit. Not in a process that is frozen: it does nothing of all that.
FIRST_STEP_FACTOR = 10.0
#: How long before its time is up a worker is asked, and what all ranks do is looked at.
BEFOREHAND = 0.3
#: How long a worker has for an answer.
ANSWER = 0.05
#: How long after "the generation is over" a worker that waits for others must be free.
FREED = 0.1
#: How long to wait for who alone has the state, where no limit is given.
PATIENCE = 600.0
#: Where all wait and nobody is ended for it, that is told after so many times the limit.
ALL_WAIT = 2.0
#: How often to look where there is nothing to wait for.
LOOK = 1.0
#: How long a replacement leaves the processors to survivors of a failure, and how often to look.
RECOVERY, RECOVERY_LOOK = 1.0, 0.01

Doing = Literal["waiting", "stuck", "working", "silent", "frozen"]


@dataclass
class Pace:
    """How one worker has been getting on."""

    generation: int = -1
    first_step: int = -1
    step: int = -1
    entered_at: float = 0.0
    #: The world it is on its way into, since `entered_at`; -1: none, it is in a step.
    entering: int = -1
    longest: float = 0.0
    steps: int = 0
    #: What was told of its hanging there; empty: nothing yet.
    told: str = ""

    def saw(self, generation: int, step: int, at: float, first: int) -> None:
        """It has entered a step; the generation's first one need not have been seen."""
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
        """It was told to enter a world, and is in no step of that yet."""
        if (generation, at) != (self.entering, self.entered_at):
            self.told = ""
        self.entering, self.entered_at = generation, at

    def words(self, now: float) -> str:
        """For how long it has not got on. At which step is told with every failure."""
        way = f" on the way into generation {self.entering}" if self.entering >= 0 else ""
        return f"no progress for {now - self.entered_at:.1f} s{way}"


def limit_for(pace: Pace, given: float | None, *, frozen: bool = False) -> float | None:
    """Seconds that what a worker is in may take, a step or the way to it; None: any time."""
    if given == 0:
        return None
    learned = max(LEARNED_FLOOR, LEARNED_FACTOR * pace.longest)
    limit = learned if given is None else given
    slow = pace.entering >= 0 or pace.step == pace.first_step
    return limit * FIRST_STEP_FACTOR if slow and not frozen else limit


def verdict(doing: Doing, stack: str, missing: str) -> str:
    """What one that hangs is doing, and who waits for it, where somebody does (`missing`)."""
    at = where(stack)
    if doing == "frozen":  # which is said of who is missing, too
        return missing or "it is frozen (stopped by a signal or a debugger)"
    if doing == "silent":
        does = f"it does not answer{f', in {at}' if at else ''}"
    else:
        does = f"it is in {at}" if at else "it is busy outside any collective"
    return f"{does}; {missing}" if missing else does


@dataclass
class HangWatchdog:
    """Watches the resident workers of one node."""

    workers: WorkerPool
    report: HangReport
    #: `--progress-timeout`: seconds, 0 for none, None to learn it.
    limit: float | None = None
    #: Whether another node can go on after a generation; and who is told what is waited for.
    others_can_go_on: Callable[[int], Awaitable[bool]] | None = None
    say: Callable[[str], None] = logger.warning
    _paces: dict[int, Pace] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, crew: Callable[[], InProcessState]) -> None:
        """For as long as the agent runs."""
        try:
            while True:
                training = crew().having(Status.TRAINING)
                due = [at for rank in training if (at := await self._look(rank)) is not None]
                await asyncio.sleep(min(max(0.0, min(due, default=LOOK)), LOOK))
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise

    async def _look(self, local_rank: int) -> float | None:
        """Judge one worker if it is time; returns in how many seconds to look again."""
        left = self._time_left(local_rank)
        if left is None or left > BEFOREHAND:
            return None if left is None else left - BEFOREHAND
        doing = await self._ask(local_rank)
        if doing in ("waiting", "stuck"):
            await self._tell_if_all_wait(local_rank)
            return LOOK
        self.report.begin()
        if left > 0 and (left := self._time_left(local_rank)) is not None and left > 0:
            return left
        await self._end(local_rank, doing)
        return None

    async def _end(self, local_rank: int, doing: Doing) -> None:
        """Its time is up: tell what all ranks do, and kill it."""
        found = await self.report.found(self.workers.generation(local_rank))
        if doing == "silent":  # a busy machine may have kept its thread from answering
            doing = await self._ask(local_rank)
        left = self._time_left(local_rank)
        if left is None or left > 0 or doing in ("waiting", "stuck"):
            return  # it has got on meanwhile, or waits for others
        rank, stack, missing = self.workers.rank(local_rank), NOTHING, ""
        with observing("Explaining a hang"):
            self.report.tell(found)
            stack = next((one.stack for one in found.doings if one.rank == rank), NOTHING)
            judged = self.report.judge(found)
            missing = judged.text if rank in judged.missing else ""
        does = verdict(doing, stack, missing)
        since = self._paces[local_rank].words(time.monotonic())
        self.workers.kill(local_rank, f"{since}: {does}", stack)

    async def _tell_if_all_wait(self, local_rank: int) -> None:
        """Nobody hangs, and yet nothing goes on: the agent of the first rank says so, once."""
        pace = self._paces[local_rank]
        limit = limit_for(pace, self.limit)
        late = limit is not None and time.monotonic() > pace.entered_at + ALL_WAIT * limit
        if pace.told or not late or self.workers.rank(local_rank) != 0:
            return
        found = await self.report.found(self.workers.generation(local_rank))
        judged = self.report.judge(found)
        if not judged.missing and self._time_left(local_rank) is not None:
            self.report.tell(found)
            pace.told = judged.text

    def _time_left(self, local_rank: int) -> float | None:
        seen = self.workers.progress(local_rank)
        pid = self.workers.pid(local_rank)
        if seen is None or pid is None:
            return None
        pace = self._paces.setdefault(local_rank, Pace())
        generation = self.workers.generation(local_rank)
        if generation == seen[0]:
            pace.saw(*seen, self.workers.first_step(local_rank))
        elif (since := self.workers.entering_since(local_rank)) is not None:
            pace.set_out(generation, since)
        else:
            return None  # it has told that it does not go there
        limit = limit_for(pace, self.limit, frozen=is_frozen(pid))
        return None if limit is None else pace.entered_at + limit - time.monotonic()

    async def recovered(self, crew: Callable[[], InProcessState]) -> None:
        """Until a worker here has committed a step in a later world, or none can be formed yet."""
        failed = crew().generation
        begun: int | None = None
        deadline = time.monotonic() + RECOVERY
        while time.monotonic() < deadline:
            state = crew()
            if state.world is not None and state.world.phase == "waiting":
                return
            for local_rank in state.having(Status.TRAINING):
                generation, step, _ = self.workers.progress(local_rank) or (-1, -1, 0.0)
                if generation > failed and begun is not None and step > begun:
                    return
                if generation > failed and begun is None:
                    begun = step
            await asyncio.sleep(RECOVERY_LOOK)

    # --- the last resort -------------------------------------------------------------------------

    def told_over(self, local_rank: int, *, finished: bool = False) -> None:
        """The worker was told that its generation is over: it must be free in no time.

        With `finished` so is the training, and no world goes on from its state.
        """
        seeing = self._see_freed(local_rank, finished)
        task = asyncio.create_task(seeing, name="see-freed")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_freed(self, local_rank: int, finished: bool) -> None:
        pid, generation = self.workers.pid(local_rank), self.workers.generation(local_rank)
        began, pause, stuck, said = time.monotonic(), FREED, 0, False

        def is_there() -> bool:
            """Whether the process lives, and is still in that world."""
            here = self.workers.pid(local_rank), self.workers.generation(local_rank)
            return here == (pid, generation) and not self.workers.has_stopped(local_rank)

        while pid is not None and is_there():
            await asyncio.sleep(pause)
            if not is_there():
                return
            doing = await self._ask(local_rank)
            waited = time.monotonic() - began
            # Twice: on a busy machine the thread that was freed may not have run yet.
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
            if waited >= LOOK:  # until then the others may only not be ready yet
                said = said or self._say_waiting(local_rank, doing, pid)
                pause = LOOK

    async def _may_be_killed(self, local_rank: int, waited: float) -> bool:
        own, limit = self._copy(local_rank), self._patience(local_rank)
        others = [self._copy(rank) for rank in self.workers.alive if rank != local_rank]
        if may_be_killed(own, others, elsewhere=False, waited=waited, limit=limit):
            return True
        elsewhere = False
        if self.others_can_go_on is not None:
            elsewhere = await self.others_can_go_on(own.generation)
        return may_be_killed(own, others, elsewhere=elsewhere, waited=waited, limit=limit)

    def _patience(self, local_rank: int) -> float:
        pace = self._paces.get(local_rank, Pace())
        return limit_for(pace, self.limit, frozen=True) or PATIENCE

    def _say_waiting(self, local_rank: int, doing: Doing, pid: int) -> bool:
        step, limit = self._copy(local_rank).step, self._patience(local_rank)
        wake = f" To resume it: kill -CONT {pid}." if doing == "frozen" else ""
        self.say(
            f"Rank {self.workers.rank(local_rank)} is {doing} and has the only copy of the state "
            f"after {step} steps: the job waits for it, at most {limit:g} s.{wake}"
        )
        return True

    def can_go_on(self, generation: int) -> bool:
        """Whether a worker here has the state of a generation that is over, and is free."""
        return any(is_usable(self._copy(rank), generation) for rank in self.workers.alive)

    def _copy(self, local_rank: int) -> Copy:
        generation = self.workers.generation(local_rank)
        shown = self.workers.doing(local_rank, generation)
        return Copy(
            generation=generation,
            step=shown.step if shown is not None else None,
            stopped=self.workers.has_stopped(local_rank),
            frozen=is_frozen(self.workers.pid(local_rank)),
            doomed=self.workers.last_stack(local_rank) is not None,
        )

    # --- asking ----------------------------------------------------------------------------------

    async def _ask(self, local_rank: int) -> Doing:
        """What a worker is doing."""
        if is_frozen(self.workers.pid(local_rank)):
            return "frozen"
        pong = await answered(self.workers, local_rank, ANSWER)
        return "silent" if pong is None else _doing(pong)


def _doing(pong: orders.Pong) -> Doing:
    if pong.waiting:
        return "stuck" if pong.aborted else "waiting"
    return "working"
