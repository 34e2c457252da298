"""Leaks of a test: processes, threads, descriptors."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """The threads, descriptors and children of this process at one moment."""

    children: frozenset[tuple[int, int]]
    threads: frozenset[int]
    descriptors: frozenset[tuple[int, str]]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            children=frozenset(_children()),
            threads=frozenset(id(thread) for thread in threading.enumerate()),
            descriptors=frozenset(_descriptors().items()),
        )


class Leaks:
    """Everything that is there now and was not there `before`.

    A process belongs to the test if it is our child, or if `mark` is in the environment it was
    started with: an orphan is no child of ours any more, but it has that.
    """

    def __init__(self, before: Snapshot, mark: str) -> None:
        self._before = before
        self._mark = mark.encode()

    def wait_for_none(self, timeout: float) -> list[str]:
        """Return what is left; threads and processes get `timeout` seconds to finish ending."""
        deadline = time.monotonic() + timeout
        while found := self.find():
            if time.monotonic() > deadline:
                break
            gc.collect()  # what only waits for the collector is no leak
            time.sleep(0.01)
        return found

    def find(self) -> list[str]:
        """One line for each."""
        found = [f"process {pid}: {_command(pid)}" for pid in self.processes()]
        for thread in threading.enumerate():
            if id(thread) not in self._before.threads:
                found.append(f"thread {thread.name}")
        for fd, target in _descriptors().items():
            if (fd, target) not in self._before.descriptors:
                found.append(f"descriptor {fd}: {target}")
        return found

    def processes(self) -> list[int]:
        ours = _children() - self._before.children - _helpers()
        return sorted({pid for pid, _ in ours} | set(self._marked()))

    def kill_processes(self) -> None:
        """So that what one test left behind does not spoil the next."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass  # it has just ended, or is an orphan that init reaps

    def _marked(self) -> list[int]:
        return [pid for pid in _pids() if self._mark in _environment(pid) and _stat(pid)]


def _pids() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _children() -> set[tuple[int, int]]:
    """Our children, zombies included, as (pid, when it started): numbers are used again."""
    found = ((pid, _stat(pid)) for pid in _pids())
    return {(pid, stat[1]) for pid, stat in found if stat and stat[0] == os.getpid()}


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start of a process."""
    text = _read(f"/proc/{pid}/stat")
    fields = text.rpartition(b")")[2].split()
    return (int(fields[1]), int(fields[19])) if fields else None


def _environment(pid: int) -> bytes:
    return _read(f"/proc/{pid}/environ")


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # of all processes, twice a test
            return file.read()
    except OSError:
        return b""  # the process has ended, or is somebody else's


def _descriptors() -> dict[int, str]:
    """Descriptor -> what it leads to, without those that stay open on purpose."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the directory that was just listed
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    found.pop(getattr(getattr(tracker, "_resource_tracker", None), "_fd", None), None)
    return {fd: target for fd, target in found.items() if target != "/dev/urandom"}


def _helpers() -> set[tuple[int, int]]:
    """Processes that `multiprocessing` starts once and keeps."""
    names = {"resource_tracker": "_resource_tracker", "forkserver": "_forkserver"}
    found = set()
    for module, attribute in names.items():
        holder = getattr(sys.modules.get(f"multiprocessing.{module}"), attribute, None)
        pid = getattr(holder, "_pid", None) or getattr(holder, "_forkserver_pid", None)
        if pid is not None and (stat := _stat(pid)):
            found.add((pid, stat[1]))
    return found
