"""Abortable waits: the training thread waits on these instead of on gloo.

gloo's own waits end when the operation does, which a frozen peer may never let happen. So every
operation launched in a world is registered here, and code that waits for it waits for an
`AbortableOperation`. It is finished once, by gloo or by `Waits.end`, whichever comes first. gloo
reports the end through its future; we ask for a callback only where a thread waits, since a call
into Python is not free. An operation of a few bytes usually ends within `SOON`: until then, gloo's
own wait costs least.

Nothing here takes a lock that two threads want: a dict's `setdefault` and `pop` are atomic, and
decide races between the gloo thread that finishes an operation and the thread that ends the world.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import faults, torch_private
from torchelastic.worker.collective_log import NO_ROW, Collectives, Mark
from torchelastic.worker_counters import stalls


class GenerationOver(RuntimeError):
    """This worker's world is over; operations still running in it will not finish."""


class PeerLostError(RuntimeError):
    """A collective failed: a connection was closed or reset, or it timed out."""


#: The source file named in gloo's errors about connections.
_TRANSPORT = "gloo/transport"

#: Seconds after which to look for the reason that a call does not end.
FAULT_AFTER = 3.0

#: How long the training thread may wait in gloo, where an abort does not reach it.
SOON = timedelta(milliseconds=2)

#: With at least this many unfinished operations, look for those that have ended.
_MANY = 64

#: Whether waits return although their operations have failed.
_ignored = False

#: The end of an operation: an error, or a value.
_Outcome = tuple[Exception | None, Any]


@contextmanager
def ignoring_failures() -> Iterator[None]:
    """Let waits for failed operations return inside this block: what they hold is thrown away."""
    global _ignored
    _ignored = True
    try:
        yield
    finally:
        _ignored = False


class Waits:
    """The unfinished operations of one world, and a way to end them all."""

    def __init__(self) -> None:
        #: Number of operations launched so far.
        self.launched = 0
        #: Called in the launching thread before each operation.
        self.before: Callable[[], None] | None = None
        #: The reason that no more operations are launched; None while they are.
        self.over: GenerationOver | None = None
        #: The error of the first operation that failed.
        self.failure: PeerLostError | None = None
        #: The memory where the agent sees operations and waits, if it gave us any.
        self.shown: Collectives | None = None
        self._calls = 0
        #: The training thread, whose waiting time is counted.
        self.trainer = threading.get_ident()
        #: Operations that gloo may not have finished, whether or not a thread waits for them.
        self.under_way: dict[int, AbortableOperation] = {}

    @property
    def pending(self) -> int:
        """The number of operations gloo has not finished, including those with aborted waits."""
        for operation in list(self.under_way.values()):
            operation.look()
        return len(self.under_way)

    def check(self) -> None:
        """Raise if the world is over.

        Raises a new error each time: an error keeps the frames it passed alive, and these a group.
        """
        if self.over is not None:
            raise GenerationOver(*self.over.args)

    def announce(self) -> int:
        """Do what precedes every operation; return the operation's number."""
        if self.over is not None:
            self.check()
        if self.before is not None:
            self.before()
        if faults.planned:
            faults.at("collective.before")
        self.launched += 1
        return self.launched

    def enter(self, operation: AbortableOperation) -> AbortableOperation:
        """Register a launched operation that has a gloo future; return it."""
        self.under_way[operation.number] = operation
        if len(self.under_way) > _MANY:
            _ = self.pending  # do not hold operations that no thread waits for
        if faults.planned or self.over is not None:
            self._launched(operation)
        return operation

    def _launched(self, operation: AbortableOperation) -> None:
        """Do what follows every launch."""
        faults.at("collective.launched")
        if self.over is not None:  # ended while the operation was launched: `end` did not see it
            operation.finish(GenerationOver(*self.over.args), None)

    def at_once(self, number: int, inner: Any, mark: Mark | None, *, soon: bool) -> None:
        """Wait for a launched operation, in the call that launches it. `soon`: it usually ends
        within `SOON`; if not, that wait costs an exception."""
        if soon and not faults.planned and self._ends_soon(inner):
            return
        self.enter(AbortableOperation(self, number, inner, mark)).wait()

    def _ends_soon(self, inner: Any) -> bool:
        """Wait in gloo for a moment; return whether the operation has ended well."""
        began = time.monotonic()
        try:
            inner.wait(SOON)
        except RuntimeError:
            return False
        finally:
            if threading.get_ident() == self.trainer:
                stalls.add(stalls.PEERS, time.monotonic() - began)
        return True

    def refused(self, error: RuntimeError) -> None:
        """Handle an error raised by gloo at launch; report it if it is about a connection."""
        if _TRANSPORT in str(error):
            raise self.failed(error) from None

    def follow(
        self, operation: AbortableOperation, inner: Any, *, tells_source: bool
    ) -> AbortableOperation:
        """Register a launched operation whose end is known only by waiting: a send, a receive."""

        def wait() -> None:
            inner.wait()
            if tells_source:
                operation.source = torch_private.source_of(inner)

        self._in_thread(operation, wait)
        self._launched(operation)
        return operation

    def call(
        self,
        function: Callable[[], Any],
        name: bytes = b"building a group",
        *,
        find_fault: Callable[[], str] | None = None,
    ) -> Any:
        """Make a blocking call in a thread that is abandoned when the world ends.

        If it takes long, `find_fault` looks for the reason in another thread; unless it returns an
        empty string, the call fails with its answer.
        """
        self.check()
        self._calls += 1
        operation = AbortableOperation(self, -self._calls, mark=(NO_ROW, 0, name))

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

    def _in_thread(self, operation: AbortableOperation, function: Callable[[], Any]) -> None:
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

        try:
            run_in_thread(run)
        except RuntimeError:  # there is no thread left, so nothing is under way
            del self.under_way[operation.number]
            raise

    def failed(self, error: Exception) -> PeerLostError:
        """Return the error that the training thread gets for a failure of gloo."""
        what = f"A collective failed: {error}"
        if self.failure is None:
            self.failure = PeerLostError(what)
        return PeerLostError(what)

    def fail(self, fault: str) -> None:
        """End every wait with the fault that keeps it from ending."""
        for operation in list(self.under_way.values()):
            operation.finish(self.failed(RuntimeError(fault)), None)

    def end(self, over: GenerationOver) -> None:
        """End every wait now, and launch nothing more."""
        self.over = over
        for operation in list(self.under_way.values()):
            operation.finish(GenerationOver(*over.args), None)


class AbortableOperation:
    """An operation whose waits end with the operation, or with the world."""

    #: The rank that a receive was from, if known.
    source = -1
    #: The error or the value it ended with; absent before.
    _outcome: _Outcome
    #: The lock that releases waiting threads; absent while none waits.
    _gate: threading.Lock

    def __init__(
        self, waits: Waits, number: int, inner: Any = None, mark: Mark | None = None
    ) -> None:
        """`inner` is gloo's work, for operations whose end a future reports; `mark` is what the
        agent sees during a wait for it."""
        self.number, self.mark = number, mark
        self._waits = waits
        self._inner = inner

    def look(self) -> None:
        """Finish the operation if gloo has."""
        inner = self._inner
        if inner is not None and inner.is_completed():
            self._ended(inner.wait)

    def told(self, future: Any) -> None:
        """Handle gloo's callback, in gloo's thread. Must not raise: that would end the process."""
        self._ended(future.value)

    def _ended(self, tell: Callable[[], Any]) -> None:
        """Finish after gloo is done; `tell` returns the result without a wait."""
        self._inner = None  # it keeps gloo's connections open
        self._waits.under_way.pop(self.number, None)
        try:
            value = tell()
        except Exception as error:
            self.finish(self._waits.failed(error), None)
        else:
            self.finish(None, value)

    def finish(self, error: Exception | None, value: Any) -> None:
        """Set how the operation ended. The first call counts."""
        outcome = (error, value)
        if self.__dict__.setdefault("_outcome", outcome) is outcome and "_gate" in self.__dict__:
            self._gate.release()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation or the world ends. Signal handlers run meanwhile."""
        if "_outcome" not in self.__dict__:
            self.look()
            if "_outcome" not in self.__dict__:
                self._block(timeout)
        error = self._outcome[0]
        if error is not None and not _ignored:
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
            raise PeerLostError(f"A collective timed out after {seconds:g} s.")
        gate.release()

    def _watched(self, gate: threading.Lock, seconds: float) -> bool:
        """Wait in the training thread: count the time and show the agent the operation."""
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


class OwnedWork(AbortableOperation, dist.Work):
    """An operation as torch and scripts see it."""

    #: Only for those who ask for it.
    _future: Any

    def __init__(
        self, waits: Waits, number: int, inner: Any = None, mark: Mark | None = None
    ) -> None:
        dist.Work.__init__(self)
        AbortableOperation.__init__(self, waits, number, inner, mark)

    def look(self) -> None:
        inner = self._inner
        if inner is not None and inner.is_completed():
            self._ended(inner.get_future().value)

    def finish(self, error: Exception | None, value: Any) -> None:
        super().finish(error, value)
        if "_future" in self.__dict__:
            self._complete_future()

    def get_future(self) -> Any:
        """Return our own future."""
        future = self.__dict__.get("_future")
        if future is None:
            future = self._future = torch.futures.Future()
            if self.is_completed():
                self._complete_future()
            else:
                self._have_it_told()
        return future

    def _complete_future(self) -> None:
        """Complete the future once: `finish` and `get_future` may both find it incomplete."""
        token = object()
        if self.__dict__.setdefault("_completed", token) is not token:
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
    """The value of a failed future, for readers in C++.

    Only Python knows `Future.set_exception`: C++ finds an exception object as the value. DDP looks
    for tensors in it, takes the first of none, and crashes. To find tensors it pickles the value,
    and there this class raises the error itself, through DDP's backward.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def _raise_failed(value: Any) -> Any:
    """Raise a failed future's error for readers in Python."""
    if isinstance(value, _Failed):
        raise value.error
    return value


# --- threads for calls that block and cannot be interrupted ---------------------------------------

# They are abandoned when no one waits for them. A finished thread is reused, so that a send does
# not start a thread; an idle thread ends after a while.

#: How long an idle thread stays, in seconds.
IDLE = 2.0

_Tasks = queue.SimpleQueue[Callable[[], None]]

#: The idle threads, by the lock they wait on. `pop` and `remove` decide who gets one.
_idle: list[_Tasks] = []


def run_in_thread(task: Callable[[], None]) -> None:
    """Run `task` in a separate thread, at once. It must not raise."""
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        # A daemon: an operation that never ends must not keep the process from ending.
        thread = threading.Thread(
            target=_serve, args=(tasks,), name="torchelastic-group", daemon=True
        )
        thread.start()
    tasks.put(task)


def _serve(tasks: _Tasks) -> None:
    while True:
        try:
            task = tasks.get(timeout=IDLE)
        except queue.Empty:
            if _retired(tasks):
                return
            continue  # just taken: a task is on its way
        task()
        del task  # it may hold the last reference to a group
        _idle.append(tasks)


def _retired(tasks: _Tasks) -> bool:
    try:
        _idle.remove(tasks)
    except ValueError:
        return False
    return True
