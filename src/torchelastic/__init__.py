"""Elastic, fault-tolerant PyTorch training.

`torchelastic run` starts a job from the command line; from Python:

    from torchelastic import LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(nproc_per_node=2), train)(args)

Layout, from top to bottom; nothing imports from a layer above its own:

    cli/, distributed/    argv becomes a job: `torchelastic run` and its module entry points
    launcher              the same from Python: `elastic_launch`
    agent/                one per node: starts, watches and stops the workers of the node
    multiprocessing/      starting processes, and the error files they leave
    worker/               what runs inside a worker
    rendezvous/           how the nodes agree on a world; the store they agree through
    events/               what happened and why, as JSON lines
    config, env, errors, clock, failure

The public names are loaded when they are first used: importing the package imports neither torch
nor anything else that takes time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.config import LaunchConfig
    from torchelastic.launcher import elastic_launch

__version__ = "1.0.0.dev0"

__all__ = ["LaunchConfig", "__version__", "elastic_launch"]

_HOME = {
    "LaunchConfig": "torchelastic.config",
    "elastic_launch": "torchelastic.launcher",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'torchelastic' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
