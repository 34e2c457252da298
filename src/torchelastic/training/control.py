"""The control thread: listens to the agent while the training thread is busy.

It answers `Ask`, `Ping` and `Dump` without the training thread, aborts the collectives of a world
that is over, and puts all other orders into the training thread's `inbox`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Protocol, TypeVar, cast

from torchelastic.errors import ChannelLost, SnapshotError
from torchelastic.snapshot import messages
from torchelastic.snapshot.agent_client import SnapshotRequests, Unanswered
from torchelastic.training.gate import Gate, GateDecision
from torchelastic.training.group.abortable_waits import GenerationOver
from torchelastic.training.inbox import Inbox
from torchelastic.training.state import Version
from torchelastic.worker import orders, status_page
from torchelastic.worker.channel import WorkerLink

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
    """An in-process worker's side of the conversation with its agent."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._inbox = Inbox()
        self._changed = threading.Condition()
        #: What the training thread may be waiting in, and in which generation.
        self._guarded: tuple[int, Abortable] | None = None
        self._status_page: status_page.StatusPage | None = None
        self._silence = 0.0
        #: By number, the requests about snapshots that a thread waits for, and their answers.
        self._answers: dict[int, tuple[messages.Answer, int | None] | None] = {}
        self.request_numbers = count(1)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="torchelastic-control", daemon=True)

    def start(self) -> None:
        """Start the thread; close the link if there is none left."""
        try:
            self._thread.start()
        except RuntimeError:
            self._link.close()
            raise

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

    def settle(self, base: Version, generation: int) -> None:
        """Report to the agent which snapshots are void: older ones beyond this base."""
        self._link.tell(messages.to_json(messages.Settled(base, generation)))

    def next(self, broken: int | None = None) -> Next:
        """Wait for the next order; see `Inbox.next`."""

        return cast(Next, self._wait(lambda: self._inbox.next(broken)))

    def gate(self, generation: int) -> Gate:
        with self._changed:
            return self._inbox.gate(generation)

    def next_size(self) -> int:
        """Return the size of the next world to enter; 0 if none was announced."""
        with self._changed:
            return self._inbox.next_size

    def wait_at(self, gate: Gate, step: int) -> GateDecision:
        """Wait for the decision on an announced step."""

        def known() -> GateDecision | None:
            decision = gate.decision(step)
            return None if decision is GateDecision.WAIT else decision

        return self._wait(known)

    def is_certified(self, gate: Gate, version: Version) -> bool:
        """Wait until the state of this version is known to be equal everywhere; return False if
        that will not be known in this generation, or states are not compared any more."""

        def known() -> bool | None:
            is_ending = gate.over or gate.answer is not None or gate.last is not None
            if is_ending or self._inbox.unchecked:
                return False
            return True if self._inbox.certified >= version else None

        return self._wait(known)

    @property
    def certified(self) -> Version:
        """The newest version known to be equal on all workers."""
        return self._inbox.certified

    @property
    def unchecked(self) -> str:
        """Why states are not compared any more; empty if they are."""
        return self._inbox.unchecked

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

    # --- any thread ------------------------------------------------------------------------------

    def ask(
        self, request: messages.Request, patience: float, generation: int
    ) -> tuple[messages.Answer, int | None]:
        """Ask about snapshots; return the answer and its descriptor, which the caller closes.
        `Unanswered` after `patience` seconds, `GenerationOver` if that comes first."""
        number, deadline = request.request, time.monotonic() + patience
        with self._changed:
            self._answers[number] = None
        try:
            self._link.tell(messages.to_json(request), timeout=patience)
            with self._changed:
                while (answer := self._answers[number]) is None:
                    if self._inbox.is_over(generation):
                        raise GenerationOver(f"Generation {generation} is over: {self.reason}.")
                    if (left := deadline - time.monotonic()) <= 0:
                        raise Unanswered("Timed out waiting for the agent's answer.")
                    self._changed.wait(left)
                return answer
        except ChannelLost as error:
            raise SnapshotError(str(error)) from None
        finally:
            with self._changed:
                del self._answers[number]

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
                received = self._link.receive(timeout=LOOK)
                if received is not None:
                    self._hear(*received)
                elif not self._stopped:
                    self._look()
            return
        except ChannelLost as error:
            why = error
        except Exception as error:  # the training thread must not wait forever
            log.exception("The control thread failed; this worker can no longer follow its agent.")
            why = ChannelLost(f"Orders from the agent cannot be read: {error!r}.")
        with self._changed:
            self._inbox.close(why)
            self._changed.notify_all()
        self._abort_what_is_over()

    def _hear(self, message: dict[str, object], descriptor: int | None) -> None:
        if str(message.get("type")).startswith(messages.PREFIX):
            self._hear_answer(message, descriptor)
            return
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

    def _hear_answer(self, message: dict[str, object], descriptor: int | None) -> None:
        answer = messages.from_json(message)
        with self._changed:
            if isinstance(answer, messages.Answer) and answer.request in self._answers:
                self._answers[answer.request] = answer, descriptor
                self._changed.notify_all()
                return
        if descriptor is not None:  # the request has timed out
            os.close(descriptor)

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


class InProcessRequests(SnapshotRequests):
    """The requests of an in-process worker about snapshots, in one world."""

    def __init__(self, control: Control, generation: int) -> None:
        super().__init__(control.request_numbers)
        self._control, self._generation = control, generation

    def _ask(
        self, request: messages.Request, patience: float
    ) -> tuple[messages.Answer, int | None]:
        return self._control.ask(request, patience, self._generation)
