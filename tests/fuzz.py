"""Messages that nobody should send: frames of the rendezvous, bent and broken, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torchelastic.agent.telemetry.collector import Begin, Heard, Lines
from torchelastic.rendezvous.embedded.ask_peers import HostAnnouncement, VoteRequest
from torchelastic.snapshot.node.stream import FOUND, GIVE, WANT, Header
from torchelastic.transport import frames
from torchelastic.transport.auth import new_nonce
from torchelastic.transport.ring import Beat, Parting

T = TypeVar("T")

TOKEN = "f" * 32

#: What may stand where something else was expected.
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, -(2**70), 1.5, 1e308, float("nan"), float("inf")),
    *("", "\x00", "\ud800", "é" * 50, "x" * 2000, "../../etc/passwd", "%s%n{}"),
    *([], [[]], {}, {"": {}}, ["a", None, 1], {"kind": "hello"}),
)
NOISE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 40,
    b"\x15\x03\x03\x00\x02\x02\x28",
    b"\x00\x00\x00\x00",
    b"\x00\x00\x00\x02{}",
    b"\xff\xff\xff\xff",
    b"\x80\x02}q\x00(X\x04\x00\x00\x00kindq\x01X\x05\x00\x00\x00helloq\x02u.",
    b"SSH-2.0-OpenSSH_9.2\r\n",
)


def greetings(job: str) -> list[frames.Message]:
    """First frames: ours, those of other versions and jobs, and what comes later otherwise."""
    return [
        frames.Hello(frames.PROTOCOL, frames.VERSION, job, None),
        frames.Hello(frames.PROTOCOL, frames.VERSION, job, TOKEN, frames.RING, -5, new_nonce()),
        frames.Hello(
            frames.PROTOCOL, frames.VERSION, job, None, frames.ELECTION, 10**9, new_nonce()
        ),
        frames.Hello(frames.PROTOCOL, frames.VERSION, job, None, frames.SNAPSHOT, 0, new_nonce()),
        frames.Hello(frames.PROTOCOL, frames.VERSION, job, None, frames.EVENTS, 0, new_nonce()),
        frames.Hello(frames.PROTOCOL, frames.VERSION + 1, job, None),
        frames.Hello(
            frames.PROTOCOL, frames.VERSION, "another job", None, "juggling", 0, new_nonce()
        ),
        frames.Hello("http", frames.VERSION, job, None),
        frames.Proof("0" * 64),
        frames.Challenge(new_nonce(), "0" * 64),
        frames.Get(1, ""),
        frames.Bye(),
    ]


def requests() -> list[frames.Message]:
    """Requests of a client, outside of the keys of others in the store."""
    return [
        frames.Get(1, "fuzz/"),
        frames.Put(2, "fuzz/a", '{"n":1}', "fuzz/2", None, False),
        frames.Put(3, "fuzz/b", "{}", "fuzz/3", 0, True),
        frames.Report(8, "fuzz/c", "{}"),
        frames.Watch(4, "fuzz/", 0),
        frames.Unwatch("fuzz/"),
        frames.OpenLease(5, TOKEN, 0.5),
        frames.KeepAlive(6),
        frames.Done(7, 1),
        frames.Refusal("You are refused."),
        frames.Hello(frames.PROTOCOL, frames.VERSION, "job", None),
    ]


def between_agents() -> list[frames.Message]:
    """Messages between agents about the host of the store and about themselves. A node with
    the secret is believed: only broken ones may be sent to a job that is to go on."""
    return [
        Beat("fuzz"),
        Parting(),
        VoteRequest(0, "fuzz", 0, False, False),
        HostAnnouncement(0, "fuzz", 0, []),
    ]


def reports() -> list[frames.Message]:
    """Messages about an agent's events, out of turn and without any lines."""
    return [Begin("fuzz"), Lines(1.0), Lines(-1e308), Heard(5.0, 5.0)]


def headers() -> list[bytes]:
    """Beginnings of a connection for snapshots. None asks for memory that matters: a node
    with the secret would be given it."""
    return [
        Header(kind=WANT, piece="shared", version=(0, 1)).pack(),
        Header(kind=WANT, piece="own:7", version=(2**40, 2**40), rank=7, size=8).pack(),
        Header(kind=GIVE, piece="own:9", version=(0, 1), origin="fuzz", room=9, used=9).pack(),
        Header(kind=FOUND, piece="shared", version=(0, 1), room=100, used=100).pack(),
    ]


class Fuzzer:
    """Makes bad messages out of good ones; the same ones from the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        breaks: tuple[Callable[[frames.Message], bytes], ...] = (
            self._cut,
            self._with_wrong_length,
            self._without_field,
            self._nested,
            self._noise,
        )
        bends = (self._flipped, self._with_odd_field, self._twice, frames.pack)
        self._breaks = breaks
        self._bends = (*breaks, *bends)

    def message(self, messages: Sequence[frames.Message]) -> bytes:
        """One of these, bent in one way or another, or left as it is."""
        return self._random.choice(self._bends)(self._random.choice(messages))

    def broken(self, messages: Sequence[frames.Message]) -> bytes:
        """One of these, so that it is one no more."""
        return self._random.choice(self._breaks)(self._random.choice(messages))

    def header(self) -> bytes:
        """A header of snapshots, whole, cut or bent, or something else."""
        data = bytearray(self._random.choice(headers()))
        for _ in range(self._random.choice((0, 1, 8))):
            # Not the sizes, behind the names and the version.
            data[self._random.randrange(77)] = self._random.randrange(256)
        whole = bytes(data) * self._random.choice((1, 1, 3))
        cut = whole[: self._random.randrange(len(whole))]
        return self._random.choice((whole, whole, cut, self._random.choice(NOISE)))

    def choice(self, items: Sequence[T]) -> T:
        return self._random.choice(items)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The same bytes as a network may deliver them."""
        while data and self._random.random() < 0.2:
            end = self._random.randint(1, len(data))
            yield data[:end]
            data = data[end:]
        if data:
            yield data

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _flipped(self, message: frames.Message) -> bytes:
        data = bytearray(frames.pack(message))
        for _ in range(self._random.randint(1, 8)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return bytes(data)

    def _cut(self, message: frames.Message) -> bytes:
        data = frames.pack(message)
        return data[: self._random.randrange(len(data))]

    def _with_wrong_length(self, message: frames.Message) -> bytes:
        length = self._random.choice((0, 1, 5, 4096, 4097, 2**22, 2**22 + 1, 2**31, 2**32 - 1))
        return length.to_bytes(4, "big") + frames.payload_of(frames.pack(message))

    def _with_odd_field(self, message: frames.Message) -> bytes:
        content = self._content(message)
        content[self._random.choice(list(content))] = self._random.choice(ODD)
        return _frame(json.dumps(content).encode())

    def _without_field(self, message: frames.Message) -> bytes:
        content = self._content(message)
        del content[self._random.choice(list(content))]
        return _frame(json.dumps(content).encode())

    def _nested(self, message: frames.Message) -> bytes:
        depth = self._random.choice((10, 500, 1900))
        return _frame(b'{"kind":' + b"[" * depth + b"]" * depth + b"}")

    def _twice(self, message: frames.Message) -> bytes:
        return frames.pack(message) * self._random.randint(2, 20)

    def _noise(self, message: frames.Message) -> bytes:
        if self._random.random() < 0.5:
            return self._random.choice(NOISE)
        return self._random.randbytes(self._random.randint(1, 3000))

    def _content(self, message: frames.Message) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(frames.payload_of(frames.pack(message)))
        return content


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload
