"""The control thread: listens to the agent while the training thread is busy.

It answers `Ask`, `Ping` and `Dump` without the training thread, aborts the collectives of a world
that is over, and puts all other orders into the training thread's `inbox`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from torchelastic.errors import ChannelLost
from torchelastic.training.gate import Gate, GateDecision
from torchelastic.training.inbox import Inbox
from torchelastic.worker import orders, status_page
from torchelastic.worker.channel import Link

log = logging.getLogger(__name__)

#: How often to look for a peer that does not answer, in seconds.
LOOK = 0.5

T = TypeVar("T")
Next = orders.Enter | orders.Over | orders.Leave


class Abortable(Protocol):
    """Something the training thread may be waiting in: a connection attempt, a process group."""

    def abort(self, reason: str) -> None:
        """End every wait. Any thread may call this, any number of times."""

    @property
    def pending(self) -> int:
        """The number of unfinished operations."""

    @property
    def aborted(self) -> bool: ...

    def show(self) -> None:
        """Show the agent the pending operations that the training thread does not show itself."""

    def look(self, silence: float) -> None:
        """End waits for a peer that has not answered for `silence` seconds."""


class Control:
    """A resident worker's side of the conversation with its agent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._inbox = Inbox()
        self._changed = threading.Condition()
        #: What the training thread may be waiting in, and in which generation.
        self._guarded: tuple[int, Abortable] | None = None
        self._status_page: status_page.StatusPage | None = None
        self._silence = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="torchelastic-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the link."""
        self._stopped = True
        self._link.wake()
        self._thread.join()
        self._link.close()
        if self._status_page is not None:
            self._status_page.close()

    # --- the training thread ---------------------------------------------------------------------

    def tell(self, report: orders.Report) -> None:
        """Report to the agent; a long error message is truncated."""
        self._link.tell(orders.to_json(report))

    def next(self, broken: int | None = None) -> Next:
        """Wait for the next order; see `Inbox.next`."""

        return cast(Next, self._wait(lambda: self._inbox.next(broken)))

    def gate(self, generation: int) -> Gate:
        with self._changed:
            return self._inbox.gate(generation)

    def wait_at(self, gate: Gate, step: int) -> GateDecision:
        """Wait for the decision on an announced step."""

        def known() -> GateDecision | None:
            decision = gate.decision(step)
            return None if decision is GateDecision.WAIT else decision

        return self._wait(known)

    def left(self, generation: int) -> None:
        """Note that this worker left the world at its last boundary."""
        with self._changed:
            self._inbox.left(generation)

    def guard(self, generation: int, group: Abortable) -> None:
        """Abort `group` from the control thread when its generation ends, or now if it has."""
        with self._changed:
            self._guarded = (generation, group)
            over = self._inbox.is_over(generation)
        if over:
            group.abort(self.reason)

    def unguard(self) -> None:
        with self._changed:
            self._guarded = None

    def is_over(self, generation: int) -> bool:
        with self._changed:
            return self._inbox.is_over(generation)

    @property
    def reason(self) -> str:
        """The reason the last world ended."""
        return self._inbox.reason

    @property
    def status_page(self) -> status_page.StatusPage | None:
        """The status page shared with the agent, or None."""
        return self._status_page

    def _wait(self, probe: Callable[[], T | None]) -> T:
        with self._changed:
            while (found := probe()) is None:
                if self._inbox.closed is not None:
                    raise self._inbox.closed
                self._changed.wait()
            return found

    # --- the control thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                received = self._link.receive(patience=LOOK)
                if received is not None:
                    self._hear(*received)
                elif not self._stopped:
                    self._look()
            return
        except ChannelLost as error:
            why = error
        except Exception as error:  # the training thread must not wait for ever
            log.exception("The control thread failed; this worker can no longer follow its agent.")
            why = ChannelLost(f"Orders from the agent cannot be read: {error!r}.")
        with self._changed:
            self._inbox.close(why)
            self._changed.notify_all()
        self._abort_what_is_over()

    def _hear(self, message: dict[str, object], descriptor: int | None) -> None:
        try:
            order = orders.from_json(message)
            if isinstance(order, orders.StatusPage) and descriptor is not None:
                self._status_page, self._silence = status_page.StatusPage(descriptor), order.silence
            elif isinstance(order, orders.Dump) and descriptor is not None:
                faulthandler.dump_traceback(descriptor, all_threads=True)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if isinstance(order, orders.Ping):
            self.tell(self._pong(order.number))
        elif isinstance(order, orders.Order):
            self._note(order)

    def _note(self, order: orders.Order) -> None:
        with self._changed:
            answer = self._inbox.take(order)
            self._changed.notify_all()
        if isinstance(order, orders.Over | orders.Closed):
            self._abort_what_is_over()
        if answer is not None:
            self.tell(answer)

    def _abort_what_is_over(self) -> None:
        """Abort outside our lock: an abort takes locks that the training thread may hold."""
        with self._changed:
            guarded = self._guarded
            over = guarded is not None and self._inbox.is_over(guarded[0])
        if over and guarded is not None:
            guarded[1].abort(self.reason)

    def _look(self) -> None:
        with self._changed:
            guarded = self._guarded
        if guarded is not None and self._silence:
            guarded[1].look(self._silence)

    def _pong(self, number: int) -> orders.Pong:
        with self._changed:
            guarded = self._guarded
        if guarded is None:
            return orders.Pong(waiting=False, number=number)
        group = guarded[1]
        group.show()
        return orders.Pong(waiting=group.pending > 0, aborted=group.aborted, number=number)
