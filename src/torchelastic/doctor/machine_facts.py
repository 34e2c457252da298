"""Read the facts of this machine that `machine_rules` judges.

Call it while this process has one thread: some system calls can only be tried in a fork.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchelastic.doctor.machine_rules import Clocks, EphemeralPorts, Limits, MachineFacts, Space
from torchelastic.system import linux, memory_limit
from torchelastic.system.cgroup import Cgroup

SHARED_MEMORY = "/dev/shm"
#: The result of `adjtimex` while the clock is not synchronized.
_TIME_ERROR = 5
#: Bytes written to test a directory.
_SAMPLE = 1 << 20


def gather() -> MachineFacts:
    """Return everything that does not depend on the launch."""
    return MachineFacts(
        kernel=".".join(os.uname().release.split(".")[:2]),
        features={
            "pidfd": _works(_use_pidfd),
            "memfd": _works(lambda: os.close(os.memfd_create("doctor", os.MFD_ALLOW_SEALING))),
            "subreaper": _works_in_child(linux.become_subreaper),
            "parent-death signal": _works_in_child(lambda: linux.die_with_parent(os.getppid())),
            "/proc": os.path.exists("/proc/self/stat"),
        },
        cgroup=_has_cgroup(),
        cpus=len(os.sched_getaffinity(0)),
        memory=memory_limit.limits(),
        shared_memory=space_in(SHARED_MEMORY),
        limits=_limits(),
        ports=_ports(),
        infiniband=bool(os.path.isdir("/sys/class/infiniband"))
        and bool(os.listdir("/sys/class/infiniband")),
    )


def space_in(path: str) -> Space:
    """Return the free space of a directory, or why it is not writable; leaves no file behind."""
    try:
        stat = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_SAMPLE))
            file.flush()
    except OSError as error:
        return Space(path, trouble=error.strerror or str(error))
    # A file system without inodes, such as btrfs, reports 0 of 0.
    inodes = stat.f_favail if stat.f_files else None
    return Space(path, stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, inodes)


class ClockWatch:
    """Compares the clocks from its creation until `read`."""

    def __init__(self) -> None:
        self._apart = time.time() - time.monotonic()

    def read(self) -> Clocks:
        jumped = time.time() - time.monotonic() - self._apart
        slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
        return Clocks(_synchronised(), jumped, slept)


def _synchronised() -> bool | None:
    """Return whether the wall clock is synchronized, according to the kernel."""
    buffer = ctypes.create_string_buffer(512)  # struct timex; its first word 0 changes nothing
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except AttributeError:
        return None
    return None if state < 0 else state != _TIME_ERROR


def _use_pidfd() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(descriptor, 0)
    finally:
        os.close(descriptor)


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def _works_in_child(attempt: Callable[[], object]) -> bool:
    """Like `_works`, for calls that would change this process."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _works(attempt) else 1)
    return os.waitpid(pid, 0)[1] == 0


def _has_cgroup() -> bool:
    made = Cgroup.create()
    return made is not None and made.remove()


def _limits() -> Limits:
    return Limits(
        files=_soft(resource.RLIMIT_NOFILE),
        # The limit does not apply to root.
        processes=_soft(resource.RLIMIT_NPROC) if os.geteuid() else None,
        locked_memory=_soft(resource.RLIMIT_MEMLOCK) if os.geteuid() else None,
        core=_soft(resource.RLIMIT_CORE),
    )


def _soft(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def _ports() -> EphemeralPorts | None:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        sockets = Path("/proc/net/sockstat").read_text()
    except OSError:
        return None
    tcp = next((line.split() for line in sockets.splitlines() if line.startswith("TCP:")), [])
    counts = dict(zip(tcp[1::2], map(int, tcp[2::2]), strict=True))
    return EphemeralPorts(int(first), int(last), counts.get("inuse", 0), counts.get("tw", 0))
