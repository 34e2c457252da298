"""Checkpoints: a state in storage, for when no worker that holds it in memory is left.

    from torchelastic.checkpoint import CheckpointStore, set_checkpoint_manager

    set_checkpoint_manager(CheckpointStore("/shared/job-1", keep_last=3, every="auto"))

`save`, `load_latest`, `finish` and their like are what the training loop calls.

    store.py          CheckpointStore: when, how, and the copy at a step boundary
    plan, tree        who writes what of a state, and under which names
    staging, job      the memory it is copied to, and what becomes of it: in a thread, or a ...
    process.py        ... process of its own
    dcp.py            the files of torch.distributed.checkpoint
    catalog, marker, fence, retention      what makes a checkpoint one, whose, and until when
    storage, fsspec_storage                where
    manager, background, checkpoint_util   0.1's names, and any manager of the user's own
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.checkpoint.background import (
    before_write,
    can_be_saved,
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
from torchelastic.checkpoint.file_system_checkpoint import FileSystemCheckpoint
from torchelastic.checkpoint.manager import (
    Checkpoint,
    CheckpointManager,
    get_checkpoint_manager,
    set_checkpoint_manager,
)
from torchelastic.checkpoint.store import CheckpointStore, FileSystemCheckpointManager

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
    "can_be_saved",
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
