"""A step in micro-batches: each with its part of the weight, gradients exchanged in the last.

DDP's own `no_sync` puts back what it found when it is left. A step that fails in the middle may not
be left: if its loop has a name, the error holds it for as long as anybody holds the error. The next
step would then find the exchange switched off, and put that back after its last micro-batch: ranks
would part without a word. So here nothing is put back: every micro-batch is told whether to
exchange, and a loop whose successor has begun has no say any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchelastic.data.batch_policy import Cut
from torchelastic.errors import ConfigError

#: Samples `start` to `stop` of a batch.
Cutter = Callable[[Any, int, int], Any]

#: Which loop it is that a model takes part in.
_LOOPS: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


@dataclass(frozen=True)
class Micro:
    """A micro-batch."""

    data: Any
    #: How many samples it has; 0 where `data` only stands in.
    samples: int
    #: What its mean loss is multiplied with.
    scale: float
    #: Whether this is the last one, whose backward exchanges gradients.
    last: bool

    def backward(self, loss: torch.Tensor) -> None:
        """`loss` is a mean over this micro-batch, on every rank, also where data stands in.

        With a GradScaler: `scaler.scale(loss * micro.scale).backward()`.
        """
        (loss * self.scale).backward()  # type: ignore[no-untyped-call]


def in_micro_batches(
    batch: Any, cuts: Sequence[Cut], models: Sequence[nn.Module], cut: Cutter | None = None
) -> Iterator[Micro]:
    """See `BatchPolicy.accumulate`."""
    if cut is None:
        _check_length(batch, expected=max(cuts[-1].stop, 1))
    return _loop(batch, cuts, models, cut or cut_tree)


def _loop(
    batch: Any, cuts: Sequence[Cut], models: Sequence[nn.Module], cut: Cutter
) -> Iterator[Micro]:
    this = object()
    for model in models:
        _LOOPS[model] = this
    try:
        for number, (start, stop, scale) in enumerate(cuts, 1):
            last = number == len(cuts)
            _exchange(models, this, last)
            # What stands in for nothing is a sample that is there.
            data = cut(batch, start, stop) if stop > start else cut(batch, 0, 1)
            yield Micro(data, stop - start, scale, last)
    finally:
        # For a loop that is left by `break`; one whose successor has begun must not touch it.
        _exchange(models, this, True)


def _exchange(models: Sequence[nn.Module], this: object, on: bool) -> None:
    """Have the next forward and backward exchange gradients, or not."""
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
    """Every tensor and array of the tree, and every list of values, from `start` to `stop`."""
    if isinstance(batch, Mapping):
        return {key: cut_tree(value, start, stop) for key, value in batch.items()}
    if _is_branch(batch):
        parts = [cut_tree(part, start, stop) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[start:stop]


def _is_branch(value: Any) -> bool:
    """A list or tuple of trees, and not one of texts or numbers, one for each sample."""
    return isinstance(value, list | tuple) and any(
        isinstance(part, Mapping | list | tuple) or hasattr(part, "shape") for part in value
    )


def _check_length(batch: Any, *, expected: int) -> None:
    found = set(_lengths(batch))
    if found != {expected}:
        told = " and ".join(map(str, sorted(found, key=str))) or "no"
        raise ConfigError(
            f"This rank's share is {expected} samples, but the batch has {told}: pass total= for "
            "the smaller batch at the end of an epoch, cut= for a batch that is not made of tensors"
            " with the samples in their first dimension."
        )


def _lengths(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, Mapping) or _is_branch(batch):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lengths(part)
    elif hasattr(batch, "shape"):
        yield batch.shape[0] if len(batch.shape) else None
    else:
        yield len(batch) if hasattr(batch, "__len__") else None
