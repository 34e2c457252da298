"""The parts of an agent: how they are opened, connected to each other, and closed in order.

No decision is made here; `agent` is the loop that uses them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torchelastic import env
from torchelastic.agent import failure_report
from torchelastic.agent.lifecycle import in_process
from torchelastic.agent.lifecycle.in_process_state import InProcessState
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.output import log_files
from torchelastic.agent.spawn.helper_processes import HelperRestarts, ProcessFactory
from torchelastic.agent.telemetry.collector import CollectedLog, LogCollector
from torchelastic.agent.telemetry.dashboard_process import DashboardProcess
from torchelastic.agent.telemetry.health_server import HealthServer
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
from torchelastic.agent.workers.pool import WorkerPool
from torchelastic.best_effort import observing
from torchelastic.clock import Clock, SystemClock
from torchelastic.cluster.job_directory import JobDirectory
from torchelastic.cluster.preemption import watcher
from torchelastic.cluster.preemption.notices import Notice
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import FAILED
from torchelastic.events import job_registry
from torchelastic.events.handlers import sink_for
from torchelastic.events.log import COLLECTED_FILE, EventLog
from torchelastic.rendezvous.embedded.voter_file import VoterFile, claim
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.world import Base, World
from torchelastic.side_tasks import SideTasks
from torchelastic.snapshot.node.snapshot_service import Snapshots
from torchelastic.transport.credentials import load_secret
from torchelastic.worker import leaving

logger = logging.getLogger(__name__)

#: Seconds a node that ends has to ship its last events, and a leader waits for those of others.
LAST_EVENTS_TIMEOUT = 1.0

State = ScriptState | InProcessState


class Owner(Protocol):
    """The agent, as its parts see it."""

    @property
    def state(self) -> State: ...

    def world_seen(self, world: World) -> None: ...

    def lease_lost(self) -> None: ...

    def place_allotted(self, place: int) -> None: ...

    def base_known(self, base: Base) -> None: ...

    def preempted(self, notice: Notice) -> None: ...

    def task_failed(self, error: Exception) -> None: ...


class Parts:
    """Everything an agent consists of beside its loop and its state."""

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
        self.node = self.file.node
        #: What happens on this node, for the agent's loop.
        self.queue: asyncio.Queue[in_process.Event | Exception] = asyncio.Queue()
        self._prints_failure = prints_failure
        self._secret = load_secret(config)
        self._sink = sink_for(config.event_log_handler)
        self._metrics = MetricsServer.wanted(config)
        self._page = DashboardProcess.wanted(config)
        self._preemption = watcher.choose(config.preemption, env.snapshot())

    @property
    def _command(self) -> list[str]:
        return [self.entry.target, *self.entry.args]

    # --- opening ---------------------------------------------------------------------------------

    def open(self, owner: Owner) -> None:
        """Open what needs no other node."""
        config = self.config
        self.tasks = SideTasks(owner.task_failed, lambda sentence: self.reporter.say(sentence))
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
        self._open_workers(owner, registry_dir)
        self._open_session(owner, MemberSession, on_child=self.factory.pids.add)
        self._open_watchdogs(owner, registry_dir)
        self.stragglers = self._open_straggler_watch()
        self._health = HealthServer.wanted(config, self.node, lambda: owner.state)
        self.reporter.started(self._command, os.getpid())
        if self.file.resumed is not None:
            self.reporter.say(self.file.sentence)
        if self._page is not None:
            with observing("Starting the dashboard"):
                self.factory.pids.update(self._page.start(self.env, self.node))
        self._start_tasks(owner)

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

    def _open_workers(self, owner: Owner, registry_dir: Path) -> None:
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
            on_base=owner.base_known,
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

    def _open_session(self, owner: Owner, kind: Callable[..., MemberSession], **given: Any) -> None:
        """Create the member session and the restarts of the helper processes it needs."""
        self.session = kind(
            self.config,
            self.node,
            self.clock,
            observer=self.reporter,
            background=self.tasks.start,
            on_world=owner.world_seen,
            on_lease_lost=owner.lease_lost,
            on_lease=self.workers.leased_until,
            on_place=owner.place_allotted,
            file=self.file,
            **given,
        )
        self.helper_restarts = HelperRestarts(
            self.factory,
            self.session,
            self.workers,
            self.reporter,
            self.clock,
            state=lambda: owner.state,
        )

    def _open_watchdogs(self, owner: Owner, registry_dir: Path) -> None:
        """Create the inspector, the query socket and the hang watchdogs."""
        config = self.config
        self._inspector = Inspector(
            self.workers,
            Stacks(self.workers),
            node=self.node,
            job=config.run_id,
            world=lambda: owner.state.world,
            can_go_on=lambda generation: (
                not owner.state.leaving and self.watchdog.can_go_on(generation)
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
        self._script_watchdog = ScriptHangWatchdog(
            self.workers, self._hangs, config.progress_timeout
        )

    def _open_straggler_watch(self) -> StragglerWatch | None:
        config = self.config
        if not config.straggler_threshold:
            return None
        replace = self.session.replace_slow if config.replace_stragglers else None
        watch = StragglerWatch(config.straggler_threshold, self.reporter.stragglers, replace)
        if config.max_nodes > 1:
            self._collector.listen(watch.take_lines)
        else:
            watch.follow(self._events)
        return watch

    def _start_tasks(self, owner: Owner) -> None:
        """Start the tasks that run until the agent ends."""
        start = self.tasks.start
        start(self.reporter.line.run, "waiting-line")
        start(partial(self.workers.timers.watch, self.workers), "timers")
        start(self._query_socket.open, "inspection-socket")
        start(
            partial(self._script_watchdog.run, lambda: isinstance(owner.state, InProcessState)),
            "script-watchdog",
        )
        for source in self._preemption:
            watch = partial(watcher.watch, source, notify=owner.preempted, say=self.reporter.say)
            start(watch, "preemption")
        if self._metrics is not None:
            start(partial(self._metrics.open, start, self.reporter.say), "metrics")
        if self._health is not None:
            start(partial(self._health.open, start, self.reporter.say), "health")
        if self._page is not None:
            start(partial(self._page.watch, self.reporter.say), "dashboard")

    def connect(self) -> None:
        """Open what needs other nodes, once the session has joined them."""
        backend = self.session.backend
        self.workers.reached_at(backend.addr)
        self.snapshots.open(backend)
        self._inspector.open(backend)
        self.tasks.start(partial(self.sampling.run, self.workers.look), "sampling")
        if self.config.max_nodes > 1:  # else this node's log is complete
            self.shipper.open(backend)
        self.reporter.joined(self.session.member.name, backend)

    # --- closing ---------------------------------------------------------------------------------

    async def close(self, state: State) -> None:
        """Leave nothing behind: no worker, no task, no file that only we needed."""
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
        self.sum_up_stragglers(before=state.generation + 1)
        self.reporter.ended(state.exitcode, state.reason, state.world)
        with observing("Shipping the last events"):
            await self.shipper.last_words(LAST_EVENTS_TIMEOUT)
            await self.shipper.close()
            await self._collector.wait_alone(LAST_EVENTS_TIMEOUT if closed else 0.0)
        await self.session.close(job_closed=closed)
        self.file.discard() if closed else self.file.close()
        with observing("Writing the last events"):
            await self._collector.close()
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

    def sum_up_stragglers(self, *, before: int) -> None:
        """Report the stragglers of past generations, unless another node leads and does."""
        if self.stragglers is not None and self.shipper.leads is not False:
            with observing("Summing up stragglers"):
                self.stragglers.sum_up(before)
