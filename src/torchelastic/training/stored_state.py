"""Checkpoints in the training loop: written by rank 0 alone, or by the first replica together.

A sharded state is in the memory of all workers of a replica. They write and read a checkpoint
together, with collectives of the replica.
"""

from __future__ import annotations

from torchelastic import checkpoint
from torchelastic.tensors import agreement
from torchelastic.training.session import Session
from torchelastic.training.state import State
from torchelastic.worker.leaving import leaving


def is_writer(here: Session) -> bool:
    """Return whether this worker takes part in writing and reading checkpoints."""
    return here.rank < (1 if here.replica is None else here.replica.size)


def is_due(here: Session, step: int) -> bool:
    """Return whether the checkpoint manager wants a checkpoint of this step; on all writers."""
    return checkpoint.is_due(step, together=here.replica is not None)


def is_wanted_by_any(here: Session, wanted: bool) -> bool:
    """Return whether user code wants a checkpoint on any writer of a sharded state; on all writers.

    Its answers may depend on what a process has seen, and these are not equally old.
    """
    return wanted if here.replica is None else not agreement.all_of_them(not wanted)


def save(here: Session, state: State, step: int) -> None:
    """Start a checkpoint; on all writers."""
    if here.replica is None:
        checkpoint.save(state, step, here.generation)
    else:
        checkpoint.save_together(state, step, here.generation, own=b"")


def save_at_end(here: Session, state: State, step: int) -> None:
    """Write a checkpoint, on all writers; return when it is in storage."""
    own = None if here.replica is None else b""
    checkpoint.save_before_leaving(state, step, here.generation, own=own)


def note_lost(here: Session) -> None:
    """Note which workers of this one's replica are new: the checkpoint that is being written does
    not wait for their predecessors."""
    manager = checkpoint.get_checkpoint_manager()
    if here.replica is None or not isinstance(manager, checkpoint.CheckpointStore):
        return
    first = here.rank - here.replica.coordinate
    versions = here.versions[first : first + here.replica.size]
    if new := [coordinate for coordinate, (generation, _) in enumerate(versions) if generation < 0]:
        manager.lost(new)


def load(here: Session, state: State, beyond: int) -> int | None:
    """Load the latest checkpoint, on all writers; return its step, or None if there is none beyond
    this one."""
    if here.replica is None:
        return checkpoint.load_latest(state, beyond=beyond)
    loaded = checkpoint.load_together(state, beyond=beyond)
    return None if loaded is None else loaded[0]


def must_save_together(here: Session) -> bool:
    """Return whether this worker's replica must write its state now, because a node of it leaves.

    Collective of the first replica, at the end of a world in which no step was interrupted. (Rank 0
    of a state that is not sharded writes it later, when the others have gone on.)
    """
    if here.replica is None or not is_writer(here):
        return False
    if checkpoint.get_checkpoint_manager() is None:
        return False
    return not agreement.all_of_them(leaving() is None)


def save_together_and_wait(here: Session, state: State, step: int) -> None:
    """Write the state before this worker's replica is gone; return when it is in storage."""
    grace = None if (notice := leaving()) is None else notice.seconds
    checkpoint.save_before_leaving(state, step, here.generation, grace, own=b"")
