"""The tensor tree: the allowed content of a training state's parts, written without pickle.

A part is a tree: None, bool, int, float, str, lists, tuples, dicts with str or int keys, tensors
and numpy arrays; or an object whose `state_dict()` is such a tree. A tree is written as a
*skeleton*, a JSON text with everything but the elements of the tensors, and the list of these
tensors. Reading returns exactly what was written: tuples stay tuples, int keys stay ints, a NaN
keeps its bits, a tensor its dtype and the order of its elements in memory.

A skeleton may come from another machine: whatever its content, reading it creates only such trees.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchelastic import torch_private
from torchelastic.errors import TransferError
from torchelastic.tensors.tensor_bytes import is_dense, stride_of

#: Longest skeleton in characters: a few million numbers in lists.
LIMIT = 64 << 20
#: Deepest nesting; a list that contains itself is deeper than any.
DEPTH = 64

_DEVICES = ("cpu", "cuda")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
#: Dict types that states use, by their letter in the skeleton.
_DICTS: dict[str, type] = {"d": dict, "o": OrderedDict, "c": Counter}
#: Numbers of fixed size, in either byte order. Anything else in an array may be an object.
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
#: The errors that Python raises for invalid input.
_UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, struct.error)
#: Beyond this an int is written in base 16: Python refuses to read more than 4300 decimal digits.
_PLAIN_INT = 1 << 63


@dataclass(frozen=True)
class Spec:
    """A tensor without its elements. `path` is its place in the tree: `['model']['bias']`."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, path: str, tensor: torch.Tensor) -> Spec:
        stride = stride_of(tensor)
        return cls(path, tensor.dtype, tuple(tensor.shape), stride, tensor.device.type)

    def describes(self, tensor: torch.Tensor) -> bool:
        """Return whether bytes sent for this spec may be written into the tensor unchanged."""
        return is_dense(tensor) and Spec.of(self.path, tensor) == self

    def empty(self) -> torch.Tensor:
        """Return an empty tensor to receive the elements."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=torch.device(self.device)
        )


def check(name: str, value: object) -> None:
    """Raise a TypeError that names the place of a value that cannot be sent."""
    _Writer().write(name, capture(value), 0)


def capture(value: Any) -> Any:
    """Return the tree of a part: the result of its `state_dict`, or the value itself."""
    return value.state_dict() if is_stateful(value) else value


def is_stateful(value: object) -> bool:
    """Return whether the part has state_dict and load_state_dict."""
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in names)


def flatten(tree: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the skeleton and its tensors: the tree's own memory wherever possible."""
    writer = _Writer()
    skeleton = {"tree": writer.write("", tree, 0), "tensors": writer.specs}
    text = json.dumps(skeleton, allow_nan=False, separators=(",", ":"))
    if len(text) > LIMIT:
        raise TransferError(
            f"The state has {len(text)} characters besides its tensors, more than the limit of "
            f"{LIMIT}: keep long lists of numbers in a tensor."
        )
    return text, writer.tensors


def restore(skeleton: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the tree; its tensors are those given, not copies."""
    tree, specs = _read(skeleton)
    if len(specs) != len(tensors):
        raise TransferError(f"Received {len(tensors)} tensors for a state of {len(specs)}.")
    for spec, tensor in zip(specs, tensors, strict=True):
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise TransferError(
                f"The tensor for {spec.path} is {tensor.dtype} of shape {tuple(tensor.shape)} "
                f"instead of {spec.dtype} of shape {spec.shape}."
            )
    return _Reader(tensors).read(tree, 0)


def specs(skeleton: str) -> list[Spec]:
    """Return the specs of a skeleton's tensors, in order."""
    return _read(skeleton)[1]


# --- tensors --------------------------------------------------------------------------------------


def _fault_of(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be sent as raw bytes, or None if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}, not a plain tensor"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a sparse or nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.device.type not in _DEVICES:
        return f"a tensor on {tensor.device.type}"
    return None


# --- writing --------------------------------------------------------------------------------------


class _Writer:
    """Walks a tree and collects its tensors, each once even if it occurs twice."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.specs: list[list[Any]] = []
        self._seen: dict[tuple[Any, ...], int] = {}

    def write(self, path: str, value: Any, depth: int) -> Any:
        """Return the value for JSON; all but plain values and lists become a dict with one key."""
        if depth > DEPTH:
            raise TypeError(
                f"{path} is nested more than {DEPTH} levels deep; does it contain itself?"
            )
        if value is None or type(value) in (bool, str):
            return value
        if isinstance(value, torch.Tensor):
            return {"x": self._tensor(path, value)}
        write = _WRITERS.get(type(value))
        if write is not None:
            return write(self, path, value, depth)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._numpy(path, value, numpy)
        raise _refusal(path, value)

    def _int(self, path: str, value: int, depth: int) -> Any:
        return value if -_PLAIN_INT <= value < _PLAIN_INT else {"i": hex(value)}

    def _float(self, path: str, value: float, depth: int) -> Any:
        return value if math.isfinite(value) else {"f": struct.pack(">d", value).hex()}

    def _list(self, path: str, value: Sequence[Any], depth: int) -> list[Any]:
        return [self.write(f"{path}[{i}]", one, depth + 1) for i, one in enumerate(value)]

    def _tuple(self, path: str, value: tuple[Any, ...], depth: int) -> Any:
        return {"t": self._list(path, value, depth)}

    def _dict(self, path: str, value: dict[Any, Any], depth: int) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{path} has the key {key!r}; keys are str or int.")
        letter = next(letter for letter, kind in _DICTS.items() if kind is type(value))
        items = [
            [self.write(path, key, depth), self.write(f"{path}[{key!r}]", one, depth + 1)]
            for key, one in value.items()
        ]
        extra = torch_private.layer_versions(value)
        if extra is None:
            return {letter: items}
        return {letter: items, "m": self.write(f"{path}._metadata", extra, depth + 1)}

    def _tensor(self, path: str, tensor: torch.Tensor) -> int:
        fault = _fault_of(tensor)
        if fault is not None:
            raise TypeError(
                f"{path or 'The state'} is {fault}, which cannot be sent to other ranks."
            )
        tensor = tensor.detach().resolve_conj().resolve_neg()
        spec = Spec.of(path, tensor)
        # Tied weights are one tensor in two places, and are sent once. Empty ones have no address.
        same = (tensor.data_ptr() or path, tensor.stride(), spec.dtype, spec.shape, tensor.device)
        if same not in self._seen:
            self._seen[same] = len(self.tensors)
            self.tensors.append(tensor)
            dtype = str(spec.dtype).removeprefix("torch.")
            self.specs.append([path, dtype, spec.shape, spec.stride, spec.device])
        return self._seen[same]

    def _numpy(self, path: str, value: Any, numpy: Any) -> Any:
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise TypeError(
                f"{path or 'The state'} is a numpy array of {value.dtype}; use a numeric dtype."
            )
        array = numpy.ascontiguousarray(value)  # a 0-dimensional one becomes one-dimensional
        if not array.flags.writeable:
            array = array.copy()  # torch warns about memory that must not be written
        elements = torch.from_numpy(array.reshape(-1).view(numpy.uint8))
        kind = "n" if isinstance(value, numpy.ndarray) else "s"
        return {kind: [self._tensor(path, elements), value.dtype.str, list(value.shape)]}


_WRITERS: dict[type, Callable[[_Writer, str, Any, int], Any]] = {
    int: _Writer._int,
    float: _Writer._float,
    list: _Writer._list,
    tuple: _Writer._tuple,
    torch.Size: _Writer._tuple,
    **{kind: _Writer._dict for kind in _DICTS.values()},
}


def _refusal(path: str, value: object) -> TypeError:
    what = "a function" if callable(value) and not isinstance(value, type) else None
    what = what or f"of type {type(value).__module__}.{type(value).__qualname__}"
    return TypeError(
        f"{path or 'The state'} is {what}, which cannot be sent to other ranks. Use tensors, numpy "
        "arrays, numbers, str, bool, None, lists, tuples and dicts, or an object whose state_dict "
        "returns these."
    )


# --- reading --------------------------------------------------------------------------------------


def _read(skeleton: str) -> tuple[Any, list[Spec]]:
    """Return the tree for JSON and the specs of its tensors."""
    if len(skeleton) > LIMIT:
        raise TransferError(
            f"A skeleton has {len(skeleton)} characters, more than the limit of {LIMIT}."
        )
    try:
        read = json.loads(skeleton, parse_constant=_no_constant)
        return read["tree"], [_spec(*fields) for fields in read["tensors"]]
    except (*_UNREADABLE, RecursionError) as error:
        raise TransferError(f"Cannot read a skeleton: {error}.") from None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _spec(path: Any, dtype: Any, shape: Any, stride: Any, device: Any) -> Spec:
    if not isinstance(path, str) or dtype not in _DTYPES or device not in _DEVICES:
        raise ValueError(f"{path!r} is not a tensor that can be sent")
    for numbers in (shape, stride):
        if any(type(number) is not int or not 0 <= number < 1 << 48 for number in numbers):
            raise ValueError(f"{path} has invalid sizes")
    spec = Spec(path, _DTYPES[dtype], tuple(shape), tuple(stride), device)
    if not _is_dense_stride(spec.shape, spec.stride):
        raise ValueError(f"{path} has gaps")
    return spec


def _is_dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether strides are dense: no gaps in memory, and no two elements in one place."""
    if len(shape) != len(stride):
        return False
    if 0 in shape:
        return all(step <= math.prod(max(size, 1) for size in shape) for step in stride)
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


class _Reader:
    """Builds the tree of a skeleton. Accepts only the letters that _Writer writes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, value: Any, depth: int) -> Any:
        if depth > DEPTH:
            raise TransferError(f"A skeleton is nested more than {DEPTH} levels deep.")
        if isinstance(value, list):
            return [self.read(one, depth + 1) for one in value]
        if not isinstance(value, dict):
            return value
        letter, content = next(iter(value.items()), ("", None))
        try:
            if letter in _DICTS:
                return self._dict(_DICTS[letter], content, value.get("m"), depth)
            return _READERS[letter](self, content, depth)
        except (*_UNREADABLE, IndexError) as error:
            raise TransferError(f"Unknown value in a skeleton at {letter!r}: {error}") from None

    def _tuple(self, content: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self.read(one, depth + 1) for one in content)

    def _dict(self, kind: type, content: Any, extra: Any, depth: int) -> Any:
        made = kind({self._key(key, depth): self.read(one, depth + 1) for key, one in content})
        if extra is not None and kind is OrderedDict:
            torch_private.set_layer_versions(made, self.read(extra, depth + 1))
        return made

    def _key(self, key: Any, depth: int) -> str | int:
        read = self.read(key, depth + 1)
        if type(read) not in (str, int):
            raise ValueError("a key is neither str nor int")
        return read  # type: ignore[no-any-return]

    def _int(self, content: Any, depth: int) -> int:
        return int(content, 16)

    def _float(self, content: Any, depth: int) -> float:
        return float(struct.unpack(">d", bytes.fromhex(content))[0])

    def _tensor(self, content: Any, depth: int) -> torch.Tensor:
        if type(content) is not int or content < 0:
            raise ValueError("the index of a tensor is invalid")
        return self._tensors[content]

    def _array(self, content: Any, depth: int) -> Any:
        index, dtype, shape = content
        if not _NUMPY_DTYPE.fullmatch(dtype):
            raise ValueError("an array does not hold numbers")
        elements = self._tensor(index, depth)
        return elements.cpu().numpy().view(dtype).reshape(shape)


_READERS: Mapping[str, Callable[[_Reader, Any, int], Any]] = {
    "t": _Reader._tuple,
    "i": _Reader._int,
    "f": _Reader._float,
    "x": _Reader._tensor,
    "n": _Reader._array,
    "s": lambda reader, content, depth: reader._array(content, depth)[()],
}


def tensors_by_path(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return each tensor of a tree by its path, as in Spec."""
    writer = _Writer()
    writer.write("", tree, 0)
    for spec, tensor in zip(writer.specs, writer.tensors, strict=True):
        yield spec[0], tensor
