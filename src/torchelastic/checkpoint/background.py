"""Saving and loading a state: what the training loop calls.

Saving stops nobody: the state is serialised at the step boundary, where it is consistent; the bytes
then go to storage in a thread. Storage slower than the interval of checkpoints delays no step: of
those that wait only the newest is kept, and the log says which one was dropped.

A checkpoint that cannot be written is told in the log at once, and the training goes on: what it
holds in memory is worth more than a stop. But `MOST_FAILURES` in a row, or the last one of the
training, are raised.
"""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from dataclasses import dataclass

from torchelastic import faults
from torchelastic.checkpoint.manager import (
    PROGRESS_KEY,
    STATE_KEY,
    Checkpoint,
    CheckpointManager,
    Saved,
    get_checkpoint_manager,
)
from torchelastic.errors import CheckpointError

log = logging.getLogger(__name__)

#: So many checkpoints in a row may fail before the training is told.
MOST_FAILURES = 3


@dataclass(frozen=True)
class Content:
    """A state as bytes, and how many steps it has committed."""

    step: int
    data: memoryview


def save(state: Saved, step: int) -> None:
    """Begin a checkpoint of `state`, which has committed `step` steps. Nothing without a manager.

    Called at a step boundary, on one rank. Returns when the state is serialised.
    """
    manager = get_checkpoint_manager()
    if manager is None:
        return
    writer = _writer_of(manager)
    writer.check()
    stream = io.BytesIO()
    state.save(stream)
    writer.put(Content(step, stream.getbuffer()))


def finish() -> None:
    """Wait until everything saved is in storage; raise if the last one could not be written."""
    if _writer is not None:
        _writer.finish()


def load_latest(state: Saved) -> int | None:
    """Load the latest checkpoint into `state` and say its step; None where there is none.

    For a worker that has nothing but its first state, in a world where nobody has more.
    """
    manager = get_checkpoint_manager()
    checkpoint = manager.get_latest_checkpoint() if manager is not None else None
    if checkpoint is None:
        return None
    try:
        step = _step_of(checkpoint)
        with checkpoint.open_input_stream(STATE_KEY) as stream:
            state.load(stream)
    except Exception as error:
        raise CheckpointError(
            f"The latest checkpoint, {checkpoint!r}, cannot be loaded ({error!r}): "
            "remove it to go on from the one before."
        ) from error
    log.info("Loaded %r, of step %d.", checkpoint, step)
    return step


def _step_of(checkpoint: Checkpoint) -> int:
    try:
        with checkpoint.open_input_stream(PROGRESS_KEY) as stream:
            return int(json.loads(stream.read())["step"])
    except (FileNotFoundError, KeyError):
        log.warning("%r does not say which step it is of: steps are counted from 0.", checkpoint)
        return 0


class Writer:
    """Writes checkpoints, one at a time, in a thread that ends when there is nothing to do."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager
        self._lock = threading.Lock()
        self._waiting: Content | None = None
        self._thread: threading.Thread | None = None
        self._failures: list[CheckpointError] = []

    def put(self, content: Content) -> None:
        """Have it written, in place of one that still waits for its turn."""
        with self._lock:
            dropped, self._waiting = self._waiting, content
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="torchelastic-checkpoint", daemon=True
                )
                self._thread.start()
        if dropped is not None:
            log.warning(
                "No checkpoint of step %d: storage is slower than checkpoints come; "
                "the one of step %d takes its turn.",
                dropped.step,
                content.step,
            )

    def check(self) -> None:
        """Raise if too many in a row have failed; then the count begins anew."""
        with self._lock:
            if len(self._failures) < MOST_FAILURES:
                return
            failures, self._failures = self._failures, []
        raise CheckpointError(
            f"{len(failures)} checkpoints in a row could not be written: {failures[-1]}"
        ) from failures[-1]

    def finish(self) -> None:
        while (thread := self._thread) is not None:
            thread.join()
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            raise failures[-1]

    def _run(self) -> None:
        while (content := self._take()) is not None:
            error = self._write(content)
            with self._lock:
                self._failures = [*self._failures, error] if error is not None else []

    def _take(self) -> Content | None:
        with self._lock:
            content, self._waiting = self._waiting, None
            if content is None:
                self._thread = None
            return content

    def _write(self, content: Content) -> CheckpointError | None:
        """Any error, a user's manager's too, has to reach the training and not end a thread."""
        began = time.monotonic()
        try:
            checkpoint = self.manager.create_checkpoint()
            write(checkpoint, content)
        except Exception as error:
            told = CheckpointError(
                f"The checkpoint of step {content.step} could not be written: {error!r}"
            )
            told.__cause__ = error
            log.error("%s", told)
            return told
        took = time.monotonic() - began
        log.info("Wrote %r, of step %d, in %.2f s.", checkpoint, content.step, took)
        return None


def write(checkpoint: Checkpoint, content: Content) -> None:
    """Fill a new checkpoint and commit it; discard it on any error."""
    half = len(content.data) // 2
    try:
        with checkpoint.open_output_stream(PROGRESS_KEY) as stream:
            stream.write(json.dumps({"step": content.step}).encode())
        with checkpoint.open_output_stream(STATE_KEY) as stream:
            stream.write(content.data[:half])
            faults.at("checkpoint.write")
            stream.write(content.data[half:])
        checkpoint.commit()
    except BaseException as error:
        _discard(checkpoint, error)
        raise


def _discard(checkpoint: Checkpoint, error: BaseException) -> None:
    """What fails in cleaning up must not hide what failed first."""
    try:
        checkpoint.discard()
    except Exception as second:
        log.error("%r could not be discarded (%r) after %r.", checkpoint, second, error)


_writer: Writer | None = None


def _writer_of(manager: CheckpointManager) -> Writer:
    """One writer at a time: what another manager has begun is finished first."""
    global _writer
    if _writer is None or _writer.manager is not manager:
        finish()
        _writer = Writer(manager)
    return _writer
