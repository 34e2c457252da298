"""The agent: one per node. It observes, lets `lifecycle` decide, and performs the commands.

`run` is the whole agent; everything below it performs one command or makes one event.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchelastic import env
from torchelastic.agent import failure_report, preflight
from torchelastic.agent.guard import GUARD_LOST_SIGNAL, is_under_nohup
from torchelastic.agent.lifecycle import in_process, script
from torchelastic.agent.lifecycle.in_process import InProcessState
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.lifecycle.transitions import Transitions
from torchelastic.agent.output import log_files
from torchelastic.agent.snapshot_service import Snapshots
from torchelastic.agent.spawn.factory import ProcessFactory
from torchelastic.agent.spawn.helper_restarts import HelperRestarts
from torchelastic.agent.telemetry.collected_log import CollectedLog
from torchelastic.agent.telemetry.collector import LogCollector
from torchelastic.agent.telemetry.dashboard_process import DashboardProcess
from torchelastic.agent.telemetry.metrics_server import MetricsServer
from torchelastic.agent.telemetry.progress_sampler import ProgressSampler
from torchelastic.agent.telemetry.reporter import Reporter
from torchelastic.agent.telemetry.shipper import LogShipper
from torchelastic.agent.telemetry.straggler_watch import StragglerWatch
from torchelastic.agent.watch.file_timers import FileTimers
from torchelastic.agent.watch.hang_report import HangReport
from torchelastic.agent.watch.hang_watchdog import HangWatchdog
from torchelastic.agent.watch.inspector import Inspector
from torchelastic.agent.watch.query_socket import QuerySocket
from torchelastic.agent.watch.script_hang_watchdog import ScriptHangWatchdog
from torchelastic.agent.watch.stack_reader import Stacks
from torchelastic.agent.workers.environment import node_env
from torchelastic.agent.workers.pool import LAST_WORDS, WorkerPool
from torchelastic.best_effort import observing
from torchelastic.clock import Clock, SystemClock
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import EXIT_FAILED, RendezvousLost
from torchelastic.events import job_registry
from torchelastic.events.handlers import sink_for
from torchelastic.events.log import COLLECTED_FILE, EventLog
from torchelastic.rendezvous.embedded.voter_file import claim
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.world import Base, World
from torchelastic.side_tasks import SideTasks
from torchelastic.transport.credentials import load_secret
from torchelastic.worker import orders

logger = logging.getLogger(__name__)

#: Seconds the rendezvous host stays so that others learn that the job is closed.
HOST_STAYS = 5.0
#: The number of nodes that report the base of a world to the leader.
BASE_REPORTERS = 3
#: Seconds a node that ends has to ship its last events, and a leader waits for those of others.
LAST_EVENTS = 1.0


@dataclass(frozen=True)
class Outcome:
    """The end of the job on this node."""

    exitcode: int
    reason: str
    #: This node's id in the world.
    node: str = ""
    world: World | None = None
    #: Global rank -> path of the function's pickled result.
    results: dict[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        world = self.world.to_json() if self.world is not None else None
        return {**dataclasses.asdict(self), "world": world}


class Agent:
    """Supervises the workers of one node until the job ends."""

    def __init__(
        self,
        config: LaunchConfig,
        entry: Entry,
        *,
        prints_failure: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._prints_failure = prints_failure
        self._entry = entry
        self._clock = clock or SystemClock()
        self._file = claim(config, [entry.target, *entry.args])
        self._node = self._file.node
        self._secret = load_secret(config)
        self._sink = sink_for(config.event_log_handler)
        self._metrics = MetricsServer.wanted(config)
        self._page = DashboardProcess.wanted(config)
        self._state: ScriptState | InProcessState = ScriptState(
            node=self._node, nproc=config.nproc_per_node
        )
        self._queue: asyncio.Queue[in_process.Event | Exception] = asyncio.Queue()
        self._beside = SideTasks(self._went_wrong, lambda sentence: self._reporter.say(sentence))
        self._transitions = Transitions()
        self._action: asyncio.Task[None] | None = None
        #: The newest generation in which a worker here was seen to have taken a step.
        self._trained = -1
        #: The newest generation whose state is kept here.
        self._kept = -1
        #: Set once this node may take part in the training (`--preflight`).
        self._fit = asyncio.Event()
        if not config.preflight:
            self._fit.set()
        #: Nothing may be started any more.
        self._closing = False

    async def run(self) -> Outcome:
        """Join, supervise, leave."""
        self._install_signals()  # the loop handles them once all is open
        self._open()
        start = self._beside.start
        try:
            start(self._reporter.line.run, "waiting-line")
            start(self._join, "join")
            start(partial(self._workers.timers.watch, self._workers), "timers")
            start(self._query_socket.open, "inspection-socket")
            start(partial(self._script_watchdog.run, self._is_resident), "script-watchdog")
            if self._metrics is not None:
                start(partial(self._metrics.open, start, self._reporter.say), "metrics")
            if self._page is not None:
                start(partial(self._page.watch, self._reporter.say), "dashboard")
            while not self._state.is_terminal:
                event = await self._next_event()
                for command in self._handle(event):
                    self._perform(command)
            return self._outcome()
        except Exception as error:
            self._state = replace(self._state, exitcode=EXIT_FAILED, reason=str(error))
            raise
        finally:
            await self._close()

    # --- parts -----------------------------------------------------------------------------------

    def _open(self) -> None:
        config = self._config
        self._run_dir = log_files.make_run_dir(config)
        self._logs = log_files.NodeLogs(config, self._run_dir)
        registry_dir = job_registry.directory_for(config.run_id, self._node)
        path = job_registry.events_path(config, self._run_dir, registry_dir)
        self._registration = job_registry.register(
            config.run_id,
            self._node,
            pid=os.getpid(),
            name=socket.gethostname(),
            endpoint=config.rdzv_endpoint,
            command=[self._entry.target, *self._entry.args],
            events=path,
            logs=self._run_dir,
        )
        self._open_events(path)
        self._env = node_env(env.snapshot(), config)
        file_timers = FileTimers.wanted(self._env, registry_dir)
        if file_timers is not None:
            self._env[file_timers.VARIABLE] = str(file_timers.path)
        self._factory = ProcessFactory(config, self._entry, self._env)
        self._snapshots = Snapshots(
            self._node,
            config.run_id,
            replicas=config.snapshot_replicas,
            bandwidth=config.snapshot_bandwidth,
            say=self._reporter.say,
            on_settled=self._settled,
        )
        self._sampling = ProgressSampler(self._reporter.sampled, self._clock)
        self._workers = WorkerPool(
            config,
            self._entry,
            self._env,
            factory=self._factory,
            node_logs=self._logs,
            reporter=self._reporter,
            clock=self._clock,
            tell_event=self._queue.put_nowait,
            secret=self._secret,
            snapshots=self._snapshots,
            sampling=self._sampling,
        )
        if file_timers is not None:
            self._workers.timers.take_also(file_timers)
        self._open_session(MemberSession, on_child=self._factory.pids.add)
        self._watch_hangs(registry_dir)
        self._stragglers = self._watch_stragglers()
        self._reporter.started([self._entry.target, *self._entry.args], os.getpid())
        if self._file.resumed is not None:
            self._reporter.say(self._file.sentence)
        if self._page is not None:
            with observing("Starting the dashboard"):
                self._factory.pids.update(self._page.start(self._env, self._node))

    def _open_session(self, kind: Callable[..., MemberSession], **given: Any) -> None:
        """Create the member session and the restarts of the helper processes it needs."""
        self._session = kind(
            self._config,
            self._node,
            self._clock,
            observer=self._reporter,
            background=self._beside.start,
            on_world=self._world_seen,
            on_lease_lost=self._lease_lost,
            file=self._file,
            **given,
        )
        self._helper_restarts = HelperRestarts(
            self._factory,
            self._session,
            self._workers,
            self._reporter,
            self._clock,
            state=lambda: self._state,
        )

    def _open_events(self, path: Path) -> None:
        """Open the event log, its shipping to the leader, and the reporter."""
        config = self._config
        self._events = EventLog(
            path,
            job=config.run_id,
            node=self._node,
            clock=self._clock,
            sink=self._sink,
        )
        if self._metrics is not None:
            self._metrics.follow(self._events)
        collected = CollectedLog(path.with_name(COLLECTED_FILE))
        self._collector = LogCollector(collected, self._clock)
        self._shipper = LogShipper(
            self._events,
            self._node,
            config.run_id,
            self._collector,
            self._clock,
            on_leader=lambda name: self._reporter.leader_found(name),
        )
        self._reporter = Reporter(
            self._events,
            config,
            self._entry.name,
            self._node,
            self._clock,
            prints_failure=self._prints_failure,
            for_others=failure_report.command_for_others(config, self._entry),
        )

    def _watch_hangs(self, registry_dir: Path) -> None:
        """Create the inspector, the query socket and the hang watchdogs."""
        config = self._config
        self._inspector = Inspector(
            self._workers,
            Stacks(self._workers),
            node=self._node,
            job=config.run_id,
            world=lambda: self._state.world,
            can_go_on=lambda generation: (
                not self._state.leaving and self._watchdog.can_go_on(generation)
            ),
        )
        self._query_socket = QuerySocket(registry_dir, self._inspector)
        self._hangs = HangReport(self._inspector.everywhere, self._reporter.hang)
        self._workers.timers.report = self._hangs
        self._watchdog = HangWatchdog(
            self._workers,
            self._hangs,
            config.progress_timeout,
            self._inspector.others_can_go_on,
            self._reporter.say,
        )
        self._script_watchdog = ScriptHangWatchdog(
            self._workers, self._hangs, config.progress_timeout
        )

    def _watch_stragglers(self) -> StragglerWatch | None:
        config = self._config
        if not config.straggler_threshold:
            return None
        replace = self._session.replace_slow if config.replace_stragglers else None
        watch = StragglerWatch(config.straggler_threshold, self._reporter.stragglers, replace)
        if config.max_nodes > 1:
            self._collector.listen(watch.take_lines)
        else:
            watch.follow(self._events)
        return watch

    def _sum_up_stragglers(self, *, before: int) -> None:
        """Report the stragglers of past generations, unless another node leads and does."""
        if self._stragglers is not None and self._shipper.leads is not False:
            with observing("Summing up stragglers"):
                self._stragglers.sum_up(before)

    async def _close(self) -> None:
        """Leave nothing behind: no worker, no task, no file that only we needed."""
        self._closing = True
        if self._action is not None:
            await asyncio.wait({self._action})
        await self._workers.close()
        await self._snapshots.close()
        await self._session.last_words(LAST_WORDS)
        await self._beside.cancel()
        with observing("Closing the watchdogs"):
            await self._query_socket.close()
            self._hangs.close()
            await self._inspector.close()
            if self._metrics is not None:
                await self._metrics.close()
        closed = self._state.world is not None and self._state.world.phase == "closed"
        if closed and self._state.exitcode == 0:
            self._registration.note_finished(self._session.member.step)
        self._sum_up_stragglers(before=self._state.generation + 1)
        self._reporter.ended(self._state.exitcode, self._state.reason, self._state.world)
        with observing("Shipping the last events"):
            await self._shipper.last_words(LAST_EVENTS)
            await self._shipper.close()
            await self._collector.wait_alone(LAST_EVENTS if closed else 0.0)
        await self._session.close(HOST_STAYS if closed else 0.0)
        self._file.discard() if closed else self._file.close()
        with observing("Writing the last events"):
            await self._collector.close()
        await self._reporter.sum_up(
            self._events.path.with_name(COLLECTED_FILE), leads=self._shipper.leads
        )
        await self._factory.close()
        with observing("Closing the logs"):
            self._logs.close(success=self._state.exitcode == 0)
            self._events.close()
            if self._sink is not None:
                self._sink.close()
        with observing("Noting the end of the job"):
            self._registration.close(self._state.exitcode)
        if self._page is not None:
            with observing("Closing the dashboard"):
                await self._page.close()
                logger.info("to see this job again: %s", self._page.again(self._run_dir))

    def _outcome(self) -> Outcome:
        state = self._state
        return Outcome(
            state.exitcode or 0, state.reason, self._node, state.world, dict(self._workers.results)
        )

    # --- joining ---------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Join the other nodes and warm up concurrently; report `ready` when both are done."""
        warming = self._beside.start(self._factory.warm_up, "warm-up")
        checking = self._beside.start(self._check, "preflight")
        self._reporter.joins()
        await self._session.join()
        self._workers.reached_at(self._session.backend.addr)
        self._snapshots.open(self._session.backend)
        self._inspector.open(self._session.backend)
        self._beside.start(partial(self._sampling.run, self._workers.look), "sampling")
        if self._config.max_nodes > 1:  # else this node's log is complete
            self._shipper.open(self._session.backend)
        self._reporter.joined(self._session.member.name, self._session.backend)
        self._reporter.warmed_up(await warming, self._factory.warnings)
        await checking
        self._beside.start(self._helper_restarts.keep_store_host, "store-host")
        self._beside.start(self._helper_restarts.keep_zygote, "zygote")

    async def _check(self) -> None:
        """Repeat the `--preflight` check, if there is one, until it passes."""

        def failed(how: str, sentence: str) -> None:
            self._session.update(unfit=f"its --preflight check {how}")
            self._reporter.say(sentence)

        if self._fit.is_set():
            return
        command, helpers = self._config.preflight, self._workers.helpers
        await preflight.until_passed(command, self._env, helpers, failed)
        self._session.update(unfit="")
        self._fit.set()

    async def _rejoin(self, gone: int) -> None:
        name = await self._session.rejoin(gone)
        self._reporter.rejoined(name, self._session.backend)

    def _world_seen(self, world: World) -> None:
        self._queue.put_nowait(script.WorldSeen(world))
        self._snapshots.hear_of(world)
        if world.phase == "running":
            self._snapshots.turn_to(world)
            self._beside.start(partial(self._helper_restarts.renew_store, world), "renew-store")
        if world.phase in ("waiting", "running"):
            self._sum_up_stragglers(before=world.generation + (world.phase == "waiting"))
        if not self._state.leaving:
            self._reporter.world_seen(world)
        if world.phase == "running":
            with observing("Reporting the new world"):
                self._sampling.turn_to(world.generation, world.count)
                self._shipper.turn_to(world.count, world.host)
                if self._stragglers is not None:
                    self._stragglers.turn_to(world.generation, world.size)

    def _settled(self, base: Base) -> None:
        """Report to the leader the base the workers here continue from; a few nodes do."""
        self._kept = base.generation
        world = self._state.world
        place = world.place(self._node) if world is not None else None
        if place is not None and place < BASE_REPORTERS:
            self._session.update(base=base)

    def _lease_lost(self) -> None:
        self._queue.put_nowait(script.LeaseLost())
        if not self._state.leaving:
            self._reporter.lease_lost(self._session.backend.loss)

    # --- events ----------------------------------------------------------------------------------

    async def _next_event(self) -> in_process.Event:
        event = await self._queue.get()
        if isinstance(event, Exception):
            raise event
        return event

    def _went_wrong(self, error: Exception) -> None:
        """Turn the failure of an essential side task into an event."""
        if isinstance(error, RendezvousLost):
            self._queue.put_nowait(script.StoreLost(str(error)))
        else:
            self._queue.put_nowait(error)

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
        deadline = self._clock.now() + self._config.shutdown_timeout
        self._queue.put_nowait(script.LeaveRequested(signum, deadline))
        self._beside.start(self._leave_in_time, "leave")
        self._reporter.leaves(signum.name)

    async def _leave_in_time(self) -> None:
        """Kill resident workers that reach no step boundary in time."""
        await asyncio.sleep(self._config.shutdown_timeout)
        self._queue.put_nowait(in_process.LeaveOverdue())

    def _forward(self, signum: signal.Signals) -> None:
        self._workers.signal(signum)
        self._reporter.signal(signum.name, "forwarded to the workers")

    def _guard_lost(self) -> None:
        """Kill everything: the command the user started is gone (`kill -9`)."""
        self._workers.kill_everything()
        os._exit(128 + signal.SIGKILL)

    def _handle(self, event: in_process.Event) -> list[in_process.Command]:
        """Let the current state machine decide; switch to `in_process` for resident workers."""
        if isinstance(self._state, InProcessState):
            return self._let_in_process(self._state, event)
        state = self._state
        decided: list[in_process.Command] = []
        known = _for_script(event)
        if known is not None:
            state, decided = self._transitions.take(script.handle, state, known)
        self._state = state
        if not script.has_turned_resident(state):
            return decided
        assert state.world is not None
        taken_over, more = in_process.take_over(state, self._reporter.name)
        again = self._let_in_process(taken_over, script.WorldSeen(state.world))
        self._beside.start(
            partial(self._watchdog.run, lambda: self._in_process_state), "hang-watchdog"
        )
        return [*decided, *more, *again]

    def _let_in_process(
        self, state: InProcessState, event: in_process.Event
    ) -> list[in_process.Command]:
        state, commands = self._transitions.take(in_process.handle, state, event)
        self._state = state
        return commands

    def _is_resident(self) -> bool:
        return isinstance(self._state, InProcessState)

    @property
    def _in_process_state(self) -> InProcessState:
        assert isinstance(self._state, InProcessState), "the workers are not resident"
        return self._state

    # --- commands --------------------------------------------------------------------------------

    def _perform(self, command: in_process.Command) -> None:
        """Perform a command: the only place with side effects."""
        match command:
            case script.Start(world):
                self._act(self._start_workers(world))
            case script.Stop(signum, told) if not self._workers.stopping:
                self._workers.begin_to_stop()
                self._act(self._stop_workers(signum, told))
            case script.Stop(signum):
                self._workers.signal(signum)
            case script.Report(changes):
                steps = {"step": self._workers.best_step, "trained": self._newest_trained()}
                self._session.update(**{**steps, "holds": self._newest_held(), **changes})
            case script.Rejoin(gone):
                self._beside.start(partial(self._rejoin, gone), "rejoin")
            case script.Tell(local_rank, order):
                self._workers.tell(local_rank, order)
                if isinstance(order, orders.Over):
                    self._watchdog.told_over(local_rank, finished=order.finished)
                elif isinstance(order, orders.Enter):
                    self._helper_restarts.check_store(order.store, local_rank, alive=True)
            case in_process.Spawn(local_rank):
                self._beside.start(partial(self._start_standby, local_rank), "standby")

    def _newest_trained(self) -> int:
        """The newest generation in which a worker here has taken a step."""
        generations = [self._trained, self._workers.counted.newest]
        for local_rank in range(self._config.nproc_per_node):
            seen = self._workers.progress(local_rank)
            if seen is not None and seen[1] > self._workers.first_step(local_rank):
                generations.append(seen[0])
        self._trained = max(generations)
        return self._trained

    def _newest_held(self) -> int:
        """The newest generation whose state is held here: in a snapshot, or by a resident worker
        that has entered a step."""
        generations = [self._kept]
        for local_rank in self._workers.alive:
            seen = self._workers.progress(local_rank)
            if seen is not None and seen != self._workers.inherited.get(local_rank):
                generations.append(seen[0])
        return max(generations)

    def _act(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` after the action under way, so that a stop cannot overtake its start."""
        self._action = self._beside.start(partial(self._after, self._action, work), "action")

    async def _after(
        self, before: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        await work

    async def _start_workers(self, world: World) -> None:
        await self._workers.start_all(world, self._node)
        self._helper_restarts.check_store(world.store, 0, alive=False)

    async def _start_standby(self, local_rank: int) -> None:
        """Start a worker for a later world once the workers of this one can spare the CPU.

        Survivors of a failure recover while a replacement would still load the script.
        """
        await self._fit.wait()
        if isinstance(self._state, InProcessState) and self._state.having(
            in_process.Status.TRAINING
        ):
            await self._watchdog.recovered(lambda: self._in_process_state)
        if self._closing or self._workers.stopping:
            return  # nothing would stop it
        world = self._state.world
        assert world is not None
        self._act(self._workers.start_standby(local_rank, world))

    async def _stop_workers(self, signum: int, told: frozenset[int]) -> None:
        await self._workers.stop(signum, self._state.generation, told)
        self._queue.put_nowait(script.WorkersGone())


def _for_script(event: in_process.Event) -> script.Event | None:
    """Return the event for the `script` machine; None if it has no such event."""
    match event:
        case in_process.Said(local_rank, orders.Enlisted()):
            return script.WorkerEnlisted(local_rank)
        case in_process.Said(local_rank, orders.CanSave()):
            return script.WorkerCanSave(local_rank)
        case in_process.Said() | in_process.LeaveOverdue():
            return None
    return event
