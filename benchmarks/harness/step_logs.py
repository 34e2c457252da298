"""The step logs of a job's workers, read while they are written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from benchmarks.harness.worker_log import History

T = TypeVar("T")


class StepLogs:
    """All step logs in a directory, which may come about later."""

    def __init__(self, directory: Path) -> None:
        self.history = History()
        self._directory = directory
        self._tails: dict[Path, Tail] = {}

    def read(self) -> History:
        """Take in what the workers have written since the last time."""
        for path in self._directory.glob("*.jsonl"):
            if path not in self._tails:
                self._tails[path] = Tail(path)
        for tail in self._tails.values():
            for line in tail.new_lines():
                self.history.add_line(line)
        return self.history

    def wait_for(self, probe: Callable[[History], T | None], what: str, patience: float) -> T:
        """Read the logs and ask `probe` until it answers."""
        deadline = time.monotonic() + patience
        while True:
            if found := probe(self.read()):
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen within {patience:g} s: {what}")
            time.sleep(0.05)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


class Tail:
    """The whole lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def new_lines(self) -> list[str]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line.decode() for line in lines]

    def close(self) -> None:
        self._file.close()
