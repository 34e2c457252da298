"""The client of the agent that holds this worker's snapshots; every request has a timeout.

`AgentClient` is for a worker that runs a script: nothing else uses its channel. In an in-process
worker the control thread receives the answers (`training.control`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from torchelastic.errors import ChannelLost, SnapshotError
from torchelastic.snapshot.layout import Memory, Version
from torchelastic.snapshot.messages import (
    Answer,
    Drop,
    Dropped,
    Fetch,
    Granted,
    Inventory,
    NodeInventory,
    Open,
    Opened,
    Outdated,
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

#: Seconds for an agent to answer, and to fetch a snapshot from another node.
ANSWER_TIMEOUT, FETCH_TIMEOUT = 30.0, 600.0
#: The least bytes per second at which the agent allocates memory: it takes the pages of all workers
#: of a node one after the other.
LEAST_ALLOCATION_RATE = 50e6


class Unanswered(SnapshotError):
    """The agent has not answered yet; it may be busy."""


class SnapshotRequests(ABC):
    """Requests to the agent about snapshots."""

    def __init__(self, numbers: Iterator[int]) -> None:
        """`numbers` are those of the requests, each used once on this worker's channel."""
        self._numbers = numbers

    @abstractmethod
    def _ask(self, request: Request, patience: float) -> tuple[Answer, int | None]:
        """Return the answer and its descriptor, which the caller closes; `SnapshotError` if there
        is none within `patience` seconds."""

    def inventory(self) -> NodeInventory:
        """Return what this node holds."""
        answer, descriptor = self._ask(Inventory(next(self._numbers)), ANSWER_TIMEOUT)
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(answer, NodeInventory):
            raise SnapshotError(f"The agent did not list its snapshots: {_words(answer)}")
        return answer

    def request_memory(self, piece: str, size: int, skeleton: int) -> Memory:
        """Return memory to write a piece to. `SnapshotError`: the agent refused; `Unanswered`: ask
        again."""
        patience = ANSWER_TIMEOUT + size / LEAST_ALLOCATION_RATE
        return self._memory(Room(next(self._numbers), piece, size, skeleton), patience)

    def open(self, piece: str, version: Version, peer: str) -> Memory:
        """Return memory that holds a piece; `peer` is the node that has it, empty for this one."""
        number = next(self._numbers)
        if peer:
            return self._memory(Fetch(number, piece, version, peer), FETCH_TIMEOUT)
        return self._memory(Open(number, piece, version), ANSWER_TIMEOUT)

    def drop(self, piece: str, version: Version) -> None:
        """Make the agent check a damaged version and stop offering it before this returns.
        `SnapshotError` if it does not answer."""
        answer, descriptor = self._ask(Drop(next(self._numbers), piece, version), FETCH_TIMEOUT)
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(answer, Dropped):
            raise SnapshotError(_words(answer))

    def tell(self, message: Sealed | Settled | Outdated) -> None:
        """Send without waiting; the message may get lost."""
        channel.send(to_json(message))

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


class AgentClient(SnapshotRequests):
    """The agent at the other end of this worker's channel."""

    def __init__(self, link: channel.WorkerLink) -> None:
        super().__init__(count(1))
        self._link = link
        #: Held by a requesting thread until it has its answer, and by the listening thread.
        self._asking = threading.Lock()
        self._on_leave: Callable[[orders.Leave], None] | None = None
        self._status_page: StatusPage | None = None

    def inventory(self) -> NodeInventory:
        """Return what this node holds. The first time, the status page precedes the answer."""
        if self._status_page is None:
            optimizer_steps.stop()  # from now on commits are counted
            channel.send(orders.to_json(orders.Keeps()))
        return super().inventory()

    def begins(self, begins: orders.Begins) -> None:
        """Report that training begins from scratch."""
        channel.send(orders.to_json(begins))

    def progress(self, version: Version, rank: int) -> None:
        """Report the number of committed steps, for failure reports and the restart budget."""
        if self._status_page is not None:
            self._status_page.rank = rank
            self._status_page.entered(*version)

    def listen(self, on_leave: Callable[[orders.Leave], None], *, together: bool = False) -> None:
        """Report that the state can be saved, alone or `together` with all ranks, and call this, in
        any thread, when this worker must leave. From then on a thread listens between requests."""
        self._on_leave = on_leave
        threading.Thread(target=self._listen, name="torchelastic-agent", daemon=True).start()
        self._link.tell(orders.to_json(orders.CanSave(together)))

    def saved(self) -> None:
        """Report that this worker has saved its state `together` with others, or gives up."""
        with contextlib.suppress(ChannelLost):  # this process ends with its agent
            self._link.tell(orders.to_json(orders.Saved()))

    def _listen(self) -> None:
        # An agent that is gone takes this process with it.
        with contextlib.suppress(ChannelLost):
            while self._link.is_ready():
                with self._asking:
                    if (received := self._link.receive(timeout=0.0)) is not None:
                        self._overhear(*received)

    def _overhear(self, message: Mapping[str, Any], descriptor: int | None) -> None:
        """Handle a message that answers no request, or a late one."""
        order = orders.from_json(message)
        if descriptor is not None:
            if isinstance(order, orders.StatusPage) and self._status_page is None:
                self._status_page = StatusPage(descriptor)
            os.close(descriptor)
        if isinstance(order, orders.Leave) and self._on_leave is not None:
            self._on_leave(order)

    def _ask(self, request: Request, patience: float) -> tuple[Answer, int | None]:
        try:
            with self._asking:
                self._link.tell(to_json(request), timeout=patience)
                return self._answer(request.request, time.monotonic() + patience)
        except ChannelLost as error:
            raise SnapshotError(str(error)) from None

    def _answer(self, number: int, deadline: float) -> tuple[Answer, int | None]:
        """Return the answer to this request; drop late answers to earlier ones."""
        while (left := deadline - time.monotonic()) > 0:
            received = self._link.receive(timeout=left)
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


def connect() -> AgentClient | None:
    """Return the client of this worker's agent, or None in a process without one."""
    global _connected
    if _connected:
        raise RuntimeError(
            "This process already keeps snapshots of another TorchState. Put all models and "
            "optimizers into one TorchState."
        )
    link = channel.link()
    _connected = link is not None
    return AgentClient(link) if link is not None else None
