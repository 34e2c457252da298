"""Waits that can be ended: what a training thread waits on instead of on gloo.

gloo's own waits end when the operation does, and a frozen peer ends it never. So every operation
launched in a world is registered here, and whoever waits for it waits for an `Operation`. That is
finished once, by gloo or by `Waits.end`, whichever comes first. gloo tells the end by its future:
who waits has it call back, and nobody else is told, for a call into Python is not free.

Nothing here takes a lock that two threads want: a dict's `setdefault` and `pop` are atomic, and
decide races between the thread of gloo that finishes an operation and the one that ends the world.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import faults, torch_private
from torchelastic.training.group import threads
from torchelastic.worker.collective_log import NO_ROW, Collectives, Mark
from torchelastic.worker_counters import stalls


class GenerationOver(RuntimeError):
    """The world this worker was in is over; whatever was under way in it will not be done."""


class PeerLostError(RuntimeError):
    """A collective failed by itself: a connection was closed or reset, or time ran out."""


#: In errors of gloo's that are about connections: the file they come from.
_TRANSPORT = "gloo/transport"

#: After how long it is asked why a call does not end, in seconds.
FAULT_AFTER = 3.0

#: From so many operations under way on, those that have ended are looked for.
_MANY = 64

#: How an operation ended: an error, or a value.
_Outcome = tuple[Exception | None, Any]


class Waits:
    """The operations under way in one world, and the end of all of them."""

    def __init__(self) -> None:
        #: Number of operations launched so far.
        self.launched = 0
        #: Called in the launching thread before each operation.
        self.before: Callable[[], None] | None = None
        #: Why no more operations are launched; None while they are.
        self.over: GenerationOver | None = None
        #: The first operation that failed by itself.
        self.failure: PeerLostError | None = None
        #: Where the agent sees what is launched and waited for, if it gave us such a place.
        self.shown: Collectives | None = None
        self._calls = 0
        #: The thread that trains: what it waits is counted.
        self.trainer = threading.get_ident()
        #: Those that gloo is not known to be done with, whoever waits for them.
        self.under_way: dict[int, Operation] = {}

    @property
    def pending(self) -> int:
        """Operations launched that gloo has not ended yet, freed waits among them."""
        for operation in list(self.under_way.values()):
            operation.look()
        return len(self.under_way)

    def check(self) -> None:
        """Raise if the world is over.

        A new error each time: an error keeps the frames it was raised through, and these a group.
        """
        if self.over is not None:
            raise GenerationOver(*self.over.args)

    def announce(self) -> int:
        """Pass what comes before every operation; its number."""
        if self.over is not None:
            self.check()
        if self.before is not None:
            self.before()
        if faults.planned:
            faults.at("collective.before")
        self.launched += 1
        return self.launched

    def enter(self, operation: Operation) -> None:
        """An operation was launched that has a future of gloo's."""
        self.under_way[operation.number] = operation
        if len(self.under_way) > _MANY:
            _ = self.pending  # those that nobody waits for are not kept for ever
        if faults.planned or self.over is not None:
            self._launched(operation)

    def _launched(self, operation: Operation) -> None:
        """Pass what comes after every launch."""
        faults.at("collective.launched")
        if self.over is not None:  # ended while the operation was launched: `end` did not see it
            operation.finish(GenerationOver(*self.over.args), None)

    def refused(self, error: RuntimeError) -> None:
        """gloo has raised instead of launching; if that is about a connection, say so."""
        if _TRANSPORT in str(error):
            raise self.failed(error) from None

    def follow(self, number: int, inner: Any, *, tells_source: bool) -> OwnedWork:
        """One was launched whose end is found out by waiting for it: a send, a receive."""
        work = OwnedWork(self, number)

        def wait() -> None:
            inner.wait()
            if tells_source:
                work.source = torch_private.source_of(inner)

        self._in_thread(work, wait)
        self._launched(work)
        return work

    def call(
        self,
        function: Callable[[], Any],
        name: bytes = b"building a group",
        *,
        find_fault: Callable[[], str] | None = None,
    ) -> Any:
        """Do something that blocks, in a thread that is left to it when the world ends.

        Where it takes long, `find_fault` is asked, in another thread, why it cannot end; it fails
        with the answer, unless that is empty.
        """
        self.check()
        self._calls += 1
        operation = Operation(self, -self._calls)
        operation.mark = (NO_ROW, 0, name)

        def look() -> None:
            fault = find_fault() if find_fault is not None else ""
            if fault and operation.number in self.under_way:
                operation.finish(self.failed(RuntimeError(fault)), None)

        looking = threading.Timer(FAULT_AFTER, look)
        looking.daemon = True
        self._in_thread(operation, function)
        self.check()  # `end` may not have seen it
        if find_fault is not None:
            looking.start()
        try:
            return operation.result()
        finally:
            looking.cancel()

    def _in_thread(self, operation: Operation, function: Callable[[], Any]) -> None:
        self.under_way[operation.number] = operation

        def run() -> None:
            ended: _Outcome
            try:
                ended = (None, function())
            except RuntimeError as error:
                ended = (self.failed(error), None)
            except Exception as error:
                ended = (error, None)
            self.under_way.pop(operation.number, None)
            operation.finish(*ended)

        threads.run(run)

    def failed(self, error: Exception) -> PeerLostError:
        """What a failure of gloo's own is to the training thread."""
        what = f"A collective failed: {error}"
        if self.failure is None:
            self.failure = PeerLostError(what)
        return PeerLostError(what)

    def fail(self, fault: str) -> None:
        """Free every wait with what was found to keep it from ending."""
        for operation in list(self.under_way.values()):
            operation.finish(self.failed(RuntimeError(fault)), None)

    def end(self, over: GenerationOver) -> None:
        """Free every wait, now, and launch nothing more."""
        self.over = over
        for operation in list(self.under_way.values()):
            operation.finish(GenerationOver(*over.args), None)


class Operation:
    """An operation whose waits end with the operation, or with the world."""

    #: What the agent is shown of it while it is waited for.
    mark: Mark | None = None
    #: The error or the value it ended with; absent before.
    _outcome: _Outcome
    #: What the waiting are released by; absent as long as nobody waits.
    _gate: threading.Lock

    def __init__(self, waits: Waits, number: int, inner: Any = None) -> None:
        """`inner` is gloo's work, for operations whose end is told by a future."""
        self.number = number
        self._waits = waits
        self._inner = inner

    def look(self) -> None:
        """Take note of the end if gloo has come to it."""
        inner = self._inner
        if inner is not None and inner.is_completed():
            self._ended(inner.wait)

    def told(self, future: Any) -> None:
        """By gloo, in a thread of its own. It must not raise: that would end the process."""
        self._ended(future.value)

    def _ended(self, tell: Callable[[], Any]) -> None:
        """gloo is done; `tell` says how that was, without a wait."""
        self._inner = None  # it keeps gloo's connections open
        self._waits.under_way.pop(self.number, None)
        try:
            value = tell()
        except Exception as error:
            self.finish(self._waits.failed(error), None)
        else:
            self.finish(None, value)

    def finish(self, error: Exception | None, value: Any) -> None:
        """The first one to call this decides how the operation ended."""
        outcome = (error, value)
        if self.__dict__.setdefault("_outcome", outcome) is outcome and "_gate" in self.__dict__:
            self._gate.release()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the operation or the world ends. Signal handlers run meanwhile."""
        if "_outcome" not in self.__dict__:
            self.look()
            if "_outcome" not in self.__dict__:
                self._block(timeout)
        error = self._outcome[0]
        if error is not None:
            raise error
        if faults.planned:
            faults.at("collective.after")
        return True

    def _block(self, timeout: timedelta | None) -> None:
        made = threading.Lock()
        made.acquire()
        gate = self.__dict__.setdefault("_gate", made)
        # `finish` sets the outcome and then looks for the gate; here it is the other way round.
        if "_outcome" in self.__dict__:
            return
        if gate is made:
            self._have_it_told()
        seconds = timeout.total_seconds() if timeout else -1
        if threading.get_ident() == self._waits.trainer:
            is_done = self._watched(gate, seconds)
        else:
            is_done = gate.acquire(timeout=seconds)
        if not is_done:
            raise PeerLostError(f"A collective was not done within {seconds:g} s.")
        gate.release()

    def _watched(self, gate: threading.Lock, seconds: float) -> bool:
        """The thread that trains waits: how long is counted, and what for is shown."""
        shown, mark, began = self._waits.shown, self.mark, time.monotonic()
        if shown is not None and mark is not None:
            shown.waits(*mark)
        try:
            return gate.acquire(timeout=seconds)
        finally:
            stalls.add(stalls.PEERS, time.monotonic() - began)
            if shown is not None:
                shown.goes_on()

    def _have_it_told(self) -> None:
        inner = self._inner
        if inner is not None:
            inner.get_future().add_done_callback(self.told)

    def result(self) -> Any:
        self.wait()
        return self._outcome[1]


class OwnedWork(Operation, dist.Work):
    """An operation as torch and scripts know them."""

    #: Only for those who ask for it.
    _future: Any

    def __init__(self, waits: Waits, number: int, inner: Any = None) -> None:
        dist.Work.__init__(self)
        Operation.__init__(self, waits, number, inner)
        self.source = -1

    def look(self) -> None:
        inner = self._inner
        if inner is not None and inner.is_completed():
            self._ended(inner.get_future().value)

    def finish(self, error: Exception | None, value: Any) -> None:
        super().finish(error, value)
        if "_future" in self.__dict__:
            self._settle()

    def get_future(self) -> Any:
        """A future of ours."""
        future = self.__dict__.get("_future")
        if future is None:
            future = self._future = torch.futures.Future()
            if self.is_completed():
                self._settle()
            else:
                self._have_it_told()
        return future

    def _settle(self) -> None:
        """Complete the future; once, for `finish` and `get_future` may both find it unsettled."""
        token = object()
        if self.__dict__.setdefault("_settled", token) is not token:
            return
        error, value = self._outcome
        if error is None:
            try:
                faults.at("collective.after")
            except Exception as fault:
                error = fault
        if error is not None:
            value = _Failed(error)
            torch_private.unwrap_by(self._future, _raise_failed)
        self._future.set_result(value)

    def is_completed(self) -> bool:
        self.look()
        return "_outcome" in self.__dict__

    def is_success(self) -> bool:
        return self.is_completed() and self._outcome[0] is None

    def exception(self) -> Exception | None:
        return self._outcome[0] if self.is_completed() else None

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()


class _Failed:
    """The value of a future that failed, for readers in C++.

    `Future.set_exception` is known to Python only: C++ finds an exception object as the value, and
    DDP, which looks for the tensors in it and takes the first of none, crashes. To look for the
    tensors it pickles the value: that is where this one raises, through DDP's backward, the error
    itself.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def _raise_failed(value: Any) -> Any:
    """What a future that failed does to readers in Python."""
    if isinstance(value, _Failed):
        raise value.error
    return value
