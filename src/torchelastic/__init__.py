"""Elastic, fault-tolerant PyTorch training.

`torchelastic run` starts a job from the command line; from Python:

    from torchelastic import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(nproc_per_node=2), main)(args)

A training whose processes live on when others are lost:

    import torchelastic
    from torchelastic.p2p import CoordinatorP2P

    torchelastic.train(CoordinatorP2P(), train_step, state)

Layout, from top to bottom; nothing imports from a layer above its own:

    cli/, distributed/    argv becomes a job: `torchelastic run` and its module entry points
    chaos/                the checker of the laws of a job

    compat/               APIs of torchelastic 0.1 and 0.2, and the rendezvous for stock torchrun
    hosts/                several machines from one command, over ssh
    integrations/         Lightning, Transformers and Accelerate
    ray/                  a job on the nodes of a Ray cluster
    torchx                the component for `torchx run`
    doctor/, dashboard/   checks before a long run; a page that shows a job

    launcher/             a job from Python: `elastic_launch`

    training/             the loop of an in-process worker: state, process group, rolling back

    agent/                one per node: starts, watches and stops the workers of the node

    snapshot/             states in memory, and their copies on other nodes

    worker/               what runs inside a worker
    timer/, metrics/      blocks that must end in time; numbers of the job and of the user
    checkpoint/, data/    states in storage; each sample once an epoch in worlds of any size

    cluster/              where a job runs: what schedulers and clouds say, how to submit to them
    rendezvous/           how the nodes agree on a world; the store they agree through
    tensors/              the parts of a training state, as trees of tensors and as bytes

    transport/            connections between agents

    events/               what happened and why, as JSON lines, and what that says of a job
    worker_counters/      what a worker counts for its agent

    backoff, config, env, errors, clock, faults, records, side_tasks, best_effort, torch_versions
    system/               Linux calls, memory limits, cgroups
    torch_backends        the only place that knows the back ends of torch.distributed by name
    torch_private         the only use of torch's private names

Import paths of earlier releases are listed in `compat/old_names.py`.

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
    from torchelastic.training.sharded.mesh import mesh
    from torchelastic.training.step_guard import Guard
    from torchelastic.training.torch_state import TorchState
    from torchelastic.training.train import run_train, train
    from torchelastic.worker.leaving import leaving
    from torchelastic.worker_stats import SimpleWorkerStats, WorkerStats

__version__ = "1.0.0.dev0"

__all__ = [
    "Coordinator",
    "Guard",
    "LaunchConfig",
    "NonRetryableException",
    "SimpleWorkerStats",
    "State",
    "StopException",
    "TorchState",
    "WorkerStats",
    "__version__",
    "elastic_launch",
    "leaving",
    "mesh",
    "run_train",
    "train",
]

_HOME = {
    "Coordinator": "torchelastic.coordinator",
    "Guard": "torchelastic.training.step_guard",
    "LaunchConfig": "torchelastic.config",
    "NonRetryableException": "torchelastic.coordinator",
    "SimpleWorkerStats": "torchelastic.worker_stats",
    "State": "torchelastic.state",
    "StopException": "torchelastic.coordinator",
    "TorchState": "torchelastic.training.torch_state",
    "WorkerStats": "torchelastic.worker_stats",
    "elastic_launch": "torchelastic.launcher",
    "leaving": "torchelastic.worker.leaving",
    "mesh": "torchelastic.training.sharded.mesh",
    "run_train": "torchelastic.training.train",
    "train": "torchelastic.training.train",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'torchelastic' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
