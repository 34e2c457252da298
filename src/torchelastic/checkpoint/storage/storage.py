"""Checkpoint storage: a local directory, or any URL of fsspec.

One level of directories, each with files. Guarantees: a file is durable once its stream is closed,
`put` replaces a file atomically, and the entries of a directory are durable after `sync`.
"""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import unquote

from torchelastic.errors import ConfigError

log = logging.getLogger(__name__)

#: Bytes per read or write; large enough that the cost of a call is negligible.
CHUNK = 1 << 22


class Storage(Protocol):
    """A storage. Paths are relative to it: `name`, or `directory/name`."""

    @property
    def place(self) -> str:
        """The path or URL that the user gave."""

    @property
    def renames(self) -> bool:
        """True if directories can be renamed atomically; else the marker alone makes one valid."""

    @property
    def is_private(self) -> bool:
        """True if only this process can see it."""

    def directories(self) -> list[str]: ...

    def sizes(self, directory: str) -> dict[str, int]:
        """Return its files with their sizes; empty if there is no such directory."""

    def make(self, directory: str) -> None:
        """Create a directory, unless it exists."""

    def sync(self, directory: str) -> None:
        """Make its entries durable."""

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, directory: str) -> None:
        """Remove a directory and its files, if it exists."""

    def remove_file(self, path: str) -> None: ...

    def rename_file(self, old: str, new: str) -> None: ...

    def reader(self, path: str) -> IO[bytes]: ...

    def writer(self, path: str) -> IO[bytes]: ...

    def get(self, path: str) -> bytes | None: ...

    def put(self, path: str, content: bytes) -> None: ...

    def lock(self, name: str) -> Any:
        """Return a context manager that excludes other processes of this machine, if possible."""

    def hold(self, directory: str) -> Callable[[], None]:
        """`make` it and keep others from clearing it, until the returned function is called or this
        process ends.
        """

    def clear(self, directory: str) -> None:
        """Remove it if no process holds it, if that can be checked."""


def open_storage(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """Open a path or `file://` URL as a local directory, every other URL with fsspec."""
    text = os.fspath(url)
    scheme, _, path = text.partition("://")
    if scheme in ("file", "local") and path:
        return LocalStorage(unquote(path))
    if re.match(r"\w+:/[^/]", text):
        raise ConfigError(f"{text} looks like a URL: write {text.replace(':/', '://', 1)}.")
    if "://" not in text:
        return LocalStorage(Path(text).expanduser())
    from torchelastic.checkpoint.storage.fsspec_storage import FsspecStorage

    return FsspecStorage(text, options or {})


class LocalStorage:
    """A local or mounted directory. Created by the first write."""

    renames = True
    is_private = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def place(self) -> str:
        return str(self.path)

    def directories(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []

    def sizes(self, directory: str) -> dict[str, int]:
        try:
            with os.scandir(self.path / directory) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def make(self, directory: str) -> None:
        (self.path / directory).mkdir(parents=True, exist_ok=True)

    def sync(self, directory: str) -> None:
        _sync_directory(self.path / directory)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.path / old, self.path / new)
        _sync_directory(self.path)

    def remove(self, directory: str) -> None:
        try:
            shutil.rmtree(self.path / directory)
        except FileNotFoundError:
            pass  # another process removes it too
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # a writer added a file: remove it next time
                raise

    def remove_file(self, path: str) -> None:
        (self.path / path).unlink(missing_ok=True)

    def rename_file(self, old: str, new: str) -> None:
        os.replace(self.path / old, self.path / new)

    def reader(self, path: str) -> IO[bytes]:
        return (self.path / path).open("rb")

    def writer(self, path: str) -> IO[bytes]:
        return io.BufferedWriter(_SyncedFile(self.path / path, "wb"), CHUNK)

    def get(self, path: str) -> bytes | None:
        try:
            return (self.path / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, path: str, content: bytes) -> None:
        target = self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # The same name for each writer: it overwrites the leftover of a killed one.
        new = target.with_name(f".{target.name}.new")
        with _SyncedFile(new, "wb") as stream:
            stream.write(content)
        os.replace(new, target)
        _sync_directory(target.parent)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                log.debug("Could not lock %s (%s): other writers are not kept out.", name, error)
            yield
        finally:
            _unlock(descriptor)

    def hold(self, directory: str) -> Callable[[], None]:
        while True:
            self.make(directory)
            descriptor = _lock_shared(self.path / directory)
            if descriptor is not None:
                return lambda: _unlock(descriptor)

    def clear(self, directory: str) -> None:
        """Remove it under the lock: a process about to hold it notices and creates it again."""
        try:
            descriptor = _open_directory(self.path / directory)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.remove(directory)
        except BlockingIOError:
            pass  # a live process writes to it
        except OSError as error:
            log.debug("Could not check for writers to %s (%s).", directory, error)
        finally:
            _unlock(descriptor)


class Summed:
    """An output stream that computes its size and CRC-32."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self._stream.write(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def crc_of(storage: Storage, path: str) -> int:
    """The CRC-32 of a file's bytes."""
    crc = 0
    with storage.reader(path) as stream:
        while chunk := stream.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


class _SyncedFile(io.FileIO):
    """A file whose bytes are on the disk once it is closed."""

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock_shared(path: Path) -> int | None:
    """Lock a directory shared, since several ranks may write to it. None if it was cleared."""
    try:
        descriptor = _open_directory(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        log.debug("Could not lock %s (%s): it will not be cleared.", path, error)
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int) -> None:
    """Close a locked file. A process that was forked meanwhile, such as a data loader's, has it
    open, too: closing it here alone would leave it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        log.debug("Could not unlock (%s).", error)
    os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = _open_directory(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
