"""The workers of one node as a state machine: an event in, a new state and commands out. Pure.

Its phases and transitions:

            Start                    up                  all succeeded
    idle ──────────▶ starting ──────────▶ running ─────────────────────▶ idle
     ▲                   │                   │
     │ gone              │  failure, world over, leave, lease lost, job closed
     └──── stopping ◀────┴───────────────────┘
               │
               └── job closed, left, store lost ──▶ ended
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchelastic.agent.lifecycle.script_events import (
    Event,
    LeaseLost,
    LeaveRequested,
    PlaceAllotted,
    StoreLost,
    WorkerCanSave,
    WorkerEnlisted,
    WorkerFailed,
    WorkerReturned,
    WorkerSaved,
    WorkersGone,
    WorkerSucceeded,
    WorkersUp,
    WorldSeen,
)
from torchelastic.errors import EXIT_RENDEZVOUS_LOST, EXIT_SIGNAL_BASE
from torchelastic.events.failure import Failure
from torchelastic.records import replace
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

__all__ = [
    "SIGINT",
    "SIGKILL",
    "SIGTERM",
    "TRANSITIONS",
    "Command",
    "Event",
    "InvalidTransition",
    "LeaseLost",
    "LeaveRequested",
    "PlaceAllotted",
    "Rejoin",
    "ReportMember",
    "ScriptPhase",
    "ScriptState",
    "StartWorkers",
    "Step",
    "Stop",
    "StoreLost",
    "Tell",
    "WorkerCanSave",
    "WorkerEnlisted",
    "WorkerFailed",
    "WorkerReturned",
    "WorkerSaved",
    "WorkerSucceeded",
    "WorkersGone",
    "WorkersUp",
    "WorldSeen",
    "handle",
    "is_in_process",
]

SIGINT, SIGKILL, SIGTERM = 2, 9, 15


class ScriptPhase(enum.Enum):
    """The phase of the node's workers."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWorkers:
    """Start the workers of this world."""

    world: World


@dataclass(frozen=True)
class Stop:
    """Send the signal to every worker's process group; answer `WorkersGone`."""

    signum: int
    #: Local ranks that exit by themselves: they were told to leave, or their program has returned.
    #: The others get the signal once these have exited.
    told: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Tell:
    """Send an order to a worker."""

    local_rank: int
    order: orders.Order


@dataclass(frozen=True)
class ReportMember:
    """Change what this node's member record says."""

    changes: dict[str, Any]


@dataclass(frozen=True)
class Rejoin:
    """Open a new lease and put the member record again, as a newcomer."""

    #: No worker of this generation or an older one is left here.
    gone: int


Command = StartWorkers | Stop | Tell | ReportMember | Rejoin


# --- state ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScriptState:
    """Everything that decides what this node does next."""

    phase: ScriptPhase = ScriptPhase.IDLE
    #: The generation whose workers run here, or ran last.
    generation: int = -1
    #: Local ranks that have not succeeded yet.
    running: frozenset[int] = frozenset()
    nproc: int = 1
    #: Local ranks whose program returned before they were told to stop. One that is told to stop
    #: may exit with 0, too, without being done.
    returned: frozenset[int] = frozenset()
    #: Local ranks that have called `torchelastic.train`.
    enlisted: frozenset[int] = frozenset()
    #: The sizes of their meshes.
    meshes: frozenset[int] = frozenset()
    #: The place of this node in its replica; -1: it has none yet.
    place: int = 0
    #: Local ranks that can store their state before they leave, and those of them that do so
    #: together with other nodes. While the latter are not done, the leave is not announced.
    savers: frozenset[int] = frozenset()
    together: frozenset[int] = frozenset()
    #: Failures of this generation here, in the order they happened.
    failures: tuple[Failure, ...] = ()
    #: The latest world: it decides what to do once the workers are gone.
    world: World | None = None
    #: The signal this node leaves by, 0 while it stays.
    leaving: int = 0
    #: When its workers are killed then, and why it leaves.
    deadline: float | None = None
    why: str = ""
    #: The lease was lost: rejoin once the workers are gone.
    rejoin: bool = False
    node: str = ""
    exitcode: int | None = None
    reason: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.phase is ScriptPhase.ENDED

    def sentence(self) -> str:
        """Describe what this node is doing."""
        if (
            self.phase is ScriptPhase.IDLE
            and self.world is not None
            and self.world.phase == "running"
        ):
            if self.world.place(self.node) is None:
                return f"waiting beside generation {self.world.generation}"
            return f"done with generation {self.generation}, waiting for the others"
        if self.phase is ScriptPhase.IDLE:
            return "waiting for a world"
        return f"{self.phase.value}, generation {self.generation}"


Step = tuple[ScriptState, list[Command]]


class InvalidTransition(AssertionError):
    """An event came in a phase in which it cannot happen: a bug in the agent's loop."""


def handle(state: ScriptState, event: Event) -> Step:
    """Handle one event: the whole state machine."""
    handler = TRANSITIONS.get((state.phase, type(event)))
    if handler is None:
        raise InvalidTransition(f"{type(event).__name__} while {state.sentence()}: {event}")
    return handler(state, event)


# --- what a new world calls for ------------------------------------------------------------------


def _world_while_idle(state: ScriptState, event: WorldSeen) -> Step:
    """A place in a running world: start; over, or waiting with a place for us: report gone;
    closed: end."""
    return _act_on_world(replace(state, world=event.world))


def _act_on_world(state: ScriptState) -> Step:
    """No worker runs here: do what the latest world says."""
    world = state.world
    if world is None:
        return state, []
    if world.phase == "closed":
        return _end(state, world.exitcode, world.reason), []
    if world.has_ended_for(state.node):
        return state, [ReportMember({"gone": world.generation})]
    if world.phase != "running" or world.place(state.node) is None:
        return state, []
    if world.generation <= state.generation or state.rejoin:  # declared lost: that world will end
        return state, []
    if world.in_process:  # `is_in_process`: `in_process` takes over
        return state, []
    return _begin(state, world)


def _begin(state: ScriptState, world: World) -> Step:
    state = replace(
        state,
        phase=ScriptPhase.STARTING,
        generation=world.generation,
        running=frozenset(range(state.nproc)),
        returned=frozenset(),
        failures=(),
        enlisted=frozenset(),
        meshes=frozenset(),
        savers=frozenset(),
        together=frozenset(),
    )
    return state, [StartWorkers(world)]


def _world_while_busy(state: ScriptState, event: WorldSeen) -> Step:
    """The same world: nothing; over, waiting, closed or a newer one: stop."""
    world = event.world
    state = replace(state, world=world)
    if world.phase == "running" and world.generation == state.generation:
        return state, []
    if world.generation < state.generation or (world.phase == "waiting" and not world.has_ended):
        return state, []
    return _stop(state, SIGTERM)


def _world_while_stopping(state: ScriptState, event: WorldSeen) -> Step:
    """Remember it until the workers are gone; tell them whether this node stores the state."""
    world = event.world
    state = replace(state, world=world)
    running = world.phase == "running" and world.generation == state.generation
    if not state.leaving or running or world.generation < state.generation:
        return state, []
    # Without the other nodes, nothing is saved together any more.
    late = _announce(state) if state.together else []
    state = replace(state, together=frozenset())
    return state, [*late, *_tell_to_leave(state, saves=world.saver == state.node)]


# --- what workers do -----------------------------------------------------------------------------


def _up(state: ScriptState, event: WorkersUp) -> Step:
    """Note that the workers run."""
    if event.generation != state.generation:
        return state, []
    if not state.running:  # they succeeded before their start was reported
        return _stop(state, SIGTERM)
    return replace(state, phase=ScriptPhase.RUNNING), []


def _ignore(state: ScriptState, event: Event) -> Step:
    """Nothing."""
    return state, []


def _returned(state: ScriptState, event: WorkerReturned) -> Step:
    """Report the first one: finished work is not repeated for a node that joins or leaves."""
    if event.generation != state.generation:
        return state, []
    is_first = not state.returned
    state = replace(state, returned=state.returned | {event.local_rank})
    return state, [ReportMember({"returned": state.generation})] if is_first else []


def _succeeded_while_stopping(state: ScriptState, event: WorkerSucceeded) -> Step:
    """It is done if its program had returned before."""
    if event.generation != state.generation or event.local_rank not in state.returned:
        return state, []
    return replace(state, running=state.running - {event.local_rank}), []


def _succeeded(state: ScriptState, event: WorkerSucceeded) -> Step:
    """Once all have succeeded: stop what they left behind, then report done."""
    if event.generation != state.generation:
        return state, []
    running = state.running - {event.local_rank}
    state = replace(state, running=running)
    if state.enlisted:
        return _failed(state, _gone_home(state))
    if running or state.phase is ScriptPhase.STARTING:
        return state, []
    return _stop(state, SIGTERM)  # nothing to stop but what the workers left behind


def _enlisted(state: ScriptState, event: WorkerEnlisted) -> Step:
    """Once all have: report it. When all nodes have, the leader makes the world in-process."""
    state = replace(
        state,
        enlisted=state.enlisted | {event.local_rank},
        meshes=state.meshes | {event.mesh},
    )
    if len(state.running) < state.nproc:
        return _failed(state, _gone_home(state))
    if len(state.meshes) > 1:
        sizes = " and ".join(map(str, sorted(state.meshes)))
        message = f"the workers of this node made meshes of different sizes: {sizes}"
        return _failed(state, _fatal(state, event.local_rank, 1, message))
    if len(state.enlisted) < state.nproc:
        return state, []
    report = {"in_process": True, "standing": tuple(range(state.nproc))}
    if event.mesh:
        report["replica"] = event.mesh
    return state, [ReportMember(report)]


def _place_allotted(state: ScriptState, event: PlaceAllotted) -> Step:
    """Take the place in a replica."""
    return replace(state, place=event.place), [ReportMember({"place": event.place})]


def _can_save(state: ScriptState, event: WorkerCanSave) -> Step:
    """Note that the worker can store its state."""
    together = state.together | ({event.local_rank} if event.together else set())
    return replace(state, savers=state.savers | {event.local_rank}, together=together), []


def _saved(state: ScriptState, event: WorkerSaved) -> Step:
    """Once all are done that store it together with other nodes: announce the leave."""
    is_last = state.leaving and state.together == {event.local_rank}
    state = replace(state, together=state.together - {event.local_rank})
    return state, [*_announce(state), *_tell_to_leave(state, saves=False)] if is_last else []


def _gone_home(state: ScriptState) -> WorkerFailed:
    """Fail the generation: some workers wait in `train` for others that have exited."""
    ended = min(set(range(state.nproc)) - state.running)
    message = "the worker exited without calling torchelastic.train while others wait in it"
    return _fatal(state, ended, 0, message)


def _fatal(state: ScriptState, local_rank: int, exitcode: int, message: str) -> WorkerFailed:
    """A failure that another start would repeat."""
    rank = state.world.rank(state.node, local_rank) if state.world is not None else None
    failure = Failure(
        generation=state.generation,
        node=state.node,
        rank=-1 if rank is None else rank,
        local_rank=local_rank,
        pid=0,
        exitcode=exitcode,
        message=message,
        fatal=True,
    )
    return WorkerFailed(failure)


def is_in_process(state: ScriptState) -> bool:
    """True if the job's workers outlive their generation: `in_process` takes over."""
    steady = state.phase in (ScriptPhase.IDLE, ScriptPhase.STARTING, ScriptPhase.RUNNING)
    return steady and state.world is not None and state.world.in_process


def _failed(state: ScriptState, event: WorkerFailed) -> Step:
    """Report it and stop the others here; the leader ends the generation everywhere."""
    if event.failure.generation != state.generation:
        return state, []
    failures = (*state.failures, event.failure)
    state, commands = _stop(replace(state, failures=failures), SIGTERM)
    return state, [ReportMember({"failures": failures}), *commands]


def _failed_while_stopping(state: ScriptState, event: WorkerFailed) -> Step:
    """Report it, too: it may be the cause."""
    failures = (*state.failures, event.failure)
    return replace(state, failures=failures), [ReportMember({"failures": failures})]


def _gone(state: ScriptState, event: WorkersGone) -> Step:
    """Report gone; then end, rejoin or do what the latest world says."""
    report: dict[str, Any] = {"gone": state.generation, "in_process": False, "standing": ()}
    succeeded = not state.running and not state.failures
    if succeeded:
        report["done"] = state.generation
    state = replace(state, phase=ScriptPhase.IDLE)
    if state.leaving:
        done = {"gone": state.generation, "done": state.generation}
        last: list[Command] = [ReportMember(done)] if succeeded else []
        return _left(state), [*(_announce(state) if state.together else []), *last]
    if state.exitcode is not None:
        return replace(state, phase=ScriptPhase.ENDED), []
    first: list[Command] = [ReportMember(report)]
    if state.rejoin:
        # The record moves to the next host: no worker here is in-process any more.
        first = [ReportMember({"in_process": False, "standing": ()}), Rejoin(state.generation)]
    state, commands = _act_on_world(state)
    return replace(state, rejoin=False), [*first, *commands]


def _stop(state: ScriptState, signum: int) -> Step:
    return replace(state, phase=ScriptPhase.STOPPING), [Stop(signum)]


# --- leaving and ending --------------------------------------------------------------------------


def _leave_while_idle(state: ScriptState, event: LeaveRequested) -> Step:
    """Announce it and end."""
    state = _left(replace(state, leaving=event.signum, why=event.why))
    return state, _announce(state)


def _leave_while_busy(state: ScriptState, event: LeaveRequested) -> Step:
    """Announce it (last, if the state is stored together with other nodes), and send the workers
    the signal, after those that can store the state have done so; end when they are gone."""
    # Tell them before their peers could exit. A signal would end them, or wait with them for a
    # collective that never ends.
    savers = state.savers & state.running
    ending = state.returned & state.running
    state = replace(
        state,
        phase=ScriptPhase.STOPPING,
        leaving=event.signum,
        deadline=event.deadline,
        why=event.why,
        savers=savers,
        together=state.together & savers,
    )
    told = _tell_to_leave(state, saves=None)
    announced = [] if state.together else _announce(state)
    return state, [*told, *announced, Stop(event.signum, told=savers | ending)]


def _tell_to_leave(state: ScriptState, *, saves: bool | None) -> list[Command]:
    leave = orders.Leave(state.leaving, state.deadline, saves)
    return [Tell(local_rank, leave) for local_rank in sorted(state.savers)]


def _leave_while_stopping(state: ScriptState, event: LeaveRequested) -> Step:
    """Announce it, once; a second SIGINT kills the workers."""
    if state.leaving:
        return state, [Stop(SIGKILL)] if event.signum == SIGINT else []
    # The workers that could store the state are already ending.
    state = replace(
        state,
        leaving=event.signum,
        deadline=event.deadline,
        why=event.why,
        savers=frozenset(),
        together=frozenset(),
    )
    return state, [*_announce(state), Stop(event.signum)]


def _announce(state: ScriptState) -> list[Command]:
    return [ReportMember({"leaving": state.why})]


def _left(state: ScriptState) -> ScriptState:
    return _end(state, EXIT_SIGNAL_BASE + state.leaving, f"left the job ({state.why})")


def _lease_lost_while_idle(state: ScriptState, event: LeaseLost) -> Step:
    """Rejoin."""
    return state, [Rejoin(state.generation)]


def _lease_lost_while_busy(state: ScriptState, event: LeaseLost) -> Step:
    """Kill the workers, since the others continue without this node; then rejoin."""
    return _stop(replace(state, rejoin=True), SIGKILL)


def _lease_lost_while_stopping(state: ScriptState, event: LeaseLost) -> Step:
    """Rejoin once the workers are gone."""
    return replace(state, rejoin=True), []


def _store_lost_while_idle(state: ScriptState, event: StoreLost) -> Step:
    """End."""
    return _end(state, EXIT_RENDEZVOUS_LOST, event.reason), []


def _store_lost_while_busy(state: ScriptState, event: StoreLost) -> Step:
    """Stop, and end when the workers are gone."""
    lost = replace(state, exitcode=EXIT_RENDEZVOUS_LOST, reason=event.reason)
    if state.phase is ScriptPhase.STOPPING:
        return lost, []
    return _stop(lost, SIGTERM)


def _end(state: ScriptState, exitcode: int, reason: str) -> ScriptState:
    return replace(state, phase=ScriptPhase.ENDED, exitcode=exitcode, reason=reason)


#: The handler of each event in each phase; `docs/concepts/states.md` is generated from it.
TRANSITIONS: dict[tuple[ScriptPhase, type], Callable[[ScriptState, Any], Step]] = {
    (ScriptPhase.IDLE, WorldSeen): _world_while_idle,
    (ScriptPhase.IDLE, PlaceAllotted): _place_allotted,
    (ScriptPhase.IDLE, WorkerReturned): _ignore,
    (ScriptPhase.IDLE, WorkerFailed): _ignore,
    (ScriptPhase.IDLE, WorkerSaved): _ignore,
    (ScriptPhase.IDLE, LeaveRequested): _leave_while_idle,
    (ScriptPhase.IDLE, LeaseLost): _lease_lost_while_idle,
    (ScriptPhase.IDLE, StoreLost): _store_lost_while_idle,
    (ScriptPhase.STARTING, WorldSeen): _world_while_busy,
    (ScriptPhase.STARTING, WorkersUp): _up,
    (ScriptPhase.STARTING, WorkerReturned): _returned,
    (ScriptPhase.STARTING, WorkerSucceeded): _succeeded,
    (ScriptPhase.STARTING, PlaceAllotted): _place_allotted,
    (ScriptPhase.STARTING, WorkerFailed): _failed,
    (ScriptPhase.STARTING, LeaveRequested): _leave_while_busy,
    (ScriptPhase.STARTING, LeaseLost): _lease_lost_while_busy,
    (ScriptPhase.STARTING, StoreLost): _store_lost_while_busy,
    (ScriptPhase.STARTING, WorkerEnlisted): _enlisted,
    (ScriptPhase.STARTING, WorkerCanSave): _can_save,
    (ScriptPhase.RUNNING, WorldSeen): _world_while_busy,
    (ScriptPhase.RUNNING, WorkerEnlisted): _enlisted,
    (ScriptPhase.RUNNING, WorkerCanSave): _can_save,
    (ScriptPhase.RUNNING, WorkerReturned): _returned,
    (ScriptPhase.RUNNING, WorkerSucceeded): _succeeded,
    (ScriptPhase.RUNNING, PlaceAllotted): _place_allotted,
    (ScriptPhase.RUNNING, WorkerFailed): _failed,
    (ScriptPhase.RUNNING, LeaveRequested): _leave_while_busy,
    (ScriptPhase.RUNNING, LeaseLost): _lease_lost_while_busy,
    (ScriptPhase.RUNNING, StoreLost): _store_lost_while_busy,
    (ScriptPhase.STOPPING, WorldSeen): _world_while_stopping,
    (ScriptPhase.STOPPING, WorkersUp): _ignore,
    (ScriptPhase.STOPPING, WorkerEnlisted): _ignore,
    (ScriptPhase.STOPPING, WorkerCanSave): _ignore,
    (ScriptPhase.STOPPING, WorkerSaved): _saved,
    (ScriptPhase.STOPPING, WorkerReturned): _ignore,
    (ScriptPhase.STOPPING, WorkerSucceeded): _succeeded_while_stopping,
    (ScriptPhase.STOPPING, PlaceAllotted): _place_allotted,
    (ScriptPhase.STOPPING, WorkerFailed): _failed_while_stopping,
    (ScriptPhase.STOPPING, WorkersGone): _gone,
    (ScriptPhase.STOPPING, LeaveRequested): _leave_while_stopping,
    (ScriptPhase.STOPPING, LeaseLost): _lease_lost_while_stopping,
    (ScriptPhase.STOPPING, StoreLost): _store_lost_while_busy,
}
