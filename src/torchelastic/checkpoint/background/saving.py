"""Saving and loading a state with the manager of this process: what the training loop calls.

A `CheckpointStore` takes a state apart (`_stored`, of a TorchState) or, of a state that only knows
how to write itself to a stream, the bytes of that. A manager of the user's own gets the stream: it
is filled at the step boundary, where the state is consistent, and copied to storage in a thread.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchelastic import faults
from torchelastic.checkpoint import time_left as leaving
from torchelastic.checkpoint.background.runner import Runner, Task
from torchelastic.checkpoint.checkpoint_store import CheckpointStore, Loaded
from torchelastic.checkpoint.manager import (
    PROGRESS_KEY,
    STATE_KEY,
    Checkpoint,
    CheckpointManager,
    Saved,
    get_checkpoint_manager,
)
from torchelastic.errors import CheckpointError
from torchelastic.worker_counters import milestones, stalls

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def save(state: Saved, step: int, generation: int | None = None) -> None:
    """Begin a checkpoint of `state`, which has committed `step` steps. Nothing without a manager.

    Called at a step boundary, on one rank. Returns when the state is copied.
    """
    manager = get_checkpoint_manager()
    if manager is None:
        return
    _finish_others(manager)
    if isinstance(manager, CheckpointStore):
        tree, lasting = _tree_of(state), _lasting_of(state)
        manager.save(tree, step, generation=generation, lasting=lasting)
        return
    stream = io.BytesIO()
    with stalls.Counted("checkpoint"):
        state.save(stream)
    content = stream.getbuffer()
    _runner.put(Task(step, lambda: _write(manager, step, content)))


def save_together(state: Saved, step: int, generation: int, own: bytes) -> None:
    """`save` of a state that is sharded over the ranks, on all of them; `own` is this rank's."""
    store = store_for_shards()
    if store is None:
        return
    _finish_others(store)
    tree, lasting = _tree_of(state), _lasting_of(state)
    store.save(tree, step, own={"own": own}, generation=generation, together=True, lasting=lasting)


def before_write() -> None:
    """A state that was saved is about to be written to: wait until it is copied."""
    if isinstance(_used, CheckpointStore):
        _used.before_write()


def finish() -> None:
    """Wait until everything saved is in storage; raise if the last one could not be written."""
    if isinstance(_used, CheckpointStore):
        _used.finish()
    _runner.finish()


def wait() -> None:
    """Wait until everything saved is in storage or was told not to be; `finish` says which."""
    if isinstance(_used, CheckpointStore):
        _used.wait()
    _runner.wait()


def newest_step() -> int | None:
    """The step of the latest checkpoint, as far as sizes tell; None where there is none. Raises
    whatever the storage raises."""
    manager = get_checkpoint_manager()
    if isinstance(manager, CheckpointStore):
        record = next(manager.catalog.records(), None)
        return (record.step or 0) if record is not None else None
    checkpoint = manager.get_latest_checkpoint() if manager is not None else None
    return _step_of(checkpoint) if checkpoint is not None else None


def load_latest(state: Saved, *, beyond: int = -1) -> int | None:
    """Load the latest checkpoint into `state` and say its step; None where there is none, or none
    of a later step than `beyond`.

    For a worker that has nothing but its first state, in a world where nobody has more.
    """
    manager = get_checkpoint_manager()
    if isinstance(manager, CheckpointStore):
        loaded = _load_from_store(manager, state, beyond=beyond)
        return loaded.step if loaded is not None else None
    checkpoint = manager.get_latest_checkpoint() if manager is not None else None
    if checkpoint is None:
        return None
    try:
        if (step := _step_of(checkpoint)) <= beyond:
            return None
        with checkpoint.open_input_stream(STATE_KEY) as stream:
            state.load(stream)
    except Exception as error:
        raise _cannot_be_loaded(repr(checkpoint), error) from error
    log.info("Loaded checkpoint %r of step %d.", checkpoint, step)
    return step


def load_together(state: Saved, *, beyond: int = -1) -> tuple[int, bytes | None] | None:
    """`load_latest` of a state that is sharded over the ranks, on all of them.

    Also says what was this rank's own, if the world that wrote it had such a rank.
    """
    store = store_for_shards()
    if store is None:
        return None
    loaded = _load_from_store(store, state, together=True, beyond=beyond)
    if loaded is None:
        return None
    return loaded.step, loaded.own["own"] if loaded.own is not None else None


def entered(generation: int, base: int) -> None:
    """A world begins from `base` steps; called on the rank that saves, as it enters."""
    if isinstance(manager := get_checkpoint_manager(), CheckpointStore):
        manager.entered(generation, base)


def is_paced() -> bool:
    """Whether the manager itself says when a checkpoint is due."""
    manager = get_checkpoint_manager()
    return isinstance(manager, CheckpointStore) and manager.every is not None


def warn_if_never_due() -> None:
    """In a script: a manager that nothing ever asks for a checkpoint is a mistake."""
    if (manager := get_checkpoint_manager()) is not None and not is_paced():
        log.warning(
            "%r never writes a checkpoint by itself, because no interval is set: pass every= to a "
            "CheckpointStore, or call save yourself.",
            manager,
        )


def is_due(step: int, *, together: bool = False) -> bool:
    """Whether the manager itself asks for a checkpoint of this step; `together` as in a store."""
    manager = get_checkpoint_manager()
    return isinstance(manager, CheckpointStore) and manager.is_due(step, together=together)


def can_be_saved(step: int, grace: float | None) -> bool:
    """Before a worker leaves, in `grace` seconds: whether this step can be put into storage until
    then, and is not there already."""
    manager = get_checkpoint_manager()
    store = manager if isinstance(manager, CheckpointStore) else None
    decision = leaving.decide(
        grace=grace,
        expected=store.seconds if store is not None else None,
        step=step,
        saved=store.saved_step if store is not None else None,
    )
    log.info("Leaving: %s.", decision.why)
    return decision.save


def save_before_leaving(
    state: Saved, step: int, generation: int | None = None, grace: float | None = None
) -> None:
    """This worker has to go, in `grace` seconds: put the state into storage if they are enough.

    Returns when it is there, or when it is clear that it will not be; that is told, not raised.
    """
    manager = get_checkpoint_manager()
    if manager is None:
        return
    began = time.monotonic()
    with suppress(CheckpointError):  # the log has it
        finish()
    left = None if grace is None else grace - (time.monotonic() - began)
    if can_be_saved(step, left):
        save(state, step, generation)
        with suppress(CheckpointError):
            finish()


def store_for_shards() -> CheckpointStore | None:
    """The manager, if any; `TypeError` if it is one that knows streams only."""
    manager = get_checkpoint_manager()
    if manager is not None and not isinstance(manager, CheckpointStore):
        raise TypeError(
            f"{type(manager).__name__} cannot store a state that is sharded over ranks: set a "
            "torchelastic.checkpoint.CheckpointStore as the checkpoint manager."
        )
    return manager


# --- a store --------------------------------------------------------------------------------------


def _tree_of(state: Saved) -> Any:
    if (stored := getattr(state, "_stored", None)) is not None:
        return stored()
    import torch

    stream = io.BytesIO()
    state.save(stream)
    return {STATE_KEY: torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)}


def _lasting_of(state: Saved) -> Collection[torch.Tensor]:
    """Of a TorchState, whose optimizers call `before_write`."""
    lasting = getattr(state, "_lasting", None)
    return lasting() if lasting is not None else ()


def _load_from_store(
    store: CheckpointStore, state: Saved, *, together: bool = False, beyond: int = -1
) -> Loaded | None:
    put = getattr(state, "_load_stored", None)
    like = getattr(state, "_shards_of", None)
    loaded = store.load(like=like, together=together, beyond=beyond)
    if loaded is None:
        return None
    try:
        if put is not None:
            put(loaded.tree)
        else:
            state.load(io.BytesIO(loaded.tree[STATE_KEY].numpy().tobytes()))
    except Exception as error:
        raise _cannot_be_loaded(f"{store.url}/{loaded.name}", error) from error
    log.info("Loaded checkpoint %s/%s of step %d.", store.url, loaded.name, loaded.step)
    return loaded


def _cannot_be_loaded(what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"Could not load the latest checkpoint {what} ({error!r}): "
        "remove it to continue from the one before."
    )


# --- a manager of the user's own ------------------------------------------------------------------


def _step_of(checkpoint: Checkpoint) -> int:
    try:
        with checkpoint.open_input_stream(PROGRESS_KEY) as stream:
            return int(json.loads(stream.read())["step"])
    except (FileNotFoundError, KeyError):
        log.warning("Checkpoint %r does not name its step; counting steps from 0.", checkpoint)
        return 0


def _write(manager: CheckpointManager, step: int, content: memoryview) -> None:
    """Fill a new checkpoint and commit it; discard it on any error."""
    began = time.monotonic()
    checkpoint = manager.create_checkpoint()
    half = len(content) // 2
    try:
        with checkpoint.open_output_stream(PROGRESS_KEY) as stream:
            stream.write(json.dumps({"step": step}).encode())
        with checkpoint.open_output_stream(STATE_KEY) as stream:
            stream.write(content[:half])
            faults.at("checkpoint.write")
            stream.write(content[half:])
        checkpoint.commit()
    except BaseException as error:
        _discard(checkpoint, error)
        raise
    seconds = time.monotonic() - began
    milestones.checkpoint_stored(step, seconds, len(content))
    log.info("Wrote checkpoint %r of step %d in %.2f s.", checkpoint, step, seconds)


def _discard(checkpoint: Checkpoint, error: BaseException) -> None:
    """What fails in cleaning up must not hide what failed first."""
    try:
        checkpoint.discard()
    except Exception as second:
        log.error(
            "Could not remove the incomplete checkpoint %r (%r) after %r.",
            checkpoint,
            second,
            error,
        )


#: Writes for managers of the user's own; a store has its own.
_runner = Runner()
#: The manager that was last saved with.
_used: CheckpointManager | None = None


def _finish_others(manager: CheckpointManager) -> None:
    """One manager at a time: what another one has begun is finished first."""
    global _used
    if _used is not None and _used is not manager:
        finish()
    _used = manager
