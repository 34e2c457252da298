"""The resident workers of one node: an event in, a new state and commands out. Pure.

Resident workers have called `torchelastic.train`; they outlive their generation, so this machine
stops none of them to start another. A worker's life:

                  train was called             a world has a place for it
    starting ──────────────────────▶ standing ──────────────────────────▶ training
        ▲                               ▲                                   │   │
        │ died: a replacement           └──── stopped: the world is over ───┘   │
        └── gone ◀── exit ── finished ◀────────── the training is done ─────────┘

The node as a whole serves until the job is closed, it has left, or the store is lost; then it stops
its workers and has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torchelastic.agent.lifecycle import script
from torchelastic.agent.lifecycle.script import (
    SIGINT,
    SIGKILL,
    SIGTERM,
    LeaseLost,
    LeaveRequested,
    Rejoin,
    Report,
    Stop,
    StoreLost,
    Tell,
    WorkerFailed,
    WorkersGone,
    WorkerSucceeded,
    WorkersUp,
    WorldSeen,
)
from torchelastic.errors import EXIT_FAILED, EXIT_RENDEZVOUS_LOST, EXIT_SIGNAL_BASE
from torchelastic.events.failure import Failure, signal_name
from torchelastic.records import replace
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

#: Starts in a row that exit before `train` is called; another one would fail the same way.
MOST_TRIES = 3
#: Failures a node reports; a world with so many is over anyway.
MOST_FAILURES = 64


class Status(enum.Enum):
    """The status of a worker."""

    STARTING = "starting"
    STANDING = "standing"
    TRAINING = "training"
    FINISHED = "finished"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The state of one local rank."""

    status: Status
    #: The last world it was told to enter.
    generation: int = -1
    #: The first step of its first world since it stood, if the others were to continue there.
    begins: int = -1
    #: The generation it was told to stop and has not stopped yet; -1: none. Whether it may finish
    #: its step first.
    stopping: int = -1
    through: bool = False
    #: The error it has reported; it is alive and waits for the end of its world.
    broken: Failure | None = None
    #: The number of steps after which its data ended; -1: it has not.
    finished: int = -1
    #: The generation for which it has reported its step, and that step.
    paused: int = -1
    entered: int = -1
    #: Starts in a row that exited before `train` was called.
    tries: int = 0


class Phase(enum.Enum):
    """The phase of the node."""

    SERVING = "serving"
    STOPPING = "stopping"
    ENDED = "ended"


# --- its own events and commands; the others are those of `script` -------------------------------


@dataclass(frozen=True)
class Said:
    """A worker has sent a message on its channel."""

    local_rank: int
    report: orders.Report


@dataclass(frozen=True)
class LeaveOverdue:
    """This node was to leave and has not reached a step boundary in time."""


@dataclass(frozen=True)
class Spawn:
    """Start a worker on standby for a world."""

    local_rank: int


Event = script.Event | Said | LeaveOverdue
Command = script.Command | Spawn


# --- state ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InProcessState:
    """Everything that decides what this node does next."""

    node: str
    #: The node's name, for people.
    name: str = ""
    phase: Phase = Phase.SERVING
    workers: Mapping[int, Worker] = field(default_factory=dict)
    #: The latest world.
    world: World | None = None
    #: The generation last reported to be gone from here.
    gone: int = -1
    failures: tuple[Failure, ...] = ()
    #: The signal this node leaves by, 0 while it stays.
    leaving: int = 0
    #: When its workers are killed then, by this machine's monotonic clock.
    deadline: float | None = None
    #: The lease was lost: join anew once the workers have stopped.
    rejoin: bool = False
    exitcode: int | None = None
    reason: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def generation(self) -> int:
        """The latest world a worker here was told to enter."""
        return max((worker.generation for worker in self.workers.values()), default=-1)

    def having(self, *statuses: Status) -> list[int]:
        """Local ranks of the workers with one of these statuses."""
        return [rank for rank, worker in self.workers.items() if worker.status in statuses]

    def sentence(self) -> str:
        """Describe what this node is doing."""
        counts = [f"{len(ranks)} {s.value}" for s in Status if (ranks := self.having(s))]
        return f"{self.phase.value}: workers {', '.join(counts) or 'none'}"


Step = tuple[InProcessState, list[Command]]


def take_over(state: script.ScriptState, name: str) -> Step:
    """Take over from `script` when the job's workers turn out to be resident."""
    running = state.phase in (script.Phase.STARTING, script.Phase.RUNNING)
    standing = Worker(status=Status.STANDING, generation=state.generation - 1)
    workers = {
        rank: standing if running else Worker(status=Status.GONE) for rank in range(state.nproc)
    }
    taken = InProcessState(
        node=state.node, name=name, workers=workers, world=state.world, leaving=state.leaving
    )
    taken, commands = _start_missing(taken)
    return taken, [*commands, _report(taken)]


def alone(node: str, name: str) -> InProcessState:
    """A process that is its own node: one worker, on its way to `train`."""
    return InProcessState(node=node, name=name, workers={0: Worker(status=Status.STARTING)})


def handle(state: InProcessState, event: Event) -> Step:
    """Handle one event: the whole state machine."""
    if state.phase is Phase.STOPPING:
        return _while_stopping(state, event)
    handler = HANDLERS.get(type(event))
    if handler is None or state.is_terminal:
        raise script.InvalidTransition(f"{event} while {state.sentence()}")
    return handler(state, event)


# --- what a world calls for ----------------------------------------------------------------------


def _world(state: InProcessState, event: WorldSeen) -> Step:
    """Running: enter. Pausing: ask. Over: stop. Waiting: stop, start missing ones. Closed: end."""
    world = event.world
    state = replace(state, world=world)
    if world.phase == "closed":
        return _stop(state, SIGTERM, world.exitcode, world.reason)
    if world.phase == "running":
        return _enter(state, world)
    if world.phase == "pausing":
        return _ask(state, world)
    state, commands = _world_over(state, world) if world.has_ended else (state, list[Command]())
    if world.phase != "waiting" or state.leaving:
        return state, commands
    state, more = _start_missing(state)  # the others may wait for them now
    return state, [*commands, *more]


def _enter(state: InProcessState, world: World) -> Step:
    if state.rejoin:
        return state, []  # the others declared this node lost: that world will end
    commands: list[Command] = []
    for local_rank, worker in state.workers.items():
        if worker.generation >= world.generation:
            continue
        rank = world.rank(state.node, local_rank)
        if worker.status in (Status.STANDING, Status.TRAINING) and rank is not None:
            entered = replace(worker, status=Status.TRAINING, generation=world.generation)
            if worker.status is Status.STANDING:
                entered = replace(entered, begins=-1 if world.after is None else world.after + 1)
            state = _with(state, local_rank, entered)
            commands.append(Tell(local_rank, _order(state, world, local_rank, rank)))
        elif rank is not None:
            state, more = _report_missing(state, world, local_rank, rank)
            commands += more
        elif worker.status is Status.TRAINING:
            state, more = _halt(state, local_rank, world, worker.generation)
            commands += more
    state, more = _say_again(state, world)
    return state, [*commands, *more]


def _say_again(state: InProcessState, world: World) -> Step:
    """Repeat reports about the last generation that came after this one was published: the
    leader ignored them, and their senders wait for the end of their world."""
    commands: list[Command] = []
    workers = [w for w in state.workers.values() if w.generation == world.generation]
    for worker in workers:
        if worker.broken is not None and worker.broken.generation < world.generation:
            again = replace(worker.broken, generation=world.generation)
            state = replace(state, failures=(*state.failures, again))
            commands.append(_report(state, failures=state.failures))
    ends = [worker.finished for worker in workers if worker.finished >= 0]
    if ends:
        commands.append(_report(state, finished=world.generation, finished_after=min(ends)))
    return state, commands


def _order(state: InProcessState, world: World, local_rank: int, rank: int) -> orders.Enter:
    node = world.find(state.node)
    assert node is not None
    return orders.Enter(
        generation=world.generation,
        rank=rank,
        size=world.size,
        store=world.store,
        local_rank=node.local_ranks.index(local_rank),
        local_size=node.nproc,
        node_rank=node.node_rank,
        nodes=world.count,
        after=world.after,
    )


def _report_missing(state: InProcessState, world: World, local_rank: int, rank: int) -> Step:
    """Report a worker that the world expects but that has died: its failure ends this world."""
    died_of = [one for one in state.failures if one.local_rank == local_rank and not one.alive]
    if state.workers[local_rank].tries:
        died_of = []  # the last one was a replacement, which was in no world
    failure = Failure(
        generation=world.generation,
        node=state.name,
        rank=rank,
        local_rank=local_rank,
        pid=0,
        exitcode=1,
        message="lost a peer: the worker exited before it could enter the world",
    )
    if died_of:
        failure = replace(died_of[-1], generation=world.generation, rank=rank)
    state = replace(state, failures=(*state.failures, failure))
    return state, [_report(state, failures=state.failures)]


def _ask(state: InProcessState, world: World) -> Step:
    state, entering = _enter(state, world)  # one never seen running: the others wait there
    training = state.having(Status.TRAINING)
    asked = [rank for rank in training if state.workers[rank].generation == world.generation]
    state, commands = _answer_for_all(state)
    told = (Tell(rank, orders.Ask(world.generation)) for rank in asked)
    return state, [*entering, *told, *commands]


def _world_over(state: InProcessState, world: World) -> Step:
    commands: list[Command] = []
    for local_rank in state.having(Status.TRAINING):
        worker = state.workers[local_rank]
        if worker.stopping < world.generation or (worker.through and world.after is None):
            state, more = _halt(state, local_rank, world, world.generation)
            commands += more
    state, more = _when_stopped(state)
    return state, [*commands, *more]


def _halt(state: InProcessState, local_rank: int, world: World, generation: int) -> Step:
    """End a generation for a worker: at the agreed step if there is one, else at once."""
    order: orders.Order = orders.Over(generation, world.reason)
    if _is_done(world):
        if not _came_too_late(state.workers[local_rank], world):
            order = orders.Over(generation, world.reason, finished=True, through=world.after)
    elif world.after is not None:
        order = orders.Through(generation, world.after)
    through = isinstance(order, orders.Through)
    worker = replace(state.workers[local_rank], stopping=generation, through=through)
    return _with(state, local_rank, worker), [Tell(local_rank, order)]


def _is_done(world: World | None) -> TypeGuard[World]:
    """True if the training is done."""
    return world is not None and world.phase == "over" and world.ending == "finished"


def _came_too_late(worker: Worker, world: World) -> bool:
    """True if the data ended before this worker's first step: it has no peers in its world, and its
    script must not continue with an untrained state."""
    return world.after is not None and world.after + 1 < worker.begins


# --- what workers say ----------------------------------------------------------------------------


def _said(state: InProcessState, event: Said) -> Step:
    """Enlisted: it stands. Entered, stopped: noted; the last one's word is reported to the leader.
    Finished: so is the training."""
    rank, worker = event.local_rank, state.workers[event.local_rank]
    match event.report:
        case orders.Enlisted() if worker.status is Status.STARTING:
            standing = replace(worker, status=Status.STANDING, tries=0)
            state = _with(state, rank, standing)
            return state, [_report(state)]
        case orders.Entered(generation, step):
            state = _with(state, rank, replace(worker, paused=generation, entered=step))
            return _answer_for_all(state)
        case orders.Stopped(generation) if worker.stopping == generation:
            return _stopped(state, rank)
        case orders.Unfit():
            return _with(state, rank, replace(worker, tries=MOST_TRIES)), []
        case orders.Finished(_, step):  # perhaps in the last step before the world it is to enter
            state = _with(state, rank, replace(worker, finished=step))
            return state, [_report(state, finished=worker.generation, finished_after=step)]
    return state, []


def _answer_for_all(state: InProcessState) -> Step:
    """Report the largest step once every worker of the pausing world has reported its step."""
    world = state.world
    if world is None or world.phase != "pausing":
        return state, []
    mine = [w for w in state.workers.values() if w.generation == world.generation]
    training = [worker for worker in mine if worker.status is Status.TRAINING]
    if any(worker.paused != world.generation for worker in training):
        return state, []
    entered = max((worker.entered for worker in training), default=-1)
    return state, [_report(state, paused=world.generation, entered=entered)]


def _stopped(state: InProcessState, local_rank: int) -> Step:
    worker, world = state.workers[local_rank], state.world
    finished = _is_done(world) and not _came_too_late(worker, world)
    status = Status.FINISHED if finished else Status.STANDING
    worker = replace(worker, status=status, stopping=-1, through=False, broken=None, finished=-1)
    return _when_stopped(_with(state, local_rank, worker))


def _when_stopped(state: InProcessState) -> Step:
    """Once nothing of the generation goes on here: say so, join anew, or leave."""
    world = state.world
    if any(worker.stopping >= 0 for worker in state.workers.values()):
        return state, []
    if state.leaving and not state.having(Status.TRAINING):
        return _dismiss(state)
    ended = world.generation if world is not None and world.has_ended_for(state.node) else -1
    if state.rejoin:
        state = replace(state, rejoin=False, gone=max(state.gone, state.generation, ended))
        return state, [Rejoin(state.gone), _report(state)]
    if _is_done(world):
        return _when_all_done(state)
    if ended <= state.gone:
        return state, []
    state = replace(state, gone=ended)
    return state, [_report(state, gone=ended)]


# --- ends of workers -----------------------------------------------------------------------------


def _succeeded(state: InProcessState, event: WorkerSucceeded) -> Step:
    """After the training: done when it was the last. Before its end: a failure all the same."""
    worker = state.workers[event.local_rank]
    if worker.status is Status.FINISHED:
        state = _with(state, event.local_rank, replace(worker, status=Status.GONE))
        return _when_all_done(state)
    failure = Failure(
        generation=worker.generation,
        node=state.name,
        rank=_rank(state, event.local_rank),
        local_rank=event.local_rank,
        pid=0,
        exitcode=0,
        message="the worker exited (exit code 0) before the training was done",
    )
    return _failed(state, WorkerFailed(failure))


def _when_all_done(state: InProcessState) -> Step:
    world = state.world
    if world is None or state.having(Status.FINISHED, Status.TRAINING):
        return state, []
    return state, [_report(state, done=world.generation, gone=world.generation)]


def _rank(state: InProcessState, local_rank: int) -> int:
    rank = state.world.rank(state.node, local_rank) if state.world is not None else None
    return rank if rank is not None else -1


def _failed(state: InProcessState, event: WorkerFailed) -> Step:
    """A living worker's error: reported. A dead one: reported, and another one started for it."""
    failure = event.failure
    if failure.local_rank not in state.workers or failure.pid < 0:
        return state, []
    if failure.generation >= 0:
        state = replace(state, failures=(*state.failures, failure)[-MOST_FAILURES:])
    before = state.workers[failure.local_rank]
    if failure.alive:
        state = _with(state, failure.local_rank, replace(before, broken=failure))
        return state, [_report(state, failures=state.failures)]
    if before.status is not Status.FINISHED and _is_done(state.world):
        # Its peers have finished the training: its failure changes nothing.
        gone = Worker(status=Status.GONE, generation=before.generation)
        return _when_all_done(_with(state, failure.local_rank, gone))
    tries = before.tries + (before.status is Status.STARTING)
    gone = Worker(status=Status.GONE, generation=before.generation, tries=tries)
    state = _with(state, failure.local_rank, gone)
    if before.status is Status.FINISHED:
        return state, [_report(state, failures=state.failures)]
    state, commands = _replace(state, failure)
    commands.insert(0, _report(state, failures=state.failures))
    state, more = _answer_for_all(state)
    commands += more
    state, more = _when_stopped(state)
    return state, [*commands, *more]


def _replace(state: InProcessState, failure: Failure) -> Step:
    """A replacement for a dead worker, unless none would live or the node is about to go."""
    if state.leaving:
        return state, []
    if state.workers[failure.local_rank].tries < MOST_TRIES:
        return _start(state, failure.local_rank)
    world = state.world
    waited_for = world is not None and world.phase == "waiting"
    if not waited_for and state.having(Status.STARTING, Status.STANDING, Status.TRAINING):
        return state, []
    if not waited_for and world is not None and world.count > 1:
        reason = f"its workers cannot train: {failure.message}"
        stopping, commands = _stop(state, SIGKILL, EXIT_FAILED, reason)
        return stopping, [Report({"leaving": reason}), *commands]
    generation = world.generation if world is not None else 0
    fatal = replace(failure, fatal=True, generation=generation)
    state = replace(state, failures=(*state.failures, fatal))
    return state, []


def _start(state: InProcessState, local_rank: int) -> Step:
    before = state.workers[local_rank]
    worker = Worker(status=Status.STARTING, generation=before.generation, tries=before.tries)
    return _with(state, local_rank, worker), [Spawn(local_rank)]


def _start_missing(state: InProcessState) -> Step:
    commands: list[Command] = []
    for rank in state.having(Status.GONE):
        state, more = _start(state, rank)
        commands += more
    return state, commands


# --- leaving and ending --------------------------------------------------------------------------


def _leave(state: InProcessState, event: LeaveRequested) -> Step:
    """Announce it; go at the next step boundary. A second interrupt kills."""
    if state.leaving:
        return _leave_overdue(state, LeaveOverdue()) if event.signum == SIGINT else (state, [])
    state = replace(state, leaving=event.signum, deadline=event.deadline)
    announce = _report(state, leaving=signal_name(event.signum))
    state, commands = _when_stopped(state)
    return state, [announce, *commands]


def _dismiss(state: InProcessState) -> Step:
    """Nobody trains here any more: send the workers home."""
    leave = orders.Leave(state.leaving, state.deadline)
    farewell: list[Command] = [Tell(rank, leave) for rank in state.having(Status.STANDING)]
    # A worker outside `train` does not read orders: it gets a signal.
    signum = SIGTERM if state.having(Status.STARTING, Status.FINISHED) else 0
    gone = _report(state, gone=state.generation)
    state, commands = _stop(state, signum, EXIT_SIGNAL_BASE + state.leaving, _left(state))
    return state, [gone, *farewell, *commands]


def _left(state: InProcessState) -> str:
    return f"left the job ({signal_name(state.leaving)})"


def _leave_overdue(state: InProcessState, event: LeaveOverdue) -> Step:
    """Kill."""
    return _stop(state, SIGKILL, EXIT_SIGNAL_BASE + state.leaving, _left(state))


def _lease_lost(state: InProcessState, event: LeaseLost) -> Step:
    """Others go on without us: the workers stop, keep their memory, and join anew."""
    commands: list[Command] = []
    for local_rank in state.having(Status.TRAINING):
        worker = state.workers[local_rank]
        order = orders.Over(worker.generation, "the other nodes declared this node lost")
        state = _with(state, local_rank, replace(worker, stopping=worker.generation))
        commands.append(Tell(local_rank, order))
    state, more = _when_stopped(replace(state, rejoin=True))
    return state, [*commands, *more]


def _store_lost(state: InProcessState, event: StoreLost) -> Step:
    """Stop, and end when the workers are gone."""
    return _stop(state, SIGTERM, EXIT_RENDEZVOUS_LOST, event.reason)


def _stop(state: InProcessState, signum: int, exitcode: int, reason: str) -> Step:
    state = replace(state, phase=Phase.STOPPING, exitcode=exitcode, reason=reason)
    return state, [Stop(signum)]


def _while_stopping(state: InProcessState, event: Event) -> Step:
    """Nothing matters any more but the end of the workers, and a user who wants it at once."""
    match event:
        case WorkersGone():
            return replace(state, phase=Phase.ENDED), []
        case LeaveOverdue() | LeaveRequested(signum=2):
            return state, [Stop(SIGKILL)]
        case WorkerFailed(failure) if failure.told and not failure.stopped:
            failures = (*state.failures, failure)
            return replace(state, failures=failures), [Report({"failures": failures})]
        case WorldSeen(world) if world.phase == "closed" and not state.leaving:
            return replace(state, world=world), []
    return state, []


def _ignore(state: InProcessState, event: Event) -> Step:
    """Nothing."""
    return state, []


# --- small parts ---------------------------------------------------------------------------------


def _with(state: InProcessState, local_rank: int, worker: Worker) -> InProcessState:
    return replace(state, workers={**state.workers, local_rank: worker})


def _report(state: InProcessState, **changes: Any) -> Report:
    """The report of this node, with these changes."""
    standing = tuple(sorted(state.having(Status.STANDING, Status.TRAINING)))
    starting = len(state.having(Status.STARTING))
    return Report({"resident": True, "standing": standing, "starting": starting, **changes})


#: The handler of each event in a serving node; `docs/concepts/states.md` is generated from it.
HANDLERS: dict[type, Callable[[InProcessState, Any], Step]] = {
    WorldSeen: _world,
    Said: _said,
    WorkerSucceeded: _succeeded,
    WorkerFailed: _failed,
    LeaveRequested: _leave,
    LeaveOverdue: _leave_overdue,
    LeaseLost: _lease_lost,
    StoreLost: _store_lost,
    WorkersUp: _ignore,
}
