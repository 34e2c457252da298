"""The collected log: events of all agents in one file, written by the leader.

It is rotated when it is full; important events are kept longest (`events.rotation`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from torchelastic.events.append_file import AppendFile
from torchelastic.events.rotation import rotate

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024 * 1024
#: Bytes kept of the part before the last.
KEPT_BYTES = MAX_BYTES // 4


class CollectedLog:
    """Used by one thread at a time. A full disk costs lines, never the job."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.path = path
        #: Failed writes.
        self.dropped = 0
        self._max_bytes, self._kept_bytes = max_bytes, kept_bytes
        self._file = AppendFile(path)

    def write(self, lines: bytes) -> None:
        """Append whole lines."""
        try:
            self._file.append(lines)
            if self._file.size > self._max_bytes:
                self._file.close()
                rotate(self.path, self._kept_bytes)
        except OSError as error:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("Collected events are lost: cannot write %s (%s).", self.path, error)

    def close(self) -> None:
        self._file.close()
