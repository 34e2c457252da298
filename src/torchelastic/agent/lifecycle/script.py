"""The table for workers that end with their generation, such as those of a plain script. Pure.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchelastic.agent.lifecycle.node_state import (
    SIGINT,
    SIGKILL,
    SIGTERM,
    Command,
    Event,
    InvalidTransition,
    LeaseLost,
    LeaveOverdue,
    LeaveRequested,
    NodeState,
    Phase,
    PlaceAllotted,
    Rejoin,
    ReportMember,
    StartWorkers,
    Stop,
    StoreLost,
    Tell,
    WorkerFailed,
    WorkerMessage,
    WorkerReturned,
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


@dataclass(frozen=True, kw_only=True)
class ScriptState(NodeState):
    """The node's knowledge of workers that do not outlive a generation."""

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
    #: Local ranks that can store their state before they leave, and those of them that do so
    #: together with other nodes. While the latter are not done, the leave is not announced.
    savers: frozenset[int] = frozenset()
    together: frozenset[int] = frozenset()

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


def handle(state: ScriptState, event: Event) -> Step:
    """Handle one event."""
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
        phase=Phase.STARTING,
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
    return replace(state, phase=Phase.RUNNING), []


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
    if running or state.phase is Phase.STARTING:
        return state, []
    return _stop(state, SIGTERM)  # nothing to stop but what the workers left behind


def _said(state: ScriptState, event: WorkerMessage) -> Step:
    """It has called `train`: report it once all have; when all nodes have, the leader makes the
    world in-process. It can store its state: note it."""
    rank = event.local_rank
    match event.report:
        case orders.Enlisted(mesh):
            return _enlisted(state, rank, mesh)
        case orders.CanSave(together):
            also = frozenset({rank} if together else ())
            state = replace(state, savers=state.savers | {rank}, together=state.together | also)
    return state, []


def _enlisted(state: ScriptState, local_rank: int, mesh: int) -> Step:
    state = replace(state, enlisted=state.enlisted | {local_rank}, meshes=state.meshes | {mesh})
    if len(state.running) < state.nproc:
        return _failed(state, _gone_home(state))
    if len(state.meshes) > 1:
        sizes = " and ".join(map(str, sorted(state.meshes)))
        message = f"the workers of this node made meshes of different sizes: {sizes}"
        return _failed(state, _fatal(state, local_rank, 1, message))
    if len(state.enlisted) < state.nproc:
        return state, []
    report = {"in_process": True, "standing": tuple(range(state.nproc))}
    if mesh:
        report["replica"] = mesh
    return state, [ReportMember(report)]


def _place_allotted(state: ScriptState, event: PlaceAllotted) -> Step:
    """Take the place in a replica."""
    return replace(state, place=event.place), [ReportMember({"place": event.place})]


def _said_while_stopping(state: ScriptState, event: WorkerMessage) -> Step:
    """Once all have stored their state together with other nodes: announce the leave."""
    if not isinstance(event.report, orders.Saved):
        return state, []
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
    steady = state.phase in (Phase.IDLE, Phase.STARTING, Phase.RUNNING)
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
    state = replace(state, phase=Phase.IDLE)
    if state.leaving:
        done = {"gone": state.generation, "done": state.generation}
        last: list[Command] = [ReportMember(done)] if succeeded else []
        return _left(state), [*(_announce(state) if state.together else []), *last]
    if state.exitcode is not None:
        return replace(state, phase=Phase.ENDED), []
    first: list[Command] = [ReportMember(report)]
    if state.rejoin:
        # The record moves to the next host: no worker here is in-process any more.
        first = [ReportMember({"in_process": False, "standing": ()}), Rejoin(state.generation)]
    state, commands = _act_on_world(state)
    return replace(state, rejoin=False), [*first, *commands]


def _stop(state: ScriptState, signum: int) -> Step:
    return replace(state, phase=Phase.STOPPING), [Stop(signum)]


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
        phase=Phase.STOPPING,
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


def _leave_overdue(state: ScriptState, event: LeaveOverdue) -> Step:
    """Kill the workers."""
    return state, [Stop(SIGKILL)]


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
    if state.phase is Phase.STOPPING:
        return lost, []
    return _stop(lost, SIGTERM)


def _end(state: ScriptState, exitcode: int, reason: str) -> ScriptState:
    return replace(state, phase=Phase.ENDED, exitcode=exitcode, reason=reason)


#: The handler of each event in each phase; `docs/concepts/states.md` is generated from it.
TRANSITIONS: dict[tuple[Phase, type], Callable[[ScriptState, Any], Step]] = {
    (Phase.IDLE, WorldSeen): _world_while_idle,
    (Phase.IDLE, PlaceAllotted): _place_allotted,
    (Phase.IDLE, WorkerReturned): _ignore,
    (Phase.IDLE, WorkerFailed): _ignore,
    (Phase.IDLE, WorkerMessage): _ignore,
    (Phase.IDLE, LeaveRequested): _leave_while_idle,
    (Phase.IDLE, LeaseLost): _lease_lost_while_idle,
    (Phase.IDLE, StoreLost): _store_lost_while_idle,
    (Phase.STARTING, WorldSeen): _world_while_busy,
    (Phase.STARTING, WorkersUp): _up,
    (Phase.STARTING, WorkerReturned): _returned,
    (Phase.STARTING, WorkerSucceeded): _succeeded,
    (Phase.STARTING, PlaceAllotted): _place_allotted,
    (Phase.STARTING, WorkerFailed): _failed,
    (Phase.STARTING, LeaveRequested): _leave_while_busy,
    (Phase.STARTING, LeaseLost): _lease_lost_while_busy,
    (Phase.STARTING, StoreLost): _store_lost_while_busy,
    (Phase.STARTING, WorkerMessage): _said,
    (Phase.RUNNING, WorldSeen): _world_while_busy,
    (Phase.RUNNING, WorkerMessage): _said,
    (Phase.RUNNING, WorkerReturned): _returned,
    (Phase.RUNNING, WorkerSucceeded): _succeeded,
    (Phase.RUNNING, PlaceAllotted): _place_allotted,
    (Phase.RUNNING, WorkerFailed): _failed,
    (Phase.RUNNING, LeaveRequested): _leave_while_busy,
    (Phase.RUNNING, LeaseLost): _lease_lost_while_busy,
    (Phase.RUNNING, StoreLost): _store_lost_while_busy,
    (Phase.STOPPING, WorldSeen): _world_while_stopping,
    (Phase.STOPPING, WorkersUp): _ignore,
    (Phase.STOPPING, WorkerMessage): _said_while_stopping,
    (Phase.STOPPING, WorkerReturned): _ignore,
    (Phase.STOPPING, WorkerSucceeded): _succeeded_while_stopping,
    (Phase.STOPPING, PlaceAllotted): _place_allotted,
    (Phase.STOPPING, WorkerFailed): _failed_while_stopping,
    (Phase.STOPPING, WorkersGone): _gone,
    (Phase.STOPPING, LeaveRequested): _leave_while_stopping,
    (Phase.STOPPING, LeaveOverdue): _leave_overdue,
    (Phase.STOPPING, LeaseLost): _lease_lost_while_stopping,
    (Phase.STOPPING, StoreLost): _store_lost_while_busy,
}
