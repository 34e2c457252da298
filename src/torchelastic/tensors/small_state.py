"""Small state: the parts that are copied before every step and put back when it is undone.

Hyperparameters of optimizers, schedulers, GradScaler, samplers, the user's own parts.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from torchelastic import torch_private
from torchelastic.tensors import tensor_tree
from torchelastic.torch_private import SCALER_TENSORS

#: Values that can be kept as they are.
_PLAIN = frozenset({int, float, str, bool, type(None), bytes, complex, torch.device, torch.dtype})


def copied(value: Any) -> Any:
    """Return a deep copy of a tree."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: one if type(one) in _PLAIN else copied(one) for key, one in value.items()}
    if kind is list:
        return [one if type(one) in _PLAIN else copied(one) for one in value]
    if kind is tuple:
        return tuple([one if type(one) in _PLAIN else copied(one) for one in value])
    return _copied_object(value)


def _copied_object(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):  # OrderedDict, Counter, defaultdict
        made = value.copy()
        for key, one in value.items():
            made[key] = copied(one)  # not `update`: a Counter adds
        return made
    if hasattr(value, "__array__"):
        return value.copy()
    # Functions, enumerations and the like: not changed in place.
    return value


def put_back(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Make the dict equal to the saved one."""
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, value in saved.items():
        live[key] = _placed(live.get(key), value)


@torch.no_grad()
def _placed(live: Any, saved: Any) -> Any:
    """Return a copy of the saved value; tensors in place, since others may hold them."""
    return live.copy_(saved) if fits(live, saved) else copied(saved)


def fits(live: Any, saved: Any) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and isinstance(saved, torch.Tensor)
        and live.shape == saved.shape
        and live.dtype == saved.dtype
    )


class _Packer:
    """Copies a tree. Most hold only numbers and strings, which `marshal` writes in one call.

    Only the process that wrote the bytes reads them.
    """

    def __init__(self) -> None:
        self._plain = True

    def pack(self, tree: Any) -> Any:
        if self._plain:
            try:
                return marshal.dumps(tree)
            except ValueError:  # it contains a tensor, or a subclass of dict
                self._plain = False
        return copied(tree)

    @staticmethod
    def unpack(packed: Any) -> Any:
        return marshal.loads(packed) if type(packed) is bytes else copied(packed)


class Saver(Protocol):
    """Saves one part at the beginning of a step and restores it."""

    def save(self) -> Any: ...

    def restore(self, saved: Any) -> None: ...


class Hyperparameters:
    """The hyperparameters in an optimizer's groups, such as the learning rate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._packer = _Packer()
        #: The last saved values, if a comparison with them shows every change.
        self._seen: list[dict[str, Any]] | None = None
        self._packed: Any = None

    def tree(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._groups
        ]

    def save(self) -> Any:
        if self._seen is None or self._groups != self._seen:
            tree = self.tree()
            self._packed = self._packer.pack(tree)
            unchanging = all(_is_unchanging(value) for one in tree for value in one.values())
            self._seen = [dict(group) for group in self._groups] if unchanging else None
        return self._packed

    def restore(self, packed: Any) -> None:
        self.load(_Packer.unpack(packed))

    def load(self, saved: Sequence[dict[str, Any]]) -> None:
        if len(saved) > len(self._groups):
            raise ValueError(
                f"The optimizer has {len(self._groups)} parameter groups, expected {len(saved)}: "
                "give it the same groups on every rank before you make a TorchState of it."
            )
        del self._groups[len(saved) :]  # a group added in the step that is undone
        for group, values in zip(self._groups, saved, strict=True):
            parameters = group.pop("params")
            put_back(group, values)
            group["params"] = parameters


def _is_unchanging(value: Any) -> bool:
    return type(value) in _PLAIN or (
        type(value) is tuple and all(type(one) in _PLAIN for one in value)
    )


class Stateful:
    """A scheduler, a sampler, or any object with state_dict and load_state_dict."""

    def __init__(self, part: Any) -> None:
        self._state_dict: Callable[[], Any] = part.state_dict
        self._load: Callable[[Any], object] = part.load_state_dict
        self._packer = _Packer()

    def save(self) -> Any:
        return self._packer.pack(self._state_dict())

    def restore(self, packed: Any) -> None:
        self._load(_Packer.unpack(packed))


class Scaler:
    """A GradScaler, saved without reading its scale as a number, which would wait for the GPU."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler: Any = scaler

    def save(self) -> tuple[Any, Any, dict[Any, Any]]:
        attributes, stages = vars(self._scaler), torch_private.scaler_stages(self._scaler)
        scale, growth = (copied(attributes[name]) for name in SCALER_TENSORS)
        return scale, growth, {key: dict(value) for key, value in stages.items()}

    def restore(self, saved: tuple[Any, Any, dict[Any, Any]]) -> None:
        attributes, stages = vars(self._scaler), torch_private.scaler_stages(self._scaler)
        *tensors, kept = saved
        for name, value in zip(SCALER_TENSORS, tensors, strict=True):
            attributes[name] = _placed(attributes[name], value)
        # Otherwise they would show gradients as already unscaled, and the redo would fail.
        stages.clear()
        stages.update({key: dict(value) for key, value in kept.items()})


class Value:
    """A part that is a value: a number, a tensor, a tuple."""

    def __init__(self, owner: object, name: str) -> None:
        self._values = vars(owner)
        self._name = name

    def save(self) -> Any:
        value = self._values[self._name]
        return value if type(value) in _PLAIN else copied(value)

    def restore(self, saved: Any) -> None:
        self._values[self._name] = _placed(self._values[self._name], saved)


def saver_of(part: Any) -> Saver:
    """Return the saver of an object."""
    if isinstance(part, torch.amp.GradScaler) and part.is_enabled():
        return Scaler(part)
    if not tensor_tree.is_stateful(part):
        raise TypeError(f"{type(part).__name__} has no state_dict and load_state_dict.")
    return Stateful(part)
