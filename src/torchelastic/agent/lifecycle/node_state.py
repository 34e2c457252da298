"""A node, as its state machine sees it: events in, commands out, and the node's part of the state.

Whatever kind of workers a node has, it is in a world, may leave, may lose its lease or its store,
and ends. Two tables have the rest: `script` for workers that end with their generation,
`in_process` for workers that outlive it. `machine` is the way in.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from torchelastic.events.failure import Failure, signal_name
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

SIGINT, SIGKILL, SIGTERM = 2, 9, 15


class InvalidTransition(AssertionError):
    """An event came in a phase in which it cannot happen: a bug in the node's loop."""


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """This node has joined under a name."""

    name: str


@dataclass(frozen=True)
class WorldSeen:
    """The leader has published a world."""

    world: World


@dataclass(frozen=True)
class WorkersUp:
    """Every worker of the generation has been started."""

    generation: int


@dataclass(frozen=True)
class WorkerReturned:
    """A worker's program has returned: its interpreter ends."""

    generation: int
    local_rank: int


@dataclass(frozen=True)
class WorkerSucceeded:
    generation: int
    local_rank: int


@dataclass(frozen=True)
class WorkerFailed:
    """A worker failed, or could not be started."""

    failure: Failure


@dataclass(frozen=True)
class WorkerMessage:
    """A worker has sent a message on its channel."""

    local_rank: int
    report: orders.Report


@dataclass(frozen=True)
class WorkerLeft:
    """A worker has left `train`, and its process goes on: nothing can start another one here."""

    local_rank: int


@dataclass(frozen=True)
class PlaceAllotted:
    """The leader has allotted this node a place in its replica."""

    place: int


@dataclass(frozen=True)
class WorkersGone:
    """No worker is left on this node, nor anything that workers started."""


@dataclass(frozen=True)
class LeaveRequested:
    """A signal or a preemption notice asks this node to leave."""

    signum: int
    #: When its workers are killed, by this machine's monotonic clock.
    deadline: float | None = None
    #: The notice; empty for a signal.
    notice: str = ""

    @property
    def why(self) -> str:
        return self.notice or signal_name(self.signum)


@dataclass(frozen=True)
class LeaveOverdue:
    """This node was to leave and has not done so in time, or need not reach a step boundary."""


@dataclass(frozen=True)
class LeaseLost:
    """The store has declared this node lost: another may already train in its place."""


@dataclass(frozen=True)
class StoreLost:
    """The store is out of reach for good."""

    reason: str


Event = (
    Named
    | WorldSeen
    | WorkersUp
    | WorkerReturned
    | WorkerSucceeded
    | WorkerFailed
    | WorkerMessage
    | WorkerLeft
    | PlaceAllotted
    | WorkersGone
    | LeaveRequested
    | LeaveOverdue
    | LeaseLost
    | StoreLost
)


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


@dataclass(frozen=True)
class Spawn:
    """Start a worker on standby for a world."""

    local_rank: int


@dataclass(frozen=True)
class Kill:
    """Kill a worker, with this as its failure."""

    local_rank: int
    why: str


Command = StartWorkers | Stop | Tell | ReportMember | Rejoin | Spawn | Kill


# --- state ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerProgress:
    """The progress of the workers, read before each event: it decides what a world begins with, and
    whether a restart counts as one without progress."""

    #: The highest step a worker has reported.
    step: int = -1
    #: The newest generation in which a worker has taken a step.
    trained: int = -1
    #: The newest generation whose state is kept here, by a worker or by the agent; and the workers
    #: without it.
    holds: int = -1
    blank: tuple[int, ...] = ()


class Phase(enum.Enum):
    """The phase of a node. Workers that outlive a generation are only served."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    SERVING = "serving"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """The node's part of what decides what it does next."""

    node: str = ""
    #: The node's name, for people.
    name: str = ""
    phase: Phase = Phase.IDLE
    #: The latest world.
    world: World | None = None
    #: The place in its replica with which the workers of this node start; -1: it has none yet.
    place: int = 0
    #: Failures of workers here, in the order they happened.
    failures: tuple[Failure, ...] = ()
    #: The signal this node leaves by, 0 while it stays.
    leaving: int = 0
    #: When its workers are killed then, by this machine's monotonic clock, and why it leaves.
    deadline: float | None = None
    why: str = ""
    #: The lease was lost: rejoin once no worker is in a world.
    rejoin: bool = False
    exitcode: int | None = None
    reason: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.phase is Phase.ENDED
