"""Every environment variable that torchelastic reads or writes, and the only code that reads them.

Those that set a flag's default are declared with the flag (`config.flag`), all others here;
`docs/reference/environment.md` is generated from both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable: its side and its meaning."""

    name: str
    #: `worker`: given to workers. `agent`: read by the agent.
    side: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable("RANK", "worker", "global rank"),
    Variable("LOCAL_RANK", "worker", "rank on this node (0 with --virtual-local-rank)"),
    Variable("NODE_RANK", "worker", "rank of the node in the world"),
    Variable("GROUP_RANK", "worker", "the same, under torchrun's name"),
    Variable("ROLE_RANK", "worker", "rank among the workers of the same role"),
    Variable("ROLE_NAME", "worker", "the role (--role)"),
    Variable("LOCAL_WORLD_SIZE", "worker", "workers on this node"),
    Variable("WORLD_SIZE", "worker", "workers in the world"),
    Variable("GROUP_WORLD_SIZE", "worker", "nodes in the world"),
    Variable("ROLE_WORLD_SIZE", "worker", "workers of the same role"),
    Variable("MASTER_ADDR", "worker", "host of the generation's store; on one node --master-addr"),
    Variable("MASTER_PORT", "worker", "port of that store; on one node --master-port, if given"),
    Variable("TORCHELASTIC_RESTART_COUNT", "worker", "the generation: 0 in the first world"),
    Variable("TORCHELASTIC_MAX_RESTARTS", "worker", "the restart budget of the job"),
    Variable("TORCHELASTIC_RUN_ID", "worker", "the job id"),
    Variable("TORCHELASTIC_START", "worker", "id of this start of the job, new with every start"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "worker", "True: workers are clients of the store"),
    Variable("TORCHELASTIC_REPLICA_SIZE", "worker", "--replica-size, if it is given"),
    Variable(
        "TORCHELASTIC_REPLICA_PLACE",
        "worker",
        "the place of this node in its replica, from 0, if replicas span nodes",
    ),
    Variable("TORCHELASTIC_ERROR_FILE", "worker", "where a failing worker writes its error.json"),
    Variable(
        "TORCHELASTIC_LEAVING_FILE",
        "worker",
        "the file that says that this node leaves the job, see torchelastic.leaving",
    ),
    Variable("TORCHELASTIC_SIGNALS_TO_HANDLE", "worker", "signals the agent handles"),
    Variable(
        "TORCHELASTIC_SHARED_SIGNALS",
        "worker",
        "signals that the scheduler (Slurm) sends to workers, too, but which the agent acts on",
    ),
    Variable("TORCHELASTIC_STARTUP", "worker", "what a new Python process runs; removed at once"),
    Variable("TORCHELASTIC_CHANNEL_FD", "worker", "descriptor of the channel to the agent"),
    Variable(
        "TORCHELASTIC_SECRET_FD",
        "worker",
        "descriptor to read the job's secret from, once; Python workers read it before the script "
        "starts",
    ),
    Variable(
        "TORCHELASTIC_STACKS_FD",
        "worker",
        "descriptor of the memory where the worker writes its stacks on request; removed at once",
    ),
    Variable("TORCHELASTIC_FAULTS", "worker", "faults to inject, see torchelastic.faults"),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "worker",
        "1 unless set; torchelastic.train with NCCL sets 2, so that NCCL's watchdog aborts the "
        "group but not the process",
    ),
    Variable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "worker",
        "0 in torchelastic.train with NCCL unless set, for the same reason",
    ),
    Variable(
        "GLOO_SOCKET_IFNAME", "worker", "network interface that other nodes reach, unless set"
    ),
    Variable("RES_OPTIONS", "worker", "DNS timeouts: timeout:1 attempts:2 unless set"),
    Variable("OMP_NUM_THREADS", "worker", "1 if unset and the node has several workers"),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "worker",
        "the devices that --nproc-per-node gpu counts; one of them with --virtual-local-rank",
    ),
    Variable("HIP_VISIBLE_DEVICES", "agent", "the AMD devices that --nproc-per-node gpu counts"),
    Variable("TORCHELASTIC_ETCD_USER", "agent", "default of etcd_user in --rdzv-conf"),
    Variable(
        "TORCHELASTIC_ETCD_PASSWORD_FILE", "agent", "default of etcd_password_file in --rdzv-conf"
    ),
    Variable("TORCHELASTIC_ETCD_BINARY_PATH", "agent", "the etcd program that EtcdServer starts"),
    Variable(
        "TORCHELASTIC_ENABLE_FILE_TIMER",
        "agent",
        "1: support torch's FileTimerClient, at the path in TORCHELASTIC_TIMER_FILE if that is set",
    ),
    Variable(
        "TORCHELASTIC_TIMER_FILE",
        "worker",
        "with TORCHELASTIC_ENABLE_FILE_TIMER, the pipe for torch's FileTimerClient",
    ),
    Variable("PYTHON_EXEC", "agent", "the Python that runs scripts"),
    Variable(
        "TORCHELASTIC_SECRET",
        "agent",
        "the job's secret if --rdzv-secret-file is not given; workers do not get this variable",
    ),
    Variable(
        "TORCHELASTIC_JOB_DIR",
        "agent",
        "directory of the job on shared storage, set by `torchelastic submit`: its secret, and "
        "whether it has finished; the first node creates it if it does not exist",
    ),
    Variable(
        "TORCHELASTIC_TORCHX_ENDPOINT",
        "agent",
        "set by the TorchX component: NAME:PORT, the variable with the host of replica 0, and the "
        "port to meet at",
    ),
    Variable(
        "TORCHELASTIC_TORCHX_REPLICA",
        "agent",
        "set by the TorchX component: the number of the replica",
    ),
    Variable(
        "TORCHELASTIC_SSH",
        "agent",
        "the command that --hosts uses instead of ssh, with its options",
    ),
    Variable("LOGLEVEL", "agent", "log level of the agent (default INFO)"),
    Variable("XDG_RUNTIME_DIR", "agent", "directory where the jobs of this machine are listed"),
    Variable("TMPDIR", "agent", "directory for temporary logs"),
)


def get(name: str, default: str = "") -> str:
    """Return the value of a variable, `default` if it is unset or empty."""
    return os.environ.get(name) or default


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment."""
    return dict(os.environ)


def replace(values: Mapping[str, str]) -> None:
    """Make the environment exactly `values`."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


def remove(name: str) -> None:
    os.environ.pop(name, None)


def update(values: Mapping[str, str]) -> None:
    """Set these variables and leave the others."""
    os.environ.update(values)
