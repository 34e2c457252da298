"""Dataclasses as JSON, and back with every field checked against its declaration.

Another process may send garbage. A field that has the wrong type or is missing raises a
`ValueError` with one sentence; the caller decides what to do. A field with a default may be
missing, and unknown fields are ignored.

A field has a plain type (bool, int, str, None, or a union of these), or is declared as float,
`Count`, a dataclass, `dict[str, T]`, `list[T]`, `tuple[T, ...]`, or as a `NamedTuple` or
`tuple[T, U]` of plain types (arrays in JSON). It may be None as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

M = TypeVar("M")

#: A whole number that is not negative.
Count = Annotated[int, "0 or more"]
#: The exact types that a field may have (a bool must not pass as an int), or a function that makes
#: the field from a JSON value, or raises `_Misfit`.
_Reader = frozenset[type] | Callable[[Any], Any]


class _Misfit(Exception):
    """A value does not match its declaration; what has a field of that name reports it."""

    def __init__(self, name: str = "", how: str = "") -> None:
        super().__init__(name, how)

    def sentence(self, what: str) -> str:
        name, how = self.args
        return f"'{name}' of {what} {how}."


def _wrong(name: str, value: Any) -> _Misfit:
    # Not `repr`, which raises `RecursionError` for what is nested deeply.
    return _Misfit(name, f"has the wrong value: {reprlib.repr(value)}")


class Codec(Generic[M]):
    """The messages of one conversation. Each is named by its class's `kind`, or else by the name of
    its class in lower case."""

    def __init__(self, *classes: type[M], key: str = "type", prefix: str = "") -> None:
        """`key` is the JSON key of the name; `prefix` distinguishes these messages from others on
        the same connection."""
        self._key = key
        self.kinds = {
            prefix + str(getattr(cls, "kind", cls.__name__.lower())): cls for cls in classes
        }
        self._names = {cls: name for name, cls in self.kinds.items()}
        self._shapes = {name: _shape(cast(Any, cls)) for name, cls in self.kinds.items()}

    def to_json(self, message: M) -> dict[str, Any]:
        name = self._names[type(message)]
        return {self._key: name, **dataclasses.asdict(cast(Any, message))}

    def from_json(self, data: Mapping[str, Any]) -> M | None:
        """The message; None if its kind is unknown, `ValueError` if a field is wrong.

        >>> @dataclasses.dataclass(frozen=True)
        ... class Ask:
        ...     generation: int
        >>> Codec(Ask).from_json({"type": "ask", "generation": "7"})
        Traceback (most recent call last):
        ValueError: 'generation' of a message 'ask' has the wrong value: '7'.
        """
        name = data.get(self._key)
        shape = self._shapes.get(name) if type(name) is str else None
        if shape is None:
            return None
        try:
            return cast(M, _read(shape, data))
        except _Misfit as misfit:
            raise ValueError(misfit.sentence(f"a message '{name}'")) from None


# Made once: `json.dumps` would make one for every text that is not written its way.
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
#: Most fields are plain, and thousands of messages are written in a second.
_ENCODERS: dict[type, Callable[[Any], str]] = {
    int: repr,
    str: json.encoder.encode_basestring_ascii,
    NoneType: lambda value: "null",
    bool: lambda value: "true" if value else "false",
}


def append_fields(text: str, message: Any) -> str:
    """The text of a JSON object, with the fields of a message and its end appended."""
    for before, name in _TEXTS[type(message)]:
        value = getattr(message, name)
        text += before + _ENCODERS.get(type(value), encode)(value)
    return text + "}"


# --- classes --------------------------------------------------------------------------------------


class _Field(NamedTuple):
    name: str
    reader: _Reader
    #: Makes the value of a field that is not sent; None: it must be.
    default: Callable[[], Any] | None


class _Shape(NamedTuple):
    fields: tuple[_Field, ...]
    #: Makes a message of the values of all fields.
    make: Callable[..., Any]


#: The fields of every message, each with the text before its value.
_TEXTS: dict[type, list[tuple[str, str]]] = {}


@cache
def _shape(cls: type) -> _Shape:
    """Cached for a class: computing it takes longer than reading a message."""
    hints = get_type_hints(cls, include_extras=True)
    names = [item.name for item in dataclasses.fields(cls)]
    _TEXTS[cls] = [(f',"{name}":', name) for name in names]
    fields = tuple(
        _Field(item.name, _reader(hints[item.name]), _default(item))
        for item in dataclasses.fields(cls)
    )
    if not any(item.kw_only for item in dataclasses.fields(cls)):
        return _Shape(fields, cls)
    return _Shape(fields, lambda *values: cls(**dict(zip(names, values, strict=True))))


def _default(item: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory
    return None if item.default is dataclasses.MISSING else lambda: item.default


def _read(shape: _Shape, data: Mapping[str, Any]) -> Any:
    values = []
    for name, reader, default in shape.fields:
        try:
            value = data[name]
        except KeyError:
            if default is None:
                raise _Misfit(name, "is missing") from None
            value = default()
        else:
            if isinstance(reader, frozenset):
                if type(value) not in reader:
                    raise _wrong(name, value)
            else:
                try:
                    value = reader(value)
                except _Misfit:
                    raise _wrong(name, value) from None
        values.append(value)
    return shape.make(*values)


# --- values ---------------------------------------------------------------------------------------


def _reader(hint: Any) -> _Reader:
    if hint in (bool, int, str, NoneType):
        return frozenset({hint})
    if hint in _CHECKS:
        return _checked(_CHECKS[hint])
    if dataclasses.is_dataclass(hint):
        return _nested(cast(type, hint))
    if hasattr(hint, "_make"):
        return _fixed(get_type_hints(hint).values(), hint._make)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return _one_of(*map(_reader, args))
    if origin is dict and args[0] is str:
        return _values(_function(_reader(args[1])))
    if origin is list or args[1:] == (...,):
        return _list_of(_function(_reader(args[0])), origin)
    if origin is tuple:
        return _fixed(args, tuple)
    raise TypeError(f"A field cannot have the type {hint}: it would be read unchecked.")


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    Count: lambda value: type(value) is int and value >= 0,
    # JSON has only finite numbers, but Python's module reads and writes others, too.
    float: lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
}


def _function(reader: _Reader) -> Callable[[Any], Any]:
    if not isinstance(reader, frozenset):
        return reader
    types = reader
    return _checked(lambda value: type(value) in types)


def _checked(fits: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not fits(value):
            raise _Misfit
        return value

    return check


def _nested(cls: type) -> _Reader:
    shape = _shape(cls)

    def read_fields(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Misfit
        return _read(shape, value)

    return read_fields


def _one_of(*readers: _Reader) -> _Reader:
    plain = frozenset[type]().union(*(one for one in readers if isinstance(one, frozenset)))
    others = [one for one in readers if not isinstance(one, frozenset)]
    if len(others) > 1:
        raise TypeError("A field can have one type that is not plain.")
    return (lambda value: value if type(value) in plain else others[0](value)) if others else plain


def _values(reader: Callable[[Any], Any]) -> _Reader:
    def read_values(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Misfit
        return {key: reader(item) for key, item in value.items()}

    return read_values


def _list_of(reader: Callable[[Any], Any], make: Callable[[Iterable[Any]], Any]) -> _Reader:
    def read_all(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _Misfit
        return make(map(reader, value))

    return read_all


def _fixed(hints: Iterable[Any], make: Callable[[Iterable[Any]], Any]) -> _Reader:
    # Thousands of rows are read at a time: the types of all items are looked up at once.
    known = frozenset(itertools.product(*(cast(frozenset[type], _reader(one)) for one in hints)))

    def read_items(value: Any) -> Any:
        if not isinstance(value, list | tuple) or tuple(map(type, value)) not in known:
            raise _Misfit
        return make(value)

    return read_items
