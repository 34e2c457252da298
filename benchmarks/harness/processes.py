"""Processes of this machine as /proc shows them, and how to end exactly those we started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
_TCP_LISTEN = "0A"


def become_subreaper() -> None:
    """Orphans of the jobs become our children, so that none can get lost when it is time to end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def raise_descriptor_limit() -> int:
    """Allow this process, and those it starts, as many open files as they can be given."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(Path("/proc/sys/fs/nr_open").read_text())
    for limit in (most, hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        except (ValueError, PermissionError):
            continue  # only root may ask for more than the hard limit, and not everywhere
        return limit
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state (field 3) on; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def descendants(root: int) -> list[int]:
    """All descendants of a process, parents before children, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def command_line(pid: int) -> list[bytes]:
    """The words of it; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def parent(pid: int) -> int:
    return int(stat_fields(pid)[1])


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to each, in order; those already gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    send(pids, signal.SIGKILL)


def end_descendants(timeout: float = 10.0) -> None:
    """Kill and reap every process that descends from this one."""
    deadline = time.monotonic() + timeout
    while left := descendants(os.getpid()):
        kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes that do not end: {left}")
        time.sleep(0.01)


def listens(root: int, port: int) -> bool:
    """Whether a process or a descendant of it listens on the port."""
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    return any(not sockets.isdisjoint(_open_files(pid)) for pid in [root, *descendants(root)])


def _listeners(port: int) -> set[str]:
    """The inodes of the sockets that listen on a TCP port of this machine."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _TCP_LISTEN and int(fields[1].split(":")[1], 16) == port:
                found.add(fields[9])
    return found


def _open_files(pid: int) -> set[str]:
    files = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone meanwhile
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                files.add(os.readlink(entry.path))
    return files


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, int]:
    """Bytes of each kind in /proc/PID/smaps_rollup (`Pss`, `Private_Dirty`, ...).

    Empty for a process that is gone or a zombie: it holds no memory.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (line.split(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
