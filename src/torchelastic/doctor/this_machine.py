"""This machine as a node of the planned launch: the facts, read by `gather`, and the verdicts.

The verdicts are pure. Call `gather` while this process has one thread: some system calls can only
be tried in a fork.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchelastic.config import LaunchConfig, parse_endpoints
from torchelastic.doctor.finding import Finding, fault, ok, warning
from torchelastic.system import linux, memory_limit
from torchelastic.system.cgroup import Cgroup
from torchelastic.system.memory_limit import Limit, in_words

MIB, GIB = 1 << 20, 1 << 30

#: Bytes that any worker needs at least.
WORKER_MEMORY = 512 * MIB
#: Containers have less than this by default.
SMALL_SHARED_MEMORY = GIB
#: Free space in a directory for logs: too little to start, and too little for a long run.
NO_SPACE, LITTLE_SPACE = 16 * MIB, GIB
INODES_MINIMUM = 1000
#: Files that a process opens besides its connections to other workers.
OWN_FILES = 128
PROCESSES_MINIMUM = 1024
PORTS_MINIMUM = 2048
#: Seconds by which the wall clock may jump during the check.
CLOCK_JUMP_LIMIT = 0.2
#: Seconds of suspend since boot.
SUSPEND_LIMIT = 5.0


@dataclass(frozen=True)
class Limits:
    """Resource limits of this process; None: unlimited."""

    files: int | None
    processes: int | None
    locked_memory: int | None
    #: Bytes of a core dump.
    core: int | None


@dataclass(frozen=True)
class EphemeralPorts:
    """The ephemeral port range."""

    first: int
    last: int
    #: TCP sockets in use, and in TIME_WAIT.
    in_use: int
    waiting: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Clocks:
    """The state of the clocks."""

    #: None: unknown.
    synchronised: bool | None
    #: Seconds that the wall clock jumped during the check, and that the machine was suspended.
    jumped: float
    slept: float


@dataclass(frozen=True)
class Space:
    """The free space of a directory."""

    path: str
    #: Bytes of the file system; None: unknown.
    size: int | None = None
    free: int | None = None
    free_inodes: int | None = None
    #: Why it is not writable; empty: it is.
    trouble: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """The facts of this machine."""

    kernel: str
    #: The kernel features we need, by name, and whether they work.
    features: Mapping[str, bool]
    #: Workers can have their own cgroup.
    cgroup: bool
    cpus: int
    memory: Sequence[Limit]
    shared_memory: Space
    limits: Limits
    ports: EphemeralPorts | None
    #: It has RDMA devices; their drivers lock memory.
    infiniband: bool


def kernel(machine: MachineFacts) -> Finding:
    lacking = [name for name, there in machine.features.items() if not there]
    if lacking:
        return fault(
            "kernel",
            f"Linux {machine.kernel} lacks or denies {', '.join(lacking)}.",
            "Run on Linux 5.3 or newer, with /proc mounted, in a sandbox that allows these calls.",
        )
    names = ", ".join(machine.features)
    if not machine.cgroup:
        # Not a warning: everything works without a cgroup, a little slower.
        return ok("kernel", f"Linux {machine.kernel} has {names}; no cgroup for workers.")
    return ok("kernel", f"Linux {machine.kernel} has {names}, and cgroups for workers.")


def cpus(machine: MachineFacts, config: LaunchConfig, threads: int | None) -> Finding:
    """`threads` is the value of OMP_NUM_THREADS; None: not set."""
    workers, there = config.nproc_per_node, machine.cpus
    each = threads or (1 if workers > 1 else there)
    if workers > there:
        return warning(
            "cpus",
            f"{workers} workers share {_count(there, 'CPU')}.",
            "Lower --nproc-per-node, or give the node more CPUs.",
        )
    if workers * each > there:
        return warning(
            "cpus",
            f"{_count(workers, 'worker')} with {_count(each, 'thread')} each (OMP_NUM_THREADS) "
            f"share {_count(there, 'CPU')}.",
            f"Set OMP_NUM_THREADS to {there // workers}.",
        )
    return ok("cpus", f"{_count(there, 'CPU')} for {_count(workers, 'worker')}.")


def devices(gpus: int, config: LaunchConfig) -> list[Finding]:
    """Judge the GPUs that workers would see; no finding without GPUs."""
    if not gpus:
        return []
    if config.nproc_per_node > gpus:
        return [
            warning(
                "gpus",
                f"{config.nproc_per_node} workers share {_count(gpus, 'GPU')}; NCCL needs one GPU "
                "per worker.",
                "Use --nproc-per-node gpu, or check CUDA_VISIBLE_DEVICES.",
            )
        ]
    return [ok("gpus", f"{_count(gpus, 'GPU')} for {_count(config.nproc_per_node, 'worker')}.")]


def memory(machine: MachineFacts, config: LaunchConfig) -> Finding:
    tightest = min(machine.memory, key=lambda limit: limit.left, default=None)
    if tightest is None:
        return ok("memory", "No memory limit could be read.")
    left = f"{in_words(tightest.left)} of {in_words(tightest.most)} available ({tightest.place})"
    if tightest.left < config.nproc_per_node * WORKER_MEMORY:
        return warning(
            "memory",
            f"Only {left} for {_count(config.nproc_per_node, 'worker')} and their snapshots.",
            "Give the node more memory, or lower --nproc-per-node.",
        )
    return ok("memory", f"{left} for workers and their snapshots.")


def shared_memory(machine: MachineFacts) -> Finding:
    space = machine.shared_memory
    if space.trouble or space.size is None or space.free is None:
        return warning(
            "shared memory",
            f"/dev/shm is unusable ({space.trouble or 'unknown size'}); DataLoader workers pass "
            "batches through it.",
            "Mount a tmpfs there.",
        )
    text = f"{in_words(space.free)} of {in_words(space.size)} of /dev/shm are free"
    if space.free < SMALL_SHARED_MEMORY:
        return warning(
            "shared memory",
            f"{text}; DataLoader workers pass batches through it and die of SIGBUS when it is "
            "full.",
            "Start the container with more (docker: --shm-size 8g), or remove old files from it.",
        )
    return ok("shared memory", f"{text}.")


def limits(machine: MachineFacts, config: LaunchConfig) -> Finding:
    """Judge the resource limits; all that are too low go into one finding."""
    low = list(_low_limits(machine, config))
    if low:
        return warning(
            "limits", " ".join(found for found, _ in low), " ".join(advice for _, advice in low)
        )
    files = machine.limits.files
    return ok("limits", f"Open files: {'unlimited' if files is None else files}.")


def _low_limits(machine: MachineFacts, config: LaunchConfig) -> list[tuple[str, str]]:
    low, has = [], machine.limits
    world = config.max_nodes * config.nproc_per_node
    # gloo connects every worker with every other, by two groups of a DDP job at least.
    needed = OWN_FILES + 2 * world
    if has.files is not None and has.files < needed:
        low.append(
            (
                f"A process may open only {has.files} files; a world of {world} workers needs "
                f"about {needed}.",
                f"Raise it: ulimit -n {max(needed, 4096)}.",
            )
        )
    if has.processes is not None and has.processes < PROCESSES_MINIMUM:
        low.append(
            (
                f"A user may have only {has.processes} processes and threads; torch starts many.",
                "Raise it: ulimit -u 8192.",
            )
        )
    if has.core != 0:
        low.append(
            (
                "Core dumps are enabled: a crashing worker writes its memory to disk first, which "
                "delays recovery.",
                "Disable them unless you need them: ulimit -c 0.",
            )
        )
    if machine.infiniband and has.locked_memory is not None:
        low.append(
            (
                f"Only {in_words(has.locked_memory)} of memory may be locked; RDMA locks its "
                "buffers.",
                "Raise it: ulimit -l unlimited.",
            )
        )
    return low


def ports(machine: MachineFacts, config: LaunchConfig, hosts: bool) -> Finding:
    """`hosts`: the endpoint may be on this machine."""
    there = machine.ports
    if there is None:
        return ok("ports", "The ephemeral port range is unknown.")
    text = f"Ephemeral ports are {there.first} to {there.last}"
    used = there.in_use + there.waiting
    if there.count < PORTS_MINIMUM or used > there.count // 2:
        return warning(
            "ports",
            f"{text}, and {used} TCP sockets are in use or in TIME_WAIT; every worker needs some.",
            "Widen net.ipv4.ip_local_port_range, or wait until sockets are free.",
        )
    for _, port in parse_endpoints(config.rdzv_endpoint) if hosts and config.rdzv_endpoint else ():
        if there.first <= port <= there.last:
            return warning(
                "ports",
                f"{text}, which includes port {port} of --rdzv-endpoint: another process may use "
                "it when the job starts.",
                f"Choose a port outside, or set net.ipv4.ip_local_reserved_ports={port}.",
            )
    return ok("ports", f"{text}, {used} in use.")


def clock(clocks: Clocks, config: LaunchConfig) -> Finding:
    """Warn at most: no decision compares the clocks of two machines."""
    if abs(clocks.jumped) > CLOCK_JUMP_LIMIT:
        return warning(
            "clock",
            f"The wall clock jumped by {clocks.jumped:+.1f} s during the check: times in logs "
            "will be wrong.",
            "Run only one of chrony, ntpd and systemd-timesyncd.",
        )
    if clocks.slept > SUSPEND_LIMIT:
        return warning(
            "clock",
            f"This machine was suspended for {clocks.slept:.0f} s since boot: a suspended node is "
            "lost to its job.",
            "Disable automatic suspend.",
        )
    if clocks.synchronised is False and config.max_nodes > 1:
        return warning(
            "clock",
            "The wall clock is not synchronized: times in this node's logs will not match those "
            "of other nodes.",
            "Run chrony, ntpd or systemd-timesyncd.",
        )
    words = {True: "is synchronized", False: "is not synchronized", None: "does not jump"}
    return ok("clock", f"The wall clock {words[clocks.synchronised]}; no decision depends on it.")


def directory(space: Space, what: str) -> Finding:
    """Judge a directory that the job writes to."""
    check = f"{what} directory"
    if space.trouble:
        return fault(
            check,
            f"{space.path} is not writable ({space.trouble}).",
            "Use another directory, or free space there.",
        )
    if space.free is None:
        return ok(check, f"{space.path} is writable.")
    text = f"{in_words(space.free)} are free in {space.path}"
    if space.free < NO_SPACE:
        return fault(check, f"Only {text}.", "Free space, or use another directory.")
    if space.free < LITTLE_SPACE:
        return warning(check, f"Only {text}.", "Free space before a long run.")
    if space.free_inodes is not None and space.free_inodes < INODES_MINIMUM:
        return warning(
            check,
            f"{space.path} has room for {_count(space.free_inodes, 'more file')} only.",
            "Remove files there, or use another directory.",
        )
    return ok(check, f"{text}.")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# --- the facts --------------------------------------------------------------------------------

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
        ports=_port_range(),
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


def _port_range() -> EphemeralPorts | None:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        sockets = Path("/proc/net/sockstat").read_text()
    except OSError:
        return None
    tcp = next((line.split() for line in sockets.splitlines() if line.startswith("TCP:")), [])
    counts = dict(zip(tcp[1::2], map(int, tcp[2::2]), strict=True))
    return EphemeralPorts(int(first), int(last), counts.get("inuse", 0), counts.get("tw", 0))
