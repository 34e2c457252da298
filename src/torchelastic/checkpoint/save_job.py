"""One rank's part of one checkpoint, as data, and `run`, which writes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import SavePlan

from torchelastic import faults
from torchelastic.checkpoint.catalog import Catalog, Draft, name_of
from torchelastic.checkpoint.fence import Fence
from torchelastic.checkpoint.marker import History, Marker
from torchelastic.checkpoint.staging import Slots
from torchelastic.checkpoint.storage import dcp_files, safe_pickle
from torchelastic.errors import CheckpointError

log = logging.getLogger(__name__)

#: Seconds between two looks of rank 0 for the parts of the others: at first, and at most.
_POLL_INTERVAL = 0.05
_LONGEST_POLL_INTERVAL = 2.0
_PART = "part-"
_FAILED = "failed-"


@dataclass(frozen=True)
class Job:
    """One rank's part of one checkpoint."""

    step: int
    rank: int
    size: int
    plan: SavePlan
    slots: Slots
    fence: Fence
    #: Agreed on by all ranks; a single rank takes the next free one.
    sequence: int | None = None
    #: Seconds that rank 0 waits for the others.
    patience: float = 600.0
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Written:
    """A written part. On rank 0 `size` is that of the whole checkpoint, on other ranks 0."""

    name: str
    size: int
    seconds: float


def run(job: Job, catalog: Catalog, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Write this rank's part; rank 0 waits for all parts and commits."""
    began = time.monotonic()
    sequence = catalog.next_sequence() if job.sequence is None else job.sequence
    draft = catalog.begin(name_of(sequence, job.step, job.fence.token))
    size = _commit(job, catalog, draft, tensors) if job.rank == 0 else _assist(job, draft, tensors)
    return Written(draft.name, size, time.monotonic() - began)


def _commit(job: Job, catalog: Catalog, draft: Draft, tensors: Mapping[str, torch.Tensor]) -> int:
    try:
        part = dcp_files.write_part(draft, job.plan, tensors, job.rank)
        faults.at("checkpoint.write")
        parts = [part, *_parts_of_others(job, draft)]
        files = dcp_files.complete(draft, parts)
        for rank in range(1, job.size):
            draft.storage.remove_file(draft.path(f"{_PART}{rank}"))
        fence = job.fence
        marker = Marker(job.step, fence.generation, files, fence.start, job.history)
        catalog.commit(draft, marker, job.fence)
        return marker.size
    except BaseException as error:
        _discard(draft, error)
        raise


def _discard(draft: Draft, error: BaseException) -> None:
    """Discard the draft. An error here must not hide the first one."""
    try:
        draft.discard()
    except OSError as second:
        log.error(
            "Could not remove the incomplete checkpoint %s (%r) after %r.",
            draft.directory,
            second,
            error,
        )


def _assist(job: Job, draft: Draft, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write a part, not on rank 0, and leave a record of it or of the failure for rank 0."""
    storage = draft.storage
    try:
        part = dcp_files.write_part(draft, job.plan, tensors, job.rank)
        faults.at("checkpoint.write")
        storage.put(draft.path(f"{_PART}{job.rank}"), safe_pickle.dumps(part))
    except Exception as error:
        _leave_word(job.rank, draft, repr(error))
        raise
    finally:
        draft.release()
    return 0


def give_up(job: Job, catalog: Catalog, why: str) -> None:
    """Tell rank 0, which would wait, that this rank writes nothing."""
    if job.rank != 0 and job.sequence is not None:
        draft = catalog.begin(name_of(job.sequence, job.step, job.fence.token))
        _leave_word(job.rank, draft, why)
        draft.release()


def give_up_parts(job: Job, catalog: Catalog, ranks: Collection[int], why: str) -> None:
    """Tell rank 0 that these ranks write nothing more; parts that are there still count."""
    assert job.sequence is not None, "agreed on by the ranks"
    draft = catalog.begin(name_of(job.sequence, job.step, job.fence.token))
    there = draft.storage.sizes(draft.directory)
    for rank in ranks:
        if f"{_PART}{rank}" not in there:
            _leave_word(rank, draft, why)
    draft.release()


def _leave_word(rank: int, draft: Draft, why: str) -> None:
    draft.storage.put(draft.path(f"{_FAILED}{rank}"), why.encode())


def _parts_of_others(job: Job, draft: Draft) -> Iterator[dcp_files.Part]:
    missing = set(range(1, job.size))
    deadline = time.monotonic() + job.patience
    look = _POLL_INTERVAL
    while missing:
        there = draft.storage.sizes(draft.directory)
        for rank in sorted(missing):
            if f"{_FAILED}{rank}" in there:
                why = draft.storage.get(draft.path(f"{_FAILED}{rank}")) or b""
                raise CheckpointError(f"rank {rank} could not write its part: {why.decode()}")
            if f"{_PART}{rank}" in there:
                missing.discard(rank)
                content = draft.storage.get(draft.path(f"{_PART}{rank}")) or b""
                yield dcp_files.part_from_bytes(content)
        if missing and time.monotonic() > deadline:
            raise CheckpointError(
                f"timed out after {job.patience:.0f} s waiting for ranks {sorted(missing)[:5]}"
            )
        if missing:
            time.sleep(look)
            look = min(look * 1.2, _LONGEST_POLL_INTERVAL)
