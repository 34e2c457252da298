"""The worker group of 0.2: the spec, the workers of a node, and their result."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchelastic.config import Std
from torchelastic.errors import ConfigError
from torchelastic.launcher.function_call import function_name
from torchelastic.multiprocessing.errors import ProcessFailure
from torchelastic.rendezvous.world import World, WorldNode


@dataclass
class WorkerSpec:
    """The program of this node's workers, their number, and their rendezvous."""

    role: str
    local_world_size: int
    #: From `rendezvous.registry.get_rendezvous_handler`.
    rdzv_handler: Any
    #: The old name of `entrypoint`.
    fn: Callable[..., Any] | None = None
    #: A function, or a program.
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    #: Restarts the whole job may spend.
    max_restarts: int = 3
    #: Ignored: workers are watched, not polled.
    monitor_interval: float = 30.0
    #: Ignored: every generation has its own store on its own port.
    master_port: int | None = None
    redirects: Std | Mapping[int, Std] = Std.NONE
    tee: Std | Mapping[int, Std] = Std.NONE

    def __post_init__(self) -> None:
        if self.local_world_size < 1:
            raise ConfigError(f"local_world_size must be at least 1, not {self.local_world_size}.")
        if self.fn is not None:
            warnings.warn(
                "WorkerSpec.fn is deprecated: use WorkerSpec.entrypoint.",
                DeprecationWarning,
                stacklevel=3,
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise ConfigError("A WorkerSpec needs an entrypoint: a function or a program.")

    def get_entrypoint_name(self) -> str:
        """The function's name, or the program."""
        assert self.entrypoint is not None
        if isinstance(self.entrypoint, str):
            return self.entrypoint
        return function_name(self.entrypoint)


@dataclass
class Worker:
    """The ranks of a worker; -1 until they are known."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1


class WorkerState(str, enum.Enum):
    """The common state of all workers of a node."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return True if the workers are running."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class WorkerGroup:
    """The workers of this node."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.state = WorkerState.INIT

    def place(self, world: World, node: WorldNode) -> None:
        """Set the ranks of every worker in a world."""
        self.group_rank, self.group_world_size = node.node_rank, world.count
        for worker in self.workers:
            worker.global_rank = node.first_rank + worker.local_rank
            worker.role_rank = node.first_role_rank + worker.local_rank
            worker.world_size = world.size
            worker.role_world_size = world.role_size(node.role)


@dataclass
class RunResult:
    """The result of the job by global rank: return values of this node's workers, or failures."""

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED
