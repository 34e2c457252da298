"""The worker's agent, as the one who holds snapshots: asked with patience, never waited for long.

For a worker that runs a script: it is alone on its channel. A resident one has a control thread
there (`control`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

from torchelastic.errors import ChannelLost, SnapshotError
from torchelastic.snapshot.layout import Memory, Version
from torchelastic.snapshot.messages import (
    Answer,
    Drop,
    Dropped,
    Fetch,
    Granted,
    Holdings,
    Inventory,
    Open,
    Opened,
    Refused,
    Request,
    Room,
    Sealed,
    Settled,
    from_json,
    to_json,
)
from torchelastic.worker import channel, optimizer_steps, orders
from torchelastic.worker.status_page import StatusPage

#: How long an agent may take to answer, and to bring a snapshot from another node.
PATIENCE, FETCH_PATIENCE = 30.0, 600.0
#: Bytes of room that it finds in a second at least: the pages of all workers of a node are taken
#: one after the other.
ROOM_PACE = 50e6


class Unanswered(SnapshotError):
    """The agent is busy, for all that is known: what was asked for may come yet."""


class Holder(Protocol):
    """What a keeper asks of an agent."""

    def inventory(self) -> Holdings: ...

    def room(self, piece: str, size: int, skeleton: int) -> Memory: ...

    def open(self, piece: str, version: Version, peer: str) -> Memory: ...

    def drop(self, piece: str, version: Version) -> None: ...

    def tell(self, message: Sealed | Settled) -> None: ...

    def progress(self, version: Version, rank: int) -> None: ...

    def begins(self, begins: orders.Begins) -> None: ...

    def listen(self, on_leave: Callable[[orders.Leave], None]) -> None: ...


class Agent:
    """A `Holder` at the other end of this worker's channel."""

    def __init__(self, link: channel.Link) -> None:
        self._link = link
        #: Held by the thread that asks until it has its answer, and by the one that listens.
        self._asking = threading.Lock()
        self._on_leave: Callable[[orders.Leave], None] | None = None
        self._numbers = count(1)
        self._status_page: StatusPage | None = None

    def inventory(self) -> Holdings:
        """What this node holds. The first time, the slate comes before the answer."""
        if self._status_page is None:
            optimizer_steps.stop()  # what is committed counts from now on
            channel.send(orders.to_json(orders.Keeps()))
        answer, descriptor = self._ask(Inventory(next(self._numbers)), PATIENCE)
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(answer, Holdings):
            raise SnapshotError(f"The agent did not list its snapshots: {_words(answer)}")
        return answer

    def room(self, piece: str, size: int, skeleton: int) -> Memory:
        """Memory to write a piece to; `SnapshotError` says why there is none, `Unanswered` that it
        may be asked for again."""
        patience = PATIENCE + size / ROOM_PACE
        return self._memory(Room(next(self._numbers), piece, size, skeleton), patience)

    def open(self, piece: str, version: Version, peer: str) -> Memory:
        """Memory that holds a piece; `peer` is where another node has it, empty if this one has."""
        number = next(self._numbers)
        if peer:
            return self._memory(Fetch(number, piece, version, peer), FETCH_PATIENCE)
        return self._memory(Open(number, piece, version), PATIENCE)

    def drop(self, piece: str, version: Version) -> None:
        """Have it look at a version that is damaged, and offer it no more: when this returns, it
        does not. `SnapshotError` if it does not answer."""
        answer, descriptor = self._ask(Drop(next(self._numbers), piece, version), FETCH_PATIENCE)
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(answer, Dropped):
            raise SnapshotError(_words(answer))

    def tell(self, message: Sealed | Settled) -> None:
        """Without waiting; it may get lost."""
        channel.send(to_json(message))

    def begins(self, begins: orders.Begins) -> None:
        """Nobody had anything to go on from."""
        channel.send(orders.to_json(begins))

    def progress(self, version: Version, rank: int) -> None:
        """So many steps are committed: it is named with a failure, and refills the restarts."""
        if self._status_page is not None:
            self._status_page.rank = rank
            self._status_page.entered(*version)

    def listen(self, on_leave: Callable[[orders.Leave], None]) -> None:
        """Say that the state can be put into storage, and call this, in any thread, when this
        worker is told to leave. From then on somebody listens when nobody asks."""
        self._on_leave = on_leave
        threading.Thread(target=self._listen, name="torchelastic-agent", daemon=True).start()
        self._link.tell(orders.to_json(orders.CanSave()))

    def _listen(self) -> None:
        # An agent that is gone takes this process with it.
        with contextlib.suppress(ChannelLost):
            while self._link.is_ready():
                with self._asking:
                    if (received := self._link.receive(patience=0.0)) is not None:
                        self._overhear(*received)

    def _overhear(self, message: Mapping[str, Any], descriptor: int | None) -> None:
        """What answers no question of ours, or comes too late for that."""
        order = orders.from_json(message)
        if descriptor is not None:
            if isinstance(order, orders.StatusPage) and self._status_page is None:
                self._status_page = StatusPage(descriptor)
            os.close(descriptor)
        if isinstance(order, orders.Leave) and self._on_leave is not None:
            self._on_leave(order)

    def _memory(self, request: Room | Open | Fetch, patience: float) -> Memory:
        answer, descriptor = self._ask(request, patience)
        if not isinstance(answer, Granted | Opened) or descriptor is None:
            raise SnapshotError(_words(answer))
        try:
            return Memory(descriptor, writable=isinstance(answer, Granted))
        except (OSError, ValueError) as error:
            raise SnapshotError(f"Cannot use the memory from the agent: {error}.") from None
        finally:
            os.close(descriptor)

    def _ask(self, request: Request, patience: float) -> tuple[Answer, int | None]:
        try:
            with self._asking:
                self._link.tell(to_json(request), patience=patience)
                return self._answer(request.request, time.monotonic() + patience)
        except ChannelLost as error:
            raise SnapshotError(str(error)) from None

    def _answer(self, number: int, deadline: float) -> tuple[Answer, int | None]:
        """The answer to this request; one that came too late for an earlier one is dropped."""
        while (left := deadline - time.monotonic()) > 0:
            received = self._link.receive(patience=left)
            if received is None:
                break
            message, descriptor = received
            answer = from_json(message)
            if isinstance(answer, Answer) and answer.request == number:
                return answer, descriptor
            self._overhear(message, descriptor)
        raise Unanswered("Timed out waiting for the agent's answer.")


def _words(answer: Answer) -> str:
    return answer.sentence if isinstance(answer, Refused) else f"It answered {answer}."


_connected = False


def connect() -> Agent | None:
    """The agent of this worker; None in a process that has none."""
    global _connected
    if _connected:
        raise RuntimeError(
            "This process already keeps snapshots of another TorchState. Put all models and "
            "optimizers into one TorchState."
        )
    link = channel.link()
    _connected = link is not None
    return Agent(link) if link is not None else None
