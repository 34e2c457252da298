"""Dataclasses as JSON data, and back with every field checked against its declaration.

Another process may send garbage. A field that has the wrong type or is missing raises a
`ValueError` with one sentence; the caller decides what to do. Unknown fields are ignored: a later
release may send more.

A field is declared as bool, int, float, str, None, `Count`, a `Literal`, `Mapping` (any object),
`Sequence[T]`, `tuple[T, ...]`, `tuple[T, U]`, a dataclass, or a union of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")
M = TypeVar("M")

#: A whole number that is not negative.
Count = Annotated[int, "0 or more"]
#: Makes what a field holds of what JSON gave, or raises `_Misfit`.
_Reader = Callable[[Any], Any]


class _Misfit(ValueError):
    """A value does not match its declaration; the caller that knows its name reports it."""


class Codec(Generic[M]):
    """The messages of one conversation. The `type` of each is its class's name in lower case."""

    def __init__(self, *kinds: type[M], prefix: str = "") -> None:
        """`prefix` distinguishes them from other messages on the same connection."""
        self._kinds = {
            prefix + getattr(kind, "wire_name", kind.__name__.lower()): kind for kind in kinds
        }
        self._names = {kind: name for name, kind in self._kinds.items()}

    def to_json(self, message: M) -> dict[str, Any]:
        name = self._names[type(message)]
        return {"type": name, **dataclasses.asdict(cast(Any, message))}

    def from_json(self, data: Mapping[str, Any]) -> M | None:
        """The message; None if its type is unknown, `ValueError` if a field is wrong.

        >>> @dataclasses.dataclass(frozen=True)
        ... class Ask:
        ...     generation: int
        >>> Codec(Ask).from_json({"type": "ask", "generation": "7"})
        Traceback (most recent call last):
        ValueError: 'generation' of a message 'ask' has the wrong value: '7'.
        """
        name = str(data.get("type"))
        kind = self._kinds.get(name)
        return read(kind, data, f"a message '{name}'") if kind is not None else None


def read(cls: type[T], data: Mapping[str, Any], what: str) -> T:
    """A dataclass from the JSON values of its fields; `what` names it in errors."""
    shape = _shape(cast(Any, cls))
    given = {}
    for name, reader in shape.readers.items():
        if name in data:
            try:
                given[name] = reader(data[name])
            except _Misfit:
                found = f"{data[name]!r:.80}"
                sentence = f"'{name}' of {what} has the wrong value: {found}."
                raise ValueError(sentence) from None
        elif name in shape.required:
            raise ValueError(f"'{name}' of {what} is missing.")
    return cls(**given)


class _Shape(NamedTuple):
    readers: Mapping[str, _Reader]
    required: frozenset[str]


@cache
def _shape(cls: type) -> _Shape:
    """Cached for a class: computing it takes longer than reading a message."""
    hints = get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    required = [
        item.name
        for item in fields
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    readers = {item.name: _reader(hints[item.name]) for item in fields}
    return _Shape(readers, frozenset(required))


# --- values ---------------------------------------------------------------------------------------


def _reader(hint: Any) -> _Reader:
    if hint in _PLAIN:
        return _checked(_PLAIN[hint])
    if dataclasses.is_dataclass(hint):
        return _nested(cast(type, hint))
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _checked(lambda value: any(_is_same(value, one) for one in args))
    if origin in (UnionType, Union):
        return _one_of([_reader(arg) for arg in args])
    if origin is Mapping:
        return _checked(lambda value: type(value) is dict)
    if origin is Sequence:
        return _list_of(_reader(args[0]), list)
    if origin is tuple and args[1:] == (...,):
        return _list_of(_reader(args[0]), tuple)
    if origin is tuple:
        return _fixed([_reader(arg) for arg in args])
    raise TypeError(f"A field cannot have the type {hint}: it would be read unchecked.")


#: By the very type: a bool is an int to Python, and to nobody else.
_PLAIN: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: type(value) is bool,
    int: lambda value: type(value) is int,
    Count: lambda value: type(value) is int and value >= 0,
    # JSON has no number that is not finite, though Python's reads and writes them.
    float: lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    str: lambda value: type(value) is str,
    NoneType: lambda value: value is None,
}


def _is_same(value: Any, one: Any) -> bool:
    return type(value) is type(one) and bool(value == one)


def _checked(fits: Callable[[Any], bool]) -> _Reader:
    def reader(value: Any) -> Any:
        if not fits(value):
            raise _Misfit
        return value

    return reader


def _nested(cls: type) -> _Reader:
    def reader(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Misfit
        try:
            return read(cls, value, cls.__name__)
        except ValueError:
            raise _Misfit from None

    return reader


def _one_of(readers: Sequence[_Reader]) -> _Reader:
    def reader(value: Any) -> Any:
        for one in readers:
            try:
                return one(value)
            except _Misfit:
                continue
        raise _Misfit

    return reader


def _list_of(reader: _Reader, make: Callable[[list[Any]], Any]) -> _Reader:
    def read_all(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _Misfit
        return make([reader(item) for item in value])

    return read_all


def _fixed(readers: Sequence[_Reader]) -> _Reader:
    def read_each(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(readers):
            raise _Misfit
        return tuple(one(item) for one, item in zip(readers, value, strict=True))

    return read_each
