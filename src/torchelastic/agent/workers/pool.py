"""The worker pool: starts, talks to and stops the worker processes of one node.

It reports what happens to them as events; `lifecycle` decides what to do.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torchelastic.agent import failure_report
from torchelastic.agent.lifecycle.node_state import (
    Event,
    WorkerFailed,
    WorkerMessage,
    WorkerProgress,
    WorkerReturned,
    WorkerSucceeded,
    WorkersUp,
)
from torchelastic.agent.output import log_files
from torchelastic.agent.spawn.helper_processes import ProcessFactory
from torchelastic.agent.telemetry.progress_sampler import ProgressSampler
from torchelastic.agent.telemetry.reporter import Reporter
from torchelastic.agent.watch.stack_reader import is_frozen
from torchelastic.agent.watch.worker_timers import Timers
from torchelastic.agent.workers import numa
from torchelastic.agent.workers.environment import entry_for, standby_env, worker_env
from torchelastic.agent.workers.handed_memory import CountedSteps, MetricTables
from torchelastic.agent.workers.oom import Facts, OomKills, memory_hint
from torchelastic.agent.workers.supervisor import Supervisor, WorkerExit, WorkerSpawn
from torchelastic.agent.workers.worker_record import WorkerRecord
from torchelastic.best_effort import observing
from torchelastic.clock import Clock
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import SpawnError
from torchelastic.events.analysis.hangs import WORLD, Collective, RankActivity
from torchelastic.events.failure import Failure
from torchelastic.metrics import metric_table
from torchelastic.rendezvous.world import World
from torchelastic.snapshot import messages
from torchelastic.snapshot.node.snapshot_service import Snapshots
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup
from torchelastic.transport.addresses import interface_of
from torchelastic.transport.auth import Secret
from torchelastic.worker import collective_log, error_file, optimizer_steps, orders, status_page
from torchelastic.worker.bootstrap import TOLD_MESSAGE, TOLD_TRACEBACK, result_path

logger = logging.getLogger(__name__)

#: Seconds to wait for the last output of exited workers.
LAST_OUTPUT_TIMEOUT = 2.0


class WorkerPool:
    """This node's workers, without the decisions about them."""

    def __init__(
        self,
        config: LaunchConfig,
        entry: Entry,
        env: Mapping[str, str],
        *,
        factory: ProcessFactory,
        node_logs: log_files.NodeLogs,
        reporter: Reporter,
        clock: Clock,
        tell_event: Callable[[Event], None],
        secret: Secret | None,
        snapshots: Snapshots,
        sampling: ProgressSampler,
    ) -> None:
        self._config = config
        self._entry = entry
        self._env = env
        self._logs = node_logs
        self._reporter = reporter
        self._clock = clock
        self._sampling = sampling
        self._tell_event = tell_event
        self._snapshots = snapshots
        self._supervisor = Supervisor(
            zygote=factory.zygote,
            cgroup=Cgroup.create(),
            on_exit=self._exited,
            on_message=self._heard,
            on_handed=self._handed,
            secret=secret,
        )
        factory.serve(self._supervisor)
        #: The timers of workers that use them.
        self.timers = Timers()
        #: The metric tables of workers that report metrics.
        self._metric_tables = MetricTables()
        #: Set when they are told to stop: their exits are not failures then.
        self.stopping = False
        #: The kernel's out-of-memory counts.
        self._memory = OomKills()
        self._records = {
            local_rank: WorkerRecord(local_rank) for local_rank in range(config.nproc_per_node)
        }
        #: The time until which this node holds its lease.
        self._leased_until = math.inf
        #: Optimizer steps of workers that report no steps.
        self.counted = CountedSteps()
        #: The newest generation in which a worker here was seen to have taken a step.
        self._trained = -1
        #: Global rank -> path of the function's pickled result.
        self.results: dict[int, str] = {}

    @property
    def alive(self) -> tuple[int, ...]:
        return self._supervisor.alive

    @property
    def helpers(self) -> set[int]:
        """Pids of our children that are not workers. Add one before the next await."""
        return self._supervisor.exempt

    def seen(self) -> WorkerProgress:
        """Return the progress that the workers show. Counted optimizer steps are no steps here, but
        show that a generation has trained; a worker holds a state once it has entered a step."""
        records = self._records.values()
        steps = [step for record in records if (step := record.newest_step()) is not None]
        trained = [self._trained, self.counted.newest]
        for record in records:
            shown = record.progress()
            if shown is not None and shown[1] > record.first_step():
                trained.append(shown[0])
        self._trained = max(trained)
        held = {local_rank: self._held(local_rank) for local_rank in self.alive}
        newest = max(held.values(), default=-1)
        blank = tuple(local_rank for local_rank, held_here in held.items() if held_here < newest)
        return WorkerProgress(max(steps, default=-1), self._trained, newest, blank)

    def _held(self, local_rank: int) -> int:
        record = self._records[local_rank]
        own = record.progress()
        return own[0] if own and own != record.inherited else -1

    def pid(self, local_rank: int) -> int | None:
        return self._supervisor.pid(local_rank)

    def is_in_process(self, local_rank: int) -> bool:
        """True if it has called `torchelastic.train`, and a control thread answers for it."""
        return self._records[local_rank].in_process

    def rank(self, local_rank: int) -> int:
        """The rank in the world it is in, or was told to enter."""
        return self._records[local_rank].rank

    def generation(self, local_rank: int) -> int:
        """The world the worker was last told to enter."""
        return self._records[local_rank].generation

    def entering_since(self, local_rank: int) -> float | None:
        """When it started to enter its world (`WorkerRecord.entering_since`)."""
        return self._records[local_rank].entering_since()

    def has_stopped(self, local_rank: int) -> bool:
        """True if it has left its world since it was told that it is over."""
        return self._records[local_rank].has_stopped

    def progress(self, local_rank: int) -> tuple[int, int, float] | None:
        """Generation, step and time of the last step it has entered, if it reports steps."""
        return self._records[local_rank].progress()

    def first_step(self, local_rank: int) -> int:
        """The first step of the generation that `progress` returns."""
        return self._records[local_rank].first_step()

    def pong(self, local_rank: int) -> orders.Pong | None:
        """Its last answer to a `Ping`."""
        return self._records[local_rank].pong

    def stack_memory(self, local_rank: int) -> int | None:
        return self._supervisor.stack_memory(local_rank)

    # --- starting --------------------------------------------------------------------------------

    def reached_at(self, addr: str) -> None:
        """Let gloo listen at the address other nodes use, unless the user has set one.

        By default it resolves the host name, which may give a loopback address.
        """
        if (interface := interface_of(addr)) is not None:
            self._env = {"GLOO_SOCKET_IFNAME": interface, **self._env}

    async def start_all(self, world: World, node: str) -> bool:
        """Start the workers of a world's node, all or none; False if that failed."""
        began = self._clock.now()
        self.results.clear()
        self.counted.close()
        found = world.find(node)
        assert found is not None
        ranks = {local: found.first_rank + local for local in range(self._config.nproc_per_node)}
        envs = {local: worker_env(self._env, self._config, world, found, local) for local in ranks}
        pids = await self._start(world.generation, ranks, envs)
        if pids is not None:
            seconds = self._clock.now() - began
            self._tell_event(WorkersUp(world.generation))
            self._reporter.workers_started(world.generation, ranks, pids, seconds)
        return pids is not None

    async def start_standby(self, local_rank: int, world: World, place: int) -> bool:
        """Start one worker that is in no world yet; its logs go with the next generation. `place`
        is that of this node in its replica. False if that failed."""
        if self.stopping:
            return True
        began = self._clock.now()
        self.counted.forget(local_rank)
        ranks = {local_rank: world.size + local_rank}
        env = standby_env(self._env, self._config, world, local_rank, place)
        pids = await self._start(world.generation + 1, ranks, {local_rank: env}, generation=-1)
        if pids is not None:
            seconds = self._clock.now() - began
            self._reporter.standby_started(local_rank, pids[local_rank], seconds)
        return pids is not None

    async def _start(
        self,
        attempt: int,
        ranks: Mapping[int, int],
        envs: Mapping[int, Mapping[str, str]],
        generation: int | None = None,
    ) -> dict[int, int] | None:
        """Open logs and start; on failure report it and return None."""
        generation = attempt if generation is None else generation
        for local, rank in ranks.items():
            self._records[local] = self._records[local].successor(generation, rank)
        try:
            opened = self._logs.open(attempt, ranks)
            for local in ranks:
                self._records[local].logs = opened
            try:
                spawns = [self._spawn(local, envs[local], opened) for local in ranks]
                return await self._supervisor.start(spawns)
            finally:
                opened.started()
        except (SpawnError, OSError) as error:
            local_rank = next(iter(ranks))
            self.fail(local_rank, f"could not start the workers: {error}")
            return None

    def _spawn(
        self, local_rank: int, env: Mapping[str, str], opened: log_files.GenerationLogs
    ) -> WorkerSpawn:
        streams = opened.streams[local_rank]
        return WorkerSpawn(
            local_rank=local_rank,
            entry=entry_for(self._entry, local_rank),
            env={**env, "TORCHELASTIC_ERROR_FILE": streams.error_file},
            stdout=streams.stdout,
            stderr=streams.stderr,
            cpus=self._cpus(local_rank),
        )

    def _cpus(self, local_rank: int) -> frozenset[int] | None:
        binding, nproc = self._config.numa_binding, self._config.nproc_per_node
        if binding is None:
            return None
        return numa.choose(binding, numa.machine(), local_rank, nproc, numa.gpu_nodes())

    # --- speaking and listening ------------------------------------------------------------------

    def tell(self, local_rank: int, order: orders.Order, fds: Iterable[int] = ()) -> None:
        """Send an order; a worker that has exited is ignored."""
        self._records[local_rank].told(order, time.monotonic())
        self._supervisor.tell(local_rank, orders.to_json(order), list(fds))

    def doing(self, local_rank: int, generation: int) -> RankActivity | None:
        """Return what a worker is doing, without its stack; None if it is not in this world."""
        record = self._records[local_rank]
        if record.generation != generation:
            return None
        seen = record.collectives()
        return RankActivity(
            rank=record.rank,
            node=self._reporter.name,
            step=self._step(local_rank),
            waits=_collective(seen.waits) if seen.waits is not None else None,
            launched=tuple(map(_collective, seen.launched)),
            frozen=is_frozen(self.pid(local_rank)),
        )

    def look(self) -> None:
        """Report what is new on the status pages and metric tables of all workers."""
        with observing("Reading the progress of the workers"):
            shown = {
                local: status_page.read(record.page)
                for local, record in self._records.items()
                if record.page is not None
            }
            shown |= self.counted.shown()
            stepped = {local: (one.generation, one.rank) for local, one in shown.items()}
            self._sampling.look(shown.values(), self._metric_tables.look(stepped))

    def _heard(self, local_rank: int, message: dict[str, Any]) -> None:
        if message.get("type") == "failure":
            self._records[local_rank].sent_error = error_file.heard(message)
        elif str(message.get("type")).startswith(messages.PREFIX):
            self._snapshots.heard(message, partial(self._answer, local_rank, self.pid(local_rank)))
        else:
            self._reported(local_rank, message)

    def _handed(self, local_rank: int, message: dict[str, Any], descriptor: int) -> None:
        """Take a message with a descriptor: a metric table, counted steps, or timers."""
        place = self._records[local_rank].place
        if message.get("type") == metric_table.MESSAGE and linux.is_memory(descriptor):
            self._metric_tables.handed(local_rank, place, descriptor)
            return
        if message.get("type") == optimizer_steps.MESSAGE and linux.is_memory(descriptor):
            self.counted.handed(local_rank, place, descriptor)
            return
        self.timers.handed(local_rank, self.pid(local_rank), message, descriptor)

    def _reported(self, local_rank: int, message: dict[str, Any]) -> None:
        try:
            report = orders.from_json(message)
        except ValueError as error:  # an invalid message must not end the agent
            logger.debug("ignored an invalid message from worker %d: %s", local_rank, error)
            return
        record = self._records[local_rank]
        if isinstance(report, orders.Stopped | orders.Finished | orders.Erred | orders.PeerLost):
            record.left(report.generation, time.monotonic())
            self.look()
        match report:
            case orders.Enlisted() as enlisted:
                record.in_process = True
                self._give_status_page(local_rank)
                self._tell_event(WorkerMessage(local_rank, enlisted))
            case orders.Keeps():
                self._give_status_page(local_rank)
            case orders.Pong() as pong:
                record.pong = pong
            case orders.PeerLost() if record.is_done:
                pass  # its peer learned first that the training is done, and left
            case orders.Erred() | orders.PeerLost() as erred:
                record.step = erred.step
                self._erred(local_rank, erred)
            case orders.Begins() as begins:
                self._reporter.begins(begins, in_process=record.in_process)
            case orders.Returned():
                record.returned_at = time.monotonic()
                self._tell_event(WorkerReturned(record.generation, local_rank))
            case orders.Stored() as stored:
                self._sampling.stored(*record.place, stored)
            case orders.Hashed() as hashed:
                self._sampling.hashed(*record.place, hashed)
            case orders.BadStep() as bad:
                self._reporter.bad_step(record.generation, bad)
            case orders.Up() as up:
                record.step, record.trains_in = up.step, up.generation
                self._reporter.training(record.rank, up)
            case orders.Stopped(_, step) | orders.Finished(_, step) as stopped:
                record.step, record.has_stopped = step, True
                self._tell_event(WorkerMessage(local_rank, stopped))
            case (
                orders.Entered()
                | orders.Checked()
                | orders.Unfit()
                | orders.CanSave()
                | orders.Saved()
            ) as said:
                self._tell_event(WorkerMessage(local_rank, said))

    def _answer(
        self, local_rank: int, pid: int | None, answer: dict[str, Any], fds: Sequence[int]
    ) -> None:
        """Answer the worker that asked, unless another one has its local rank now."""
        if pid == self.pid(local_rank):
            self._supervisor.tell(local_rank, answer, fds)

    def _give_status_page(self, local_rank: int) -> None:
        """Give a replacement the status page of the worker it replaces."""
        self.counted.forget(local_rank)
        record = self._records[local_rank]
        if record.page is None:
            record.page = status_page.create()
        status_page.write_lease(record.page, self._leased_until)
        record.inherited = record.progress()
        self.tell(local_rank, orders.StatusPage(self._config.lease), [record.page])

    def leased_until(self, until: float) -> None:
        """Tell the workers until when this node holds its lease: they enter no step after that,
        even if this process is stopped and cannot tell them to."""
        self._leased_until = until
        for record in self._records.values():
            if record.page is not None:
                status_page.write_lease(record.page, until)

    # --- ends ------------------------------------------------------------------------------------

    def _exited(self, exit: WorkerExit) -> None:
        """Report the exit first, whatever else fails."""
        generation, rank = self._records[exit.local_rank].place
        failure = self._failure_of(exit) if exit.exitcode != 0 else None
        if exit.exitcode == 0:
            if self._entry.kind == "function":
                self.results[rank] = result_path(self._entry.target, generation, rank)
            self._tell_event(WorkerSucceeded(generation, exit.local_rank))
        elif failure is not None:
            self._tell_event(WorkerFailed(failure))
        self.look()
        with observing("Closing the memory of a worker that exited"):
            self.timers.ended(exit.local_rank)
            self._metric_tables.forget(exit.local_rank)
        returned = self._records[exit.local_rank].returned_at
        exiting = 0.0 if returned is None else time.monotonic() - returned
        self._reporter.worker_exited(rank, exit, generation, exiting)
        if failure is not None:
            self._reporter.worker_failed(failure)

    def _failure_of(self, exit: WorkerExit) -> Failure | None:
        """The failure of a worker that exited; at least its exit code."""
        told, path, hint = None, "", ""
        log_lines: tuple[str, ...] = ()
        with observing("Reading the error file of a worker"):
            path, told = self._records[exit.local_rank].error()
        message = told.message[:TOLD_MESSAGE] if told else failure_report.exit_words(exit.exitcode)
        with observing("Asking the kernel why a worker ended"):
            hint = self._hint(exit, message)
        with observing("Reading the last lines of a worker"):
            log_lines = self._last_lines(exit.local_rank, told.traceback if told else "")
        return self._failure(
            exit.local_rank,
            pid=exit.pid,
            exitcode=exit.exitcode,
            message=message if told else failure_report.with_hint(message, hint),
            traceback=told.traceback[-TOLD_TRACEBACK:] if told else "",
            place=told.place if told else "",
            stopped=self._is_stopped(exit.local_rank),
            error_file=path if told else "",
            hint=hint,
            log_lines=log_lines,
            # The worker's own time is nearer to the error: its exit may take a while.
            wall_time=(told.timestamp if told else 0) or time.time(),
        )

    def _is_stopped(self, local_rank: int) -> bool:
        """True if we stopped the worker, so that its exit code means nothing."""
        record = self._records[local_rank]
        return record.cut_off or (self.stopping and not record.exits_by_itself)

    def _hint(self, exit: WorkerExit, message: str) -> str:
        """The kernel's hint about an exit that we did not cause."""
        if self._is_stopped(exit.local_rank) or self._records[exit.local_rank].verdict:
            return ""
        return memory_hint(self._memory.look(exit.pid, exit.exitcode, message))

    def _last_lines(self, local_rank: int, besides: str) -> tuple[str, ...]:
        logs = self._records[local_rank].logs
        return logs.last_lines(local_rank, besides) if logs is not None else ()

    def fail(self, local_rank: int, message: str, *, alive: bool = False) -> None:
        """Report a failure on our side, of something the workers need.

        With `alive` the worker itself is fine: its generation ends, and it is not replaced.
        """
        pid = (self.pid(local_rank) or 0) if alive else 0
        self._fail(local_rank, pid=pid, exitcode=1, message=message, alive=alive)

    def _erred(self, local_rank: int, erred: orders.Erred | orders.PeerLost) -> None:
        """Report an error of a worker that is still alive."""
        lost = isinstance(erred, orders.PeerLost)
        log_lines: tuple[str, ...] = ()
        if not lost:
            with observing("Reading the last lines of a worker"):
                log_lines = self._last_lines(local_rank, "")
        self._fail(
            local_rank,
            pid=self.pid(local_rank) or 0,
            exitcode=1,
            message=(f"lost a peer: {erred.message}" if lost else erred.message)[:TOLD_MESSAGE],
            traceback="" if isinstance(erred, orders.PeerLost) else erred.traceback,
            place="" if isinstance(erred, orders.PeerLost) else erred.place,
            before=erred.generation < self._records[local_rank].generation,
            alive=True,
            fatal=isinstance(erred, orders.Erred) and not erred.retry,
            # Every survivor of a failure reports a lost peer, and the next world waits for that.
            hint="" if lost else memory_hint(Facts(exitcode=1, message=erred.message)),
            log_lines=log_lines,
        )

    def _fail(self, local_rank: int, **what: Any) -> None:
        if (failure := self._failure(local_rank, **what)) is not None:
            self._tell_event(WorkerFailed(failure))
            self._reporter.worker_failed(failure)

    def _failure(self, local_rank: int, **what: Any) -> Failure | None:
        """None if we stopped it and it reported nothing."""
        record = self._records[local_rank]
        generation, rank = record.place
        shown: dict[str, Any] = {
            "wall_time": time.time(),
            "before": record.trains_in is not None and record.trains_in < generation,
        }
        with observing("Reading the last step of a worker"):
            shown["step"] = self._step(local_rank)
            if (doing := self.doing(local_rank, generation)) is not None:
                shown |= doing.as_last()
        failure = Failure(
            generation=generation,
            node=self._reporter.name,
            rank=rank,
            local_rank=local_rank,
            role=self._config.role,
            **{**shown, **what},
        )
        return failure if failure.told or not failure.stopped else None

    def _step(self, local_rank: int) -> int | None:
        """The step the worker was in, had last reported, or its optimizer had taken."""
        told = self._records[local_rank].newest_step()
        counted = self.counted.seen(local_rank)
        return counted[1] if told is None and counted is not None else told

    # --- stopping --------------------------------------------------------------------------------

    def signal(self, signum: int) -> None:
        self._supervisor.signal(signum)

    def begin_to_stop(self) -> None:
        """Treat exits from now on as ordered, except of workers that have exited or are exiting
        already: their peers may have reported them first."""
        self.stopping = True
        for local_rank, record in self._records.items():
            record.exits_by_itself = local_rank in self.alive and (
                self._supervisor.has_ended(local_rank) or record.error()[1] is not None
            )

    def condemn(self, local_rank: int, why: str, stack: str = "") -> None:
        """Set `why` as the failure of a worker, however it exits from now on."""
        self._records[local_rank].verdict = error_file.ErrorRecord(why, stack or why)

    def last_stack(self, local_rank: int) -> str | None:
        """The stack of a condemned worker, which must get no more signals; None for others."""
        verdict = self._records[local_rank].verdict
        return verdict.traceback if verdict is not None else None

    def kill(self, local_rank: int, why: str, stack: str = "", *, over: bool = False) -> None:
        """Kill one worker at once, with `why` as its failure. With `over` its world was already
        over by another failure."""
        if over:
            self._records[local_rank].cut_off = True
        self.condemn(local_rank, why, stack)
        self._supervisor.kill(local_rank)
        self._reporter.worker_killed(*self._records[local_rank].place, local_rank, why, stack)

    async def stop(
        self, signum: int, generation: int, told: Collection[int], timeout: float
    ) -> None:
        """Stop them all, after those that were told to leave; kill them after `timeout` seconds.

        Returns when all are gone.
        """
        began = self._clock.now()
        await self._supervisor.stop(signum, timeout=timeout, told=told)
        with observing("Draining the output of the workers"):
            for opened in self._opened_logs():
                await opened.drained(LAST_OUTPUT_TIMEOUT)
        for record in self._records.values():
            record.logs = None
        self.stopping = False
        self._reporter.workers_stopped(generation, self._clock.now() - began)

    def kill_everything(self) -> None:
        self._supervisor.kill_everything()

    async def close(self) -> None:
        """Stop and release everything when the agent ends."""
        if self.alive:  # only after an internal error
            await self._supervisor.stop(timeout=self._config.shutdown_timeout)
        self._supervisor.close()
        self._metric_tables.close()
        self.counted.close()
        self.timers.close()
        self._memory.close()
        for opened in self._opened_logs():
            opened.close()
        for record in self._records.values():
            if record.page is not None:
                os.close(record.page)
                record.page = None  # the sampler still looks until its task is cancelled

    def _opened_logs(self) -> set[log_files.GenerationLogs]:
        return {record.logs for record in self._records.values() if record.logs is not None}


def _collective(seen: collective_log.LoggedCollective) -> Collective:
    return Collective(seen.name, seen.number, seen.group or WORLD)
