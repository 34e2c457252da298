"""A module name of 0.1's."""

from torchelastic.checkpoint.checkpoint_store import FileSystemCheckpointManager
from torchelastic.checkpoint.stored_checkpoint import FileSystemCheckpoint

__all__ = ["FileSystemCheckpoint", "FileSystemCheckpointManager"]
