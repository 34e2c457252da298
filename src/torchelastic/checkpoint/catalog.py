"""Which checkpoints there are in a storage, how one becomes one, and which are removed.

    latest                       the name of the newest, replaced as a whole
    fence.json                   who writes here now (`fence`)
    000007-step3500-5f0c/        a checkpoint: the files of torch.distributed.checkpoint, and
      .metadata  __0_0.distcp
      commit.json                ... the marker, written last: sizes and checksums of the others
    .new-000008-step4000-5f0c/   being written
    .old-000003-step1500-5f0c/   being removed

Where a directory cannot be renamed (an object store) it has its name from the beginning, and only
the marker tells. A name is never used twice: its number grows, and the end of it is the writer's.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from torchelastic.checkpoint import fence, marker, retention
from torchelastic.checkpoint.fence import Fence, Verdict
from torchelastic.checkpoint.marker import File, Marker
from torchelastic.checkpoint.storage import Storage, Summed, crc_of
from torchelastic.errors import CheckpointError

log = logging.getLogger(__name__)

LATEST = "latest"
FENCE = "fence.json"
_LOCK = ".lock"
_NEW = ".new-"
_OLD = ".old-"
_NAME = re.compile(r"(\d{6,})(?:-step(\d+))?-([0-9a-f]+)")


class Fenced(CheckpointError):
    """A later world or another job writes here now: what this one has is void."""


def name_of(sequence: int, step: int | None, token: str) -> str:
    return f"{sequence:06d}-{token}" if step is None else f"{sequence:06d}-step{step}-{token}"


def sequence_of(name: str) -> int | None:
    """The number in a checkpoint's name, finished or not; None where it is none."""
    found = _NAME.fullmatch(name.removeprefix(_NEW))
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Record:
    """A committed checkpoint."""

    name: str
    marker: Marker

    @property
    def sequence(self) -> int:
        return sequence_of(self.name) or 0

    @property
    def step(self) -> int | None:
        return self.marker.step


class Draft:
    """A checkpoint being written. Several processes may write files of one."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self.directory = f"{_NEW}{name}" if storage.renames else name
        self.files: dict[str, File] = {}
        # Dropped without an end, it must not keep its directory from being cleared.
        self._release = weakref.finalize(self, storage.hold(self.directory))

    def path(self, file: str) -> str:
        return f"{self.directory}/{file}"

    def writer(self, file: str) -> Summed:
        """A stream into one of its files; `close_file` notes what was written."""
        return Summed(self.storage.writer(self.path(file)))

    def close_file(self, file: str, stream: Summed) -> None:
        stream.close()
        self.files[file] = File(stream.size, stream.crc)

    def release(self) -> None:
        """This process writes nothing more to it."""
        self._release()

    def discard(self) -> None:
        try:
            self.storage.remove(self.directory)
        finally:
            self.release()


class Catalog:
    """The checkpoints of one storage."""

    def __init__(
        self, storage: Storage, *, keep_last: int | None = None, keep_every: int | None = None
    ) -> None:
        self.storage = storage
        self.keep_last, self.keep_every = keep_last, keep_every
        #: Markers never change once they are there.
        self._markers: dict[str, Marker] = {}
        self._told: set[str] = set()

    # --- what there is ---------------------------------------------------------------------------

    def next_sequence(self) -> int:
        return self._last_sequence() + 1

    def _last_sequence(self) -> int:
        numbers = map(sequence_of, self.storage.directories())
        return max((number for number in numbers if number is not None), default=-1)

    def records(self) -> Iterator[Record]:
        """Every one that can be loaded as far as sizes tell, the newest first.

        What looks like one and is none is told once, in a sentence, and passed over.
        """
        worlds = fence.from_json(self.storage.get(FENCE)).worlds
        for record in self._committed():
            if fence.is_void(record.sequence, record.step, worlds):
                self._tell(record.name, "is void: its steps were done again by a later world")
            elif (problem := self.problem(record)) is not None:
                self._tell(record.name, f"is torn: {problem}")
            else:
                yield record

    def _committed(self) -> Iterator[Record]:
        names = [name for name in self.storage.directories() if _NAME.fullmatch(name)]
        for name in sorted(names, key=lambda name: (sequence_of(name) or 0, name), reverse=True):
            found = self._marker(name)
            if found is not None:
                yield Record(name, found)

    def _marker(self, name: str) -> Marker | None:
        if name not in self._markers:
            content = self.storage.get(f"{name}/{marker.NAME}")
            found = marker.from_json(content) if content is not None else None
            if found is None:
                # Without a marker an object store's may still be being written.
                if content is not None or self.storage.renames:
                    self._tell(name, f"has no {marker.NAME} that can be read")
                return None
            self._markers[name] = found
        return self._markers[name]

    def problem(self, record: Record) -> str | None:
        return marker.torn(record.marker, self.storage.sizes(record.name))

    def corruption(self, record: Record) -> str | None:
        """What its checksums say is wrong; reads every byte."""
        for name, file in record.marker.files.items():
            try:
                crc = crc_of(self.storage, f"{record.name}/{name}")
            except OSError as error:
                return f"'{name}' cannot be read ({error})"
            if crc != file.crc:
                return f"the bytes of '{name}' are not those that were written"
        return None

    def sound(self) -> Iterator[Record]:
        """`records`, without those that are corrupt."""
        for record in self.records():
            if (problem := self.corruption(record)) is None:
                yield record
            else:
                self._tell(record.name, f"is corrupt: {problem}")

    def _tell(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("The checkpoint %s/%s %s; it is skipped.", self.storage.place, name, what)

    # --- a new one -------------------------------------------------------------------------------

    def take(self, mine: Fence, base: int | None) -> None:
        """Fence off whoever wrote here before; the world begins from step `base`."""
        with self.storage.lock(_LOCK):
            found = fence.from_json(self.storage.get(FENCE))
            after = fence.taken(found, mine, sequence=self._last_sequence(), base=base)
            self.storage.put(FENCE, fence.to_json(after))

    def begin(self, name: str) -> Draft:
        return Draft(self.storage, name)

    def commit(self, draft: Draft, content: Marker, mine: Fence | None = None) -> Record:
        """Make it a checkpoint, unless `mine` has been replaced; then remove what is too many."""
        storage = self.storage
        with storage.lock(_LOCK):
            if mine is not None:
                self._check_fence(mine)
            storage.put(draft.path(marker.NAME), marker.to_json(content))
            storage.settle(draft.directory)
            if storage.renames:
                storage.rename(draft.directory, draft.name)
            self._point_to(draft.name)
        draft.release()
        self.tidy(mine)
        return Record(draft.name, content)

    def _check_fence(self, mine: Fence) -> None:
        found = fence.from_json(self.storage.get(FENCE))
        verdict = fence.judge(found, mine)
        if verdict is Verdict.VOID:
            raise Fenced(
                f"generation {found.generation} of job '{found.run}' writes to "
                f"{self.storage.place} now, what generation {mine.generation} has is void"
            )
        if verdict is Verdict.RETAKE:
            after = fence.taken(found, mine, sequence=-1, base=None)
            self.storage.put(FENCE, fence.to_json(after))

    def _point_to(self, name: str) -> None:
        present = (self.storage.get(LATEST) or b"").decode(errors="replace").strip()
        if (sequence_of(present) or -1) <= (sequence_of(name) or 0):
            self.storage.put(LATEST, f"{name}\n".encode())

    # --- what is too many ------------------------------------------------------------------------

    def tidy(self, mine: Fence | None = None) -> None:
        """Remove old ones and what killed writers left.

        What cannot be removed is told and left: the new checkpoint is good all the same.
        """
        try:
            self._clear_leftovers(mine)
            valid = list(self.records()) if self.keep_last is not None else []
            for record in retention.removable(
                valid, keep_last=self.keep_last, keep_every=self.keep_every
            ):
                self.remove(record.name)
        except OSError as error:
            log.warning("What is not kept at %s stays: %s", self.storage.place, error)

    def remove(self, name: str) -> None:
        """By way of another name, where there are renames: half removed it is no checkpoint."""
        if not self.storage.renames:
            self.storage.remove(name)
            return
        self.storage.remove(f"{_OLD}{name}")
        with suppress(FileNotFoundError):  # another process has removed it
            self.storage.rename(name, f"{_OLD}{name}")
        self.storage.remove(f"{_OLD}{name}")

    def _clear_leftovers(self, mine: Fence | None) -> None:
        for name in self.storage.directories():
            if name.startswith(_NEW):
                self.storage.clear(name)
            elif name.startswith(_OLD) or self._is_leftover(name, mine):
                self.storage.remove(name)

    def _is_leftover(self, name: str, mine: Fence | None) -> bool:
        """In a storage without renames: a name without a marker, and nobody to write it."""
        found = _NAME.fullmatch(name)
        if self.storage.renames or found is None or mine is None or found[3] == mine.token:
            return False
        # The fence is ours, so its writer can never commit it.
        return self.storage.get(f"{name}/{marker.NAME}") is None
