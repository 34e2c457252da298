"""The transfer of state, as the bytes of its tensors, to the ranks that lack it.

Every holder sends its share of the bytes to every rank that lacks them, all in parallel: the bytes
of all tensors, one after the other, are cut into equal slices, one per holder. The skeleton, which
is sent first, defines the content of each slice.

Large tensors are sent from and received into their own memory; small ones are packed together,
since a message costs more than their bytes.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchelastic import torch_backends
from torchelastic.errors import TransferError
from torchelastic.tensors import tensor_tree
from torchelastic.tensors.tensor_bytes import elements_of
from torchelastic.tensors.tensor_tree import Spec

log = logging.getLogger(__name__)

#: Tensors below this many bytes are sent together with their neighbours.
SMALL = 256 << 10
#: The largest message in bytes. A receiver can process one while the next arrives.
LARGEST = 32 << 20
#: Messages in flight between two ranks. Each one occupies a thread on either side.
WINDOW = 4

#: A holder's first message: this number, length and checksum of the skeleton, bytes of tensors.
MAGIC = 0x7465_5374_6174_6531


class Messages(Protocol):
    """Messages between ranks; torch.distributed itself is one."""

    def isend(self, tensor: torch.Tensor, dst: int) -> Any: ...

    def irecv(self, tensor: torch.Tensor, src: int) -> Any: ...


class Receiver(Protocol):
    """The world a transfer happens in, as one of its ranks sees it."""

    rank: int
    size: int
    #: Bytes of state this rank has received.
    received: int


def share(
    world: Receiver,
    tree: Any,
    *,
    holders: Sequence[int],
    lacking: Sequence[int] | None = None,
    into: Any = None,
    link: Messages | None = None,
) -> Any:
    """Collective: send the tree to the ranks that lack it, by default all but the holders. Returns
    it there, None on the others.

    All holders' trees are equal; the tree of a rank that lacks it is ignored. `into` is a tree of
    that rank whose tensors are reused for received ones of the same path and spec: its content
    must be expendable, since an error leaves it half-written. `link` is torch.distributed's default
    group unless given.
    """
    link = dist if link is None else link
    if lacking is None:
        lacking = [rank for rank in range(world.size) if rank not in holders]
    if world.rank in holders:
        share = _Share(holders.index(world.rank), len(holders))
        _send(_Moving(link), tree, share, lacking)
    if world.rank not in lacking:
        return None
    began = time.monotonic()
    number = lacking.index(world.rank)
    received, count = _receive(_Moving(link), holders, number, _destination(into))
    world.received += count
    took = time.monotonic() - began
    log.info("Received %d bytes from %d peers in %.3f s.", count, len(holders), took)
    return received


# --- who sends what ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """The index of a holder among several."""

    index: int
    of: int


@dataclass(frozen=True)
class Span:
    """Some bytes of a tensor."""

    tensor: int
    begin: int
    end: int


#: One message: part of a large tensor, or several small tensors.
Message = tuple[Span, ...]


def messages(sizes: Sequence[int], index: int, of: int) -> Iterator[Message]:
    """Return the messages in which a holder sends its share of tensors of these sizes."""
    total = sum(sizes)
    together: list[Span] = []
    for span in _spans(sizes, total * index // of, total * (index + 1) // of):
        if span.end - span.begin >= SMALL:
            yield (span,)
            continue
        together.append(span)
        if sum(one.end - one.begin for one in together) >= SMALL:
            yield tuple(together)
            together = []
    if together:
        yield tuple(together)


def _spans(sizes: Sequence[int], begin: int, end: int) -> Iterator[Span]:
    """Return the spans from `begin` to `end` of all tensors end to end, limited in size."""
    at = 0
    for tensor, size in enumerate(sizes):
        first, last = max(begin - at, 0), min(end - at, size)
        for start in range(first, last, LARGEST):
            yield Span(tensor, start, min(start + LARGEST, last))
        at += size


# --- holders --------------------------------------------------------------------------------------


def _send(moving: _Moving, tree: Any, share: _Share, lacking: Sequence[int]) -> None:
    skeleton, tensors = tensor_tree.flatten(tree)
    flat = [elements_of(tensor) for tensor in tensors]
    sizes = [len(one) for one in flat]
    # Holders begin with different peers, so that none has to wait for all of them.
    first = share.index % max(len(lacking), 1)
    peers = [*lacking[first:], *lacking[:first]]
    for peer in peers:
        if lacking.index(peer) % share.of == share.index:
            text = skeleton.encode()
            moving.send(torch.tensor([MAGIC, len(text), zlib.crc32(text), sum(sizes)]), peer)
            moving.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), peer)
    for message in messages(sizes, share.index, share.of):
        pieces = [flat[span.tensor][span.begin : span.end] for span in message]
        joined = pieces[0] if len(pieces) == 1 else torch.cat([one.cpu() for one in pieces])
        for peer in peers:
            moving.send(joined, peer)
    moving.finish()


# --- those who lack it ----------------------------------------------------------------------------


def _receive(
    moving: _Moving,
    holders: Sequence[int],
    number: int,
    room_for: Callable[[Spec], torch.Tensor],
) -> tuple[Any, int]:
    skeleton, total = _receive_skeleton(moving, holders[number % len(holders)])
    specs = tensor_tree.specs(skeleton)
    sizes = [spec.nbytes for spec in specs]
    if sum(sizes) != total:
        raise TransferError("The size of a peer's state differs from the size in its skeleton.")
    tensors = [room_for(spec) for spec in specs]
    flat = [elements_of(tensor) for tensor in tensors]
    queues = [messages(sizes, index, len(holders)) for index in range(len(holders))]
    for turn in zip_longest(*queues):  # a message of each: all holders send at the same time
        for peer, message in zip(holders, turn, strict=True):
            if message is not None:
                _receive_message(moving, peer, flat, message)
    moving.finish()
    return tensor_tree.restore(skeleton, tensors), total


def _receive_skeleton(moving: _Moving, peer: int) -> tuple[str, int]:
    header = torch.zeros(4, dtype=torch.int64)
    moving.receive(header, peer)
    moving.finish()
    magic, length, checksum, total = header.tolist()
    if magic != MAGIC or not 0 < length <= tensor_tree.LIMIT:
        raise TransferError("Received something other than a peer's state.")
    text = bytearray(length)
    moving.receive(torch.frombuffer(text, dtype=torch.uint8), peer)
    moving.finish()
    if zlib.crc32(text) != checksum:
        raise TransferError("The skeleton of a peer's state was damaged in transfer.")
    return text.decode(), total


def _receive_message(
    moving: _Moving, peer: int, flat: Sequence[torch.Tensor], message: Message
) -> None:
    pieces = [flat[span.tensor][span.begin : span.end] for span in message]
    if len(pieces) == 1:
        moving.receive(pieces[0], peer)
        return
    joined = torch.empty(sum(map(len, pieces)), dtype=torch.uint8)
    moving.receive(joined, peer, lambda: _spread(joined, pieces))


def _spread(joined: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    begin = 0
    for piece in pieces:
        piece.copy_(joined[begin : begin + len(piece)])
        begin += len(piece)


def _destination(into: Any) -> Callable[[Spec], torch.Tensor]:
    """Return the tensor to receive into: the existing one if its bytes fit, or a new one."""
    own = dict(tensor_tree.tensors_by_path(into)) if into is not None else {}

    def room_for(spec: Spec) -> torch.Tensor:
        tensor = own.get(spec.path)
        return tensor if tensor is not None and spec.describes(tensor) else spec.empty()

    return room_for


# --- moving ---------------------------------------------------------------------------------------


class _Moving:
    """The messages in flight, few with each peer; holds their tensors until they arrive."""

    def __init__(self, link: Messages) -> None:
        self._link = link
        self._device = torch.device(torch_backends.here())
        self._under_way: dict[int, deque[tuple[Any, Callable[[], object]]]] = {}

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        staged = tensor.to(self._device)
        self._add(peer, self._link.isend(staged, peer), lambda: staged)

    def receive(
        self, tensor: torch.Tensor, peer: int, then: Callable[[], object] = lambda: None
    ) -> None:
        """Receive a tensor; call `then` when it has arrived."""
        if tensor.device.type == self._device.type:
            self._add(peer, self._link.irecv(tensor, peer), then)
            return
        staged = torch.empty_like(tensor, device=self._device)
        self._add(peer, self._link.irecv(staged, peer), lambda: (tensor.copy_(staged), then()))

    def finish(self) -> None:
        for queue in self._under_way.values():
            while queue:
                _end(*queue.popleft())

    def _add(self, peer: int, work: Any, then: Callable[[], object]) -> None:
        queue = self._under_way.setdefault(peer, deque())
        queue.append((work, then))
        if len(queue) > WINDOW:
            _end(*queue.popleft())


def _end(work: Any, then: Callable[[], object]) -> None:
    work.wait()
    then()
