"""`CheckpointUtil`: checkpoints for a custom training loop, with the names of 0.1."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch.distributed as dist

from torchelastic.checkpoint.manager import Saved, get_checkpoint_manager
from torchelastic.checkpoint.saving import load_latest, save
from torchelastic.tensors import agreement


class _Coordinator(Protocol):
    def should_save_checkpoint(self) -> bool: ...


class _State(Saved, Protocol):
    def should_save_checkpoint(self, rank: int) -> bool: ...


S = TypeVar("S", bound=_State)


class CheckpointUtil:
    """Loads at the beginning, saves when the coordinator or the state wants to, on rank 0.

    Unlike in 0.1, saving has no barrier. Call `torchelastic.checkpoint.finish()` at the end of the
    training: it waits for the last checkpoint.
    """

    def __init__(self, coordinator: _Coordinator) -> None:
        self.coordinator = coordinator
        self.checkpoint_loaded = False
        #: Steps committed: those of the checkpoint loaded, and one for each `save_checkpoint`.
        self.step = 0

    def load_checkpoint(self, state: S, rank: int) -> S:
        """Load on rank 0, unless some worker has a state already. Called by all workers."""
        if get_checkpoint_manager() is not None and not _anyone(self.checkpoint_loaded):
            step = load_latest(state) if rank == 0 else None
            self.step = step if step is not None else self.step
        return state

    def set_checkpoint_loaded(self) -> None:
        """Note that this worker has a state: no worker of the world loads a checkpoint any more."""
        self.checkpoint_loaded = True

    def save_checkpoint(self, state: S, rank: int) -> None:
        """Called after each step."""
        self.step += 1
        wanted = self.coordinator.should_save_checkpoint() or state.should_save_checkpoint(rank)
        if wanted and rank == 0:
            save(state, self.step)


def _anyone(flag: bool) -> bool:
    """Return True if it is set on any worker of the world."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    return bool(agreement.largest(int(flag))[0])
