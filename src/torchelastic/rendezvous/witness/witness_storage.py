"""The storage of a witness, and the process that accesses it: `python -m … FD URL`.

Storage may block forever (a hard NFS mount), so an agent never touches it itself. Requests and
answers are lines of JSON, one answer for each request, in order.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import sys
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import unquote

from torchelastic.errors import ConfigError
from torchelastic.system import linux

Json = dict[str, Any]
#: `link` on a file system without hard links: FUSE mounts of buckets, FAT, some SMB servers.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class WitnessStorage(Protocol):
    """Small values by key; keys contain slashes. Every failure is an `OSError`."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a value if the key is absent; False if it exists."""

    def replace(self, key: str, data: bytes) -> None: ...

    def read(self, key: str) -> bytes | None: ...

    def names(self, prefix: str) -> list[str]:
        """The keys directly under a prefix, without it."""

    def remove(self, prefix: str) -> None:
        """Remove all keys under a prefix."""


def open_storage(url: str) -> WitnessStorage:
    """A path or a `file://` URL is a directory; every other URL needs fsspec."""
    scheme, _, path = url.partition("://")
    if scheme in ("file", "local") and path:
        return Directory(Path(unquote(path)))
    if "://" not in url:
        return Directory(Path(url).expanduser())
    return ObjectStore(url)


class Directory:
    """A directory on storage that all nodes share."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def create(self, key: str, data: bytes) -> bool:
        # A link to a complete file: O_EXCL would leave an empty one after a crash.
        with self._written(key, data) as (new, target):
            try:
                os.link(new, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                raise ConfigError(
                    f"Cannot use --witness {self._root}: its file system has no hard links "
                    f"({error.strerror}), which a witness needs to create a key atomically. Use "
                    "a directory on NFS or another shared file system, or an object store."
                ) from error
        _sync(target.parent)
        return True

    def replace(self, key: str, data: bytes) -> None:
        with self._written(key, data) as (new, target):
            os.replace(new, target)
        _sync(target.parent)

    @contextlib.contextmanager
    def _written(self, key: str, data: bytes) -> Any:
        """Write a temporary file beside the final one, and sync it to disk."""
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
        try:
            with new.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            yield new, target
        finally:
            new.unlink(missing_ok=True)

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, prefix: str) -> list[str]:
        try:
            found = os.listdir(self._root / prefix)
        except FileNotFoundError:
            return []
        return [name for name in found if not name.startswith(".")]

    def remove(self, prefix: str) -> None:
        target = self._root / prefix
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStore:
    """A prefix in an object store (`config.WITNESS_SCHEMES`). Its fsspec driver creates with
    `If-None-Match: *` (s3fs, adlfs) or `ifGenerationMatch=0` (gcsfs)."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise ConfigError(f"--witness {url} needs fsspec: pip install fsspec.") from error
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"Cannot use --witness {url}: {error}") from error
        self._root = root.rstrip("/")

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._at(key), data, mode="create")
        except OSError:
            # The error for an existing key depends on the store; reading the key does not.
            if self.read(key) is None:
                raise
            return False
        return True

    def replace(self, key: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(key), data)

    def read(self, key: str) -> bytes | None:
        try:
            return cast(bytes, self._fs.cat_file(self._at(key)))
        except FileNotFoundError:
            return None

    def names(self, prefix: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(prefix), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, prefix: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(prefix), recursive=True)

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}"


# --- the process ---------------------------------------------------------------------------------


def answer(storage: WitnessStorage, request: Json) -> Json:
    """Perform a request; `error` in the answer describes a failure."""
    key = str(request.get("key", ""))
    data = json.dumps(request.get("value")).encode()
    try:
        match request["do"]:
            case "create":
                return {"created": storage.create(key, data), **_found(storage.read(key))}
            case "replace":
                storage.replace(key, data)
                return {}
            case "read":
                return _found(storage.read(key))
            case "names":
                return {"names": storage.names(key)}
            case "remove":
                storage.remove(key)
                return {}
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:  # of any library that accesses the storage
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": f"unknown request {request['do']}"}


def _found(data: bytes | None) -> Json:
    """`value` is the stored value; None if it is not a JSON object, and so not ours."""
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return {"value": value if isinstance(value, dict) else None}


def main() -> None:
    linux.block_signals_for_agent()
    descriptor, url = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("rwb") as lines:
        try:
            storage = open_storage(url)
            failed = ""
        except ConfigError as error:
            failed = str(error)
        for line in lines:
            found = {"refused": failed} if failed else answer(storage, json.loads(line))
            lines.write(json.dumps(found).encode() + b"\n")
            lines.flush()


if __name__ == "__main__":
    main()
