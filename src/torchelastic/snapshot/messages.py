"""What a worker and its agent say to each other about snapshots: the messages, as data.

One JSON object a message over the worker's channel, its `type` is `snapshot.` and the class's name
in lower case. What a worker asks has a number, and so has the answer to it:

    worker  Room(1, piece, ...)      agent  Granted(1) with a memory, or Refused(1, sentence)
    worker  Inventory(2)             agent  Holdings(2, ...)
    worker  Open(3, piece, version)  agent  Opened(3) with a memory, or Refused
    worker  Fetch(4, ..., peer)      agent  the same, once it has a copy from another agent
    worker  Drop(5, piece, version)  agent  Dropped(5)
    worker  Sealed(...), Settled(...): no answer; what is not heard does no harm

The memory comes as a descriptor (`layout.Memory`). The one of `Granted` is to be written to, the
one of `Opened` to be read: which version it is of is found there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torchelastic.snapshot.layout import Version
from torchelastic.transport.codec import Codec, Count

PREFIX = "snapshot."


@dataclass(frozen=True)
class Holding:
    """A version of a piece that a node holds."""

    piece: str
    version: Version
    bytes: Count
    #: Of the worker that wrote it, and of its world.
    rank: Count
    size: Count
    #: A copy of another node's, rather than what a worker of this node has written.
    replica: bool = False


# --- up: from the worker to the agent ------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """Memory to write a piece to: the same that it had, if the sizes fit and it is there."""

    request: Count
    piece: str
    bytes: Count
    skeleton_bytes: Count


@dataclass(frozen=True)
class Inventory:
    """What does this node hold?"""

    request: Count


@dataclass(frozen=True)
class Open:
    """A memory of this node that holds this version of a piece."""

    request: Count
    piece: str
    version: Version


@dataclass(frozen=True)
class Fetch:
    """The same, copied from the node whose agent is reached at `peer` if this node lacks it."""

    request: Count
    piece: str
    version: Version
    peer: str


@dataclass(frozen=True)
class Drop:
    """A version of a piece is damaged here: look, and do not offer it any more."""

    request: Count
    piece: str
    version: Version


@dataclass(frozen=True)
class Sealed:
    """There is a new version. May get lost: the agent finds it as well by looking."""

    piece: str
    version: Version


@dataclass(frozen=True)
class Settled:
    """This generation has begun with that base: what older ones did beyond it is void."""

    base: Version
    generation: Count


# --- down: from the agent to the worker ----------------------------------------------------------


@dataclass(frozen=True)
class Granted:
    """The memory comes with this; nobody else writes to it."""

    request: Count


@dataclass(frozen=True)
class Opened:
    """The memory comes with this, for reading."""

    request: Count


@dataclass(frozen=True)
class Dropped:
    """What is damaged of that version is not held any more."""

    request: Count


@dataclass(frozen=True)
class Refused:
    """It cannot be had; the sentence says why and what to do."""

    request: Count
    sentence: str


@dataclass(frozen=True)
class Holdings:
    """What this node holds, and where other agents reach its agent (empty: nowhere)."""

    request: Count
    holdings: tuple[Holding, ...]
    peer: str = ""
    node: str = ""


Request = Room | Inventory | Open | Fetch | Drop
Question = Request | Sealed | Settled
Answer = Granted | Opened | Dropped | Refused | Holdings

_codec: Codec[Question | Answer] = Codec(*get_args(Question | Answer), prefix=PREFIX)
to_json, from_json = _codec.to_json, _codec.from_json
