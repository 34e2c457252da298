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

from torchelastic.errors import EXIT_RENDEZVOUS_LOST, EXIT_SIGNAL_BASE
from torchelastic.events.failure import Failure, signal_name
from torchelastic.records import replace
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

SIGINT, SIGKILL, SIGTERM = 2, 9, 15


class Phase(enum.Enum):
    """The phase of the node's workers."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldSeen:
    """The leader has published a world."""

    world: World


@dataclass(frozen=True)
class WorkersUp:
    """Every worker of the generation has been started."""

    generation: int


@dataclass(frozen=True)
class WorkerSucceeded:
    generation: int
    local_rank: int


@dataclass(frozen=True)
class WorkerFailed:
    """A worker failed, or could not be started."""

    failure: Failure


@dataclass(frozen=True)
class WorkerEnlisted:
    """A worker has called `torchelastic.train`: it could outlive its generation."""

    local_rank: int


@dataclass(frozen=True)
class WorkerCanSave:
    """A worker can store its state before it leaves."""

    local_rank: int


@dataclass(frozen=True)
class WorkersGone:
    """No worker is left on this node, nor anything that workers started."""


@dataclass(frozen=True)
class LeaveRequested:
    """A signal (or notice) asks this node to leave."""

    signum: int
    #: When its workers are killed, by this machine's monotonic clock.
    deadline: float | None = None


@dataclass(frozen=True)
class LeaseLost:
    """The store has declared this node lost: another may already train in its place."""


@dataclass(frozen=True)
class StoreLost:
    """The store is out of reach for good."""

    reason: str


Event = (
    WorldSeen
    | WorkersUp
    | WorkerSucceeded
    | WorkerFailed
    | WorkerEnlisted
    | WorkerCanSave
    | WorkersGone
    | LeaveRequested
    | LeaseLost
    | StoreLost
)


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Start the workers of this world."""

    world: World


@dataclass(frozen=True)
class Stop:
    """Send the signal to every worker's process group; answer `WorkersGone`."""

    signum: int
    #: Local ranks that were told to leave and exit by themselves: the others get the signal, once
    #: these have exited.
    told: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Tell:
    """Send an order to a worker."""

    local_rank: int
    order: orders.Order


@dataclass(frozen=True)
class Report:
    """Change what this node's member record says."""

    changes: dict[str, Any]


@dataclass(frozen=True)
class Rejoin:
    """Open a new lease and put the member record again, as a newcomer."""

    #: No worker of this generation or an older one is left here.
    gone: int


Command = Start | Stop | Tell | Report | Rejoin


# --- state ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScriptState:
    """Everything that decides what this node does next."""

    phase: Phase = Phase.IDLE
    #: The generation whose workers run here, or ran last.
    generation: int = -1
    #: Local ranks that have not succeeded yet.
    running: frozenset[int] = frozenset()
    nproc: int = 1
    #: Local ranks that have called `torchelastic.train`.
    enlisted: frozenset[int] = frozenset()
    #: Local ranks that can store their state before they leave.
    savers: frozenset[int] = frozenset()
    #: Failures of this generation here, in the order they happened.
    failures: tuple[Failure, ...] = ()
    #: The latest world: it decides what to do once the workers are gone.
    world: World | None = None
    #: The signal this node leaves by, 0 while it stays.
    leaving: int = 0
    #: When its workers are killed then.
    deadline: float | None = None
    #: The lease was lost: join anew once the workers are gone.
    rejoin: bool = False
    node: str = ""
    exitcode: int | None = None
    reason: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.phase is Phase.ENDED

    def sentence(self) -> str:
        """Describe what this node is doing."""
        if self.phase is Phase.IDLE and self.world is not None and self.world.phase == "running":
            if self.world.place(self.node) is None:
                return f"waiting beside generation {self.world.generation}"
            return f"done with generation {self.generation}, waiting for the others"
        if self.phase is Phase.IDLE:
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
        return state, [Report({"gone": world.generation})]
    if world.phase != "running" or world.place(state.node) is None:
        return state, []
    if world.generation <= state.generation or state.rejoin:  # declared lost: that world will end
        return state, []
    if world.resident:  # `has_turned_resident`: `in_process` takes over
        return state, []
    return _begin(state, world)


def _begin(state: ScriptState, world: World) -> Step:
    state = replace(
        state,
        phase=Phase.STARTING,
        generation=world.generation,
        running=frozenset(range(state.nproc)),
        failures=(),
        enlisted=frozenset(),
        savers=frozenset(),
    )
    return state, [Start(world)]


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
    """Remember it until the workers are gone; say who puts the state into storage."""
    world = event.world
    state = replace(state, world=world)
    running = world.phase == "running" and world.generation == state.generation
    if not state.leaving or running or world.generation < state.generation:
        return state, []
    return state, _tell_to_leave(state, saves=world.saver == state.node)


# --- what workers do -----------------------------------------------------------------------------


def _up(state: ScriptState, event: WorkersUp) -> Step:
    """They run."""
    if event.generation != state.generation:
        return state, []
    if not state.running:  # they succeeded before their start was reported
        return _stop(state, SIGTERM)
    return replace(state, phase=Phase.RUNNING), []


def _ignore(state: ScriptState, event: Event) -> Step:
    """Nothing."""
    return state, []


def _succeeded(state: ScriptState, event: WorkerSucceeded) -> Step:
    """The last one: stop what they left behind, then report done."""
    if event.generation != state.generation:
        return state, []
    running = state.running - {event.local_rank}
    state = replace(state, running=running)
    if state.enlisted:
        return _failed(state, _gone_home(state))
    if running or state.phase is Phase.STARTING:
        return state, []
    return _stop(state, SIGTERM)  # nothing to stop but what the workers left behind


def _enlisted(state: ScriptState, event: WorkerEnlisted) -> Step:
    """The last one: report it; when all nodes have, the leader makes the world resident."""
    state = replace(state, enlisted=state.enlisted | {event.local_rank})
    if len(state.running) < state.nproc:
        return _failed(state, _gone_home(state))
    if len(state.enlisted) < state.nproc:
        return state, []
    return state, [Report({"resident": True, "standing": tuple(range(state.nproc))})]


def _can_save(state: ScriptState, event: WorkerCanSave) -> Step:
    """Note it."""
    return replace(state, savers=state.savers | {event.local_rank}), []


def _gone_home(state: ScriptState) -> WorkerFailed:
    """Fail the generation: some workers wait in `train` for others that have exited."""
    ended = min(set(range(state.nproc)) - state.running)
    rank = state.world.rank(state.node, ended) if state.world is not None else None
    failure = Failure(
        generation=state.generation,
        node=state.node,
        rank=-1 if rank is None else rank,
        local_rank=ended,
        pid=0,
        exitcode=0,
        message="the worker exited without calling torchelastic.train while others wait in it",
        fatal=True,
    )
    return WorkerFailed(failure)


def has_turned_resident(state: ScriptState) -> bool:
    """True if the job's workers outlive their generation: `in_process` takes over."""
    steady = state.phase in (Phase.IDLE, Phase.STARTING, Phase.RUNNING)
    return steady and state.world is not None and state.world.resident


def _failed(state: ScriptState, event: WorkerFailed) -> Step:
    """Report it and stop the others here; the leader ends the generation everywhere."""
    if event.failure.generation != state.generation:
        return state, []
    failures = (*state.failures, event.failure)
    state, commands = _stop(replace(state, failures=failures), SIGTERM)
    return state, [Report({"failures": failures}), *commands]


def _failed_while_stopping(state: ScriptState, event: WorkerFailed) -> Step:
    """Report it, too: a consequence, or another cause."""
    failures = (*state.failures, event.failure)
    return replace(state, failures=failures), [Report({"failures": failures})]


def _gone(state: ScriptState, event: WorkersGone) -> Step:
    """Report gone; then end, join anew or do what the latest world says."""
    report: dict[str, Any] = {"gone": state.generation, "resident": False, "standing": ()}
    succeeded = not state.running and not state.failures
    if succeeded:
        report["done"] = state.generation
    state = replace(state, phase=Phase.IDLE)
    if state.leaving:
        return _left(state)
    if state.exitcode is not None:
        return replace(state, phase=Phase.ENDED), []
    first: list[Command] = [Report(report)]
    if state.rejoin:
        # The record moves to the next host: no worker here is resident any more.
        first = [Report({"resident": False, "standing": ()}), Rejoin(state.generation)]
    state, commands = _act_on_world(state)
    return replace(state, rejoin=False), [*first, *commands]


def _stop(state: ScriptState, signum: int) -> Step:
    return replace(state, phase=Phase.STOPPING), [Stop(signum)]


# --- leaving and ending --------------------------------------------------------------------------


def _leave_while_idle(state: ScriptState, event: LeaveRequested) -> Step:
    """Announce it and end."""
    state, commands = _left(replace(state, leaving=event.signum))
    return state, [_announce(event), *commands]


def _leave_while_busy(state: ScriptState, event: LeaveRequested) -> Step:
    """Announce it and pass the signal on at once, or when those who can store the state have; end
    when the workers are gone."""
    # Tell them before their peers could exit. A signal would end them, or wait with them for a
    # collective that never ends.
    savers = state.savers & state.running
    state = replace(
        state,
        phase=Phase.STOPPING,
        leaving=event.signum,
        deadline=event.deadline,
        savers=savers,
    )
    told = _tell_to_leave(state, saves=None)
    return state, [*told, _announce(event), Stop(event.signum, told=savers)]


def _tell_to_leave(state: ScriptState, *, saves: bool | None) -> list[Command]:
    leave = orders.Leave(state.leaving, state.deadline, saves)
    return [Tell(local_rank, leave) for local_rank in sorted(state.savers)]


def _leave_while_stopping(state: ScriptState, event: LeaveRequested) -> Step:
    """The same, once; a second interrupt kills."""
    if state.leaving:
        return state, [Stop(SIGKILL)] if event.signum == SIGINT else []
    state = replace(state, leaving=event.signum, savers=frozenset())  # they are ending already
    return state, [_announce(event), Stop(event.signum)]


def _announce(event: LeaveRequested) -> Report:
    return Report({"leaving": signal_name(event.signum)})


def _left(state: ScriptState) -> Step:
    name = signal_name(state.leaving)
    return _end(state, EXIT_SIGNAL_BASE + state.leaving, f"left the job ({name})"), []


def _lease_lost_while_idle(state: ScriptState, event: LeaseLost) -> Step:
    """Join anew."""
    return state, [Rejoin(state.generation)]


def _lease_lost_while_busy(state: ScriptState, event: LeaseLost) -> Step:
    """Kill the workers, since others go on without us; then join anew."""
    return _stop(replace(state, rejoin=True), SIGKILL)


def _lease_lost_while_stopping(state: ScriptState, event: LeaseLost) -> Step:
    """Join anew once the workers are gone."""
    return replace(state, rejoin=True), []


def _store_lost_while_idle(state: ScriptState, event: StoreLost) -> Step:
    """End."""
    return _end(state, EXIT_RENDEZVOUS_LOST, event.reason), []


def _store_lost_while_busy(state: ScriptState, event: StoreLost) -> Step:
    """Stop, and end when the workers are gone."""
    lost = replace(state, exitcode=EXIT_RENDEZVOUS_LOST, reason=event.reason)
    if state.phase is Phase.STOPPING:
        return lost, []
    return _stop(lost, SIGTERM)


def _end(state: ScriptState, exitcode: int, reason: str) -> ScriptState:
    return replace(state, phase=Phase.ENDED, exitcode=exitcode, reason=reason)


#: The handler of each event in each phase; `docs/concepts/states.md` is generated from it.
TRANSITIONS: dict[tuple[Phase, type], Callable[[ScriptState, Any], Step]] = {
    (Phase.IDLE, WorldSeen): _world_while_idle,
    (Phase.IDLE, WorkerFailed): _ignore,
    (Phase.IDLE, LeaveRequested): _leave_while_idle,
    (Phase.IDLE, LeaseLost): _lease_lost_while_idle,
    (Phase.IDLE, StoreLost): _store_lost_while_idle,
    (Phase.STARTING, WorldSeen): _world_while_busy,
    (Phase.STARTING, WorkersUp): _up,
    (Phase.STARTING, WorkerSucceeded): _succeeded,
    (Phase.STARTING, WorkerFailed): _failed,
    (Phase.STARTING, LeaveRequested): _leave_while_busy,
    (Phase.STARTING, LeaseLost): _lease_lost_while_busy,
    (Phase.STARTING, StoreLost): _store_lost_while_busy,
    (Phase.STARTING, WorkerEnlisted): _enlisted,
    (Phase.STARTING, WorkerCanSave): _can_save,
    (Phase.RUNNING, WorldSeen): _world_while_busy,
    (Phase.RUNNING, WorkerEnlisted): _enlisted,
    (Phase.RUNNING, WorkerCanSave): _can_save,
    (Phase.RUNNING, WorkerSucceeded): _succeeded,
    (Phase.RUNNING, WorkerFailed): _failed,
    (Phase.RUNNING, LeaveRequested): _leave_while_busy,
    (Phase.RUNNING, LeaseLost): _lease_lost_while_busy,
    (Phase.RUNNING, StoreLost): _store_lost_while_busy,
    (Phase.STOPPING, WorldSeen): _world_while_stopping,
    (Phase.STOPPING, WorkersUp): _ignore,
    (Phase.STOPPING, WorkerEnlisted): _ignore,
    (Phase.STOPPING, WorkerCanSave): _ignore,
    (Phase.STOPPING, WorkerSucceeded): _ignore,
    (Phase.STOPPING, WorkerFailed): _failed_while_stopping,
    (Phase.STOPPING, WorkersGone): _gone,
    (Phase.STOPPING, LeaveRequested): _leave_while_stopping,
    (Phase.STOPPING, LeaseLost): _lease_lost_while_stopping,
    (Phase.STOPPING, StoreLost): _store_lost_while_busy,
}
