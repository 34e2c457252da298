"""A rehearsal of the optimizer's step, by a worker that waits for its first world.

When a process computes with DTensors for the first time, torch derives the placement of each
operation's result, for each shape: 2 to 4 ms each. In a replacement's first step all other workers
would wait for that. A rehearsal derives them in advance, with tensors that have no memory ("meta").
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchelastic.tensors.dtensors import is_sharded, local_of, shard_like

log = logging.getLogger(__name__)


def rehearse(optimizers: Iterable[Optimizer]) -> None:
    """Take steps with copies of these optimizers that have neither values nor hooks."""
    for optimizer in optimizers:
        # Others may do more in a step than compute.
        if type(optimizer).__module__.startswith("torch.optim."):
            try:
                _rehearse(optimizer)
            except Exception as error:  # only the first step takes longer
                log.debug("Cannot rehearse a step of %s: %s", type(optimizer).__name__, error)


def _rehearse(optimizer: Any) -> None:
    copy: Any = object.__new__(type(optimizer))
    groups = [_without_values(group) for group in optimizer.param_groups]
    copy.__setstate__(
        {"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups}
    )
    for _ in range(2):  # the first step makes the state that later ones update
        type(optimizer).step.__wrapped__(copy)  # without the hooks that all optimizers share


def _without_values(group: Mapping[str, Any]) -> dict[str, Any]:
    sharded = [one for one in group["params"] if is_sharded(one) and one.requires_grad]
    made: dict[str, Any] = dict(group)
    if made.get("foreach", False) is None:  # torch would decide by the device
        made["foreach"] = bool(sharded) and sharded[0].is_cuda and not made.get("fused")
    if not made.get("foreach"):  # one by one: each shape once
        sharded = [*{(one.shape, one.placements, one.dtype): one for one in sharded}.values()]
    made["params"] = _parameters(sharded)
    return made


def _parameters(templates: Sequence[Any]) -> list[torch.nn.Parameter]:
    made = []
    for template in templates:
        part = torch.empty_like(local_of(template), device="meta")
        parameter = torch.nn.Parameter(shard_like(template, part))
        parameter.grad = shard_like(template, part)
        made.append(parameter)
    return made
