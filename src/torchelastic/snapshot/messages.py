"""What a worker and its agent say to each other about snapshots: the messages, as data.

One JSON object a message over the worker's channel, its `type` is `snapshot.` and the class's name
in lower case. What a worker asks has a number, and so has the answer to it:

    worker  Room(1, piece, ...)      agent  Granted(1) with a memory, or Refused(1, sentence)
    worker  Inventory(2)             agent  Holdings(2, ...)
    worker  Open(3, piece, version)  agent  Opened(3) with a memory, or Refused
    worker  Fetch(4, ..., peer)      agent  the same, once it has a copy from another agent
    worker  Sealed(...), Settled(...): no answer; what is not heard does no harm

The memory comes as a descriptor (`layout.Memory`). The one of `Granted` is to be written to, the
one of `Opened` to be read: which version it is of is found there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from torchelastic.snapshot.layout import Version

PREFIX = "snapshot."


@dataclass(frozen=True)
class Holding:
    """A version of a piece that a node holds."""

    piece: str
    version: Version
    bytes: int
    #: Of the worker that wrote it, and of its world.
    rank: int
    size: int
    #: A copy of another node's, rather than what a worker of this node has written.
    replica: bool = False


# --- up: from the worker to the agent ------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Memory to write a piece to: the same that it had, if the sizes fit and it is there."""

    request: int
    piece: str
    bytes: int
    skeleton_bytes: int


@dataclass(frozen=True)
class Inventory:
    """What does this node hold?"""

    request: int


@dataclass(frozen=True)
class Open:
    """A memory of this node that holds this version of a piece."""

    request: int
    piece: str
    version: Version


@dataclass(frozen=True)
class Fetch:
    """The same, copied from the node whose agent is reached at `peer` if this node lacks it."""

    request: int
    piece: str
    version: Version
    peer: str


@dataclass(frozen=True)
class Sealed:
    """There is a new version. May get lost: the agent finds it as well by looking."""

    piece: str
    version: Version


@dataclass(frozen=True)
class Settled:
    """This generation has begun with that base: what older ones did beyond it is void."""

    base: Version
    generation: int


# --- down: from the agent to the worker ----------------------------------------------------------


@dataclass(frozen=True)
class Granted:
    """The memory comes with this; nobody else writes to it."""

    request: int


@dataclass(frozen=True)
class Opened:
    """The memory comes with this, for reading."""

    request: int


@dataclass(frozen=True)
class Refused:
    """It cannot be had; the sentence says why and what to do."""

    request: int
    sentence: str


@dataclass(frozen=True)
class Holdings:
    """What this node holds, and where other agents reach its agent (empty: nowhere)."""

    request: int
    holdings: tuple[Holding, ...]
    peer: str = ""
    node: str = ""


Request = Room | Inventory | Open | Fetch
Question = Request | Sealed | Settled
Answer = Granted | Opened | Refused | Holdings

_TYPES: dict[str, type[Any]] = {
    PREFIX + kind.__name__.lower(): kind
    for kind in (Room, Inventory, Open, Fetch, Sealed, Settled, Granted, Opened, Refused, Holdings)
}
_HINTS = {kind: get_type_hints(kind) for kind in (*_TYPES.values(), Holding)}


def to_json(message: Question | Answer) -> dict[str, Any]:
    kind = PREFIX + type(message).__name__.lower()
    return {"type": kind, **dataclasses.asdict(message)}


def from_json(data: Mapping[str, Any]) -> Question | Answer | None:
    """The message; None where its type is none of these, `ValueError` where a field is wrong."""
    kind = _TYPES.get(str(data.get("type")))
    if kind is None:
        return None
    message: Question | Answer = _made(kind, data)
    return message


def _made(kind: type[Any], data: Mapping[str, Any]) -> Any:
    fields = {
        item.name: _read(data[item.name], _HINTS[kind][item.name], item.name)
        for item in dataclasses.fields(kind)
        if item.name in data
    }
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"A message is not complete: {error}.") from None


def _read(value: Any, hint: Any, name: str) -> Any:
    """A field as its declaration has it."""
    if hint == Version:
        return _version(value, name)
    if hint == tuple[Holding, ...] and isinstance(value, list | tuple):
        return tuple(_made(Holding, item) for item in value if isinstance(item, Mapping))
    if type(value) is not hint or (hint is int and value < 0):
        raise ValueError(f"'{name}' of a message is not what it should be: {value!r:.80}.")
    return value


def _version(value: Any, name: str) -> Version:
    if isinstance(value, list | tuple) and [type(part) for part in value] == [int, int]:
        return (value[0], value[1])
    raise ValueError(f"'{name}' of a message is no version: {value!r:.80}.")
