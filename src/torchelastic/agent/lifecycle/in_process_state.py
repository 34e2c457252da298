"""The state of a node's in-process workers, as data (`in_process`)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World


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
    #: Starts in a row that exited before `train` was called.
    tries: int = 0


class InProcessPhase(enum.Enum):
    """The phase of the node."""

    SERVING = "serving"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class InProcessState:
    """Everything that decides what this node does next."""

    node: str
    #: The node's name, for people.
    name: str = ""
    phase: InProcessPhase = InProcessPhase.SERVING
    workers: Mapping[int, Worker] = field(default_factory=dict)
    #: The latest world.
    world: World | None = None
    #: The generation last reported to be gone from here.
    gone: int = -1
    failures: tuple[Failure, ...] = ()
    #: The place in its replica with which the workers of this node start; -1: it has none yet. And
    #: the one that the leader has allotted last.
    place: int = 0
    allotted: int = -1
    #: The signal this node leaves by, 0 while it stays.
    leaving: int = 0
    #: When its workers are killed then, by this machine's monotonic clock, and why it leaves.
    deadline: float | None = None
    why: str = ""
    #: The lease was lost: rejoin once the workers have stopped.
    rejoin: bool = False
    exitcode: int | None = None
    reason: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.phase is InProcessPhase.ENDED

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
