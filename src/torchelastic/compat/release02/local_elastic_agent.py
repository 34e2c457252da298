"""0.2's agent: a job from a `WorkerSpec`. Thin over the launcher."""

from __future__ import annotations

import abc

from torchelastic.compat.release02.rendezvous_registry import AgentRendezvousHandler
from torchelastic.compat.release02.worker_group import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torchelastic.config import LaunchConfig
from torchelastic.errors import EXIT_OK, ConfigError
from torchelastic.launcher.launch_job import Ended, run_agent


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
        raise ConfigError(
            f"{type(self).__name__} cannot start workers: only the agent process of torchelastic "
            "does. Use LocalElasticAgent, or elastic_launch."
        )


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
            "torchelastic.compat.release02.rendezvous_registry.get_rendezvous_handler(RendezvousParameters(...))."
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
