"""A state as a tree of this worker's shards, to send to a worker with the same coordinates.

A DTensor becomes a dict with one key, `SHARD`, and its local part. Optimizer state must be sharded
like its parameter: nothing else tells the receiver how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchelastic.errors import ConfigError
from torchelastic.tensors.dtensors import is_sharded, local_or_whole, shard_like
from torchelastic.tensors.module_state import parameters_of

SHARD = "torchelastic.shard"


def to_shards(tree: Any) -> Any:
    """Replace every DTensor of a tree by its local part."""
    if is_sharded(tree):
        return {SHARD: local_or_whole(tree)}
    if type(tree) is dict:
        return {key: to_shards(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(to_shards(value) for value in tree)
    return tree


def from_shards(
    tree: Mapping[str, Any],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Reverse `to_shards` for a state of these models and optimizers. `parameters` are those that
    its gradients belong to."""
    made = dict(tree)
    made["model"] = [
        saved | {"parameters": _like(saved["parameters"], dict(model.named_parameters()))}
        for saved, model in zip(tree["model"], models, strict=True)
    ]
    made["optimizer"] = [
        saved | {"state": _state(saved["state"], parameters_of(optimizer))}
        for saved, optimizer in zip(tree["optimizer"], optimizers, strict=True)
    ]
    made["gradients"] = [
        _whole(saved, parameter)
        for saved, parameter in zip(tree["gradients"], parameters, strict=True)
    ]
    return made


def check_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizer state that is sharded otherwise than its parameter, or inside of a dict."""
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for name, value in entries.items():
                if not _is_sendable(value, parameter):
                    raise ConfigError(
                        f"{type(optimizer).__name__} keeps {name!r} sharded otherwise than its "
                        "parameter, which torchelastic.train does not support: use an optimizer "
                        "whose state has the shape of its parameters."
                    )


def _is_sendable(value: Any, parameter: Any) -> bool:
    if not is_sharded(value):
        inner = value.values() if isinstance(value, dict) else value
        several = isinstance(value, dict | list | tuple)
        return not several or all(_is_sendable(one, None) for one in inner)
    return (
        is_sharded(parameter)
        and value.shape == parameter.shape
        and value.placements == parameter.placements
    )


def _like(saved: Mapping[str, Any], live: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    # A parameter that is missing here is reported when the tree is loaded.
    return {name: _whole(value, live.get(name)) for name, value in saved.items()}


def _state(saved: Mapping[Any, Any], parameters: Sequence[torch.Tensor]) -> dict[Any, Any]:
    return {
        key: {
            name: _whole(value, parameters[key] if isinstance(key, int) else None)
            for name, value in entries.items()
        }
        for key, entries in saved.items()
    }


def _whole(value: Any, template: Any) -> Any:
    if type(value) is dict and list(value) == [SHARD]:
        return shard_like(template, value[SHARD]) if is_sharded(template) else value[SHARD]
    return value
