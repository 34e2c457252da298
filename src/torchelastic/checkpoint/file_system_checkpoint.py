"""Checkpoints in a directory: local, or shared by the nodes.

    7/default  7/progress  7/manifest.json     a committed checkpoint
    .new-8/                                    being written; locked by the process that does
    .old-3/                                    being removed

A checkpoint gets its name by a rename, after every byte of it has reached the disk, and the
manifest says how long each of its files is: what a kill, a power cut or a copy left half done is
never taken for a checkpoint. What a killed process left of one is cleared by the next one made.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from torchelastic.checkpoint.manager import Checkpoint, CheckpointManager
from torchelastic.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_NEW = ".new-"
_OLD = ".old-"


class FileSystemCheckpointManager(CheckpointManager):
    """Checkpoints as directories under `checkpoint_dir`, which is made if it is not there.

    Of more than `keep_last` checkpoints the oldest are removed; None keeps all. Processes may share
    the directory: each checkpoint has an id of its own, and nobody removes what another one writes.
    """

    def __init__(
        self, checkpoint_dir: str | os.PathLike[str], *, keep_last: int | None = None
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}: keep at least 1, or None to keep all.")
        self.directory = Path(checkpoint_dir)
        self.keep_last = keep_last
        self.directory.mkdir(parents=True, exist_ok=True)

    def create_checkpoint(self) -> FileSystemCheckpoint:
        self._clear_leftovers()
        while True:
            number = self._next_id()
            checkpoint = self._begin(number)
            if checkpoint is not None:
                return checkpoint

    def get_checkpoint(self, sequence_id: int) -> FileSystemCheckpoint | None:
        if not _is_complete(self.directory / str(sequence_id)):
            return None
        return FileSystemCheckpoint(self, sequence_id)

    def get_latest_checkpoint(self) -> FileSystemCheckpoint | None:
        return next(self._committed(), None)

    def list_checkpoints(self) -> list[FileSystemCheckpoint]:
        return list(self._committed())

    def retain(self) -> None:
        """Remove what is older than the last `keep_last`.

        What cannot be removed is told and left: the new checkpoint is good all the same.
        """
        if self.keep_last is None:
            return
        for checkpoint in self.list_checkpoints()[self.keep_last :]:
            try:
                checkpoint.discard()
            except OSError as error:
                log.warning("%r should have been removed, but stays: %s", checkpoint, error)

    def _committed(self) -> Iterator[FileSystemCheckpoint]:
        ids = (int(name) for name in os.listdir(self.directory) if name.isdecimal())
        for number in sorted(ids, reverse=True):
            checkpoint = self.get_checkpoint(number)
            if checkpoint is not None:
                yield checkpoint

    def _next_id(self) -> int:
        names = (name.removeprefix(_NEW) for name in os.listdir(self.directory))
        return max((int(name) for name in names if name.isdecimal()), default=-1) + 1

    def _begin(self, number: int) -> FileSystemCheckpoint | None:
        """Take the id `number`; None where another process was quicker.

        Only the maker of `.new-8` ever makes `8`, so the id is taken with the directory.
        """
        path = self.directory / f"{_NEW}{number}"
        try:
            path.mkdir()
        except FileExistsError:
            return None
        lock = _lock_own(path)
        if lock is None:
            return None
        if (self.directory / str(number)).exists():  # made since the ids were read
            _remove(path)
            os.close(lock)
            return None
        return FileSystemCheckpoint(self, number, lock)

    def _clear_leftovers(self) -> None:
        """Remove what killed processes have left: nobody holds its lock."""
        for path in self.directory.iterdir():
            if path.name.startswith(_OLD):
                _remove(path)
            elif path.name.startswith(_NEW):
                _remove_if_abandoned(path)


class FileSystemCheckpoint(Checkpoint):
    """One directory of files, one for each key. Made by its manager."""

    def __init__(
        self, manager: FileSystemCheckpointManager, sequence_id: int, lock: int | None = None
    ) -> None:
        self.sequence_id = sequence_id
        self._manager = manager
        self._streams: list[IO[bytes]] = []
        self._writing = lock is not None
        self._discarded = False
        # Dropped without commit or discard, it must not keep its directory locked.
        self._unlock = weakref.finalize(self, os.close, lock) if lock is not None else None

    def __repr__(self) -> str:
        return f"FileSystemCheckpoint({str(self.directory)!r})"

    @property
    def directory(self) -> Path:
        """Where its files are at present."""
        name = f"{_NEW if self._writing else ''}{self.sequence_id}"
        return self._manager.directory / name

    def open_output_stream(self, key: str) -> IO[bytes]:
        if not self._writing:
            raise CheckpointError(f"{self!r} cannot be written to: make a new checkpoint.")
        stream = io.BufferedWriter(_SyncedFile(self._file(key), "wb"))
        self._streams.append(stream)
        return stream

    def open_input_stream(self, key: str) -> IO[bytes]:
        return self._file(key).open("rb")

    def commit(self) -> None:
        if self._discarded:
            raise CheckpointError(f"{self!r} was discarded: make a new checkpoint.")
        if self._writing:
            self._close_streams()
            self._write_manifest()
            _sync_directory(self.directory)
            os.rename(self.directory, self._manager.directory / str(self.sequence_id))
            _sync_directory(self._manager.directory)
            self._release()
            self._manager.retain()

    def discard(self) -> None:
        self._discarded = True
        if not self._writing:
            self._remove_committed()
            return
        try:
            self._close_streams()
        finally:
            _remove(self.directory)
            self._release()

    def _file(self, key: str) -> Path:
        if not key or key.startswith(".") or "/" in key or key == _MANIFEST:
            raise ConfigError(f"'{key}' cannot name a file of a checkpoint: use a plain word.")
        return self.directory / key

    def _close_streams(self) -> None:
        while self._streams:
            self._streams.pop().close()

    def _write_manifest(self) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(self.directory.iterdir())}
        with io.BufferedWriter(_SyncedFile(self.directory / _MANIFEST, "wb")) as stream:
            stream.write(json.dumps({"files": sizes}).encode())

    def _release(self) -> None:
        self._writing = False
        if self._unlock is not None:
            self._unlock()

    def _remove_committed(self) -> None:
        """By way of another name: half removed it must not be taken for a checkpoint."""
        old = self._manager.directory / f"{_OLD}{self.sequence_id}"
        _remove(old)
        try:
            os.rename(self.directory, old)
        except FileNotFoundError:
            return  # another process has removed it
        _remove(old)


class _SyncedFile(io.FileIO):
    """A file whose bytes are on the disk once it is closed."""

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_complete(path: Path) -> bool:
    """Whether the manifest is there, and every file it names, as long as it says."""
    try:
        sizes = json.loads((path / _MANIFEST).read_bytes())["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (ValueError, KeyError, TypeError, AttributeError):
        log.warning("%s is no manifest: %s is not taken for a checkpoint.", _MANIFEST, path)
        return False


def _lock_own(path: Path) -> int | None:
    """Lock the directory this process has just made; None where it was cleared in between."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        log.debug("%s cannot be locked (%s): nobody will clear it.", path, error)
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return None
    return descriptor


def _remove_if_abandoned(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except BlockingIOError:
        pass  # its process lives
    except OSError as error:
        log.debug("Whether somebody writes to %s cannot be told (%s).", path, error)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # it never was, or another process removes it too
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # another process adds to what is removed: next time
            raise
