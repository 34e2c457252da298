"""A tree of tensors and plain values, flattened for storage and restored from it.

Tensors go to torch.distributed.checkpoint under dotted names (`model.fc.weight`), so that its own
tools find them. Everything else is the *skeleton*: JSON, so that loading it runs no code.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from torchelastic.errors import CheckpointError

#: The key of values that JSON cannot express.
_KIND = "!"


def flatten(
    tree: Any, prefix: str = "", *, reserved: Collection[str] = ()
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the skeleton, and the tensors by name; no name is `reserved`.

    A tensor that occurs twice is stored twice.
    """
    tensors = dict.fromkeys(reserved, torch.empty(0))
    skeleton = _take_apart(tree, prefix, tensors)
    return skeleton, {name: one for name, one in tensors.items() if name not in reserved}


def restore(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree; a tensor missing in `tensors` is an error."""
    return _put_together(skeleton, tensors)


def _take_apart(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        name = _free(path, tensors)
        tensors[name] = node
        return {_KIND: "tensor", "name": name}
    if isinstance(node, Mapping):
        return _mapping(node, path, tensors)
    if isinstance(node, list | tuple):
        items = [_take_apart(item, _join(path, i), tensors) for i, item in enumerate(node)]
        return {_KIND: "tuple", "items": items} if isinstance(node, tuple) else items
    return _value(node, path)


def _mapping(node: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if _KIND not in node and all(type(key) is str for key in node):
        return {key: _take_apart(v, _join(path, key), tensors) for key, v in node.items()}
    items = [
        [_value(key, path), _take_apart(v, _join(path, key), tensors)] for key, v in node.items()
    ]
    return {_KIND: "dict", "items": items}


def _value(node: Any, path: str) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, bytes):
        return {_KIND: "bytes", "base64": base64.b64encode(node).decode()}
    if isinstance(node, torch.dtype):
        return {_KIND: "dtype", "name": str(node).removeprefix("torch.")}
    raise CheckpointError(
        f"A checkpoint cannot hold '{path}', a {type(node).__qualname__}: use tensors, numbers, "
        "strings, bytes, None, and lists, tuples and dicts of these."
    )


def _free(path: str, taken: Mapping[str, Any]) -> str:
    """Return a unique path: numbered if taken, as for 1 and "1", or "a.b" and b within a."""
    numbered = (f"{path}#{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if name not in taken)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _put_together(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_put_together(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if _KIND not in node:
        return {key: _put_together(item, tensors) for key, item in node.items()}
    return _KINDS[node[_KIND]](node, tensors)


def _dict(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {
        _put_together(key, tensors): _put_together(item, tensors) for key, item in node["items"]
    }


def _dtype(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    found = getattr(torch, node["name"], None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"This version of torch does not know the dtype '{node['name']}'.")
    return found


_KINDS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": lambda node, tensors: tensors[node["name"]],
    "tuple": lambda node, tensors: tuple(_put_together(node["items"], tensors)),
    "dict": _dict,
    "bytes": lambda node, tensors: base64.b64decode(node["base64"]),
    "dtype": _dtype,
}
