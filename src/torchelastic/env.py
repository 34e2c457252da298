"""Every environment variable torchelastic reads or writes, declared once; the only reader of them.

`docs/reference/environment.md` is generated from `VARIABLES`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable: who sets it and what it means."""

    name: str
    #: `worker`: given to workers. `agent`: read by the agent. `flag`: a flag's default.
    side: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable("RANK", "worker", "global rank"),
    Variable("LOCAL_RANK", "worker", "rank on this node (0 with --virtual-local-rank)"),
    Variable("NODE_RANK", "worker", "rank of the node in the world"),
    Variable("GROUP_RANK", "worker", "the same, by torchrun's name"),
    Variable("ROLE_RANK", "worker", "rank among the workers of the same role"),
    Variable("ROLE_NAME", "worker", "the role (--role)"),
    Variable("LOCAL_WORLD_SIZE", "worker", "workers on this node"),
    Variable("WORLD_SIZE", "worker", "workers in the world"),
    Variable("GROUP_WORLD_SIZE", "worker", "nodes in the world"),
    Variable("ROLE_WORLD_SIZE", "worker", "workers of the same role"),
    Variable("MASTER_ADDR", "worker", "host of the generation's store; on one node --master-addr"),
    Variable("MASTER_PORT", "worker", "port of that store; on one node --master-port, where given"),
    Variable("TORCHELASTIC_RESTART_COUNT", "worker", "the generation: 0 in the first world"),
    Variable("TORCHELASTIC_MAX_RESTARTS", "worker", "the restart budget of the job"),
    Variable("TORCHELASTIC_RUN_ID", "worker", "the job id"),
    Variable("TORCHELASTIC_START", "worker", "tells this start of the job from an earlier one"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "worker", "True: workers are clients of the store"),
    Variable("TORCHELASTIC_ERROR_FILE", "worker", "where a failing worker writes its error.json"),
    Variable("TORCHELASTIC_SIGNALS_TO_HANDLE", "worker", "signals the agent handles"),
    Variable("TORCHELASTIC_STARTUP", "worker", "what a starting Python is to be; removed at once"),
    Variable("TORCHELASTIC_CHANNEL_FD", "worker", "descriptor of the channel to the agent"),
    Variable(
        "TORCHELASTIC_SECRET_FD",
        "worker",
        "descriptor to read the job's secret from, once; Python workers have done it before the "
        "script begins",
    ),
    Variable(
        "TORCHELASTIC_STACKS_FD",
        "worker",
        "descriptor of the memory that stacks are written to when asked for; removed at once",
    ),
    Variable("TORCHELASTIC_FAULTS", "worker", "faults to inject, see torchelastic.faults"),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "worker",
        "1 unless set; torchelastic.train with NCCL makes it 2, so that the watchdog aborts the "
        "group and leaves the process alone",
    ),
    Variable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "worker",
        "unless set, 0 in torchelastic.train with NCCL: for the same reason",
    ),
    Variable(
        "GLOO_SOCKET_IFNAME", "worker", "unless set, the interface where other nodes reach this one"
    ),
    Variable("RES_OPTIONS", "worker", "timeout:1 attempts:2 unless set: how long DNS is asked"),
    Variable("OMP_NUM_THREADS", "worker", "1 if unset and the node has several workers"),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "worker",
        "the devices --nproc-per-node gpu counts; one of them with --virtual-local-rank",
    ),
    Variable("HIP_VISIBLE_DEVICES", "agent", "the AMD devices --nproc-per-node gpu counts"),
    Variable("TORCHELASTIC_ETCD_USER", "agent", "etcd_user where --rdzv-conf has none"),
    Variable(
        "TORCHELASTIC_ETCD_PASSWORD_FILE", "agent", "etcd_password_file where --rdzv-conf has none"
    ),
    Variable("TORCHELASTIC_ETCD_BINARY_PATH", "agent", "the etcd that EtcdServer starts"),
    Variable(
        "TORCHELASTIC_ENABLE_FILE_TIMER",
        "agent",
        "1: torch's FileTimerClient works; at the path in TORCHELASTIC_TIMER_FILE if that is set",
    ),
    Variable(
        "TORCHELASTIC_TIMER_FILE",
        "worker",
        "with TORCHELASTIC_ENABLE_FILE_TIMER, the pipe that torch's FileTimerClient wants",
    ),
    Variable("PYTHON_EXEC", "agent", "the Python that runs scripts"),
    Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "agent", "default of --shutdown-timeout"),
    Variable(
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "agent",
        "default of --log-line-prefix-template",
    ),
    Variable(
        "TORCHELASTIC_SECRET",
        "agent",
        "the secret of the job where no --rdzv-secret-file is given; workers do not get it",
    ),
    Variable("LOGLEVEL", "agent", "level of the agent's own log (default INFO)"),
    Variable("XDG_RUNTIME_DIR", "agent", "where jobs of this machine are listed"),
    Variable("TMPDIR", "agent", "where temporary logs go"),
)


def get(name: str, default: str = "") -> str:
    """The value of a variable, `default` when it is unset or empty."""
    return os.environ.get(name) or default


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, to be handed to workers."""
    return dict(os.environ)


def replace(values: Mapping[str, str]) -> None:
    """Make the environment exactly `values`."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


def remove(name: str) -> None:
    """Unset a variable."""
    os.environ.pop(name, None)


def update(values: Mapping[str, str]) -> None:
    """Set some variables, leave the others."""
    os.environ.update(values)
