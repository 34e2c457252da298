"""Save and load a state with the manager of this process; the training loop calls this.

A `CheckpointStore` stores the tensors of a TorchState (`_stored`), or the bytes of a state that
only knows how to write itself to a stream. A custom manager gets the stream: it is filled at the
step boundary, where the state is consistent, and copied to storage in a thread.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torchelastic import faults
from torchelastic.checkpoint.checkpoint_store import CheckpointStore, LoadedCheckpoint
from torchelastic.checkpoint.interval import decide_before_leaving
from torchelastic.checkpoint.manager import (
    PROGRESS_KEY,
    STATE_KEY,
    Checkpoint,
    CheckpointManager,
    Saved,
    get_checkpoint_manager,
)
from torchelastic.checkpoint.runner import Runner, Task
from torchelastic.errors import CheckpointError
from torchelastic.worker_counters import milestones, stalls

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def save(state: Saved, step: int, generation: int | None = None) -> None:
    """Start a checkpoint of `state`, which has committed `step` steps, if there is a manager.

    Called at a step boundary, on one rank. Returns when the state is copied.
    """
    manager = get_checkpoint_manager()
    if manager is None:
        return
    _finish_others(manager)
    if isinstance(manager, CheckpointStore):
        tree, lasting = _tree_of(state), _lasting_of(state)
        hashed = _is_hashed(state)
        manager.save(tree, step, generation=generation, lasting=lasting, hashed=hashed)
        return
    stream = io.BytesIO()
    with stalls.Counted("checkpoint"):
        state.save(stream)
        if _is_hashed(state):
            milestones.weights_hashed(step, state.digest())  # type: ignore[attr-defined]
    content = stream.getbuffer()
    _runner.put(Task(step, lambda: _write(manager, step, content)))


def save_together(state: Saved, step: int, generation: int | None, own: bytes) -> None:
    """`save` for a state that is sharded over the ranks; `own` is this rank's part."""
    store = store_for_shards()
    if store is None:
        return
    _finish_others(store)
    tree, lasting = _tree_of(state), _lasting_of(state)
    store.save(tree, step, own={"own": own}, generation=generation, together=True, lasting=lasting)


def before_write() -> None:
    """Wait until the saved state is copied: it is about to change."""
    if isinstance(_used, CheckpointStore):
        _used.before_write()


def finish() -> None:
    """Wait until everything saved is in storage; raise if the last one could not be written."""
    if isinstance(_used, CheckpointStore):
        _used.finish()
    _runner.finish()


def wait() -> None:
    """Wait until everything saved is in storage or has failed; `finish` also raises."""
    if isinstance(_used, CheckpointStore):
        _used.wait()
    _runner.wait()


def newest_step() -> int | None:
    """The step of the latest checkpoint, checked by file sizes only; None if there is none. Raises
    any error of the storage."""
    manager = get_checkpoint_manager()
    if isinstance(manager, CheckpointStore):
        record = next(manager.catalog.records(), None)
        return (record.step or 0) if record is not None else None
    checkpoint = manager.get_latest_checkpoint() if manager is not None else None
    return _step_of(checkpoint) if checkpoint is not None else None


def load_latest(state: Saved, *, beyond: int = -1) -> int | None:
    """Load the latest checkpoint into `state` and return its step; None if no checkpoint is later
    than `beyond`.

    For a worker with its initial state, in a world where no worker has a newer one.
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
    """`load_latest` for a state that is sharded over the ranks.

    Also returns this rank's own part, if the world that wrote it had this rank.
    """
    store = store_for_shards()
    if store is None:
        return None
    loaded = _load_from_store(store, state, together=True, beyond=beyond)
    if loaded is None:
        return None
    return loaded.step, loaded.own["own"] if loaded.own is not None else None


def entered(generation: int, base: int, *, saves: bool = True) -> None:
    """Note that a world begins from `base` steps, and whether this rank saves."""
    if isinstance(manager := get_checkpoint_manager(), CheckpointStore):
        manager.entered(generation, base, saves=saves)


def is_paced() -> bool:
    """True if the manager decides when a checkpoint is due."""
    manager = get_checkpoint_manager()
    return isinstance(manager, CheckpointStore) and manager.every is not None


def warn_if_never_due() -> None:
    """Warn a script whose manager would never write a checkpoint."""
    if (manager := get_checkpoint_manager()) is not None and not is_paced():
        log.warning(
            "%r never writes a checkpoint by itself, because no interval is set: pass every= to a "
            "CheckpointStore, or call save yourself.",
            manager,
        )


def is_due(step: int, *, together: bool = False) -> bool:
    """True if the manager wants a checkpoint of this step; `together` as in CheckpointStore."""
    manager = get_checkpoint_manager()
    return isinstance(manager, CheckpointStore) and manager.is_due(step, together=together)


def _can_be_saved(step: int, grace: float | None) -> bool:
    """True if this step is not in storage yet, and can be stored in the `grace` seconds before this
    worker leaves."""
    manager = get_checkpoint_manager()
    store = manager if isinstance(manager, CheckpointStore) else None
    expected, saved = (store.seconds, store.saved_step) if store is not None else (None, None)
    can, why = decide_before_leaving(grace=grace, expected=expected, step=step, saved=saved)
    log.info("Leaving: %s.", why)
    return can


def save_before_leaving(
    state: Saved,
    step: int,
    generation: int | None = None,
    grace: float | None = None,
    *,
    own: bytes | None = None,
) -> None:
    """Store the state before this worker leaves, if `grace` seconds are enough.

    With `own`, this rank's part of a state that is sharded over the ranks, all ranks call this
    together, and the time must be enough on all. Returns when the state is stored, or cannot be
    stored; errors are logged, not raised.
    """
    if get_checkpoint_manager() is None:
        return
    began = time.monotonic()
    wait()
    left = None if grace is None else grace - (time.monotonic() - began)
    wanted = _can_be_saved(step, left)
    if own is None:
        if wanted:
            save(state, step, generation)
            wait()
        return
    from torchelastic.tensors import agreement  # imports torch

    # Rank 0 alone knows what is in storage, and each knows how long its own part takes.
    if agreement.all_of_them(wanted):
        save_together(state, step, generation, own)
        wait()
        agreement.all_of_them(True)  # rank 0 has made one checkpoint of all parts, or given up


def store_for_shards() -> CheckpointStore | None:
    """Return the manager, if any; `TypeError` if it cannot store shards."""
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
    """The tensors of a TorchState that only its optimizers change, after `before_write`."""
    lasting = getattr(state, "_lasting", None)
    return lasting() if lasting is not None else ()


def _is_hashed(state: Saved) -> bool:
    """Whether the hash of a TorchState's weights is reported."""
    return getattr(state, "_is_hashed", False) and milestones.is_heard()


def _load_from_store(
    store: CheckpointStore, state: Saved, *, together: bool = False, beyond: int = -1
) -> LoadedCheckpoint | None:
    put = getattr(state, "_load_stored", None)
    like = getattr(state, "_shards_of", None)
    loaded = store.load(like=like, together=together, beyond=beyond)
    if loaded is None:
        return None
    try:
        if put is not None:
            put(loaded.tree)
        else:
            from torchelastic.tensors.tensor_bytes import bytes_of

            state.load(io.BytesIO(bytes_of(loaded.tree[STATE_KEY])))
    except Exception as error:
        raise _cannot_be_loaded(f"{store.url}/{loaded.name}", error) from error
    log.info("Loaded checkpoint %s/%s of step %d.", store.url, loaded.name, loaded.step)
    return loaded


def _cannot_be_loaded(what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"Could not load the latest checkpoint {what} ({error!r}): "
        "remove it to continue from the one before."
    )


# --- a custom manager ---------------------------------------------------------------------------


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
    """Discard the checkpoint. An error here must not hide the first one."""
    try:
        checkpoint.discard()
    except Exception as second:
        log.error(
            "Could not remove the incomplete checkpoint %r (%r) after %r.",
            checkpoint,
            second,
            error,
        )


#: Writes for custom managers; a CheckpointStore has its own runner.
_runner = Runner()
#: The manager that was last saved with.
_used: CheckpointManager | None = None


def _finish_others(manager: CheckpointManager) -> None:
    """Finish the checkpoints of another manager before this one starts."""
    global _used
    if _used is not None and _used is not manager:
        finish()
    _used = manager
