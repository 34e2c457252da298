"""Elastic, fault-tolerant PyTorch training.

`torchelastic run` starts a job from the command line; from Python:

    from torchelastic import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(nproc_per_node=2), main)(args)

A training whose processes live on when others are lost:

    import torchelastic
    from torchelastic.p2p import CoordinatorP2P

    torchelastic.train(CoordinatorP2P(), train_step, state)

Layout, from top to bottom; nothing imports from a layer above its own:

    testing/              the checker of the laws, and the simulated control plane

    cli/, distributed/    argv becomes a job: `torchelastic run` and its module entry points
    dashboard/            a page that shows a job

    integrations/         Lightning, Transformers and Accelerate
    doctor/               what to check before a long run

    p2p, train_loop, state, coordinator, worker_stats, fault_injection
                          the module names of release 0.1

    agent/                one per node: starts, watches and stops the workers of the node
    launcher/             a job from Python: `elastic_launch`
    torchrun/             the rendezvous for stock torchrun
    training/             the loop of a resident worker: state, process group, rolling back
    multiprocessing/      starting processes, and the error files they leave

    worker/               what runs inside a worker
    timer/                blocks that must end in time
    metrics/              what happened in numbers, and numbers of the user's

    rendezvous/           how the nodes agree on a world; the store they agree through
    snapshot/             states in memory, and their copies on other nodes
    checkpoint/           states in storage
    data/                 samples shared out in worlds of any size, each once an epoch
    utils/                names of release 0.1

    events/               what happened and why, as JSON lines
    event_logger, jobs    events of the user's; the jobs of this machine

    config, env, errors, clock, codec, failure, faults, milestones, records,
    stalls, http1, http1_socket, tensor_bytes, terminal_text, backends, torch_versions
    torch_private         the only use of torch's private names

The public names are loaded when they are first used: importing the package imports neither torch
nor anything else that takes time.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own takes milliseconds to import, in every process
if TYPE_CHECKING:
    from torchelastic.config import LaunchConfig
    from torchelastic.coordinator import Coordinator, NonRetryableException, StopException
    from torchelastic.launcher import elastic_launch
    from torchelastic.state import State
    from torchelastic.train_loop import run_train, train
    from torchelastic.training.torch_state import TorchState
    from torchelastic.worker_stats import SimpleWorkerStats, WorkerStats

__version__ = "1.0.0.dev0"

__all__ = [
    "Coordinator",
    "LaunchConfig",
    "NonRetryableException",
    "SimpleWorkerStats",
    "State",
    "StopException",
    "TorchState",
    "WorkerStats",
    "__version__",
    "elastic_launch",
    "run_train",
    "train",
]

_HOME = {
    "Coordinator": "torchelastic.coordinator",
    "LaunchConfig": "torchelastic.config",
    "NonRetryableException": "torchelastic.coordinator",
    "SimpleWorkerStats": "torchelastic.worker_stats",
    "State": "torchelastic.state",
    "StopException": "torchelastic.coordinator",
    "TorchState": "torchelastic.training.torch_state",
    "WorkerStats": "torchelastic.worker_stats",
    "elastic_launch": "torchelastic.launcher",
    "run_train": "torchelastic.train_loop",
    "train": "torchelastic.train_loop",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'torchelastic' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
