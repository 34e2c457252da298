"""Waits that can be ended: what a training thread waits on instead of on gloo.

gloo's own waits end when the operation does, and a frozen peer ends it never. So every operation
launched in a world is registered here, and whoever waits for it waits for an `OwnedWork`. That is
finished once, by gloo's callback or by `Waits.end`, whichever comes first.

Nothing here takes a lock that two threads want: a dict's `setdefault` and `pop` are atomic, and
decide races between the thread of gloo that finishes an operation and the one that ends the world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchelastic import faults
from torchelastic.training import group_threads


class GenerationOver(RuntimeError):
    """The world this worker was in is over; whatever was under way in it will not be done."""


class PeerLostError(RuntimeError):
    """A collective failed by itself: a connection was closed or reset, or time ran out."""


#: In errors of gloo's that are about connections: the file they come from.
_TRANSPORT = "gloo/transport"

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
        self._calls = 0
        self._under_way: dict[int, OwnedWork] = {}

    @property
    def pending(self) -> int:
        """Operations launched whose end gloo has not told yet, freed waits among them."""
        return len(self._under_way)

    def launch(self, start: Callable[[], Any]) -> OwnedWork:
        """Start an operation whose end gloo tells by a future."""
        work = self.announce()
        inner = self._start(start)
        self._under_way[work.number] = work  # before the callback, which removes it
        inner.get_future().add_done_callback(work.told)
        return self.entered(work)

    def _start(self, start: Callable[[], Any]) -> Any:
        """Start it. On a connection that is broken already gloo raises here, not in the wait."""
        try:
            return start()
        except RuntimeError as error:
            if _TRANSPORT in str(error):
                raise self.failed(error) from None
            raise  # an argument that gloo does not take

    def check(self) -> None:
        """Raise if the world is over.

        A new error each time: an error keeps the frames it was raised through, and these a group.
        """
        if self.over is not None:
            raise GenerationOver(*self.over.args)

    def announce(self) -> OwnedWork:
        """Pass what comes before every operation, and number it."""
        self.check()
        if self.before is not None:
            self.before()
        faults.at("collective.before")
        self.launched += 1
        return OwnedWork(self, self.launched)

    def entered(self, work: OwnedWork) -> OwnedWork:
        """Pass what comes after every launch."""
        faults.at("collective.launched")
        if self.over is not None:  # ended while the operation was launched: `end` did not see it
            work.finish(GenerationOver(*self.over.args), None)
        return work

    def launch_blocking(self, start: Callable[[], Any], *, tells_source: bool = False) -> OwnedWork:
        """Start an operation whose end is found out by waiting for it: a send, a receive."""
        work = self.announce()
        inner = self._start(start)

        def wait() -> Any:
            inner.wait()
            if tells_source:
                work.source = inner._source_rank()

        self._in_thread(work, wait)
        return self.entered(work)

    def call(self, function: Callable[[], Any]) -> Any:
        """Do something that blocks, in a thread that is left to it when the world ends."""
        self.check()
        self._calls += 1
        work = OwnedWork(self, -self._calls)
        self._in_thread(work, function)
        self.check()  # `end` may not have seen it
        return work.result()

    def _in_thread(self, work: OwnedWork, function: Callable[[], Any]) -> None:
        self._under_way[work.number] = work

        def run() -> None:
            ended: _Outcome
            try:
                ended = (None, function())
            except RuntimeError as error:
                ended = (self.failed(error), None)
            except Exception as error:
                ended = (error, None)
            self.told(work)
            work.finish(*ended)

        group_threads.run(run)

    def told(self, work: OwnedWork) -> None:
        """gloo is done with this operation, whoever waited for it."""
        self._under_way.pop(work.number, None)

    def failed(self, error: Exception) -> PeerLostError:
        """What a failure of gloo's own is to the training thread."""
        what = f"A collective failed: {error}"
        if self.failure is None:
            self.failure = PeerLostError(what)
        return PeerLostError(what)

    def end(self, over: GenerationOver) -> None:
        """Free every wait, now, and launch nothing more."""
        self.over = over
        for work in list(self._under_way.values()):
            work.finish(GenerationOver(*over.args), None)


class OwnedWork(dist.Work):
    """An operation whose waits end with the operation, or with the world."""

    #: The error or the value it ended with; absent before.
    _outcome: _Outcome
    #: Only for those who ask for it.
    _future: Any

    def __init__(self, waits: Waits, number: int) -> None:
        super().__init__()
        self.number = number
        self._waits = waits
        self._gate = threading.Lock()
        self._gate.acquire()
        self.source = -1

    def told(self, inner: Any) -> None:
        """gloo's callback, in a thread of gloo. It must not raise: that would end the process."""
        self._waits.told(self)
        try:
            value = inner.value()
        except Exception as error:
            self.finish(self._waits.failed(error), None)
        else:
            self.finish(None, value)

    def finish(self, error: Exception | None, value: Any) -> None:
        """The first one to call this decides how the operation ended."""
        outcome = (error, value)
        if self.__dict__.setdefault("_outcome", outcome) is not outcome:
            return
        self._gate.release()
        if "_future" in self.__dict__:
            self._settle()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the operation or the world ends. Signal handlers run meanwhile."""
        if "_outcome" not in self.__dict__:
            seconds = timeout.total_seconds() if timeout else -1
            if not self._gate.acquire(timeout=seconds):
                raise PeerLostError(f"A collective was not done within {seconds:g} s.")
            self._gate.release()
        error = self._outcome[0]
        if error is not None:
            raise error
        faults.at("collective.after")
        return True

    def get_future(self) -> Any:
        """What DDP waits on, in C++."""
        future = self.__dict__.get("_future")
        if future is None:
            future = self._future = torch.futures.Future()
            if "_outcome" in self.__dict__:
                self._settle()
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
            self._future._set_unwrap_func(_raise_failed)
        self._future.set_result(value)

    def is_completed(self) -> bool:
        return "_outcome" in self.__dict__

    def is_success(self) -> bool:
        return self.is_completed() and self._outcome[0] is None

    def exception(self) -> Exception | None:
        return self._outcome[0] if self.is_completed() else None

    def result(self) -> Any:
        self.wait()
        return self._outcome[1]

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
