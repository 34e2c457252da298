"""The table for in-process workers, which outlive their generation. Pure.

They have called `torchelastic.train`; none of them is stopped to start another. A worker's life:

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

from torchelastic.agent.lifecycle.node_state import (
    SIGINT,
    SIGKILL,
    SIGTERM,
    Command,
    Event,
    InvalidTransition,
    Kill,
    LeaseLost,
    LeaveOverdue,
    LeaveRequested,
    NodeState,
    Phase,
    PlaceAllotted,
    Rejoin,
    ReportMember,
    Spawn,
    Stop,
    StoreLost,
    Tell,
    WorkerFailed,
    WorkerLeft,
    WorkerMessage,
    WorkerReturned,
    WorkersGone,
    WorkerSucceeded,
    WorkersUp,
    WorldSeen,
)
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.errors import EXIT_FAILED, EXIT_RENDEZVOUS_LOST, EXIT_SIGNAL_BASE
from torchelastic.events.failure import OTHER_BITS, Failure
from torchelastic.records import replace
from torchelastic.rendezvous import replicas
from torchelastic.rendezvous.state_check import Checked
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

#: Starts in a row that exit before `train` is called; another one would fail the same way.
MOST_TRIES = 3
#: Most failures that a node reports: a world with this many is over anyway.
MOST_FAILURES = 64


# --- state ---------------------------------------------------------------------------------------


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
    #: The first step of the first world it entered since it was last standing, if that world
    #: continues after an agreed step; -1 if not.
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
    #: The last hash of its state that it has reported.
    checked: orders.Checked | None = None
    #: Starts in a row that exited before `train` was called.
    tries: int = 0
    #: How the one before it exited.
    exitcode: int = 1


@dataclass(frozen=True, kw_only=True)
class InProcessState(NodeState):
    """The node's knowledge of workers that outlive a generation."""

    phase: Phase = Phase.SERVING
    workers: Mapping[int, Worker] = field(default_factory=dict)
    #: The generation last reported to be gone from here.
    gone: int = -1
    #: The place in its replica that the leader has allotted last.
    allotted: int = -1
    #: The last verdict on states that workers were told: generation, step, why there are no more.
    certified: tuple[int, int, str] = (-1, -1, "")

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


def take_over(state: ScriptState) -> Step:
    """Take over from `script` when all workers of the job have called `torchelastic.train`."""
    running = state.phase in (Phase.STARTING, Phase.RUNNING)
    standing = Worker(status=Status.STANDING, generation=state.generation - 1)
    workers = {
        rank: standing if running else Worker(status=Status.GONE) for rank in range(state.nproc)
    }
    taken = InProcessState(
        node=state.node,
        name=state.name,
        workers=workers,
        world=state.world,
        place=state.place,
        leaving=state.leaving,
        deadline=state.deadline,
        why=state.why,
    )
    taken, commands = _start_missing(taken)
    return taken, [*commands, _report(taken)]


def alone(node: str, name: str) -> InProcessState:
    """The state of a process that is its own node: one worker, which will call `train`."""
    return InProcessState(node=node, name=name, workers={0: Worker(status=Status.STARTING)})


def handle(state: InProcessState, event: Event) -> Step:
    """Handle one event."""
    if state.phase is Phase.STOPPING:
        return _while_stopping(state, event)
    handler = HANDLERS.get(type(event))
    if handler is None or state.is_terminal:
        raise InvalidTransition(f"{event} while {state.sentence()}")
    state, commands = handler(state, event)
    if state.allotted in (-1, state.place) or state.phase is not Phase.SERVING:
        return state, commands
    state, more = _take_place(state)
    return state, [*commands, *more]


# --- what a world calls for ----------------------------------------------------------------------


def _world(state: InProcessState, event: WorldSeen) -> Step:
    """Running: enter. Pausing: ask. Over: stop. Waiting: stop, start missing ones. Closed: end."""
    world = event.world
    state = replace(state, world=world)
    if world.phase == "closed":
        return _stop(state, SIGTERM, world.exitcode, world.reason)
    if world.phase in ("running", "pausing"):
        state, commands = _enter(state, world) if world.phase == "running" else _ask(state, world)
        state, more = _tell_certified(state, world)
        return state, [*commands, *more]
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
            order = _enter_order(world, state.node, local_rank, rank)
            commands.append(Tell(local_rank, order))
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
        exitcode=state.workers[local_rank].exitcode,
        message="lost a peer: the worker exited before it could enter the world",
    )
    if died_of:
        failure = replace(died_of[-1], generation=world.generation, rank=rank)
    state = replace(state, failures=(*state.failures, failure))
    return state, [_report(state, failures=state.failures)]


def _ask(state: InProcessState, world: World) -> Step:
    # This node may not have seen the world in phase running: the others wait for its workers.
    state, entering = _enter(state, world)
    training = state.having(Status.TRAINING)
    asked = [rank for rank in training if state.workers[rank].generation == world.generation]
    state, commands = _answer_for_all(state)
    told = (Tell(rank, orders.Ask(world.generation)) for rank in asked)
    return state, [*entering, *told, *commands]


def _tell_certified(state: InProcessState, world: World) -> Step:
    """Tell the workers of a world that their states were equal, or are not compared any more."""
    verdict = world.generation, world.certified, world.unchecked
    if verdict == state.certified or (world.certified < 0 and not world.unchecked):
        return state, []
    state = replace(state, certified=verdict)
    training = state.having(Status.TRAINING)
    told = [rank for rank in training if state.workers[rank].generation == world.generation]
    return state, [Tell(rank, orders.Certified(*verdict)) for rank in told]


def _world_over(state: InProcessState, world: World) -> Step:
    commands: list[Command] = []
    for local_rank in state.having(Status.TRAINING):
        worker = state.workers[local_rank]
        if worker.stopping >= world.generation and (not worker.through or world.after is not None):
            continue
        if world.rank(state.node, local_rank) in world.wrong:  # only its exit counts
            state = _with(state, local_rank, replace(worker, stopping=world.generation))
            commands.append(Kill(local_rank, OTHER_BITS + world.reason))
        else:
            state, more = _halt(state, local_rank, world, world.generation)
            commands += more
    state, more = _when_stopped(state)
    return state, [*commands, *more]


def _halt(state: InProcessState, local_rank: int, world: World, generation: int) -> Step:
    """End a generation for a worker."""
    worker = state.workers[local_rank]
    order = _end_order(world, generation, worker.begins)
    through = isinstance(order, orders.Through)
    worker = replace(worker, stopping=generation, through=through)
    return _with(state, local_rank, worker), [Tell(local_rank, order)]


# --- what workers say ----------------------------------------------------------------------------


def _said(state: InProcessState, event: WorkerMessage) -> Step:
    """Enlisted: the worker can enter a world. Entered, stopped: note it, and report to the leader
    once all have. Finished: report that the training is done."""
    rank, worker = event.local_rank, state.workers[event.local_rank]
    match event.report:
        case orders.Enlisted(mesh) if worker.status is Status.STARTING:
            if why := _mesh_misfit(state, mesh):
                unfit = replace(worker, tries=MOST_TRIES)
                return _with(state, rank, unfit), [Tell(rank, orders.Closed(why))]
            standing = replace(worker, status=Status.STANDING, tries=0)
            state = _with(state, rank, standing)
            return state, [_report(state)]
        case orders.Entered(generation, step):
            state = _with(state, rank, replace(worker, paused=generation, entered=step))
            return _answer_for_all(state)
        case orders.Checked() as said:
            return _checked(state, rank, said)
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


def _checked(state: InProcessState, local_rank: int, said: orders.Checked) -> Step:
    """Report the hashes once every worker has reported its own after the same step."""
    state = _with(state, local_rank, replace(state.workers[local_rank], checked=said))
    place = state.world.find(state.node) if state.world is not None else None
    if place is None:
        return state, []
    rows = [
        Checked(rank, told.step, told.digest, told.written, told.pinned, told.odd)
        for rank, one in enumerate(place.local_ranks, place.first_rank)
        if (told := state.workers[one].checked) is not None
        and (told.generation, told.step) == (said.generation, said.step)
    ]
    if len(rows) < place.nproc:
        return state, []
    return state, [_report(state, checked=tuple(rows), checked_in=said.generation)]


def _stopped(state: InProcessState, local_rank: int) -> Step:
    worker, world = state.workers[local_rank], state.world
    finished = _is_done(world) and not _came_too_late(worker.begins, world)
    status = Status.FINISHED if finished else Status.STANDING
    worker = replace(worker, status=status, stopping=-1, through=False, broken=None, finished=-1)
    return _when_stopped(_with(state, local_rank, worker))


def _when_stopped(state: InProcessState) -> Step:
    """Report gone, rejoin or leave once all workers of the generation have stopped."""
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
    """After the training: end once all have. Before its end: a failure, too."""
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


def _left_training(state: InProcessState, event: WorkerLeft) -> Step:
    """After the training: as if it had exited. Before its end: this node has no worker; end."""
    if state.having(Status.FINISHED):
        return _succeeded(state, WorkerSucceeded(state.generation, event.local_rank))
    return _store_lost(state, StoreLost("the worker has left the training"))


def _when_all_done(state: InProcessState) -> Step:
    world = state.world
    if world is None or state.having(Status.FINISHED, Status.TRAINING):
        return state, []
    return state, [_report(state, done=world.generation, gone=world.generation)]


def _rank(state: InProcessState, local_rank: int) -> int:
    rank = state.world.rank(state.node, local_rank) if state.world is not None else None
    return rank if rank is not None else -1


def _failed(state: InProcessState, event: WorkerFailed) -> Step:
    """Report it; replace a worker that has exited."""
    failure = event.failure
    if failure.local_rank not in state.workers or failure.pid < 0:
        return state, []
    if failure.generation >= 0:
        state = replace(state, failures=(*_recent(state), failure)[-MOST_FAILURES:])
    before = state.workers[failure.local_rank]
    if failure.alive:
        state = _with(state, failure.local_rank, replace(before, broken=failure))
        return state, [_report(state, failures=state.failures)]
    if before.status is not Status.FINISHED and _is_done(state.world):
        # Its peers have finished the training: its failure changes nothing.
        gone = Worker(status=Status.GONE, generation=before.generation)
        return _when_all_done(_with(state, failure.local_rank, gone))
    tries = before.tries + (before.status is Status.STARTING)
    gone = Worker(
        status=Status.GONE, generation=before.generation, tries=tries, exitcode=failure.exitcode
    )
    state = _with(state, failure.local_rank, gone)
    if before.status is Status.FINISHED:
        return state, [_report(state, failures=state.failures)]
    state, commands = _replace(state, failure)
    commands.insert(0, _report(state, failures=state.failures))
    state, more = _answer_for_all(state)
    commands += more
    state, more = _when_stopped(state)
    return state, [*commands, *more]


def _recent(state: InProcessState) -> tuple[Failure, ...]:
    """The failures of this generation and of the one before: the leader ignores older ones, and
    the member record would grow with every worker that is lost."""
    last = state.world.generation - 1 if state.world is not None else 0
    return tuple(failure for failure in state.failures if failure.generation >= last)


def _replace(state: InProcessState, failure: Failure) -> Step:
    """Replace a worker that has exited, unless too many failed to start or the node leaves."""
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
        return stopping, [ReportMember({"leaving": reason}), *commands]
    generation = world.generation if world is not None else 0
    fatal = replace(failure, fatal=True, generation=generation)
    state = replace(state, failures=(*state.failures, fatal))
    return state, []


def _start(state: InProcessState, local_rank: int) -> Step:
    before = state.workers[local_rank]
    worker = Worker(
        status=Status.STARTING,
        generation=before.generation,
        tries=before.tries,
        exitcode=before.exitcode,
    )
    return _with(state, local_rank, worker), [Spawn(local_rank)]


def _start_missing(state: InProcessState) -> Step:
    commands: list[Command] = []
    if state.place < 0:
        return state, []
    for rank in state.having(Status.GONE):
        state, more = _start(state, rank)
        commands += more
    return state, commands


# --- replicas ------------------------------------------------------------------------------------


def _mesh_misfit(state: InProcessState, mesh: int) -> str:
    """Return why a worker's mesh does not fit the replicas of the job; empty if it does."""
    job, nproc = state.world.replica if state.world is not None else 0, len(state.workers)
    return replicas.mesh_misfit(mesh, nproc, flag=job if job > nproc else 0, job=job)


def _place_allotted(state: InProcessState, event: PlaceAllotted) -> Step:
    """Take the place in a replica, once the workers are in no world."""
    return replace(state, allotted=event.place), []


def _take_place(state: InProcessState) -> Step:
    """Start the workers, again if they have started with another place."""
    # A starting worker is killed only when it is up: its report would be taken for its successor's.
    if state.leaving or state.having(Status.STARTING, Status.TRAINING, Status.FINISHED):
        return state, []
    state, commands = replace(state, place=state.allotted), list[Command]()
    for rank in state.having(Status.STANDING):
        state = _with(state, rank, replace(state.workers[rank], status=Status.STARTING))
        why = f"the node moves to place {state.place} of its replica"
        commands.append(Kill(rank, why))
    state, more = _start_missing(state)
    return state, [*commands, *more, _report(state, place=state.place)]


# --- leaving and ending --------------------------------------------------------------------------


def _leave(state: InProcessState, event: LeaveRequested) -> Step:
    """Announce it, and leave at the next step boundary; a second SIGINT kills the workers."""
    if state.leaving:
        return _leave_overdue(state, LeaveOverdue()) if event.signum == SIGINT else (state, [])
    state = replace(state, leaving=event.signum, deadline=event.deadline, why=event.why)
    announce = _report(state, leaving=event.why)
    state, commands = _when_stopped(state)
    return state, [announce, *commands]


def _dismiss(state: InProcessState) -> Step:
    """End the workers: no world trains here any more."""
    leave = orders.Leave(state.leaving, state.deadline)
    farewell: list[Command] = [Tell(rank, leave) for rank in state.having(Status.STANDING)]
    # A worker outside `train` does not read orders: it gets a signal.
    signum = SIGTERM if state.having(Status.STARTING, Status.FINISHED) else 0
    gone = _report(state, gone=state.generation)
    state, commands = _stop(state, signum, EXIT_SIGNAL_BASE + state.leaving, _left(state))
    return state, [gone, *farewell, *commands]


def _left(state: InProcessState) -> str:
    return f"left the job ({state.why})"


def _leave_overdue(state: InProcessState, event: LeaveOverdue) -> Step:
    """Kill the workers."""
    return _stop(state, SIGKILL, EXIT_SIGNAL_BASE + state.leaving, _left(state))


def _lease_lost(state: InProcessState, event: LeaseLost) -> Step:
    """Stop the workers, which keep their state, and rejoin: the others continue without it."""
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
    """Wait for the exit of the workers; a SIGINT kills them."""
    match event:
        case WorkersGone():
            return replace(state, phase=Phase.ENDED), []
        case LeaveOverdue() | LeaveRequested(signum=2):
            return state, [Stop(SIGKILL)]
        case WorkerFailed(failure) if failure.told and not failure.stopped:
            failures = (*state.failures, failure)
            return replace(state, failures=failures), [ReportMember({"failures": failures})]
        case WorldSeen(world) if world.phase == "closed" and not state.leaving:
            return replace(state, world=world), []
    return state, []


def _ignore(state: InProcessState, event: Event) -> Step:
    """Nothing."""
    return state, []


# --- small parts ---------------------------------------------------------------------------------


def _with(state: InProcessState, local_rank: int, worker: Worker) -> InProcessState:
    return replace(state, workers={**state.workers, local_rank: worker})


def _report(state: InProcessState, **changes: Any) -> ReportMember:
    """The report of this node, with these changes."""
    standing = tuple(sorted(state.having(Status.STANDING, Status.TRAINING)))
    starting = len(state.having(Status.STARTING))
    if state.world is not None and state.world.replica:
        changes["replica"] = state.world.replica
    return ReportMember({"in_process": True, "standing": standing, "starting": starting, **changes})


#: The handler of each event in a serving node; `docs/concepts/states.md` is generated from it.
HANDLERS: dict[type, Callable[[InProcessState, Any], Step]] = {
    WorldSeen: _world,
    WorkerMessage: _said,
    WorkerSucceeded: _succeeded,
    WorkerFailed: _failed,
    WorkerLeft: _left_training,
    LeaveRequested: _leave,
    LeaveOverdue: _leave_overdue,
    LeaseLost: _lease_lost,
    StoreLost: _store_lost,
    WorkersUp: _ignore,
    WorkerReturned: _ignore,
    PlaceAllotted: _place_allotted,
}


# --- orders --------------------------------------------------------------------------------------


def _enter_order(world: World, node: str, local_rank: int, rank: int) -> orders.Enter:
    """The order to enter a world."""
    place = world.find(node)
    assert place is not None
    return orders.Enter(
        generation=world.generation,
        rank=rank,
        size=world.size,
        store=world.store,
        local_rank=place.local_ranks.index(local_rank),
        local_size=place.nproc,
        node_rank=place.node_rank,
        nodes=world.count,
        after=world.after,
        replica=world.replica,
        unchecked=world.unchecked,
        rewind=None if world.rewind is None else world.rewind[:3],
    )


def _end_order(world: World, generation: int, begins: int) -> orders.Over | orders.Through:
    """The order to end a generation: at the agreed step if there is one, else at once. `begins` is
    the first step of the worker, if it is known."""
    if _is_done(world):
        if _came_too_late(begins, world):
            return orders.Over(generation, world.reason)
        return orders.Over(generation, world.reason, finished=True, through=world.after)
    if world.after is not None:
        return orders.Through(generation, world.after)
    return orders.Over(generation, world.reason)


def _is_done(world: World | None) -> TypeGuard[World]:
    """True if the training is done."""
    return world is not None and world.phase == "over" and world.ending == "finished"


def _came_too_late(begins: int, world: World) -> bool:
    """True if the data ended before a worker's first step: it has no peers in its world, and its
    script must not continue with an untrained state."""
    return world.after is not None and world.after + 1 < begins
