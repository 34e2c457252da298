"""A thread that writes checkpoints to storage, one at a time, and reports errors.

A checkpoint that cannot be written is logged at once, and training continues, however often it
happens: the state in memory is worth more than a stop. `finish` raises if the last checkpoint of a
training is not in storage.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torchelastic.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A checkpoint to be written."""

    step: int
    write: Callable[[], None]
    #: Called when it is done, failed or dropped: its memory is free again.
    over: Callable[[], None] = lambda: None


#: Seconds that a program that ends with an error waits for the checkpoint being written.
TIMEOUT_AFTER_AN_ERROR = 10.0

_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


class Runner:
    """Runs tasks in a thread that ends when idle. The program waits for it at exit."""

    def __init__(self, place: str = "") -> None:
        _runners.add(self)
        #: Where checkpoints go, for messages.
        self._place = place
        self._lock = threading.Lock()
        self._waiting: Task | None = None
        self._thread: threading.Thread | None = None
        #: Failures in a row.
        self.failures: list[CheckpointError] = []

    @property
    def is_busy(self) -> bool:
        return self._thread is not None

    def put(self, task: Task) -> None:
        """Run a task; it replaces one that is still waiting."""
        self.make_way(task.step)
        with self._lock:
            self._waiting = task
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="torchelastic-checkpoint", daemon=True)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError as error:  # no thread is left
                self._thread = self._waiting = None
                self.failures = [*self.failures, self._told(task, error)]
                task.over()

    def make_way(self, step: int) -> None:
        """Drop the waiting task, if any, in favour of this newer step."""
        with self._lock:
            dropped, self._waiting = self._waiting, None
        if dropped is not None:
            dropped.over()
            log.warning(
                "Skipped the checkpoint of step %d: storage is slower than checkpoints come. "
                "Writing step %d instead.",
                dropped.step,
                step,
            )

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all tasks are done, for at most `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (thread := self._thread) is not None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            thread.join(left)

    def finish(self) -> None:
        """`wait`, then raise if the last one failed. Raises once."""
        self.wait()
        with self._lock:
            failures, self.failures = self.failures, []
        if failures:
            raise failures[-1]

    def _run(self) -> None:
        while (task := self._take()) is not None:
            error = self._do(task)
            task.over()
            with self._lock:
                self.failures = [*self.failures, error] if error is not None else []

    def _take(self) -> Task | None:
        with self._lock:
            task, self._waiting = self._waiting, None
            if task is None:
                self._thread = None
            return task

    def _do(self, task: Task) -> CheckpointError | None:
        """Run a task and return its error: any error must reach the user, not end the thread."""
        try:
            task.write()
        except Exception as error:
            told = self._told(task, error)
            # Its frames hold the copy of the state: keeping the error would keep that too.
            traceback.clear_frames(error.__traceback__)
            return told
        return None

    def _told(self, task: Task, error: Exception) -> CheckpointError:
        """Log that a checkpoint could not be written."""
        to = f" to {self._place}" if self._place else ""
        why = str(error) if isinstance(error, CheckpointError | OSError) else repr(error)
        told = CheckpointError(f"Could not write the checkpoint of step {task.step}{to}: {why}")
        told.__cause__ = error
        again = f" ({len(self.failures) + 1} failures in a row)" if self.failures else ""
        log.error("%s%s. Training continues; earlier checkpoints stay.", str(told), again)
        return told


@atexit.register
def _finish_before_the_end() -> None:
    """Wait at exit: a thread inside torch would crash the interpreter."""
    failing = hasattr(sys, "last_type")
    for runner in list(_runners):
        runner.wait(TIMEOUT_AFTER_AN_ERROR if failing else None)
