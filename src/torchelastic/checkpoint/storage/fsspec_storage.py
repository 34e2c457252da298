"""Checkpoints at any URL that fsspec supports: s3://, gs://, memory:// and so on.

An object store has no rename and no locks. Instead, a name is never used twice, and the marker,
written last and atomically, makes a checkpoint valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, cast

from torchelastic.errors import ConfigError


class FsspecStorage:
    """A prefix of an fsspec file system; `options` are passed to it."""

    renames = False

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.place = url
        try:
            import fsspec  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise ConfigError(f"Checkpoints at {url} need fsspec: pip install fsspec.") from error
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"Cannot store checkpoints at {url}: {error}") from error
        self.is_private = url.startswith("memory://")

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def directories(self) -> list[str]:
        return [name for name, info in self._entries("").items() if info["type"] == "directory"]

    def sizes(self, directory: str) -> dict[str, int]:
        found = self._entries(directory)
        return {name: int(info["size"]) for name, info in found.items() if info["type"] == "file"}

    def _entries(self, directory: str) -> dict[str, dict[str, Any]]:
        """List a directory without fsspec's cache: others write there too."""
        path = self._at(directory).rstrip("/")
        self._fs.invalidate_cache(path)
        try:
            found = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {info["name"].rstrip("/").rpartition("/")[2]: info for info in found}

    def make(self, directory: str) -> None:
        self._fs.makedirs(self._at(directory), exist_ok=True)

    def sync(self, directory: str) -> None:
        """Nothing to do: an object is durable once it was put."""

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("Object stores cannot rename a directory.")

    def remove(self, directory: str) -> None:
        """Remove the marker first: a half removed checkpoint must not look valid."""
        from torchelastic.checkpoint import marker

        self.remove_file(f"{directory}/{marker.NAME}")
        if self._fs.exists(self._at(directory)):
            self._fs.rm(self._at(directory), recursive=True)

    def remove_file(self, path: str) -> None:
        if self._fs.exists(self._at(path)):
            self._fs.rm_file(self._at(path))

    def rename_file(self, old: str, new: str) -> None:
        self._fs.mv(self._at(old), self._at(new))

    def reader(self, path: str) -> IO[bytes]:
        return cast(IO[bytes], self._fs.open(self._at(path), "rb"))

    def writer(self, path: str) -> IO[bytes]:
        return cast(IO[bytes], self._fs.open(self._at(path), "wb"))

    def get(self, path: str) -> bytes | None:
        try:
            return cast(bytes, self._fs.cat_file(self._at(path)))
        except FileNotFoundError:
            return None

    def put(self, path: str, content: bytes) -> None:
        target = self._at(path)
        try:
            self._fs.pipe_file(target, content)
        except FileNotFoundError:  # of a system that has directories, and this is the first file
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(target, content)

    def lock(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def hold(self, directory: str) -> Callable[[], None]:
        self.make(directory)
        return lambda: None

    def clear(self, directory: str) -> None:
        """Nothing to do: writers are unknown here, so the catalog uses the fence."""
