"""Shared state, the same on every rank: as a tree to send to other ranks, and loaded from one.

Parameters and buffers keep their identity when they are loaded: optimizers, DDP and the user's own
variables refer to them. Optimizer state is taken exactly as it was, which
`Optimizer.load_state_dict` does not do: it casts state to the parameters' type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchelastic import torch_private
from torchelastic.errors import TransferError
from torchelastic.tensors.dtensors import local_or_whole
from torchelastic.tensors.small_state import Hyperparameters, fits

#: The form of a state: a line for each thing that must be the same on all ranks, with its value.
Form = Sequence[tuple[str, str]]


def submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and all below it, in any order; `modules()` takes six times as long."""
    seen: set[nn.Module] = set()
    left: list[nn.Module | None] = [module]
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.add(one)
            yield one
            left.extend(torch_private.children_of(one).values())


def named_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all buffers by name; soon done if there are none, as in most models."""
    if any(map(torch_private.buffers_of, submodules(module))):
        return dict(module.named_buffers())
    return {}


def form_number(form: Form) -> int:
    """Return a number that is the same for equal forms, and 0 for an empty one."""
    digest = hashlib.blake2b(form_text(form).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") if form else 0


def form_text(form: Form) -> str:
    return json.dumps(list(form))


def module_tree(module: nn.Module) -> dict[str, Any]:
    """Return parameters and all buffers, including non-persistent ones."""
    return {
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
    }


def state_dict_of(module: nn.Module, kept: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the module's state_dict with these parameters and buffers instead of its own."""
    names = {id(one): name for name, one in (*module.named_parameters(), *module.named_buffers())}
    # Tied parameters have one name among the parameters and several here.
    return {
        key: kept[names[id(value)]] if id(value) in names else value
        for key, value in module.state_dict(keep_vars=True).items()
    }


def form_of_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield what must be the same on all workers, in words; buffers may differ."""
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            dtype = str(parameter.dtype).removeprefix("torch.")
            yield parameter_name(name, number), f"{dtype} of shape {tuple(parameter.shape)}"


def parameter_name(name: str, model: int) -> str:
    """Return a parameter of the first or of another model in words.

    >>> parameter_name("0.weight", 0), parameter_name("0.weight", 1)
    ("parameter '0.weight'", "parameter '0.weight' of model 1")
    """
    return f"parameter '{name}'" + (f" of model {model}" if model else "")


def form_of_optimizers(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str]]:
    for number, optimizer in enumerate(optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        groups = f"parameters by group: {', '.join(map(str, sizes))}"
        yield f"optimizer {number}", f"{type(optimizer).__name__} ({groups})"


def differences(own: Form, others: Form, here: str, there: str) -> Iterator[str]:
    """Yield the differences of two forms in words; `here` and `there` say whose they are."""
    mine, theirs = dict(own), dict(others)
    for what, how in own:
        if what not in theirs:
            yield f"{what} exists on {here}, not on {there}"
        elif theirs[what] != how:
            yield f"{what} is {how} on {here} and {theirs[what]} on {there}"
    yield from (f"{what} exists on {there}, not on {here}" for what in theirs if what not in mine)
    for (mine_next, _), (theirs_next, _) in zip_longest(own, others, fillvalue=("nothing", "")):
        if mine_next != theirs_next:
            yield f"{here} has {mine_next}, {there} {theirs_next} in its place"


@torch.no_grad()
def load_module(module: nn.Module, tree: Mapping[str, Any]) -> None:
    live = dict(module.named_parameters())
    if list(live) != list(tree["parameters"]):
        different = sorted(set(live) ^ set(tree["parameters"]))
        raise TransferError(
            f"This worker's model differs from its peers' in {different[:3]}: every rank must "
            "build the same model."
        )
    for name, parameter in live.items():
        fill(parameter, tree["parameters"][name])
    for name, value in tree["buffers"].items():
        _load_buffer(module, name, value)


def _load_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    buffers = torch_private.buffers_of(owner)
    buffers[last] = taken(buffers.get(last), value)


def optimizer_tree(optimizer: Optimizer) -> dict[str, Any]:
    """Return state by the parameter's index, as in `state_dict`, and hyperparameters."""
    return {"state": optimizer_state(optimizer), "groups": Hyperparameters(optimizer).tree()}


def optimizer_state(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    numbers = {p: i for i, p in enumerate(parameters_of(optimizer))}
    return {
        numbers[key] if isinstance(key, torch.Tensor) else key: dict(entries)
        for key, entries in optimizer.state.items()
    }


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, tree: Mapping[str, Any]) -> None:
    parameters = parameters_of(optimizer)
    Hyperparameters(optimizer).load(tree["groups"])
    state = optimizer.state
    wanted = {
        parameters[key] if isinstance(key, int) else key: entries
        for key, entries in tree["state"].items()
    }
    for key in [key for key in state if key not in wanted]:
        del state[key]
    for key, entries in wanted.items():
        live = state[key]
        state[key] = {name: taken(live.get(name), value) for name, value in entries.items()}


@torch.no_grad()
def fill(live: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy these values into a tensor, unless they were received into its own memory."""
    # A sharded tensor has no address, only its part has: all of them return 0.
    own, received = local_or_whole(live), local_or_whole(value)
    is_there = live is value or own.data_ptr() == received.data_ptr() != 0
    return live if is_there else live.copy_(value)


def taken(live: Any, value: Any) -> Any:
    """Return the value, in the existing tensor's memory if it fits."""
    return fill(live, value) if fits(live, value) else value


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters by their indices in `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
