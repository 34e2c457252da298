"""0.1's checkpoint: named streams in a storage, visible all at once."""

from __future__ import annotations

import io
import secrets
from typing import IO, Any

from torchelastic.checkpoint import marker
from torchelastic.checkpoint.catalog import Catalog, CheckpointRecord, Draft, name_of, sequence_of
from torchelastic.checkpoint.manager import Checkpoint
from torchelastic.checkpoint.marker import Marker
from torchelastic.errors import CheckpointError, ConfigError


class FileSystemCheckpoint(Checkpoint):
    """One directory with a file for each key. Created by its store."""

    def __init__(
        self, catalog: Catalog, record: CheckpointRecord | None, draft: Draft | None = None
    ) -> None:
        self._catalog, self._record, self._draft = catalog, record, draft
        self._streams: list[IO[bytes]] = []
        self._discarded = False

    @classmethod
    def new(cls, catalog: Catalog) -> FileSystemCheckpoint:
        catalog.tidy()  # leftovers of killed writers
        name = name_of(catalog.next_sequence(), None, secrets.token_hex(3))
        return cls(catalog, None, catalog.begin(name))

    def __repr__(self) -> str:
        return f"FileSystemCheckpoint('{self._catalog.storage.place}/{self.directory}')"

    @property
    def directory(self) -> str:
        """The current directory of its files in the storage."""
        if self._record is not None:
            return self._record.name
        return self._draft.directory if self._draft is not None else ""

    @property
    def sequence_id(self) -> int:
        """Grows from checkpoint to checkpoint."""
        name = self._draft.name if self._draft is not None else self.directory
        return sequence_of(name) or 0

    @property
    def step(self) -> int | None:
        """The number of committed steps, if known."""
        return self._record.step if self._record is not None else None

    def open_output_stream(self, key: str) -> IO[bytes]:
        if self._draft is None:
            raise CheckpointError(
                f"{self!r} is committed and cannot change: create a new checkpoint."
            )
        stream = io.BufferedWriter(_Stream(self._draft, _file(key)))
        self._streams.append(stream)
        return stream

    def open_input_stream(self, key: str) -> IO[bytes]:
        return self._catalog.storage.reader(f"{self.directory}/{_file(key)}")

    def commit(self) -> None:
        if self._discarded:
            raise CheckpointError(f"{self!r} was discarded: create a new checkpoint.")
        if self._draft is not None:
            self._close_streams()
            draft, content = self._draft, Marker(files=self._draft.files)
            self._record, self._draft = self._catalog.commit(draft, content), None

    def discard(self) -> None:
        self._discarded = True
        if self._record is not None:
            self._catalog.remove(self._record.name)
            return
        try:
            self._close_streams()
        finally:
            if self._draft is not None:
                self._draft.discard()

    def _close_streams(self) -> None:
        while self._streams:
            self._streams.pop().close()


class _Stream(io.RawIOBase):
    """Writes a file of a draft; closing it records size and checksum in the draft."""

    def __init__(self, draft: Draft, file: str) -> None:
        super().__init__()
        self._draft, self._file = draft, file
        self._summed = draft.writer(file)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._summed.write(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._draft.close_file(self._file, self._summed)


def _file(key: str) -> str:
    if not key or key.startswith(".") or "/" in key or key == marker.NAME:
        raise ConfigError(f"'{key}' is not a valid checkpoint key: use a plain file name.")
    return key
