"""The messages on a connection: frames of JSON, each message a checked dataclass. Never pickle.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON, an object whose `kind`
names the message. The conversation:

    client                          server
    hello                      ->
                               <-   challenge, if the job has a secret
    proof                      ->
                               <-   welcome; or refusal, elsewhere (then the connection ends)
    get, watch                 ->
                               <-   rows (one or more)
    put, open_lease, keep_alive, give_up ->
                               <-   done, or no_lease
    report                     ->
                               <-   no_lease, or nothing
    unwatch, bye               ->
                               <-   changed (to watchers), lease_ended, refusal

Requests may be sent without waiting for earlier answers; answers carry the request's id. Requests
are handled in order: an answer shows that all earlier requests were received.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from torchelastic.errors import WireError
from torchelastic.system.text import printable
from torchelastic.transport import codec
from torchelastic.transport.codec import Codec

PROTOCOL = "torchelastic-rendezvous"
VERSION = 1

FRAME_LIMIT = 4 * 1024 * 1024
#: Bytes of a frame before both ends know each other.
GREETING_LIMIT = 4 * 1024
#: A row is sent back in another message than it came in: how many bytes longer that may be.
ROOM = 16 * 1024
KEY_LIMIT = 512
TOKEN_LIMIT = 128

#: Purposes of a connection, named in its hello.
STORE = "store"
RING = "ring"
ELECTION = "election"
SNAPSHOT = "snapshot"
EVENTS = "events"
ACTIVITIES = "activities"

#: The key of a message's name.
_KIND = "kind"
_LENGTH = struct.Struct(">I")
#: Most characters of another version's name that are shown.
_SHOWN = 20


class Row(NamedTuple):
    """One key at one revision: its JSON text, or None if the change deleted it."""

    key: str
    text: str | None
    created: int
    modified: int


@dataclass(frozen=True, slots=True)
class Message:
    """A message from one end to the other."""

    kind: ClassVar[str]


# Messages of a client


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first frame of a connection."""

    kind = "hello"
    protocol: str
    version: int
    job: str
    #: The lease to take up again, after a connection was lost.
    lease: str | None
    #: `STORE`, `RING`, `ELECTION`, `SNAPSHOT`, `EVENTS` or `ACTIVITIES`.
    purpose: str = STORE
    #: The latest term of the store's hosts that the client knows of.
    term: int = 0
    #: See `secret`; empty: this node has none.
    nonce: str = ""
    #: Nodes of the client's machine that saw the end of their run of the job.
    ended: list[str] = field(default_factory=list)


class OtherVersion(NamedTuple):
    """The protocol version of a client that does not use ours."""

    version: str


@dataclass(frozen=True, slots=True)
class Proof(Message):
    """Answers a challenge: the client has the job's secret."""

    kind = "proof"
    proof: str


@dataclass(frozen=True, slots=True)
class Get(Message):
    """Asks for the rows under a prefix."""

    kind = "get"
    id: int
    prefix: str


@dataclass(frozen=True, slots=True)
class Put(Message):
    """Sets a key, and others beside it, all or none.

    With `expected`, only if the key's last change was at that revision; with `provided`, only if
    another key exists that last changed at a given revision.
    """

    kind = "put"
    id: int
    key: str
    value: str
    #: The same when the request is sent again after a lost connection, so that it is done once.
    stamp: str
    expected: int | None
    leased: bool
    beside: dict[str, str] = field(default_factory=dict)
    provided: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Sets a key under this connection's lease. Answered only if there is no lease: thousands
    report at once, and need no confirmation."""

    kind = "report"
    id: int
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Watch(Message):
    """Asks for the changes under a prefix after a revision: first as `rows`, then as `changed`.

    Without a revision, the rows are the current ones.
    """

    kind = "watch"
    id: int
    prefix: str
    after: int | None


@dataclass(frozen=True, slots=True)
class Unwatch(Message):
    """Ends every watch of this connection on a prefix."""

    kind = "unwatch"
    prefix: str


@dataclass(frozen=True, slots=True)
class OpenLease(Message):
    """Opens a lease, ending the one this connection had. The client chooses the token."""

    kind = "open_lease"
    id: int
    token: str
    seconds: float


@dataclass(frozen=True, slots=True)
class KeepAlive(Message):
    """Renews this connection's lease."""

    kind = "keep_alive"
    id: int


@dataclass(frozen=True, slots=True)
class GiveUp(Message):
    """Ends the lease of a key that was created at this revision. `provided` is as in `Put`."""

    kind = "give_up"
    id: int
    key: str
    created: int
    provided: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """Ends this connection's lease at once, and the connection."""

    kind = "bye"


# Messages of the server


@dataclass(frozen=True, slots=True)
class Challenge(Message):
    """The first answer to a hello if the job has a secret: the server's proof, and a nonce for the
    client's."""

    kind = "challenge"
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The answer to a hello."""

    kind = "welcome"
    protocol: str
    version: int
    #: Names this server's state; another name at the same port knows nothing of what was before.
    store: str
    #: Whether the lease named in the hello was taken up.
    lease: bool
    #: The term of the store's host.
    term: int = 0


@dataclass(frozen=True, slots=True)
class Elsewhere(Message):
    """The address of the store, as known to an agent that does not host it."""

    kind = "elsewhere"
    #: As `host:port`, the likeliest first; empty while no node hosts it.
    addresses: list[str]
    term: int


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """The reason why the server ends the connection, for people. Every version has this message."""

    kind = "refusal"
    sentence: str

    @property
    def line(self) -> str:
        """The sentence for a log: whoever answers at an endpoint may have written it."""
        return printable(self.sentence)


@dataclass(frozen=True, slots=True)
class Rows(Message):
    """Answers `get` and `watch`; more of the same answer follows unless `last`."""

    kind = "rows"
    id: int
    revision: int
    rows: list[Row]
    last: bool


@dataclass(frozen=True, slots=True)
class Done(Message):
    """Answers `put` (the revision, None if a condition failed) and requests without a revision."""

    kind = "done"
    id: int
    revision: int | None


@dataclass(frozen=True, slots=True)
class NoLease(Message):
    """Answers a request that needed a lease: there is none, and nothing was done."""

    kind = "no_lease"
    id: int


@dataclass(frozen=True, slots=True)
class Changed(Message):
    """Tells watchers of a prefix what changed under it."""

    kind = "changed"
    prefix: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class LeaseEnded(Message):
    """Tells the holder of a lease that it expired."""

    kind = "lease_ended"
    token: str


M = TypeVar("M", bound=Message)


def by_kind(*classes: type[M]) -> Codec[M]:
    """The messages that may come at some point of a conversation."""
    return Codec(*classes, key=_KIND)


GREETINGS = by_kind(Hello)
PROOFS = by_kind(Proof)
ANSWERS_TO_HELLO = by_kind(Challenge, Welcome, Refusal, Elsewhere)
REQUESTS = by_kind(Get, Put, Report, Watch, Unwatch, OpenLease, KeepAlive, GiveUp, Bye)
ANSWERS = by_kind(Rows, Done, NoLease, Changed, LeaseEnded, Refusal)


# Messages to bytes


_encode_finite = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder().raw_decode


def pack(message: Message) -> bytes:
    """A message as one frame."""
    return _frame(codec.append_fields(f'{{"{_KIND}":"{message.kind}"', message).encode())


def pack_rows(id: int, revision: int, rows: Sequence[Row], last: bool) -> bytes:
    """A `rows` message, packed once: the possible next hosts ask for the same long list at the same
    time."""
    head = f'{{"{_KIND}":"{Rows.kind}","id":{id},"revision":{revision},"last":{codec.encode(last)}'
    return _frame(f'{head},"rows":{_text_of(tuple(rows))}}}'.encode())


@lru_cache(maxsize=2)
def _text_of(rows: tuple[Row, ...]) -> str:
    return codec.encode(rows)


def pack_before(message: Message, rest: bytes) -> bytes:
    """A message and, after the end of its line, raw bytes for the receiver."""
    return _frame(payload_of(pack(message)) + b"\n" + rest)


def _frame(payload: bytes) -> bytes:
    if len(payload) > FRAME_LIMIT:
        raise WireError(
            f"A message of {len(payload)} bytes is too large: the limit is {FRAME_LIMIT}."
        )
    return _LENGTH.pack(len(payload)) + payload


def payload_of(frame: bytes) -> bytes:
    """The payload of a packed frame."""
    return frame[_LENGTH.size :]


def batches(rows: Iterable[Row], limit: int = FRAME_LIMIT // 2) -> list[list[Row]]:
    """Rows in portions that fit a frame each; one empty portion if there are none."""
    portions: list[list[Row]] = [[]]
    weight = 0
    for row in rows:
        # JSON inside JSON: at most every character of the text is a quote to be escaped.
        size = 2 * len(row.text or "") + 6 * len(row.key) + 64
        if portions[-1] and weight + size > limit:
            portions.append([])
            weight = 0
        portions[-1].append(row)
        weight += size
    return portions


def encode_value(key: str, value: Mapping[str, Any]) -> str:
    """A value as stored text; refused here if it does not fit in a frame."""
    text = _encode_finite(value)
    if not key or len(key) > KEY_LIMIT:
        raise WireError(f"A key must have 1 to {KEY_LIMIT} characters, not {len(key)}.")
    # In a message its quotes are escaped, which at most doubles it: most values need no check.
    size = 2 * len(text) if 2 * len(text) < FRAME_LIMIT - ROOM else len(codec.encode(text))
    if size > FRAME_LIMIT - ROOM:
        raise WireError(
            f"The value of '{key}' has {size} bytes: the limit is {FRAME_LIMIT - ROOM}."
        )
    return text


# Bytes to messages


class Unpacker:
    """Cuts a stream of bytes into the payloads of its frames."""

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        #: Most bytes of a frame; may be changed at any time.
        self.limit = limit
        self._buffer = bytearray()

    @property
    def is_amid(self) -> bool:
        """Return whether part of a frame has arrived."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Add bytes; return the payloads they complete."""
        if not self._buffer and (payload := self._whole(data)) is not None:
            return (payload,)
        self._buffer += data
        return iter(self._next, None)

    def _whole(self, data: bytes) -> bytes | None:
        """The payload of bytes that are exactly one frame, as is usual when few are on their
        way."""
        if len(data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(data)
        if length > self.limit or len(data) != _LENGTH.size + length:
            return None
        return data[_LENGTH.size :]

    def _next(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.limit:
            # Checked before waiting: text of another protocol reads as a length of gigabytes.
            raise WireError(f"A frame of {length} bytes exceeds the limit of {self.limit}.")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return payload


def _load(payload: bytes | str, what: str) -> dict[str, Any]:
    try:
        text = (payload if isinstance(payload, str) else payload.decode()).strip(" \t\r\n")
        content, end = _decode(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what} is not JSON: {error}.") from error
    if end != len(text):
        raise WireError(f"{what} has trailing data after its JSON.")
    if not isinstance(content, dict):
        raise WireError(f"{what} is JSON, but not an object.")
    return content


def parse(payload: bytes, kinds: Codec[M]) -> M:
    """The message in a frame, if it is of these kinds and its fields are valid."""
    content = _load(payload, "A frame")
    try:
        message = kinds.from_json(content)
    except ValueError as error:
        raise WireError(str(error)) from None
    if message is None:
        raise WireError(f"A frame is not one of: {', '.join(kinds.kinds)}.")
    return message


def parse_hello(payload: bytes) -> Hello | OtherVersion:
    """The hello of a client, or its other version of the protocol."""
    content = _load(payload, "A frame")
    if content.get(_KIND) != Hello.kind or content.get("protocol") != PROTOCOL:
        raise WireError(f"The first frame of a connection is not a hello of {PROTOCOL}.")
    if content.get("version") != VERSION:
        return OtherVersion(str(content.get("version"))[:_SHOWN])
    return parse(payload, GREETINGS)


def decode_value(text: str) -> dict[str, Any]:
    """The value of a stored text."""
    return _load(text, "A value")
