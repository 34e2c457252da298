"""The reporter: every decision goes to the event log and, as a line, to stderr."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchelastic import env
from torchelastic.agent import failure_report
from torchelastic.agent.output.console import Console, WaitingLine, show
from torchelastic.agent.telemetry.progress_sampler import Seen
from torchelastic.agent.workers.supervisor import WorkerExit
from torchelastic.best_effort import quiet
from torchelastic.clock import Clock
from torchelastic.config import LaunchConfig
from torchelastic.errors import EXIT_FAILED, EXIT_RENDEZVOUS_LOST, FAILED
from torchelastic.events import types as events
from torchelastic.events import words
from torchelastic.events.analysis.goodput import Goodput, GoodputFold, goodput
from torchelastic.events.failure import Failure
from torchelastic.events.log import EventLog, read_files
from torchelastic.events.timeline import DISRUPTIONS
from torchelastic.rendezvous.forming import REPEAT_INTERVAL, time_limit
from torchelastic.rendezvous.membership.backend import RendezvousBackend
from torchelastic.rendezvous.restart_policy import Kind
from torchelastic.rendezvous.world import Member, World
from torchelastic.worker import orders

logger = logging.getLogger("torchelastic")

#: Seconds a node looks for the others before it logs that.
JOINING_QUIET = 5.0
#: Seconds that the line about a generation that is over waits for the cause to be known. Nothing
#: else waits for it.
CAUSE_TIMEOUT = 0.5


def set_up_log(name: str = "") -> Console:
    """Send the agent's log to stderr, each line marked with the node's name once it has one."""
    known = [handler for handler in logger.handlers if isinstance(handler, Console)]
    handler = known[0] if known else Console()
    mark = f"torchelastic {name}".rstrip()
    handler.setFormatter(logging.Formatter(f"[{mark}] %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    wanted = env.get("LOGLEVEL", "INFO").upper()
    level = logging.getLevelName(wanted)
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    if not isinstance(level, int):
        logger.warning("LOGLEVEL=%s is not a valid log level; using INFO", wanted)
    return handler


def _as_json(failure: Failure | None) -> dict[str, Any] | None:
    return failure.to_json() if failure is not None else None


def _restart(world: World, kind: Kind) -> events.RestartDecided:
    failed = kind in DISRUPTIONS
    return events.RestartDecided(
        restart=world.phase != "closed",
        reason=world.reason,
        kind=kind,
        cause=_as_json(world.cause) if failed else None,
        consequences=[one.to_json() for one in world.consequences] if failed else [],
    )


def _going_back(world: World) -> events.StatesDiffered:
    assert world.rewind is not None
    names = [node.name for node in world.nodes if any(map(node.has_rank, world.wrong))]
    return events.StatesDiffered(
        ranks=list(world.wrong), names=names, back=world.rewind.step, text=world.reason
    )


def _screen() -> Console:
    """The console of the agent's log; one that shows nothing if the log is not set up."""
    known = (handler for handler in logger.handlers if isinstance(handler, Console))
    return next(known, None) or Console(fd=-1)


@quiet
class Reporter:
    """Reports each decision with its reason, once. Also the leader's observer."""

    def __init__(
        self,
        log: EventLog,
        config: LaunchConfig,
        entry: str,
        node: str,
        clock: Clock,
        *,
        prints_failure: bool,
        for_others: str = "",
    ) -> None:
        """`for_others` is the command to start the other nodes with."""
        self._log = log
        self._config = config
        self._entry = entry
        self._node = node
        #: Whether this process has to print the final failure block.
        self._prints_failure = prints_failure
        self.name = ""
        #: The last generation that was reported, and whether a signal ends the job here.
        self._told, self._told_replica, self._leaving = -1, 0, False
        #: What was reported about the comparison of states.
        self._told_of_states: set[str] = set()
        #: The last generation that was reported as over, and the reason.
        self._told_over = -1, ""
        #: The furthest step the job had reached before this world, and warnings given at starts.
        self._best_step = -1
        self._beginnings: set[str] = set()
        self._goodput = GoodputFold()
        log.listen(self._goodput.feed)
        self.line = WaitingLine(_screen(), clock)
        #: Logs, after a while, that this node looks for the others.
        self._joining: asyncio.TimerHandle | None = None
        #: A world that is over because a worker lost a peer, and when to log it anyway.
        self._over: World | None = None
        self._saying_over: asyncio.TimerHandle | None = None
        self._clock = clock
        self._for_others = for_others
        #: When to log the command for the other nodes again.
        self._say_command_at = clock.now()

    def started(self, command: list[str], pid: int) -> None:
        config = self._config
        for note in config.notes:
            logger.info(note)
            self._log.emit(events.Note(text=note))
        self._log.emit(
            events.AgentStarted(
                pid=pid,
                endpoint=config.rdzv_endpoint,
                command=command,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                nproc=config.nproc_per_node,
            )
        )

    def warmed_up(self, ready: float | str | None, warnings: list[str]) -> None:
        """Report that the zygote is ready, or why there is none."""
        for warning in warnings:
            self.say(warning)
        if isinstance(ready, str):
            logger.info("workers start as plain processes: %s", ready)
            self._log.emit(events.ZygoteUnavailable(reason=ready))
        elif ready is not None:
            self._log.emit(events.ZygoteReady(seconds=ready))

    def joins(self) -> None:
        """Show that this node looks for the others: the host may not be up yet."""
        config = self._config
        if config.max_nodes == 1:
            return
        what = f"looking for job {config.run_id} at {config.rdzv_endpoint}"
        patience = config.wait_for_nodes or None  # 0: forever
        if not self.line.show(what, patience):
            said = f"{what}{time_limit(patience)}"
            self._joining = asyncio.get_running_loop().call_later(JOINING_QUIET, logger.info, said)

    def joined(self, name: str, backend: RendezvousBackend) -> None:
        self._stop_joining()
        self.name = name
        if self._config.max_nodes > 1:
            set_up_log(name)
            where = "hosting" if backend.is_host else "joined"
            logger.info("%s job %s at %s", where, self._config.run_id, backend.endpoint)
        self._log.emit(events.Joined(name=name, endpoint=backend.endpoint, hosting=backend.is_host))

    def _stop_joining(self) -> None:
        self.line.clear()
        if self._joining is not None:
            self._joining.cancel()

    def rejoined(self, name: str, backend: RendezvousBackend) -> None:
        self.name = name
        if self._config.max_nodes > 1:
            set_up_log(name)
        where = "hosting the rendezvous now" if backend.is_host else "rejoined"
        logger.info("%s at %s", where, backend.endpoint)
        self._log.emit(events.Note(text=f"{where} as {name} at {backend.endpoint}"))

    def without_host(self, sentence: str) -> None:
        if not self.name and self._for_others:  # they may not be started yet
            sentence = f"{sentence} Every node of this job needs: {self._for_others}"
        logger.warning("%s", sentence)
        self._log.emit(events.Note(text=sentence))

    def lease_lost(self, store_lost: str) -> None:
        if store_lost:
            logger.warning("%s This node stops its workers and looks for another host.", store_lost)
            self._log.emit(events.LeaseLost(reason=store_lost))
            return
        reason = f"no keep-alive reached the rendezvous for {self._config.lease:g} s"
        failed = "the other nodes treat this node as failed; " if self._config.max_nodes > 1 else ""
        logger.warning("%s: %sit stops its workers and joins again", reason, failed)
        self._log.emit(events.LeaseLost(reason=reason))

    def say(self, sentence: str) -> None:
        logger.info(sentence)
        self._log.emit(events.Note(text=sentence))

    def leaves(self, signal: str) -> None:
        """Report the signal; a repeated one (`timeout` sends two) goes to the event log only."""
        again, self._leaving = self._leaving, True
        self.signal(signal, "leaving the job", again=again)

    def preempted(self, reason: str, seconds: float) -> None:
        """Report a preemption notice, because of which this node leaves."""
        self._leaving = True
        logger.info("%s: leaving the job; the workers have %.0f s", reason, seconds)
        self._log.emit(events.Leaving(reason=reason))

    def signal(self, name: str, action: str, *, again: bool = False) -> None:
        if not again:
            logger.info("%s: %s", name, action)
        self._log.emit(events.SignalReceived(signal=name, action=action))

    # --- what the leader sees and decides --------------------------------------------------------

    def became_leader(self) -> None:
        self._log.emit(events.BecameLeader())

    def node_joined(self, member: Member) -> None:
        self._log.emit(events.NodeJoined(name=member.name))

    def node_lost(self, name: str, reason: str) -> None:
        self._log.emit(events.NodeLost(name=name, reason=reason))

    def node_leaving(self, member: Member) -> None:
        self._log.emit(events.NodeLeaving(name=member.name, reason=member.leaving))

    def decided(self, world: World, kind: Kind | None) -> None:
        generation = world.generation
        if world.phase == "over":
            assert kind is not None
            cause = _as_json(world.cause) if kind in DISRUPTIONS else None
            over = events.GenerationOver(kind=kind, reason=world.reason, cause=cause)
            self._log.emit(over, generation=generation)
            if world.goes_back:
                self._log.emit(_going_back(world), generation=generation)
        elif world.phase == "pausing":
            changing = events.WorldChanging(reason=world.reason)
            self._log.emit(changing, generation=generation)
        elif kind is not None:
            self._log.emit(_restart(world, kind), generation=generation)

    # --- what every node sees --------------------------------------------------------------------

    def leader_found(self, name: str) -> None:
        self._log.emit(events.LeaderFound(name=name))

    def world_seen(self, world: World) -> None:
        self._best_step = world.restarts.best_step
        self._say_over(world)
        if world.phase != "waiting":
            self.line.clear()
        if world.phase == "running":
            self._world_runs(world)
        elif world.phase == "over":
            self._ends(world)
        elif world.phase == "pausing":
            logger.info("generation %d ends at the next step: %s", world.generation, world.reason)
        elif world.phase == "waiting":
            self._waits(world)

    def _ends(self, world: World) -> None:
        """Log why a generation is over; if only the loss of a peer is known, a moment later."""
        self._over = world
        if failure_report.is_cause_known(world):
            self._say_over()
        else:
            loop = asyncio.get_running_loop()
            self._saying_over = loop.call_later(CAUSE_TIMEOUT, self._say_over)

    def _say_over(self, following: World | None = None) -> None:
        if self._saying_over is not None:
            self._saying_over.cancel()
        over, self._over, self._saying_over = self._over, None, None
        if over is not None:
            reason, (generation, told) = failure_report.why_over(over, following), self._told_over
            new = reason.removeprefix(f"{told}; ") if generation == over.generation else reason
            logger.info("generation %d is over: %s", over.generation, new)
            self._told_over = over.generation, reason

    def _world_runs(self, world: World) -> None:
        for sentence in (world.unchecked, world.blamed):
            if sentence and sentence not in self._told_of_states:
                self._told_of_states.add(sentence)
                logger.warning("%s", sentence)
                self._log.emit(events.Note(text=sentence), generation=world.generation)
        if (world.generation, world.replica) == (self._told, self._told_replica):
            return  # the same world, whose workers have all called `train`
        if world.generation != self._told:
            logger.info("%s%s", failure_report.world_sentence(world), self._beside(world))
        self._told, self._told_replica = world.generation, world.replica
        names = [node.name for node in world.nodes]
        formed = events.WorldFormed(
            nodes=names,
            size=world.size,
            store=world.store,
            reason=world.reason,
            restarts_used=world.restarts.used,
            spares=list(world.spares),
            held={one.name: one.sentence() for one in world.held if one.seconds},
            count=world.count,
            replica=world.replica,
        )
        self._log.emit(formed, generation=world.generation)

    def _beside(self, world: World) -> str:
        """The end of the sentence on a node that has no place in the world."""
        if world.place(self._node) is not None:
            return ""
        for one in world.held:
            if one.node == self._node and one.seconds:
                return f"; this node is a spare, held out for {one.span()}"
        is_full = world.count >= self._config.max_nodes
        if is_full or self.name in world.spares or world.spare_count > len(world.spares):
            return "; this node waits as a spare"
        return "; this node warms up and joins the next generation"

    def _waits(self, world: World) -> None:
        if self._config.min_nodes == 1 and not world.count:
            return  # a job that needs one node waits for no other
        missing = words.listed(world.missing, world.missing_count)
        missing = f"; missing: {missing}" if missing else ""
        what = world.reason.removesuffix(time_limit(world.patience))
        if not self.line.show(f"{what}{missing}", world.patience):
            logger.info("%s%s", world.reason, missing)
        if not world.enough and self._for_others and self._clock.now() >= self._say_command_at:
            self._say_command_at = self._clock.now() + REPEAT_INTERVAL
            logger.info("start the other nodes with: %s", self._for_others)
        waiting = events.Waiting(
            need=self._config.min_nodes,
            missing=list(world.missing),
            reason=world.reason,
            enough=world.enough,
        )
        self._log.emit(waiting, generation=world.generation)

    # --- workers ---------------------------------------------------------------------------------

    def workers_started(
        self, generation: int, ranks: Mapping[int, int], pids: Mapping[int, int], seconds: float
    ) -> None:
        started = events.WorkersStarted(
            ranks=[ranks[local_rank] for local_rank in sorted(ranks)],
            pids=[pids[local_rank] for local_rank in sorted(ranks)],
            seconds=seconds,
        )
        self._log.emit(started, generation=generation)

    def standby_started(self, local_rank: int, pid: int, seconds: float) -> None:
        logger.info(
            "local rank %d: worker started (pid %d); it joins the next world once it is ready",
            local_rank,
            pid,
        )
        started = events.StandbyStarted(local_rank=local_rank, worker_pid=pid, seconds=seconds)
        self._log.emit(started)

    def training(self, rank: int, up: orders.Up) -> None:
        training = events.Training(
            rank=rank, step=up.step, received=up.received, built=up.built, fetched=up.fetched
        )
        self._log.emit(training, generation=up.generation)

    def begins(self, begins: orders.Begins, *, in_process: bool) -> None:
        """Warn, once per text, that training starts at step 0 or could have to."""
        told = failure_report.beginning(begins, best_step=self._best_step, in_process=in_process)
        if told and told not in self._beginnings:
            self._beginnings.add(told)
            logger.warning(told)
            self._log.emit(events.Note(text=told), generation=begins.generation)

    def sampled(self, generation: int, seen: Seen) -> None:
        if isinstance(seen, events.WeightsHashed) and seen.final:
            logger.info(words.weights(seen))
        self._log.emit(seen, generation=generation)

    def bad_step(self, generation: int, bad: orders.BadStep) -> None:
        self._log.emit(events.StepSkipped(**asdict(bad)), generation=generation)

    def hang(self, generation: int, hang: events.Hang) -> None:
        # Where no rank waits, as when a timer expires, the line about the killed rank is enough.
        if any(row["waiting"] for row in hang.ranks):
            logger.warning("workers are hung: %s", hang.text)
        self._log.emit(hang, generation=generation)

    def stragglers(self, generation: int, found: Sequence[events.Straggler]) -> None:
        """Log the costliest straggler of each node; all of them go to the event log."""
        by_node: dict[tuple[str, bool], list[events.Straggler]] = {}
        for one in sorted(found, key=lambda one: -one.cost):
            self._log.emit(one, generation=generation)
            by_node.setdefault((one.name, one.over), []).append(one)
        for first, *others in by_node.values():
            more = f" (and {words.counted(len(others), 'more worker')} there)" if others else ""
            logger.warning("%s%s", first.text, more)

    def worker_killed(
        self, generation: int, rank: int, local_rank: int, reason: str, stack: str
    ) -> None:
        """A worker that is in no world yet has generation -1."""
        where = f"; its stack:\n{stack}" if stack else ""
        logger.warning("killed rank %d (local rank %d): %s%s", rank, local_rank, reason, where)
        killed = events.WorkerKilled(rank=rank, local_rank=local_rank, reason=reason, stack=stack)
        self._log.emit(killed, generation=generation if generation >= 0 else None)

    def worker_exited(self, rank: int, exit: WorkerExit, generation: int, exiting: float) -> None:
        exited = events.WorkerExited(
            rank=rank,
            local_rank=exit.local_rank,
            worker_pid=exit.pid,
            exitcode=exit.exitcode,
            exiting=exiting,
        )
        self._log.emit(exited, generation=generation)

    def worker_failed(self, failure: Failure) -> None:
        failed = events.WorkerFailed(failure=failure.to_json())
        self._log.emit(failed, generation=failure.generation)

    def workers_stopped(self, generation: int, seconds: float) -> None:
        self._log.emit(events.WorkersStopped(seconds=seconds), generation=generation)

    # --- the end ---------------------------------------------------------------------------------

    def ended(self, exitcode: int | None, reason: str, world: World | None) -> None:
        self._stop_joining()
        self._say_over(world)
        ended = events.JobEnded(
            exitcode=exitcode if exitcode is not None else EXIT_FAILED,
            reason=reason,
            cause=_as_json(world.cause) if world is not None else None,
        )
        self._log.emit(ended, generation=world.generation if world is not None else None)
        if exitcode in FAILED and world is not None:
            if self._prints_failure:
                show(failure_report.job_failed(world, name=self._entry))
        elif self._leaving and self._told < 0:
            pass  # Ctrl-C before the first world: the signal has been reported
        elif exitcode and (world is not None or exitcode == EXIT_RENDEZVOUS_LOST):
            logger.error("ended with exit code %d: %s", exitcode, reason)

    async def sum_up(self, collected: Path, *, leads: bool | None) -> None:
        """Log the job's goodput, on the node that has collected all events. A node that does not
        know the leader logs its own view."""
        if self._told < 0 or leads is False:
            return
        found = await asyncio.to_thread(_goodput_of, collected) if leads else None
        alone = found is None and self._config.max_nodes > 1
        told = words.goodput(self._goodput.at() if found is None else found)
        logger.info("%s%s", told, " (from this node's events only)" if alone else "")


def _goodput_of(collected: Path) -> Goodput | None:
    """Goodput from the collected events; None if there are none (the disk was full)."""
    try:
        records = read_files([collected], thin=True)
    except OSError as error:
        logger.debug("cannot read the collected events: %s", error)
        return None
    return goodput(records) if records else None
