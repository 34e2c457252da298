"""The messages between a worker and its agent about snapshots, as data.

Each message is one JSON object on the worker's channel; its `type` is `snapshot.` and the class's
`kind`, or its name in lower case. A request has a number, which its answer repeats:

    worker  Room(1, piece, ...)      agent  Granted(1) with a memory, or Refused(1, sentence)
    worker  Inventory(2)             agent  NodeInventory(2, ...)
    worker  Open(3, piece, version)  agent  Opened(3) with a memory, or Refused
    worker  Fetch(4, ..., peer)      agent  the same, once it has a copy from another agent
    worker  Drop(5, piece, version)  agent  Dropped(5)
    worker  Sealed(...), Settled(...), Outdated(...): no answer; a lost one does no harm

The memory comes as a descriptor (`layout.Memory`). `Granted` brings one to write to, `Opened` one
to read from; the version is in the memory itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torchelastic.snapshot.layout import Version
from torchelastic.transport.codec import Codec, Count

PREFIX = "snapshot."


@dataclass(frozen=True)
class InventoryItem:
    """A version of a piece that a node holds."""

    piece: str
    version: Version
    bytes: Count
    #: Of the worker that wrote it, and of its world.
    rank: Count
    size: Count
    #: Whether it is a copy of another node's piece, not written by a worker of this node.
    replica: bool = False


# --- up: from the worker to the agent ------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Request memory to write a piece to: the piece's old memory if the sizes fit."""

    request: Count
    piece: str
    bytes: Count
    skeleton_bytes: Count


@dataclass(frozen=True)
class Inventory:
    """Request the list of what this node holds."""

    request: Count


@dataclass(frozen=True)
class Open:
    """Request a memory of this node that holds this version of a piece."""

    request: Count
    piece: str
    version: Version


@dataclass(frozen=True)
class Fetch:
    """Request the same, copied from the agent at `peer` if this node lacks it."""

    request: Count
    piece: str
    version: Version
    peer: str


@dataclass(frozen=True)
class Drop:
    """Report a damaged version of a piece: check it, and stop offering it."""

    request: Count
    piece: str
    version: Version


@dataclass(frozen=True)
class Sealed:
    """Report a new version. May get lost: the agent also finds it by looking."""

    piece: str
    version: Version


@dataclass(frozen=True)
class Settled:
    """Report this generation's base: versions of older generations beyond it are void."""

    base: Version
    generation: Count


@dataclass(frozen=True)
class Outdated:
    """Report that no version before this one is needed: workers of several replicas have it."""

    before: Version


# --- down: from the agent to the worker ----------------------------------------------------------


@dataclass(frozen=True)
class Granted:
    """The requested memory, to which no other worker writes."""

    request: Count


@dataclass(frozen=True)
class Opened:
    """The requested memory, for reading."""

    request: Count


@dataclass(frozen=True)
class Dropped:
    """The damaged copies of that version are dropped."""

    request: Count


@dataclass(frozen=True)
class Refused:
    """The request failed; the sentence gives the reason and the remedy."""

    request: Count
    sentence: str


@dataclass(frozen=True)
class NodeInventory:
    """The pieces that this node holds, and its agent's address for other agents (empty: none)."""

    kind: ClassVar[str] = "holdings"

    request: Count
    holdings: tuple[InventoryItem, ...]
    peer: str = ""
    node: str = ""


Request = Room | Inventory | Open | Fetch | Drop
Question = Request | Sealed | Settled | Outdated
Answer = Granted | Opened | Dropped | Refused | NodeInventory

_codec: Codec[Question | Answer] = Codec(*get_args(Question | Answer), prefix=PREFIX)
to_json, from_json = _codec.to_json, _codec.from_json
