"""Sharded state that looks replicated: FSDP1, DeepSpeed and torch's ZeRO hold shards in plain
tensors.

Each rank has other values under the same names. To keep one rank's as the state of all would go
unnoticed, so these are refused. They are found by the names of their classes: importing the
frameworks takes seconds, and they need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from torchelastic import torch_private
from torchelastic.errors import ConfigError

#: By the beginning of a class's full name, what it belongs to.
_KINDS = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP1",
    "torch.distributed._shard.sharded_tensor.": "FSDP1",
    "deepspeed.runtime.": "DeepSpeed",
    "torch.distributed.optim.zero_redundancy_optimizer.": "ZeRO",
}
_ADVICE = {
    "FSDP1": "use FSDP2 (fully_shard), or do not keep it, and save checkpoints with "
    "torch.distributed.checkpoint",
    "DeepSpeed": "use FSDP2 (fully_shard), or do not keep it, and save checkpoints with "
    "DeepSpeed's own save_checkpoint",
    "ZeRO": "use FSDP2 (fully_shard) or a plain optimizer, or do not keep it, and save what "
    "consolidate_state_dict collects",
}


def refuse(models: Iterable[Any], optimizers: Iterable[Any]) -> None:
    """Raise ConfigError if a framework shards one of these in plain tensors."""
    for found in _objects(models, optimizers):
        if kind := kind_of(found):
            raise refusal(type(found).__qualname__, kind)


def refusal(what: str, kind: str) -> ConfigError:
    """Return the error about a model, an optimizer or a framework's strategy."""
    return ConfigError(
        f"Cannot keep {what}: {kind} shards the state over ranks in plain tensors, which look like "
        f"replicated ones. Fix: {_ADVICE[kind]}."
    )


def kind_of(found: object) -> str:
    """Return the framework that shards it, such as "FSDP1"; an empty text if none does."""
    if hasattr(found, "ds_id"):  # a parameter that ZeRO-3 partitions
        return "DeepSpeed"
    if torch_private.is_of_fsdp1(found):
        return "FSDP1"
    names = [f"{one.__module__}.{one.__qualname__}" for one in type(found).__mro__]
    kinds = (kind for name in names for start, kind in _KINDS.items() if name.startswith(start))
    return next(kinds, "")


def _objects(models: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[object]:
    for model in models:
        yield model
        if isinstance(model, nn.Module):
            yield from model.modules()
            yield from model.parameters()
    for optimizer in optimizers:
        yield optimizer
        for group in getattr(optimizer, "param_groups", ()):
            yield from group["params"]
