"""A step in micro-batches: each with its part of the weight, gradients exchanged in the last.

DDP's own `no_sync` restores the previous setting on exit. A step that fails in the middle may never
exit: the error's traceback can keep its loop alive. The next step would then find the exchange
switched off and restore that after its last micro-batch, so ranks would silently diverge. So here
nothing is restored: every micro-batch sets whether to exchange, and an old loop changes nothing
once the next one has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchelastic.data.batch_policy import MicroBatchSlice
from torchelastic.errors import ConfigError

#: Samples `start` to `stop` of a batch.
Cutter = Callable[[Any, int, int], Any]

#: The latest loop of each model.
_LOOPS: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


@dataclass(frozen=True)
class Micro:
    """A micro-batch."""

    data: Any
    #: The number of samples; 0 where `data` is only a placeholder.
    samples: int
    #: The factor for its mean loss.
    scale: float
    #: This is the last one; its backward exchanges gradients.
    last: bool

    def backward(self, loss: torch.Tensor, scaler: Any = None) -> None:
        """Run backward. `loss` is the mean over this micro-batch, also for a placeholder; `scaler`
        is the GradScaler, if the script has one."""
        weighted = loss * self.scale
        (weighted if scaler is None else scaler.scale(weighted)).backward()


def in_micro_batches(
    batch: Any,
    cuts: Sequence[MicroBatchSlice],
    models: Sequence[nn.Module],
    cut: Cutter | None = None,
) -> Iterator[Micro]:
    """See `BatchPolicy.accumulate`."""
    if cut is None:
        check_length(batch, expected=max(cuts[-1].stop, 1))
    return _loop(batch, cuts, models, cut or cut_tree)


def _loop(
    batch: Any, cuts: Sequence[MicroBatchSlice], models: Sequence[nn.Module], cut: Cutter
) -> Iterator[Micro]:
    this = object()
    for model in models:
        _LOOPS[model] = this
    try:
        for number, (start, stop, scale) in enumerate(cuts, 1):
            last = number == len(cuts)
            _exchange(models, this, last)
            # An empty micro-batch gets a placeholder sample.
            data = cut(batch, start, stop) if stop > start else cut(batch, 0, 1)
            yield Micro(data, stop - start, scale, last)
    finally:
        # For a loop that is left by `break`; one whose successor has begun must not touch it.
        _exchange(models, this, True)


def _exchange(models: Sequence[nn.Module], this: object, on: bool) -> None:
    """Switch the gradient exchange of the next forward and backward on or off."""
    for model in models:
        if _LOOPS[model] is this:
            _switch(model, on)


def _switch(model: Any, on: bool) -> None:
    if hasattr(model, "set_requires_gradient_sync"):  # fully_shard
        model.set_requires_gradient_sync(on)
    elif hasattr(model, "require_backward_grad_sync"):  # DDP: what its no_sync sets
        model.require_backward_grad_sync = on


# --- cutting --------------------------------------------------------------------------------------


def cut_tree(batch: Any, start: int, stop: int) -> Any:
    """Slice every tensor, array and list of values in the tree from `start` to `stop`."""
    if isinstance(batch, Mapping):
        return {key: cut_tree(value, start, stop) for key, value in batch.items()}
    if _is_branch(batch):
        parts = [cut_tree(part, start, stop) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[start:stop]


def _is_branch(value: Any) -> bool:
    """True for a list or tuple of trees; False for one value per sample."""
    return isinstance(value, list | tuple) and any(
        isinstance(part, Mapping | list | tuple) or hasattr(part, "shape") for part in value
    )


def check_length(batch: Any, *, expected: int) -> None:
    found = set(_lengths(batch))
    if found != {expected}:
        told = " and ".join(map(str, sorted(found, key=str))) or "no"
        raise ConfigError(
            f"This rank's share is {expected} samples, but the batch has {told}. Pass total= for "
            "the smaller batch at the end of an epoch, or cut= if the batch is not made of tensors "
            "whose first dimension is the samples."
        )


def _lengths(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, Mapping) or _is_branch(batch):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lengths(part)
    elif hasattr(batch, "shape"):
        yield batch.shape[0] if len(batch.shape) else None
    else:
        yield len(batch) if hasattr(batch, "__len__") else None
