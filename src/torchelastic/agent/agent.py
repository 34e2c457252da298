"""The agent: the node whose workers are child processes. One per machine.

`run` is its whole life; `agent.node_loop` is the loop in it. The rest of this file opens and closes
what an agent consists of, and makes the events: the worlds and the lease, signals, preemption.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torchelastic import env
from torchelastic.agent import failure_report, preflight
from torchelastic.agent.guard import GUARD_LOST_SIGNAL, is_under_nohup
from torchelastic.agent.lifecycle.in_process import InProcessState, Status
from torchelastic.agent.lifecycle.last_copy import is_waited_for
from torchelastic.agent.lifecycle.node_state import (
    LeaseLost,
    LeaveOverdue,
    LeaveRequested,
    Named,
    PlaceAllotted,
    StoreLost,
    WorkerProgress,
    WorkersGone,
    WorldSeen,
)
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.node_loop import NodeLoop
from torchelastic.agent.output import log_files
from torchelastic.agent.spawn.helper_processes import HelperRestarts, ProcessFactory
from torchelastic.agent.telemetry.bad_step_watch import BadStepWatch
from torchelastic.agent.telemetry.collector import CollectedLog, LogCollector
from torchelastic.agent.telemetry.dashboard_process import DashboardProcess
from torchelastic.agent.telemetry.http_endpoints import HealthServer, MetricsServer
from torchelastic.agent.telemetry.job_events import JobEvents
from torchelastic.agent.telemetry.progress_sampler import ProgressSampler
from torchelastic.agent.telemetry.reporter import Reporter
from torchelastic.agent.telemetry.shipper import LogShipper
from torchelastic.agent.telemetry.straggler_watch import StragglerWatch
from torchelastic.agent.watch.hang_watchdog import HangReport, HangWatchdog
from torchelastic.agent.watch.inspector import Inspector, QuerySocket
from torchelastic.agent.watch.stack_reader import Stacks
from torchelastic.agent.watch.worker_timers import FileTimers
from torchelastic.agent.workers.environment import node_env
from torchelastic.agent.workers.pool import WorkerPool
from torchelastic.best_effort import observing
from torchelastic.clock import Clock, SystemClock
from torchelastic.cluster import preemption
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.cluster.preemption import Notice
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import FAILED, RendezvousLost, exitcode_of
from torchelastic.events import job_registry
from torchelastic.events.handlers import sink_for
from torchelastic.events.log import COLLECTED_FILE, EventLog
from torchelastic.records import replace
from torchelastic.rendezvous.embedded.voter_file import VoterFile, claim
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.world import Base, World
from torchelastic.side_tasks import SideTasks, Work, pause
from torchelastic.snapshot.node.snapshot_service import Snapshots
from torchelastic.transport.credentials import load_secret
from torchelastic.worker import leaving, orders

logger = logging.getLogger(__name__)

#: The number of nodes that report the base of a world to the leader.
BASE_REPORTERS = 3
#: Seconds that the agent keeps for its own end, of those that a preemption notice leaves.
END_OF_AGENT = 2.0
#: Seconds between two looks at workers that the others may wait for while this node leaves.
LEAVE_LOOK = 0.1
#: Seconds a node that ends has to ship its last events, and a leader waits for those of others.
LAST_EVENTS_TIMEOUT = 1.0


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


class Agent(NodeLoop):
    """Supervises the workers of one node until the job ends."""

    def __init__(
        self,
        config: LaunchConfig,
        entry: Entry,
        *,
        prints_failure: bool = True,
        clock: Clock | None = None,
        file: VoterFile | None = None,
    ) -> None:
        """Check what the user asked for; nothing is open yet."""
        self.config, self.entry = config, entry
        self.clock = clock or SystemClock()
        self.file = file or claim(config, self._command)
        place = -1 if config.nodes_per_replica > 1 else 0
        state = ScriptState(node=self.file.node, nproc=config.nproc_per_node, place=place)
        super().__init__(state)
        self._prints_failure = prints_failure
        self._secret = load_secret(config)
        self._sink = sink_for(config.event_log_handler)
        self._metrics = MetricsServer.wanted(config)
        self._page = DashboardProcess.wanted(config)
        self._preemption = preemption.choose(config.preemption, env.snapshot())
        #: The newest generation whose state is kept here.
        self._kept = -1
        #: The last start or stop of workers.
        self._action: asyncio.Task[None] | None = None
        #: Nothing may be started any more.
        self._closing = False
        #: Set once this node may take part in the training (`--preflight`).
        self._fit = asyncio.Event()
        if not config.preflight:
            self._fit.set()
        #: Starts of workers that failed, one after the other.
        self._failed_starts = 0

    @property
    def _command(self) -> list[str]:
        return [self.entry.target, *self.entry.args]

    async def run(self) -> JobOutcome:
        """Join, supervise, leave."""
        self._install_signals()  # the loop handles them once all is open
        self.open()
        try:
            self.tasks.start(self._join, "join")
            await self.supervise()
            state, results = self.state, dict(self.workers.results)
            return JobOutcome(state.exitcode or 0, state.reason, self.node, state.world, results)
        except Exception as error:
            failed = replace(self.state, exitcode=exitcode_of(error), reason=str(error))
            self.machine.state = failed
            raise
        finally:
            self._closing = True
            if self._action is not None:
                await asyncio.wait({self._action})
            await self.close()

    # --- opening ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Open what needs no other node."""
        config = self.config
        self.tasks = SideTasks(self._task_failed, lambda sentence: self.reporter.say(sentence))
        self._run_dir = log_files.make_run_dir(config)
        self._logs = log_files.NodeLogs(config, self._run_dir)
        registry_dir = job_registry.directory_for(config.run_id, self.node)
        path = job_registry.events_path(config, self._run_dir, registry_dir)
        self._registration = job_registry.register(
            config.run_id,
            self.node,
            pid=os.getpid(),
            name=socket.gethostname(),
            endpoint=config.rdzv_endpoint,
            command=self._command,
            events=path,
            logs=self._run_dir,
        )
        self._open_events(path)
        self._open_workers(registry_dir)
        self._open_session(MemberSession, on_child=self.factory.pids.add)
        self._open_watchdogs(registry_dir)
        self._open_watches_of_job()
        self._health = HealthServer.wanted(config, self.node, lambda: self.state)
        self.reporter.started(self._command, os.getpid())
        if self.file.resumed is not None:
            self.reporter.say(self.file.sentence)
        if self._page is not None:
            with observing("Starting the dashboard"):
                self.factory.pids.update(self._page.start(self.env, self.node))
        self._start_tasks()

    def _open_events(self, path: Path) -> None:
        """Open the event log, its shipping to the leader, and the reporter."""
        config = self.config
        self._events = EventLog(
            path, job=config.run_id, node=self.node, clock=self.clock, sink=self._sink
        )
        if self._metrics is not None:
            self._metrics.follow(self._events)
        self._collector = LogCollector(CollectedLog(path.with_name(COLLECTED_FILE)), self.clock)
        self.shipper = LogShipper(
            self._events,
            self.node,
            config.run_id,
            self._collector,
            self.clock,
            on_leader=lambda name: self.reporter.leader_found(name),
        )
        self.reporter = Reporter(
            self._events,
            config,
            self.entry.name,
            self.node,
            self.clock,
            prints_failure=self._prints_failure,
            for_others=failure_report.command_for_others(config, self.entry),
        )

    def _open_workers(self, registry_dir: Path) -> None:
        """Create the worker pool and what serves its workers."""
        config = self.config
        self.env = node_env(env.snapshot(), config)
        file_timers = FileTimers.wanted(self.env, registry_dir)
        if file_timers is not None:
            self.env[file_timers.VARIABLE] = str(file_timers.path)
        self.leave_file = leaving.LeaveFile(registry_dir)
        self.env[leaving.VARIABLE] = str(self.leave_file.path)
        self.factory = ProcessFactory(config, self.entry, self.env)
        self.snapshots = Snapshots(
            self.node,
            config.run_id,
            replicas=config.snapshot_replicas,
            bandwidth=config.snapshot_bandwidth,
            say=self.reporter.say,
            on_base=self._base_known,
        )
        self.sampling = ProgressSampler(self.reporter.sampled, self.clock)
        self.workers = WorkerPool(
            config,
            self.entry,
            self.env,
            factory=self.factory,
            node_logs=self._logs,
            reporter=self.reporter,
            clock=self.clock,
            tell_event=self.queue.put_nowait,
            secret=self._secret,
            snapshots=self.snapshots,
            sampling=self.sampling,
        )
        if file_timers is not None:
            self.workers.timers.take_also(file_timers)

    def _open_session(self, kind: Callable[..., MemberSession], **given: Any) -> None:
        """Create the member session and the restarts of the helper processes it needs."""
        self.session = kind(
            self.config,
            self.node,
            self.clock,
            observer=self.reporter,
            background=self.tasks.start,
            on_world=self._world_seen,
            on_lease_lost=self._lease_lost,
            on_lease=self.workers.leased_until,
            on_place=lambda place: self.queue.put_nowait(PlaceAllotted(place)),
            file=self.file,
            **given,
        )
        self.helper_restarts = HelperRestarts(
            self.factory,
            self.session,
            self.workers,
            self.reporter,
            self.clock,
            state=lambda: self.state,
        )

    def _open_watchdogs(self, registry_dir: Path) -> None:
        """Create the inspector, the query socket and the hang watchdog."""
        config = self.config
        self._inspector = Inspector(
            self.workers,
            Stacks(self.workers),
            node=self.node,
            job=config.run_id,
            world=lambda: self.state.world,
            can_go_on=lambda generation: (
                not self.state.leaving and self.watchdog.can_go_on(generation)
            ),
        )
        self._query_socket = QuerySocket(registry_dir, self._inspector)
        self._hangs = HangReport(self._inspector.everywhere, self.reporter.hang)
        self.workers.timers.report = self._hangs
        self.watchdog = HangWatchdog(
            self.workers,
            self._hangs,
            config.progress_timeout,
            self._inspector.others_can_go_on,
            self.reporter.say,
        )

    def _open_watches_of_job(self) -> None:
        """Watch the whole job, wherever its events are known."""
        job_events = JobEvents()
        self.stragglers = self._straggler_watch()
        if self.stragglers is not None:
            job_events.listen(self.stragglers.take)
        self.bad_steps = BadStepWatch(partial(logger.warning, "%s"), self.clock)
        job_events.listen(self.bad_steps.take)
        if self.config.max_nodes > 1:
            self._collector.listen(job_events.take_lines)
        else:
            job_events.follow(self._events)

    def _straggler_watch(self) -> StragglerWatch | None:
        config = self.config
        if not config.straggler_threshold:
            return None
        replace = self.session.replace_slow if config.replace_stragglers else None
        return StragglerWatch(config.straggler_threshold, self.reporter.stragglers, replace)

    def _start_tasks(self) -> None:
        """Start the tasks that run until the agent ends."""
        start = self.tasks.start
        start(self.reporter.line.run, "waiting-line")
        start(partial(self.workers.timers.watch, self.workers), "timers")
        start(self._query_socket.open, "inspection-socket")
        start(partial(self.watchdog.run, lambda: self.state), "hang-watchdog")
        for source in self._preemption:
            watch = partial(preemption.watch, source, notify=self._preempted, say=self.reporter.say)
            start(watch, "preemption")
        if self._metrics is not None:
            start(partial(self._metrics.open, start, self.reporter.say), "metrics")
        if self._health is not None:
            start(partial(self._health.open, start, self.reporter.say), "health")
        if self._page is not None:
            start(partial(self._page.watch, self.reporter.say), "dashboard")

    # --- joining ---------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Join the other nodes and warm up concurrently; report `ready` when both are done."""
        start = self.tasks.start
        warming = start(self.factory.warm_up, "warm-up")
        checking = start(self._check, "preflight")
        self.reporter.joins()
        await self.session.join()
        self._connect()
        self.reporter.warmed_up(await warming, self.factory.warnings)
        await checking
        start(self.helper_restarts.keep_store_host, "store-host")
        start(self.helper_restarts.keep_zygote, "zygote")

    def _connect(self) -> None:
        """Open what needs other nodes, once the session has joined them."""
        backend, name = self.session.backend, self.session.member.name
        self.queue.put_nowait(Named(name))
        self.workers.reached_at(backend.addr)
        self.snapshots.open(backend)
        self._inspector.open(backend)
        self.tasks.start(partial(self.sampling.run, self.workers.look), "sampling")
        if self.config.max_nodes > 1:  # else this node's log is complete
            self.shipper.open(backend)
        self.reporter.joined(name, backend)

    async def rejoin(self, gone: int) -> None:
        await super().rejoin(gone)
        self.reporter.rejoined(self.session.member.name, self.session.backend)

    async def _check(self) -> None:
        """Repeat the `--preflight` check, if there is one, until it passes."""

        def failed(how: str, sentence: str) -> None:
            self.session.update(unfit=f"its --preflight check {how}")
            self.reporter.say(sentence)

        if self._fit.is_set():
            return
        command, helpers = self.config.preflight, self.workers.helpers
        await preflight.until_passed(command, self.env, helpers, failed)
        self.session.update(unfit="")
        self._fit.set()

    async def _lacks_processes(self) -> bool:
        problem = await preflight.check("true", self.env, self.workers.helpers)
        why = "" if problem is None else f"a process {problem[0]}"
        self.session.update(unfit=why)
        return bool(why)

    async def _until_startable(self) -> None:
        while True:
            await asyncio.sleep(pause(self._failed_starts))
            if not await self._lacks_processes():
                return

    # --- events ----------------------------------------------------------------------------------

    def _world_seen(self, world: World) -> None:
        """Handle a world that the leader has published."""
        self.queue.put_nowait(WorldSeen(world))
        self.snapshots.hear_of(world)
        if world.phase == "running":
            self.snapshots.turn_to(world)
            self.tasks.start(partial(self.helper_restarts.renew_store, world), "renew-store")
        if world.phase in ("waiting", "running"):
            self._sum_up_stragglers(before=world.generation + (world.phase == "waiting"))
        if not self.state.leaving:
            self.reporter.world_seen(world)
        if world.phase == "running":
            with observing("Reporting the new world"):
                self.sampling.turn_to(world.generation, world.count)
                self.shipper.turn_to(world.count, world.host)
                self.bad_steps.turn_to(world.count)
                if self.stragglers is not None:
                    self.stragglers.turn_to(world.generation, world.size)

    def _base_known(self, base: Base) -> None:
        """Report to the leader the base the workers here continue from; a few nodes do."""
        world = self.state.world
        if world is None or not world.in_process:  # else workers hold it
            self._kept = base.generation
        place = world.place(self.node) if world is not None else None
        if place is not None and place < BASE_REPORTERS:
            self.session.update(base=base)

    def _lease_lost(self) -> None:
        """Handle the loss of this node's lease: the others have given it up."""
        self.queue.put_nowait(LeaseLost())
        if not self.state.leaving:
            self.reporter.lease_lost(self.session.backend.loss)

    def _task_failed(self, error: Exception) -> None:
        """Turn the failure of an essential side task into an event."""
        lost = isinstance(error, RendezvousLost)
        self.queue.put_nowait(StoreLost(str(error)) if lost else error)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in self.config.signals_to_handle:
            signum = signal.Signals[name]
            if signum == signal.SIGHUP and is_under_nohup():
                continue
            loop.add_signal_handler(signum, partial(self._asked_to_leave, signum))
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # it is not among them
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            if signum.name not in self.config.signals_to_handle:
                loop.add_signal_handler(signum, partial(self._forward, signum))
        loop.add_signal_handler(GUARD_LOST_SIGNAL, self._guard_lost)

    def _asked_to_leave(self, signum: signal.Signals) -> None:
        self.reporter.leaves(signum.name)
        self._leave(signum, self.config.shutdown_timeout)

    def _preempted(self, notice: Notice) -> None:
        """Leave: this machine will be taken away. The agent itself needs a moment to end."""
        seconds = self.config.shutdown_timeout
        if notice.seconds is not None:
            seconds = max(notice.seconds - END_OF_AGENT, notice.seconds / 2)
        self.reporter.preempted(notice.reason, seconds)
        self._leave(signal.SIGTERM, seconds, notice.reason)

    def _leave(self, signum: signal.Signals, seconds: float, notice: str = "") -> None:
        deadline = self.clock.now() + seconds
        request = LeaveRequested(signum, deadline, notice)
        with observing("Telling scripts that this node leaves"):
            self.leave_file.announce(request.why, deadline)
        self.queue.put_nowait(request)
        self.tasks.start(partial(self._leave_in_time, seconds), "leave")

    async def _leave_in_time(self, seconds: float) -> None:
        """Kill workers that have not ended in time, at the earliest of several deadlines, or that
        the others need not wait for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0 and not self._is_waited_for():
            await asyncio.sleep(min(left, LEAVE_LOOK))
        self.queue.put_nowait(LeaveOverdue())

    def _is_waited_for(self) -> bool:
        state, workers = self.state, self.workers
        if not isinstance(state, InProcessState):
            return False
        training = state.having(Status.TRAINING)
        return is_waited_for(state, {rank: workers.progress(rank) for rank in training})

    def _forward(self, signum: signal.Signals) -> None:
        self.workers.signal(signum)
        self.reporter.signal(signum.name, "forwarded to the workers")

    def _guard_lost(self) -> None:
        """Kill everything: the command the user started is gone (`kill -9`)."""
        self.workers.kill_everything()
        os._exit(128 + signal.SIGKILL)

    # --- the workers -----------------------------------------------------------------------------

    def seen(self) -> WorkerProgress:
        """Return the workers' progress, and the state that this agent holds for them."""
        seen = self.workers.seen()
        return replace(seen, holds=max(self._kept, seen.holds))

    def start(self, world: World) -> None:
        self._act(partial(self._start_workers, world))

    def start_standby(self, local_rank: int) -> None:
        self.tasks.start(partial(self._start_standby, local_rank), "standby")

    def tell(self, local_rank: int, order: orders.Order) -> None:
        """Tell it, and see that it leaves a world that is over, or finds the store of a new one."""
        self.workers.tell(local_rank, order)
        if isinstance(order, orders.Over):
            self.watchdog.told_over(local_rank, finished=order.finished)
        elif isinstance(order, orders.Enter):
            self.helper_restarts.check_store(order.store, local_rank, alive=True)

    def stop(self, signum: int, told: frozenset[int]) -> None:
        """Stop them; send those that are already stopping the signal, too."""
        if self.workers.stopping:
            self.workers.signal(signum)
            return
        self.workers.begin_to_stop()
        self._act(partial(self._stop_workers, signum, told))

    def kill(self, local_rank: int, why: str) -> None:
        self._act(partial(self._kill, local_rank, why))

    def _act(self, work: Work) -> None:
        """Run `work` after the action under way, so that a stop cannot overtake its start."""
        self._action = self.tasks.start(partial(_after, self._action, work), "action")

    async def _start_workers(self, world: World) -> None:
        await self._started(partial(self.workers.start_all, world, self.node))
        self.helper_restarts.check_store(world.store, 0, alive=False)

    async def _start_standby(self, local_rank: int) -> None:
        """Start a worker for a later world once the workers of this one can spare a CPU."""
        await self._fit.wait()
        if isinstance(self.state, InProcessState):
            await self.watchdog.recovered(self._in_process_state)
        if self._closing or self.workers.stopping:
            return  # nothing would stop it
        world, place = self.state.world, self.state.place
        assert world is not None
        standby = partial(self.workers.start_standby, local_rank, world, place)
        self._act(partial(self._started, standby))

    async def _started(self, start: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Start workers. If this machine cannot start any process (pids.max, memory), stay out of
        worlds until it can."""
        if await start():
            self._failed_starts = 0
            return
        self._failed_starts += 1
        if await self._lacks_processes():
            why = self.session.member.unfit
            self.reporter.say(f"this node stays out of training until it can start: {why}")
            self.tasks.start(self._until_startable, "preflight")

    async def _kill(self, local_rank: int, why: str) -> None:
        if not self.workers.stopping:
            self.workers.kill(local_rank, why)

    async def _stop_workers(self, signum: int, told: frozenset[int]) -> None:
        timeout, deadline = self.config.shutdown_timeout, self.state.deadline
        if deadline is not None:
            timeout = max(deadline - self.clock.now(), 0.0)
        await self.workers.stop(signum, self.state.generation, told, timeout)
        self.queue.put_nowait(WorkersGone())

    def _in_process_state(self) -> InProcessState:
        assert isinstance(self.state, InProcessState), "the workers are not in-process workers"
        return self.state

    # --- closing ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Leave nothing behind: no worker, no task, no file that only we needed."""
        state = self.state
        closed = state.world is not None and state.world.phase == "closed"
        await self.workers.close()
        await self.snapshots.close()
        await self.session.last_words()
        await self.tasks.cancel()
        with observing("Closing the watchdogs"):
            await self._query_socket.close()
            self._hangs.close()
            await self._inspector.close()
            if self._metrics is not None:
                await self._metrics.close()
            if self._health is not None:
                await self._health.close()
        if closed:
            self._note_end(state.exitcode or 0)
        self._sum_up_stragglers(before=state.generation + 1)
        with observing("Reporting bad steps"):
            self.bad_steps.say()
        self.reporter.ended(state.exitcode, state.reason, state.world)
        with observing("Shipping the last events"):
            await self.shipper.last_words(LAST_EVENTS_TIMEOUT)
            await self.shipper.close()
            await self._collector.wait_alone(LAST_EVENTS_TIMEOUT if closed else 0.0)
        await self.session.close(job_closed=closed)
        self.file.discard() if closed else self.file.close()
        with observing("Writing the last events"):
            await self._collector.close()
            self.bad_steps.say()
        await self.reporter.sum_up(
            self._events.path.with_name(COLLECTED_FILE), leads=self.shipper.leads
        )
        await self.factory.close()
        with observing("Closing the logs"):
            self._logs.close(success=state.exitcode == 0)
            self._events.close()
            if self._sink is not None:
                self._sink.close()
        with observing("Noting the end of the job"):
            self._registration.close(state.exitcode)
        if self._page is not None:
            with observing("Closing the dashboard"):
                await self._page.close()
                logger.info("to see this job again: %s", self._page.again(self._run_dir))

    def _note_end(self, exitcode: int) -> None:
        """Record how the job ended, for nodes that start too late and for the scheduler."""
        step = self.session.member.step
        self._registration.note_closed(step, finished=exitcode == 0)
        if not self.config.job_dir:
            return
        directory = JobDirectory(Path(self.config.job_dir))
        with observing("Noting the end of the job in its directory"):
            if exitcode == 0:
                directory.note_finished(self.config.run_id, step)
            elif exitcode in FAILED:
                directory.note_failed(exitcode)

    def _sum_up_stragglers(self, *, before: int) -> None:
        """Report the stragglers of past generations, unless another node leads and does."""
        if self.stragglers is not None and self.shipper.leads is not False:
            with observing("Summing up stragglers"):
                self.stragglers.sum_up(before)


async def _after(before: asyncio.Task[None] | None, work: Work) -> None:
    if before is not None:
        await asyncio.wait({before})
    await work()
