"""The parts that a `TorchState` is made of, as they were given: one object, several, or values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchelastic.data.ledger import Ledger
from torchelastic.data.progress import DataProgress
from torchelastic.snapshot.shards import is_plain, take_out
from torchelastic.tensors import tensor_tree

#: The format name in a checkpoint of this class.
FORMAT = "torchelastic.TorchState 2"
#: The prefix of optimizer tensors in it: `optimizer.state/0/3/exp_avg`.
OPTIMIZER = "optimizer"


def members(part: Any) -> list[Any]:
    """Return the objects of a part that is one, several or none."""
    if part is None:
        return []
    if type(part) is dict:
        return list(part.values())
    return list(part) if type(part) in (list, tuple) else [part]


def like(part: Any, items: Sequence[Any]) -> Any:
    """Return the items in the shape of the part."""
    if part is None:
        return None
    if type(part) is dict:
        return dict(zip(part, items, strict=True))
    return type(part)(items) if type(part) in (list, tuple) else items[0]


def cut_like(part: Any, items: Any) -> list[Any]:
    """Reverse `_like`: return the items of a part; each may be a dict itself."""
    return members(items) if type(part) in (dict, list, tuple) or part is None else [items]


def is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def modules(part: Any) -> list[nn.Module]:
    """Return the models, without DDP."""
    for model in members(part):
        _expect("model", model, nn.Module)
    return [
        model.module if isinstance(model, DistributedDataParallel) else model
        for model in members(part)
    ]


def take_out_shards(solid: Mapping[str, Any]) -> list[str]:
    """Remove the sharded tensors from a fresh tree; return their names."""
    lasting = {
        "parameters": [model["parameters"] for model in solid["model"]],
        "state": [optimizer["state"] for optimizer in solid["optimizer"]],
    }
    return list(take_out(lasting))


def optimizers_of(part: Any) -> list[Optimizer]:
    for optimizer in members(part):
        _expect("optimizer", optimizer, Optimizer)
    return members(part)


def _expect(name: str, part: object, kind: type) -> None:
    if not isinstance(part, kind):
        raise TypeError(f"'{name}' must be a {kind.__qualname__}, not a {type(part).__qualname__}.")


def stateful(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return all objects but models and optimizers, by name."""
    found = {}
    for name, part in objects.items():
        if name in ("model", "optimizer"):
            continue
        for number, one in enumerate(members(part)):
            if not tensor_tree.is_stateful(one):
                raise TypeError(
                    f"'{name}', a {type(one).__qualname__}, has no state_dict and load_state_dict: "
                    "add them, or keep its state in values."
                )
            found[name if one is part else f"{name}.{number}"] = one
    return found


def sort(more: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Split `more` into the names of values and the objects."""
    objects = {name: part for name, part in more.items() if tensor_tree.is_stateful(part)}
    values = tuple(name for name in more if name not in objects)
    for name in values:
        tensor_tree.check(name, more[name])
    return values, objects


def refuse_names(more: Mapping[str, Any], kind: type) -> None:
    for name in more:
        if hasattr(kind, name) or name.startswith("_"):
            raise TypeError(
                f"A part cannot be named '{name}': TorchState already has that attribute."
            )


# --- commits -------------------------------------------------------------------------------------


def recorded(stateful: Mapping[str, Any], ledger: Ledger | None) -> list[DataProgress]:
    """Return the parts that record the samples of a step; none without a ledger."""
    found = progresses(stateful)
    if ledger is not None and not found:
        raise TypeError(
            "A ledger needs a sampler that records the samples of each step: pass an "
            "ElasticSampler or an ElasticStream as sampler."
        )
    return found if ledger is not None else []


def progresses(stateful: Mapping[str, Any]) -> list[DataProgress]:
    """Return the parts that know which samples they have handed out."""
    return [part for part in _told(stateful) if isinstance(part, DataProgress)]


def positions(stateful: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that say where training is in its data, by name."""
    return {
        name: part
        for name, part in stateful.items()
        if name.partition(".")[0] == "sampler"
        or isinstance(getattr(part, "progress", part), DataProgress)
    }


def listeners(stateful: Mapping[str, Any]) -> list[Callable[[], object]]:
    found = (getattr(part, "committed", None) for part in _told(stateful))
    return [method for method in found if callable(method)]


def _told(stateful: Mapping[str, Any]) -> list[Any]:
    """Return the objects to notify of commits: parts, and a loader's sampler; each once."""
    told = {}
    for part in stateful.values():
        known = getattr(part, "progress", None)
        one = known if isinstance(known, DataProgress) else part
        told[id(one)] = one
    return list(told.values())


# --- checkpoints ---------------------------------------------------------------------------------


def written_by(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return the tensors that only optimizers write."""
    written: list[torch.Tensor] = [p for model in models for p in model.parameters()]
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            written += [one for one in entries.values() if isinstance(one, torch.Tensor)]
    return written


def stored(
    step: int, model: Any, optimizers: Sequence[Mapping[str, Any]], rest: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a checkpoint's content as a tree of tensors and plain values."""
    # By name, so that they are found whether or not they are sharded at the time.
    named = take_out(state_of(optimizers), is_plain)
    skeleton, tensors = tensor_tree.flatten({**rest, "optimizer": optimizers})
    saved = {"format": FORMAT, "step": step, "model": model}
    return saved | {OPTIMIZER: named, "skeleton": skeleton, "tensors": tensors}


def state_of(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of optimizers in the form for `take_out` and `put_in`."""
    return {"parameters": [], "state": [optimizer["state"] for optimizer in optimizers]}
