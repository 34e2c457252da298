"""Worker process: checkpoints in storage, used when no copy of the state in memory is left.

    from torchelastic.checkpoint import CheckpointStore, set_checkpoint_manager

    set_checkpoint_manager(CheckpointStore("/shared/job-1", keep_last=3, every="auto"))

The training loop calls `save`, `load_latest`, `finish` and the other functions.

    checkpoint_store  CheckpointStore: when to save, and the copy at a step boundary
    saving            save and load with the manager of this process, for the training loop
    interval          when to save: the interval, and before a worker leaves
    write_plan        which rank writes which tensors, and under which names
    catalog, marker, fence    valid checkpoints, what to remove, who may write
    staging           the memory that a state is copied to at a step boundary
    runner, save_job, writer_process    the thread or process that writes the copy
    storage/          directories and URLs, and the files of torch.distributed.checkpoint
    manager, checkpoint_util            the API of 0.1, and custom managers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.checkpoint.checkpoint_store import CheckpointStore, FileSystemCheckpointManager
from torchelastic.checkpoint.manager import (
    Checkpoint,
    CheckpointManager,
    get_checkpoint_manager,
    set_checkpoint_manager,
)
from torchelastic.checkpoint.saving import (
    before_write,
    entered,
    finish,
    is_due,
    is_paced,
    load_latest,
    load_together,
    newest_step,
    save,
    save_before_leaving,
    save_together,
    wait,
    warn_if_never_due,
)
from torchelastic.checkpoint.stored_checkpoint import FileSystemCheckpoint

if TYPE_CHECKING:
    from torchelastic.checkpoint.checkpoint_util import CheckpointUtil

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointStore",
    "CheckpointUtil",
    "FileSystemCheckpoint",
    "FileSystemCheckpointManager",
    "before_write",
    "entered",
    "finish",
    "get_checkpoint_manager",
    "is_due",
    "is_paced",
    "load_latest",
    "load_together",
    "newest_step",
    "save",
    "save_before_leaving",
    "save_together",
    "set_checkpoint_manager",
    "wait",
    "warn_if_never_due",
]


def __getattr__(name: str) -> object:
    """`CheckpointUtil` imports torch; nothing else here does."""
    if name != "CheckpointUtil":
        raise AttributeError(f"module 'torchelastic.checkpoint' has no attribute '{name}'")
    from torchelastic.checkpoint.checkpoint_util import CheckpointUtil

    return CheckpointUtil
