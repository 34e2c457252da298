"""The checkpoints of a storage: list, commit and remove them.

    latest                       the name of the newest checkpoint, replaced atomically
    fence.json                   the world that may write here (`fence`)
    000007-step3500-5f0c/        a checkpoint: the files of torch.distributed.checkpoint, and
      .metadata  __0_0.distcp
      commit.json                ... the marker, written last: sizes and checksums of the others
    .new-000008-step4000-5f0c/   being written
    .old-000003-step1500-5f0c/   being removed

An object store cannot rename a directory: there it has its final name from the beginning, and only
the marker makes it a checkpoint. A name is never used twice: its number grows, and it ends with the
token of the writer.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torchelastic.checkpoint import fence, marker
from torchelastic.checkpoint.fence import Fence, WriteVerdict
from torchelastic.checkpoint.marker import File, History, Marker
from torchelastic.checkpoint.storage.storage import Storage, Summed, crc_of
from torchelastic.errors import CheckpointError

log = logging.getLogger(__name__)

LATEST = "latest"
FENCE = "fence.json"
_LOCK = ".lock"
_NEW = ".new-"
_OLD = ".old-"
_NAME = re.compile(r"(\d{6,})(?:-step(\d+))?-([0-9a-f]+)")


class Fenced(CheckpointError):
    """A later world or another job writes here now: this writer's checkpoint is void."""

    def __init__(self, message: str, generation: int) -> None:
        super().__init__(message)
        #: The generation of the checkpoint.
        self.generation = generation


def _fenced(found: Fence, mine: Fence, place: str) -> Fenced:
    if fence.is_same_start(found, mine) and found.generation == mine.generation:
        return Fenced(
            f"another process of this world also saves to {place}: call save on rank 0 only, or "
            "on all ranks with together=True",
            mine.generation,
        )
    return Fenced(
        f"generation {found.generation} of job '{found.run}' now writes to {place}; the "
        f"checkpoint of generation {mine.generation} is void",
        mine.generation,
    )


def name_of(sequence: int, step: int | None, token: str) -> str:
    return f"{sequence:06d}-{token}" if step is None else f"{sequence:06d}-step{step}-{token}"


def sequence_of(name: str) -> int | None:
    """The number in a checkpoint's name, finished or not; None for any other name."""
    found = _NAME.fullmatch(name.removeprefix(_NEW))
    return int(found[1]) if found else None


@dataclass(frozen=True)
class CheckpointRecord:
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
        # A draft that is simply dropped must not keep its directory from being cleared.
        self._release = weakref.finalize(self, storage.hold(self.directory))

    def path(self, file: str) -> str:
        return f"{self.directory}/{file}"

    def writer(self, file: str) -> Summed:
        """Return a stream into one of its files; `close_file` records size and checksum."""
        return Summed(self.storage.writer(self.path(file)))

    def close_file(self, file: str, stream: Summed) -> None:
        stream.close()
        self.files[file] = File(stream.size, stream.crc)

    def release(self) -> None:
        """Stop writing to it in this process."""
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

    # --- listing ---------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        return self._last_sequence() + 1

    def _last_sequence(self) -> int:
        numbers = map(sequence_of, self.storage.directories())
        return max((number for number in numbers if number is not None), default=-1)

    def records(self) -> Iterator[CheckpointRecord]:
        """Yield every checkpoint whose file sizes are right, the newest first.

        Invalid ones are logged once and skipped.
        """
        worlds = self._fence().worlds
        for record in self._committed():
            if fence.is_void(record.sequence, record.step, worlds):
                self._tell(record.name, "is void: a later world redid its steps")
            elif (problem := self.problem(record)) is not None:
                self._tell(record.name, f"is torn: {problem}")
            else:
                yield record

    def _committed(self) -> Iterator[CheckpointRecord]:
        names = [name for name in self.storage.directories() if _NAME.fullmatch(name)]
        for name in sorted(names, key=lambda name: (sequence_of(name) or 0, name), reverse=True):
            found = self._marker(name)
            if found is not None:
                yield CheckpointRecord(name, found)

    def _marker(self, name: str) -> Marker | None:
        if name not in self._markers:
            content = self.storage.get(f"{name}/{marker.NAME}")
            found = marker.from_json(content) if content is not None else None
            if found is None:
                # In an object store, one without a marker may still be being written.
                if content is not None or self.storage.renames:
                    self._tell(name, f"has no readable {marker.NAME}")
                return None
            self._markers[name] = found
        return self._markers[name]

    def history(self, mine: Fence) -> History:
        """Return the history of this start of the job before the world `mine`."""
        newest = next(self._committed(), None)
        if newest is None or newest.marker.start != mine.start:
            return History()
        ended = mine.generation - (newest.marker.generation or 0)
        if ended < 0:  # another start of the job, whose name is unknown
            return History()
        seen = newest.marker.history
        return replace(seen, ended=seen.ended + ended)

    def problem(self, record: CheckpointRecord) -> str | None:
        return marker.torn(record.marker, self.storage.sizes(record.name))

    def corruption(self, record: CheckpointRecord) -> str | None:
        """Compare all checksums and describe the first error; reads every byte."""
        for name, file in record.marker.files.items():
            try:
                crc = crc_of(self.storage, f"{record.name}/{name}")
            except OSError as error:
                return f"could not read '{name}' ({error})"
            if crc != file.crc:
                return f"the checksum of '{name}' does not match"
        return None

    def sound(self, beyond: int = -1) -> Iterator[CheckpointRecord]:
        """Yield `records` of steps after `beyond`, without corrupt ones."""
        for record in self.records():
            if (record.step or 0) <= beyond:
                return  # the rest are of earlier steps: do not read every byte of them
            if (problem := self.corruption(record)) is None:
                yield record
            else:
                self._tell(record.name, f"is corrupt: {problem}")

    @property
    def skipped(self) -> int:
        """The number of checkpoints that were skipped."""
        return len(self._told - {FENCE})

    def _tell(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("Skipped checkpoint %s/%s: it %s.", self.storage.place, name, what)

    # --- writing ---------------------------------------------------------------------------------

    def _fence(self, run: str = "") -> Fence:
        try:
            return fence.from_json(self.storage.get(FENCE))
        except ValueError as error:
            if FENCE not in self._told:
                self._told.add(FENCE)
                log.warning(
                    "%s/%s is damaged (%s). Void checkpoints are recognized by their numbers "
                    "instead; the next writer replaces the file.",
                    self.storage.place,
                    FENCE,
                    error,
                )
        found = list(self._committed())
        newest = Fence(run=run)
        if found:
            last = found[0].marker
            generation = last.generation if last.generation is not None else -1
            newest = replace(newest, start=last.start, generation=generation)
        return fence.rebuilt([(record.sequence, record.step) for record in found], newest)

    def take(self, mine: Fence, base: int | None) -> None:
        """Take the fence from earlier writers; the world begins from step `base`."""
        with self.storage.lock(_LOCK):
            found = self._fence(mine.run)
            if fence.is_late(found, mine):
                raise _fenced(found, mine, self.storage.place)
            after = fence.taken(found, mine, sequence=self._last_sequence(), base=base)
            self.storage.put(FENCE, fence.to_json(after))
            self._point_to_newest()

    def _point_to_newest(self) -> None:
        """Update `latest`: the checkpoint it names may be void now."""
        newest = next(self.records(), None)
        present = self._latest()
        if newest is None and present:
            self.storage.remove_file(LATEST)
        elif newest is not None and newest.name != present:
            self.storage.put(LATEST, f"{newest.name}\n".encode())

    def begin(self, name: str) -> Draft:
        return Draft(self.storage, name)

    def commit(self, draft: Draft, content: Marker, mine: Fence | None = None) -> CheckpointRecord:
        """Make it a checkpoint, unless another writer has the fence; then remove old ones."""
        storage = self.storage
        with storage.lock(_LOCK):
            if mine is not None:
                self._check_fence(mine, CheckpointRecord(draft.name, content))
            storage.put(draft.path(marker.NAME), marker.to_json(content))
            storage.sync(draft.directory)
            if storage.renames:
                storage.rename(draft.directory, draft.name)
            if (sequence_of(self._latest()) or -1) <= (sequence_of(draft.name) or 0):
                storage.put(LATEST, f"{draft.name}\n".encode())
        draft.release()
        self.tidy(mine)
        return CheckpointRecord(draft.name, content)

    def _check_fence(self, mine: Fence, new: CheckpointRecord) -> None:
        found = self._fence(mine.run)
        verdict = fence.judge(found, mine)
        if verdict is WriteVerdict.VOID:
            raise _fenced(found, mine, self.storage.place)
        if verdict is WriteVerdict.RETAKE:
            # A writer that replaces a damaged fence has redone its own step and later ones.
            base = new.step - 1 if found.is_rebuilt and new.step is not None else None
            after = fence.taken(found, mine, sequence=new.sequence - 1, base=base)
            self.storage.put(FENCE, fence.to_json(after))

    def _latest(self) -> str:
        return (self.storage.get(LATEST) or b"").decode(errors="replace").strip()

    # --- removing --------------------------------------------------------------------------------

    def tidy(self, mine: Fence | None = None) -> None:
        """Remove old checkpoints and leftovers of killed writers.

        A failure to remove is only logged: the new checkpoint is valid anyway.
        """
        try:
            self._clear_leftovers(mine)
            if self.keep_last is not None:
                self._remove_too_many(self.keep_last)
        except OSError as error:
            log.warning("Could not remove old checkpoints at %s: %s", self.storage.place, error)

    def _remove_too_many(self, keep_last: int) -> None:
        valid = list(self.records())
        for record in removable(valid, keep_last=keep_last, keep_every=self.keep_every):
            self.remove(record.name)
        # Torn and void ones are useless once enough valid ones came after them.
        if len(valid) >= keep_last:
            good = {record.name for record in valid}
            for record in self._committed():
                if record.sequence < valid[keep_last - 1].sequence and record.name not in good:
                    self.remove(record.name)

    def remove(self, name: str) -> None:
        """Remove it. Rename it first if possible: a half-removed one must not count."""
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
        """In a storage without renames: True if it has no marker and no live writer."""
        found = _NAME.fullmatch(name)
        if self.storage.renames or found is None or mine is None or found[3] == mine.token:
            return False
        # While we hold the fence, its writer can never commit it.
        unmarked = self.storage.get(f"{name}/{marker.NAME}") is None
        return unmarked and self._fence().token == mine.token


# --- which checkpoints to remove after a new one is written: pure ---------------------------------


def removable(
    newest_first: Sequence[CheckpointRecord], *, keep_last: int | None, keep_every: int | None
) -> list[CheckpointRecord]:
    """Return all but the last `keep_last` and those of every `keep_every`-th step.

    Pass valid checkpoints only: one that cannot be loaded must not count as kept. Without
    `keep_last` nothing is removed. The newest is never removed.
    """
    if keep_last is None:
        return []
    return [
        one
        for one in newest_first[max(keep_last, 1) :]
        if keep_every is None or one.step is None or one.step % keep_every
    ]


# --- the claim of a world to write checkpoints: takes the fence in the background -----------------


class FenceClaim:
    """Takes the fence once: in a thread when the world begins, or with its first checkpoint."""

    def __init__(self, catalog: Catalog, fence: Fence, base: int | None = None) -> None:
        self.fence = fence
        self._catalog, self._base = catalog, base
        self._taken = False
        self._began, self._before = time.monotonic(), History()
        self._thread: threading.Thread | None = None

    def history(self) -> History:
        """Return the history of this start of the job until now."""
        here = time.monotonic() - self._began
        return replace(self._before, seconds=self._before.seconds + here)

    def begin(self) -> None:
        thread = threading.Thread(target=self._try, name="torchelastic-fence", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left
            self._warn(error)
        else:
            self._thread = thread

    def ensure(self) -> None:
        """Return when this world has the fence. May block: not for the training thread."""
        if self._thread is not None:
            self._thread.join()
        if not self._taken:
            self._take()

    def _take(self) -> None:
        self._catalog.take(self.fence, self._base)
        self._before = self._catalog.history(self.fence)
        self._taken = True

    def _try(self) -> None:
        try:
            self._take()
        except Exception as error:  # of any storage
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        log.warning(
            "Cannot write checkpoints to %s yet: %s. The first checkpoint tries again.",
            self._catalog.storage.place,
            error,
        )
