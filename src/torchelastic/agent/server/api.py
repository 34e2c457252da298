"""A module name of 0.2's."""

from torchelastic.agent.server.local_elastic_agent import ElasticAgent, SimpleElasticAgent
from torchelastic.agent.server.worker_group import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

DEFAULT_ROLE = "default"
