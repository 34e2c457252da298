"""The agent: one per node. Take the next event, let `lifecycle` decide, perform the commands.

`run` is the whole agent; everything below it performs one command or makes one event. `wiring` has
the parts that it is made of.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchelastic.agent import preflight
from torchelastic.agent.guard import GUARD_LOST_SIGNAL, is_under_nohup
from torchelastic.agent.lifecycle import in_process, script
from torchelastic.agent.lifecycle.in_process_state import InProcessState, Status
from torchelastic.agent.lifecycle.last_copy import is_waited_for
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.lifecycle.transitions import Transitions
from torchelastic.agent.wiring import Parts, State
from torchelastic.best_effort import observing
from torchelastic.cluster.preemption.notices import Notice
from torchelastic.errors import RendezvousLost, exitcode_of
from torchelastic.rendezvous.world import Base, World
from torchelastic.side_tasks import Work, pause
from torchelastic.worker import orders

#: The number of nodes that report the base of a world to the leader.
BASE_REPORTERS = 3
#: Seconds that the agent keeps for its own end, of those that a preemption notice leaves.
END_OF_AGENT = 2.0
#: Seconds between two looks at workers that the others may wait for while this node leaves.
LEAVE_LOOK = 0.1


@dataclass(frozen=True)
class JobOutcome:
    """The end of the job on this node."""

    exitcode: int
    reason: str
    #: This node's id in the world.
    node: str = ""
    world: World | None = None
    #: Global rank -> path of the function's pickled result.
    results: dict[int, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it as JSON, for `elastic_launch`."""
        world = self.world.to_json() if self.world is not None else None
        path.write_text(json.dumps({**dataclasses.asdict(self), "world": world}))


class Agent:
    """Supervises the workers of one node until the job ends."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._node = parts.node
        place = -1 if parts.config.nodes_per_replica > 1 else 0
        self.state: State = ScriptState(
            node=parts.node, nproc=parts.config.nproc_per_node, place=place
        )
        self._transitions = Transitions()
        self._action: asyncio.Task[None] | None = None
        #: The newest generation whose state is kept here.
        self._kept = -1
        #: Set once this node may take part in the training (`--preflight`).
        self._fit = asyncio.Event()
        if not self._config.preflight:
            self._fit.set()
        #: Starts of workers that failed, one after the other.
        self._failed_starts = 0
        #: Nothing may be started any more.
        self._closing = False

    async def run(self) -> JobOutcome:
        """Join, supervise, leave."""
        self._install_signals()  # the loop handles them once all is open
        self._parts.open(self)
        try:
            self._parts.tasks.start(self._join, "join")
            while not self.state.is_terminal:
                event = await self._next_event()
                for command in self._handle(event):
                    self._perform(command)
            return self._outcome()
        except Exception as error:
            self.state = replace(self.state, exitcode=exitcode_of(error), reason=str(error))
            raise
        finally:
            await self._close()

    async def _close(self) -> None:
        self._closing = True
        if self._action is not None:
            await asyncio.wait({self._action})
        await self._parts.close(self.state)

    def _outcome(self) -> JobOutcome:
        state, results = self.state, dict(self._parts.workers.results)
        return JobOutcome(state.exitcode or 0, state.reason, self._node, state.world, results)

    # --- joining ---------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Join the other nodes and warm up concurrently; report `ready` when both are done."""
        parts, start = self._parts, self._parts.tasks.start
        warming = start(parts.factory.warm_up, "warm-up")
        checking = start(self._check, "preflight")
        parts.reporter.joins()
        await parts.session.join()
        parts.connect()
        parts.reporter.warmed_up(await warming, parts.factory.warnings)
        await checking
        start(parts.helper_restarts.keep_store_host, "store-host")
        start(parts.helper_restarts.keep_zygote, "zygote")

    async def _check(self) -> None:
        """Repeat the `--preflight` check, if there is one, until it passes."""
        parts = self._parts

        def failed(how: str, sentence: str) -> None:
            parts.session.update(unfit=f"its --preflight check {how}")
            parts.reporter.say(sentence)

        if self._fit.is_set():
            return
        command, helpers = self._config.preflight, parts.workers.helpers
        await preflight.until_passed(command, parts.env, helpers, failed)
        parts.session.update(unfit="")
        self._fit.set()

    async def _started(self, start: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Start workers. If this machine cannot start any process (pids.max, memory), stay out of
        worlds until it can."""
        if await start():
            self._failed_starts = 0
            return
        self._failed_starts += 1
        if await self._lacks_processes():
            why = self._parts.session.member.unfit
            self._parts.reporter.say(f"this node stays out of training until it can start: {why}")
            self._parts.tasks.start(self._until_startable, "preflight")

    async def _lacks_processes(self) -> bool:
        problem = await preflight.check("true", self._parts.env, self._parts.workers.helpers)
        why = "" if problem is None else f"a process {problem[0]}"
        self._parts.session.update(unfit=why)
        return bool(why)

    async def _until_startable(self) -> None:
        while True:
            await asyncio.sleep(pause(self._failed_starts))
            if not await self._lacks_processes():
                return

    async def _rejoin(self, gone: int) -> None:
        name = await self._parts.session.rejoin(gone)
        self._parts.reporter.rejoined(name, self._parts.session.backend)

    # --- events ----------------------------------------------------------------------------------

    async def _next_event(self) -> in_process.Event:
        event = await self._parts.queue.get()
        if isinstance(event, Exception):
            raise event
        return event

    def world_seen(self, world: World) -> None:
        """Handle a world that the leader has published."""
        parts = self._parts
        parts.queue.put_nowait(script.WorldSeen(world))
        parts.snapshots.hear_of(world)
        if world.phase == "running":
            parts.snapshots.turn_to(world)
            parts.tasks.start(partial(parts.helper_restarts.renew_store, world), "renew-store")
        if world.phase in ("waiting", "running"):
            parts.sum_up_stragglers(before=world.generation + (world.phase == "waiting"))
        if not self.state.leaving:
            parts.reporter.world_seen(world)
        if world.phase == "running":
            with observing("Reporting the new world"):
                parts.sampling.turn_to(world.generation, world.count)
                parts.shipper.turn_to(world.count, world.host)
                if parts.stragglers is not None:
                    parts.stragglers.turn_to(world.generation, world.size)

    def base_known(self, base: Base) -> None:
        """Report to the leader the base the workers here continue from; a few nodes do."""
        world = self.state.world
        if world is None or not world.in_process:  # else workers hold it
            self._kept = base.generation
        place = world.place(self._node) if world is not None else None
        if place is not None and place < BASE_REPORTERS:
            self._parts.session.update(base=base)

    def place_allotted(self, place: int) -> None:
        """Handle the place in a replica that the leader has allotted to this node."""
        self._parts.queue.put_nowait(script.PlaceAllotted(place))

    def lease_lost(self) -> None:
        """Handle the loss of this node's lease: the others have given it up."""
        self._parts.queue.put_nowait(script.LeaseLost())
        if not self.state.leaving:
            self._parts.reporter.lease_lost(self._parts.session.backend.loss)

    def task_failed(self, error: Exception) -> None:
        """Turn the failure of an essential side task into an event."""
        lost = isinstance(error, RendezvousLost)
        self._parts.queue.put_nowait(script.StoreLost(str(error)) if lost else error)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in self._config.signals_to_handle:
            signum = signal.Signals[name]
            if signum == signal.SIGHUP and is_under_nohup():
                continue
            loop.add_signal_handler(signum, partial(self._asked_to_leave, signum))
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # it is not among them
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            if signum.name not in self._config.signals_to_handle:
                loop.add_signal_handler(signum, partial(self._forward, signum))
        loop.add_signal_handler(GUARD_LOST_SIGNAL, self._guard_lost)

    def _asked_to_leave(self, signum: signal.Signals) -> None:
        self._parts.reporter.leaves(signum.name)
        self._leave(signum, self._config.shutdown_timeout)

    def preempted(self, notice: Notice) -> None:
        """Leave: this machine will be taken away. The agent itself needs a moment to end."""
        seconds = self._config.shutdown_timeout
        if notice.seconds is not None:
            seconds = max(notice.seconds - END_OF_AGENT, notice.seconds / 2)
        self._parts.reporter.preempted(notice.reason, seconds)
        self._leave(signal.SIGTERM, seconds, notice.reason)

    def _leave(self, signum: signal.Signals, seconds: float, notice: str = "") -> None:
        deadline = self._parts.clock.now() + seconds
        request = script.LeaveRequested(signum, deadline, notice)
        with observing("Telling scripts that this node leaves"):
            self._parts.leave_file.announce(request.why, deadline)
        self._parts.queue.put_nowait(request)
        self._parts.tasks.start(partial(self._leave_in_time, seconds), "leave")

    async def _leave_in_time(self, seconds: float) -> None:
        """Kill workers that have not ended in time, at the earliest of several deadlines, or that
        the others need not wait for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0 and not self._is_waited_for():
            await asyncio.sleep(min(left, LEAVE_LOOK))
        self._parts.queue.put_nowait(in_process.LeaveOverdue())

    def _is_waited_for(self) -> bool:
        state, workers = self.state, self._parts.workers
        if not isinstance(state, InProcessState):
            return False
        training = state.having(Status.TRAINING)
        return is_waited_for(state, {rank: workers.progress(rank) for rank in training})

    def _forward(self, signum: signal.Signals) -> None:
        self._parts.workers.signal(signum)
        self._parts.reporter.signal(signum.name, "forwarded to the workers")

    def _guard_lost(self) -> None:
        """Kill everything: the command the user started is gone (`kill -9`)."""
        self._parts.workers.kill_everything()
        os._exit(128 + signal.SIGKILL)

    # --- decisions -------------------------------------------------------------------------------

    def _handle(self, event: in_process.Event) -> list[in_process.Command]:
        """Let the current state machine decide; switch to `in_process` once the world says so."""
        if isinstance(self.state, InProcessState):
            return self._let_in_process(self.state, event)
        state = self.state
        decided: list[in_process.Command] = []
        known = _for_script(event)
        if known is not None:
            state, decided = self._transitions.take(script.handle, state, known)
        self.state = state
        if not script.is_in_process(state):
            return decided
        assert state.world is not None
        taken_over, more = in_process.take_over(state, self._parts.reporter.name)
        again = self._let_in_process(taken_over, script.WorldSeen(state.world))
        watch = partial(self._parts.watchdog.run, self._in_process_state)
        self._parts.tasks.start(watch, "hang-watchdog")
        return [*decided, *more, *again]

    def _let_in_process(
        self, state: InProcessState, event: in_process.Event
    ) -> list[in_process.Command]:
        state, commands = self._transitions.take(in_process.handle, state, event)
        self.state = state
        return commands

    def _in_process_state(self) -> InProcessState:
        assert isinstance(self.state, InProcessState), "the workers are not in-process workers"
        return self.state

    # --- commands --------------------------------------------------------------------------------

    def _perform(self, command: in_process.Command) -> None:
        """Perform a command: the only place with side effects."""
        parts, workers = self._parts, self._parts.workers
        match command:
            case script.StartWorkers(world):
                self._act(partial(self._start_workers, world))
            case script.Stop(signum, told) if not workers.stopping:
                workers.begin_to_stop()
                self._act(partial(self._stop_workers, signum, told))
            case script.Stop(signum):
                workers.signal(signum)
            case script.ReportMember(changes):
                newest: dict[str, Any] = {
                    "step": workers.best_step,
                    "trained": workers.newest_trained,
                    "holds": max(self._kept, workers.newest_held),
                }
                if self.state.world is not None and self.state.world.replica > 1:
                    newest["blank"] = workers.blank
                parts.session.update(**{**newest, **changes})
            case script.Rejoin(gone):
                parts.tasks.start(partial(self._rejoin, gone), "rejoin")
            case script.Tell(local_rank, order):
                workers.tell(local_rank, order)
                if isinstance(order, orders.Over):
                    parts.watchdog.told_over(local_rank, finished=order.finished)
                elif isinstance(order, orders.Enter):
                    parts.helper_restarts.check_store(order.store, local_rank, alive=True)
            case in_process.Kill(local_rank, why):
                self._act(partial(self._kill, local_rank, why))
            case in_process.Spawn(local_rank):
                parts.tasks.start(partial(self._start_standby, local_rank), "standby")

    def _act(self, work: Work) -> None:
        """Run `work` after the action under way, so that a stop cannot overtake its start."""
        self._action = self._parts.tasks.start(partial(_after, self._action, work), "action")

    async def _start_workers(self, world: World) -> None:
        await self._started(partial(self._parts.workers.start_all, world, self._node))
        self._parts.helper_restarts.check_store(world.store, 0, alive=False)

    async def _start_standby(self, local_rank: int) -> None:
        """Start a worker for a later world once the workers of this one can spare a CPU."""
        await self._fit.wait()
        state, workers = self.state, self._parts.workers
        if isinstance(state, InProcessState):
            await self._parts.watchdog.recovered(self._in_process_state)
        if self._closing or workers.stopping:
            return  # nothing would stop it
        assert self.state.world is not None
        world, place = self.state.world, self.state.place
        standby = partial(workers.start_standby, local_rank, world, place)
        self._act(partial(self._started, standby))

    async def _kill(self, local_rank: int, why: str) -> None:
        if not self._parts.workers.stopping:
            self._parts.workers.kill(local_rank, why)

    async def _stop_workers(self, signum: int, told: frozenset[int]) -> None:
        timeout, deadline = self._config.shutdown_timeout, self.state.deadline
        if deadline is not None:
            timeout = max(deadline - self._parts.clock.now(), 0.0)
        await self._parts.workers.stop(signum, self.state.generation, told, timeout)
        self._parts.queue.put_nowait(script.WorkersGone())


async def _after(before: asyncio.Task[None] | None, work: Work) -> None:
    if before is not None:
        await asyncio.wait({before})
    await work()


def _for_script(event: in_process.Event) -> script.Event | None:
    """Return the event for the `script` machine; None if it has no such event."""
    match event:
        case in_process.WorkerMessage(local_rank, orders.Enlisted(mesh)):
            return script.WorkerEnlisted(local_rank, mesh)
        case in_process.WorkerMessage(local_rank, orders.CanSave(together)):
            return script.WorkerCanSave(local_rank, together)
        case in_process.WorkerMessage(local_rank, orders.Saved()):
            return script.WorkerSaved(local_rank)
        case in_process.LeaveOverdue():
            return script.LeaveRequested(signal.SIGINT)  # as a second Ctrl-C: kill the workers
        case in_process.WorkerMessage():
            return None
    return event
