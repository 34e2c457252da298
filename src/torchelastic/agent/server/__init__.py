"""The agent of torchelastic 0.2, for programs that were written for it."""

from torchelastic.agent.server.local_elastic_agent import (
    ElasticAgent,
    LocalElasticAgent,
    SimpleElasticAgent,
)
from torchelastic.agent.server.worker_group import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

__all__ = [
    "ElasticAgent",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
