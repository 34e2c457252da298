"""0.2's `agent.server`: a job from a `WorkerSpec`, the workers of a node, and their result."""

from __future__ import annotations

import abc
import enum
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchelastic.compat.old_names import REFUSED
from torchelastic.compat.rendezvous_api import AgentRendezvousHandler
from torchelastic.config import LaunchConfig, Std
from torchelastic.errors import EXIT_OK, ConfigError
from torchelastic.launcher.launch_job import Ended, function_name, run_agent
from torchelastic.rendezvous.world import World, WorldNode

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

DEFAULT_ROLE = "default"


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
    #: None: the workers are processes of the agent, not of this program.
    id: Any = field(default=None, init=False)


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
        self.store = None
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


class ElasticAgent(abc.ABC):
    """Runs the workers of one node."""

    @abc.abstractmethod
    def run(self, role: str = "default") -> RunResult:
        """Run the workers until the job ends."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = "default") -> WorkerGroup:
        """The workers, as they are now."""


class SimpleElasticAgent(ElasticAgent):
    """0.2's base class for custom agents, which are not supported here."""

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300) -> None:
        raise ConfigError(REFUSED["SimpleElasticAgent"])


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of one node as processes of this machine.

    The agent is a separate process: `run` waits for it. An agent has one role, that of its spec.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_dir: str | None = None,
    ) -> None:
        """`exit_barrier_timeout` is ignored: the nodes agree on the end without a barrier."""
        self._group = WorkerGroup(spec)
        self._config = launch_config(spec, start_method, log_dir)

    def get_worker_group(self, role: str = "default") -> WorkerGroup:
        return self._group

    def run(self, role: str = "default") -> RunResult:
        """Run this node's part of the job to its end.

        Returns a result for failed workers, and raises if the job ends for another reason (too few
        nodes, a signal, a lost rendezvous), like `torchelastic.launcher.launch_agent`.
        """
        spec, group = self._group.spec, self._group
        assert spec.entrypoint is not None
        group.state = WorkerState.HEALTHY
        try:
            ended = run_agent(self._config, spec.entrypoint, spec.args)
        except BaseException:
            group.state = WorkerState.STOPPED
            raise
        if ended.world is not None and ended.place is not None:
            group.place(ended.world, ended.place)
        result = _result(ended)
        group.state = result.state
        if result.state is WorkerState.STOPPED:
            raise ended.error(spec.get_entrypoint_name())
        return result


def launch_config(spec: WorkerSpec, start_method: str, log_dir: str | None) -> LaunchConfig:
    """Return the launch config for a spec."""
    handler = spec.rdzv_handler
    if not isinstance(handler, AgentRendezvousHandler):
        raise ConfigError(
            f"{type(handler).__name__} is not a rendezvous handler of torchelastic: make one with "
            "torchelastic.rendezvous.get_rendezvous_handler(RendezvousParameters(...))."
        )
    params = handler.params
    return LaunchConfig(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        nproc_per_node=spec.local_world_size,
        run_id=params.run_id,
        role=spec.role,
        rdzv_backend=params.backend,
        rdzv_endpoint=params.endpoint,
        rdzv_configs=params.config,
        max_restarts=spec.max_restarts,
        monitor_interval=spec.monitor_interval,
        start_method=start_method,
        log_dir=log_dir,
        redirects=spec.redirects,
        tee=spec.tee,
    )


def _result(ended: Ended) -> RunResult:
    if ended.exitcode == EXIT_OK:
        return RunResult(WorkerState.SUCCEEDED, ended.results)
    if ended.failures:
        return RunResult(WorkerState.FAILED, failures=ended.failures)
    return RunResult(WorkerState.STOPPED)
