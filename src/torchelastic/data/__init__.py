"""Worker process: data loading in a world that changes: each sample once an epoch.

order        the order of an epoch: a permutation that is computed, not stored
shares       the samples of a step that each rank takes, as pure functions
progress     samples committed, and samples handed out since
sampler      ElasticSampler
loader       DataLoader
stateful     the same loader on torchdata's StatefulDataLoader
streaming    ElasticStream: records in numbered shards of unknown length
fixed_batch  BatchPolicy.fixed: numbered micro-batches and the tree of their sum
batch_policy BatchPolicy: the batch size of a step, and each rank's share of it
accumulation a step in micro-batches, with the right weights
learning_rate SampleSchedule: learning rates that follow samples instead of steps
ledger       Ledger: the samples that each committed step used, as JSON lines
verdict      checks that ledger lines use every sample exactly once
checker      the same check as a command, over files
own_rank     the rank of this process, and the world size

The names below are loaded when they are first used: most of them need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.data.batch_policy import BatchPolicy
    from torchelastic.data.learning_rate import SampleSchedule
    from torchelastic.data.ledger import Ledger
    from torchelastic.data.loader import DataLoader
    from torchelastic.data.sampler import ElasticSampler
    from torchelastic.data.stateful import StatefulDataLoader
    from torchelastic.data.streaming import ElasticStream

__all__ = [
    "BatchPolicy",
    "DataLoader",
    "ElasticSampler",
    "ElasticStream",
    "Ledger",
    "SampleSchedule",
    "StatefulDataLoader",
]

_HOME = {
    "BatchPolicy": "torchelastic.data.batch_policy",
    "DataLoader": "torchelastic.data.loader",
    "ElasticSampler": "torchelastic.data.sampler",
    "ElasticStream": "torchelastic.data.streaming",
    "Ledger": "torchelastic.data.ledger",
    "SampleSchedule": "torchelastic.data.learning_rate",
    "StatefulDataLoader": "torchelastic.data.stateful",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'torchelastic.data' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
