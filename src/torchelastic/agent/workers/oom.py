"""Find out whether a worker was killed because memory ran out, and how certain that is.

An out-of-memory kill looks like any `kill -9`. But the kernel counts such kills before it kills, in
the container (cgroup) and on the machine, and its log, where readable, names the process.
`OomKills` reads these; the pure `memory_hint` puts them into words.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchelastic.system import cgroup
from torchelastic.system.memory_limit import in_words

logger = logging.getLogger(__name__)

#: SIGKILL, and a shell's code for it.
_KILLED = (-9, 128 + 9)
#: torch's error in the worker when a DataLoader's process was killed.
_CHILD_KILLED = "is killed by signal: Killed"
#: A higher limit means none: cgroup version 1 shows a very large number then.
_NO_LIMIT = 1 << 60
#: The inode of the first pid namespace: the kernel log has its pids, which differ in others.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
#: Records of the kernel log read at a time.
_MOST_RECORDS = 20_000

#: Errors that name the cause themselves: their beginning, and the hint.
_MEMORY_ERRORS = (
    (
        re.compile(r"([\w.]*\.)?OutOfMemoryError\b|RuntimeError: .*(CUDA|HIP) out of memory"),
        "out of memory on the device: an allocation failed",
    ),
    (
        re.compile(
            r"([\w.]*\.)?_?(Array)?MemoryError\b"
            r"|RuntimeError: .*DefaultCPUAllocator: (can't|not enough)"
            r"|OSError: \[Errno 12\]"
            r"|(RuntimeError: )?std::bad_alloc"
        ),
        "out of memory: an allocation in main memory failed",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a worker's exit."""

    exitcode: int
    message: str = ""
    #: Out-of-memory kills that explain no other worker's exit, in its container and on its
    #: machine; None if unknown.
    in_container: int | None = None
    on_machine: int | None = None
    #: The kernel log names this process.
    named: bool = False
    #: The container's memory limit in bytes.
    limit: int | None = None


def memory_hint(facts: Facts) -> str:
    """The hint about memory that follows from the facts; empty: none.

    Only a kill for lack of memory begins with "out of memory": `Failure.out_of_memory` reads it.

    >>> memory_hint(Facts(exitcode=-9, in_container=1, limit=2 << 30))
    "out of memory: the kernel killed it (limit 2.0 GiB; the container's oom_kill count rose)"
    """
    if _CHILD_KILLED in facts.message:
        return _of_kill(facts, "a process it had started")
    if facts.exitcode in _KILLED:
        return _of_kill(facts, "it") or _not_counted(facts)
    for pattern, words in _MEMORY_ERRORS:
        if pattern.match(facts.message):
            return words
    return ""


def _of_kill(facts: Facts, whom: str) -> str:
    limit = f"limit {in_words(facts.limit)}; " if facts.limit is not None else ""
    if facts.named and whom == "it":
        return f"out of memory: the kernel killed it ({limit}the kernel log names the process)"
    if facts.in_container:
        count = "the container's oom_kill count rose"
        return f"out of memory: the kernel killed {whom} ({limit}{count})"
    if facts.on_machine and facts.in_container is None:
        return (
            "perhaps out of memory: the kernel killed a process on this machine to free memory, "
            "but it may have been a different one"
        )
    return ""


def _not_counted(facts: Facts) -> str:
    """The hint for a SIGKILL that the kernel did not count as out of memory."""
    if facts.in_container == 0 or facts.on_machine == 0:
        return (
            "the kernel reports no out-of-memory kill; a user, the scheduler or systemd-oomd may "
            "have sent SIGKILL"
        )
    return ""


# --- what the kernel says ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """The files with the kernel's counts and limits."""

    #: The directory of this process's memory cgroup; None: it has none.
    group: Path | None
    #: Whether it also counts kills in the groups below, as version 2 does.
    whole: bool = True
    vmstat: Path = Path("/proc/vmstat")
    log: Path = Path("/dev/kmsg")

    @classmethod
    def find(cls) -> Sources:
        """Those of this process."""
        first = cgroup.own_directory("memory")
        if first is not None:
            return cls(Path(first), whole=False)
        own = cgroup.own_directory()
        for directory in _upwards(Path(own) if own is not None else None):
            if (directory / "memory.events").exists():
                return cls(directory)
        return cls(None)

    def killed_in_container(self) -> int | None:
        """The number of out-of-memory kills in the container so far."""
        if self.group is None:
            return None
        name = "memory.events" if self.whole else "memory.oom_control"
        return _count(self.group / name)

    def killed_on_machine(self) -> int | None:
        return _count(self.vmstat)

    def limit(self) -> int | None:
        """The lowest memory limit of this group and its parents; None: no limit."""
        name = "memory.max" if self.whole else "memory.limit_in_bytes"
        found = [_number(directory / name) for directory in _upwards(self.group)]
        return min((size for size in found if size is not None and size < _NO_LIMIT), default=None)


def _upwards(directory: Path | None) -> Iterator[Path]:
    """A cgroup and all its parents, each of which limits it."""
    if directory is not None:
        yield directory
        yield from directory.parents


def _count(path: Path) -> int | None:
    """The number after `oom_kill` in a file; None if there is none."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    counts = [line.partition(" ")[2] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts and counts[0].isdecimal() else None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


class OomKills:
    """Follows the kernel's counts. One kill explains one worker's exit."""

    def __init__(self, sources: Sources | None = None) -> None:
        self._sources = sources or Sources.find()
        self._explained_in_container = self._sources.killed_in_container()
        self._explained_on_machine = self._sources.killed_on_machine()
        self._log = _KernelLog(self._sources.log)

    def look(self, pid: int, exitcode: int, message: str) -> Facts:
        """Return the facts about this worker's exit. It costs a few small reads, and only if the
        kernel may have killed it."""
        if exitcode not in _KILLED and _CHILD_KILLED not in message:
            return Facts(exitcode=exitcode, message=message)
        in_container = _since(self._sources.killed_in_container(), self._explained_in_container)
        on_machine = _since(self._sources.killed_on_machine(), self._explained_on_machine)
        if in_container and self._explained_in_container is not None:
            self._explained_in_container += 1
        if on_machine and self._explained_on_machine is not None:
            self._explained_on_machine += 1
        if not in_container and not self._sources.whole and on_machine:
            in_container = None  # version 1 does not count kills in groups below
        return Facts(
            exitcode=exitcode,
            message=message,
            in_container=in_container,
            on_machine=on_machine,
            named=self._log.names(pid),
            limit=self._sources.limit(),
        )

    def close(self) -> None:
        self._log.close()


def _since(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)


class _KernelLog:
    """The kernel log's records about killed processes, from now on."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        self._named: set[int] = set()
        try:
            if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
                return
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(path, flags)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:  # usually only root may read it
            logger.debug("cannot read the kernel log: %s", error)
            self.close()

    def names(self, pid: int) -> bool:
        """True, once, if the kernel killed this process: its pid may be reused."""
        for record in self._new():
            if (found := re.search(r"Killed process (\d+) \(", record)) is not None:
                self._named.add(int(found[1]))
        named = pid in self._named
        self._named.discard(pid)
        return named

    def _new(self) -> Iterator[str]:
        if self._descriptor is None:
            return
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # older records were overwritten: read on
            except OSError as error:
                logger.debug("stopped reading the kernel log: %s", error)
                self.close()
                return
            if not record:
                return
            yield record.decode(errors="replace")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
