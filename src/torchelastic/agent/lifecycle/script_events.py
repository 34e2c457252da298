"""What happens to the workers of one node: the events of `script`."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.events.failure import Failure, signal_name
from torchelastic.rendezvous.world import World


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
class WorkerEnlisted:
    """A worker has called `torchelastic.train`: it could outlive its generation."""

    local_rank: int
    #: The number of workers in its mesh; 0: it made none.
    mesh: int = 0


@dataclass(frozen=True)
class WorkerCanSave:
    """A worker can store its state before it leaves."""

    local_rank: int
    #: Only together with workers of other nodes, which have to continue until then.
    together: bool = False


@dataclass(frozen=True)
class WorkerSaved:
    """A worker that stores its state together with others has done so, or given up."""

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
class LeaseLost:
    """The store has declared this node lost: another may already train in its place."""


@dataclass(frozen=True)
class StoreLost:
    """The store is out of reach for good."""

    reason: str


Event = (
    WorldSeen
    | WorkersUp
    | WorkerReturned
    | WorkerSucceeded
    | WorkerFailed
    | WorkerEnlisted
    | WorkerCanSave
    | WorkerSaved
    | PlaceAllotted
    | WorkersGone
    | LeaveRequested
    | LeaseLost
    | StoreLost
)
