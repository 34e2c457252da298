"""The names of 0.2's `agent.server`."""

from torchelastic.compat.release02.local_elastic_agent import (
    ElasticAgent,
    LocalElasticAgent,
    SimpleElasticAgent,
)
from torchelastic.compat.release02.worker_group import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

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
