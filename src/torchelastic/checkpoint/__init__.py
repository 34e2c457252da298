"""Checkpoints: a state in storage, for when no worker that holds it in memory is left.

    from torchelastic.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager

    set_checkpoint_manager(FileSystemCheckpointManager("/shared/checkpoints", keep_last=3))

`save`, `load_latest` and `finish` are what the training loop calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.checkpoint.background import finish, load_latest, save
from torchelastic.checkpoint.file_system_checkpoint import (
    FileSystemCheckpoint,
    FileSystemCheckpointManager,
)
from torchelastic.checkpoint.manager import (
    Checkpoint,
    CheckpointManager,
    get_checkpoint_manager,
    set_checkpoint_manager,
)

if TYPE_CHECKING:
    from torchelastic.checkpoint.checkpoint_util import CheckpointUtil

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointUtil",
    "FileSystemCheckpoint",
    "FileSystemCheckpointManager",
    "finish",
    "get_checkpoint_manager",
    "load_latest",
    "save",
    "set_checkpoint_manager",
]


def __getattr__(name: str) -> object:
    """`CheckpointUtil` imports torch; nothing else here does."""
    if name != "CheckpointUtil":
        raise AttributeError(f"module 'torchelastic.checkpoint' has no attribute '{name}'")
    from torchelastic.checkpoint.checkpoint_util import CheckpointUtil

    return CheckpointUtil
