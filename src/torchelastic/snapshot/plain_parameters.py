"""The check that all ranks have the same plain parameters.

A plain tensor is kept once, for all ranks. Pipeline stages, experts and other parameters that each
rank has for itself look the same: after a restart, all ranks would get those of one. So

    restore   compares the names and shapes of all ranks' states (`module_state.Form`)
    commit    the first ones of a generation compare some values of each plain parameter

and a difference is refused. DTensors say themselves what they are, and are not compared. Neither
are buffers, optimizer state and other parts: they may differ between ranks that train one model.

Values count as different only beyond rounding: a parameter that several ranks compute without
averaging it (a plain one beside tensor parallelism) may drift apart by that. Drift grows, so later
commits do not compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from torchelastic.errors import ConfigError
from torchelastic.snapshot.shards import is_plain
from torchelastic.tensors import agreement
from torchelastic.tensors.dtensors import is_sharded
from torchelastic.tensors.module_state import Form, differences, parameter_name

#: Values compared of each parameter, evenly spread over it.
SAMPLES = 16
#: The last commit of a generation that compares. Before it, only every power of two does: experts
#: that begin equal and get no samples at first differ later.
LAST_COMMIT = 64
#: Stands for infinity: differences of infinities are not numbers.
_HUGE = 1e30


def is_compared(commit: int) -> bool:
    """Return whether this commit of a generation compares, counted from 1.

    >>> [commit for commit in range(1000) if is_compared(commit)]
    [1, 2, 4, 8, 16, 32, 64]
    """
    return 0 < commit <= LAST_COMMIT and not commit & (commit - 1)


class PlainParameters:
    """The plain parameters of some modules, on this rank."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._names: list[str] = []

    def find(self) -> tuple[str, str]:
        """Find them, before they are compared; return their number as a line of a `Form`."""
        self._names = [name for name, one in self._parameters() if _is_compared(one)]
        return "the number of plain parameters", str(len(self._names))

    def check(self) -> None:
        """Collective: raise ConfigError if a parameter differs between ranks."""
        if not self._names:
            return
        live = dict(self._parameters())
        values = torch.stack([_samples(live.get(name)) for name in self._names])
        tolerances = [_tolerance(live.get(name)) for name in self._names]
        place = first_difference(*agreement.extremes(values), tolerances)
        if place is not None:
            said = agreement.gather(values[place].tolist())
            raise different_values(self._names[place], said)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, module in enumerate(self._modules):
            for name, one in module.named_parameters():
                yield parameter_name(name, number), one


def _is_compared(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and is_plain(parameter) and not is_sharded(parameter)


@torch.no_grad()
def _samples(parameter: torch.Tensor | None) -> torch.Tensor:
    """Return some of its values on the CPU; zeros if it is not there or not plain any more."""
    if parameter is None or not _is_compared(parameter) or not parameter.numel():
        return torch.zeros(SAMPLES)
    last = parameter.numel() - 1
    places = [last * number // (SAMPLES - 1) for number in range(SAMPLES)]
    tensor = parameter.detach()
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    at = torch.tensor(places, device=tensor.device)
    found = tensor[torch.unravel_index(at, tensor.shape)]
    found = torch.view_as_real(found).sum(-1) if found.is_complex() else found
    found = found.to(torch.float32)
    return torch.nan_to_num(found, nan=0.0, posinf=_HUGE, neginf=-_HUGE).cpu()


def _tolerance(parameter: torch.Tensor | None) -> float:
    """Return how much of its largest value a parameter's values may differ by."""
    coarse = torch.finfo(torch.float32).eps
    if parameter is not None and parameter.is_floating_point():
        coarse = max(coarse, torch.finfo(parameter.dtype).eps)
    return math.sqrt(coarse)


def first_difference(
    least: torch.Tensor, most: torch.Tensor, tolerances: Sequence[float]
) -> int | None:
    """Return the first row whose values differ between ranks, given the extremes of each value."""
    spread = (most - least).amax(1)
    scale = torch.maximum(least.abs(), most.abs()).amax(1)
    found = (spread > torch.tensor(tolerances) * scale).nonzero()
    return int(found[0]) if len(found) else None


def different_values(name: str, said: Sequence[Sequence[float]]) -> ConfigError:
    """Return the error for a parameter, given its values on each rank."""
    distances = [max(abs(a - b) for a, b in zip(said[0], one, strict=True)) for one in said]
    other = distances.index(max(distances))
    return ConfigError(
        f"Cannot keep {name}: it is a plain tensor with other values on rank {other} than on rank "
        "0, and a restart would give all ranks those of one. Fix: make it a DTensor "
        "(docs/guides/parallelism.md), or keep it equal on all ranks; else do not keep it, and "
        "save checkpoints with torch.distributed.checkpoint. If all ranks train one model by DDP, "
        "one of them computed wrongly or its memory changed (docs/guides/bad-numbers.md)."
    )


def different_forms(said: Sequence[Form]) -> ConfigError:
    """Return the error for states of different forms, given that of each rank."""
    other, form = next((rank, form) for rank, form in enumerate(said) if form != said[0])
    what = next(differences(said[0], form, "rank 0", f"rank {other}"))
    return ConfigError(
        f"Cannot keep this state: {what}, and a restart would give all ranks those of one. Fix: "
        "give all ranks the same model, optimizers and parts; else do not keep it, and save "
        "checkpoints with torch.distributed.checkpoint."
    )
