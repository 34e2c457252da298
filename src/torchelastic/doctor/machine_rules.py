"""Verdicts on this machine, as one node of the launch that is planned. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.config import LaunchConfig, parse_endpoints
from torchelastic.doctor.finding import Finding, fault, ok, warning
from torchelastic.system.memory_limit import Limit, in_words

MIB, GIB = 1 << 20, 1 << 30

#: Bytes that a worker needs at least, whatever it trains.
WORKER_MEMORY = 512 * MIB
#: Less than this is what containers have when nobody has asked for more.
SMALL_SHARED_MEMORY = GIB
#: Of a directory for logs: too little to begin, and too little for long.
NO_SPACE, LITTLE_SPACE = 16 * MIB, GIB
LITTLE_INODES = 1000
#: Files that a process has open besides its connections to other workers.
OWN_FILES = 128
FEW_PROCESSES = 1024
FEW_PORTS = 2048
#: Seconds by which the wall clock may go wrong while we look.
JUMP = 0.2
#: Seconds of sleep since the machine was started.
SLEEP = 5.0


@dataclass(frozen=True)
class Limits:
    """What this process may have; None: any number."""

    files: int | None
    processes: int | None
    locked_memory: int | None
    #: Bytes of a core dump.
    core: int | None


@dataclass(frozen=True)
class Ports:
    """Those that the kernel gives to who does not ask for a certain one."""

    first: int
    last: int
    #: TCP sockets, and those that have ended and are remembered.
    in_use: int
    waiting: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Clocks:
    """None: the kernel does not say."""

    synchronised: bool | None
    #: Seconds that the wall clock has jumped while we looked, and that the machine has slept.
    jumped: float
    slept: float


@dataclass(frozen=True)
class Space:
    """A directory."""

    path: str
    #: Of the file system; None: it cannot be asked.
    size: int | None = None
    free: int | None = None
    free_inodes: int | None = None
    #: Why nothing can be written there; empty: it can.
    trouble: str = ""


@dataclass(frozen=True)
class Machine:
    """All that was asked."""

    kernel: str
    #: Whether there is what we use, by its name.
    features: Mapping[str, bool]
    #: Whether workers can have a cgroup of their own.
    cgroup: bool
    cpus: int
    memory: Sequence[Limit]
    shared_memory: Space
    limits: Limits
    ports: Ports | None
    #: It has RDMA devices, whose drivers lock memory.
    infiniband: bool


def kernel(machine: Machine) -> Finding:
    lacking = [name for name, there in machine.features.items() if not there]
    if lacking:
        return fault(
            "kernel",
            f"Linux {machine.kernel} does not let us use {', '.join(lacking)}.",
            "Run on Linux 5.3 or newer, with /proc mounted, in a sandbox that allows these.",
        )
    names = ", ".join(machine.features)
    if not machine.cgroup:
        # Not a warning: what a cgroup does is done without one, a little slower.
        return ok("kernel", f"Linux {machine.kernel} has {names}; no cgroup for workers.")
    return ok("kernel", f"Linux {machine.kernel} has {names}, and cgroups for workers.")


def cpus(machine: Machine, config: LaunchConfig, threads: int | None) -> Finding:
    """`threads` is what OMP_NUM_THREADS says; None: nothing."""
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
    """The GPUs that workers would see; where there are none, nothing is said of them."""
    if not gpus:
        return []
    if config.nproc_per_node > gpus:
        return [
            warning(
                "gpus",
                f"{config.nproc_per_node} workers share {_count(gpus, 'GPU')}, which NCCL refuses.",
                "Say --nproc-per-node gpu, or see CUDA_VISIBLE_DEVICES.",
            )
        ]
    return [ok("gpus", f"{_count(gpus, 'GPU')} for {_count(config.nproc_per_node, 'worker')}.")]


def memory(machine: Machine, config: LaunchConfig) -> Finding:
    tightest = min(machine.memory, key=lambda limit: limit.left, default=None)
    if tightest is None:
        return ok("memory", "There is no limit that could be read.")
    left = f"{in_words(tightest.left)} of the {in_words(tightest.most)} of {tightest.place}"
    if tightest.left < config.nproc_per_node * WORKER_MEMORY:
        return warning(
            "memory",
            f"Only {left} may be taken by {_count(config.nproc_per_node, 'worker')} and their "
            "snapshots.",
            "Give the node more memory, or lower --nproc-per-node.",
        )
    return ok("memory", f"{left} may be taken, snapshots included.")


def shared_memory(machine: Machine) -> Finding:
    space = machine.shared_memory
    if space.trouble or space.size is None or space.free is None:
        return warning(
            "shared memory",
            f"/dev/shm cannot be used ({space.trouble or 'its size is not known'}), and "
            "DataLoader workers pass batches through it.",
            "Mount a tmpfs there.",
        )
    text = f"{in_words(space.free)} of {in_words(space.size)} of /dev/shm are free"
    if space.free < SMALL_SHARED_MEMORY:
        return warning(
            "shared memory",
            f"{text}, and DataLoader workers pass batches through it: when it is full they die "
            "of SIGBUS.",
            "Start the container with more (docker: --shm-size 8g), or remove what is left in it.",
        )
    return ok("shared memory", f"{text}.")


def limits(machine: Machine, config: LaunchConfig) -> Finding:
    """Of several that are too low, all are told in one line."""
    told = list(_low_limits(machine, config))
    if told:
        return warning(
            "limits", " ".join(found for found, _ in told), " ".join(advice for _, advice in told)
        )
    files = machine.limits.files
    return ok("limits", f"{'Any number of' if files is None else files} files may be open.")


def _low_limits(machine: Machine, config: LaunchConfig) -> list[tuple[str, str]]:
    told, has = [], machine.limits
    world = config.max_nodes * config.nproc_per_node
    # gloo connects every worker with every other, by two groups of a DDP job at least.
    needed = OWN_FILES + 2 * world
    if has.files is not None and has.files < needed:
        told.append(
            (
                f"A process may open {has.files} files, and a world of {world} workers needs "
                f"about {needed}.",
                f"Raise it: ulimit -n {max(needed, 4096)}.",
            )
        )
    if has.processes is not None and has.processes < FEW_PROCESSES:
        told.append(
            (
                f"A user may have {has.processes} processes and threads, and torch starts many.",
                "Raise it: ulimit -u 8192.",
            )
        )
    if has.core != 0:
        told.append(
            (
                "A worker that crashes writes its memory to disk first, and its end is noticed "
                "only after that.",
                "Unless you need core dumps: ulimit -c 0.",
            )
        )
    if machine.infiniband and has.locked_memory is not None:
        told.append(
            (
                f"Only {in_words(has.locked_memory)} of memory may be locked, and RDMA locks its "
                "buffers.",
                "Lift it: ulimit -l unlimited.",
            )
        )
    return told


def ports(machine: Machine, config: LaunchConfig, hosts: bool) -> Finding:
    """`hosts` says whether the endpoint may be this machine's."""
    there = machine.ports
    if there is None:
        return ok("ports", "The kernel does not say which ports it gives out.")
    text = f"Ports {there.first} to {there.last} are given out"
    used = there.in_use + there.waiting
    if there.count < FEW_PORTS or used > there.count // 2:
        return warning(
            "ports",
            f"{text}, and {used} TCP sockets are in use or just ended: every worker needs some.",
            "Widen net.ipv4.ip_local_port_range, or wait until they are free.",
        )
    for _, port in parse_endpoints(config.rdzv_endpoint) if hosts and config.rdzv_endpoint else ():
        if there.first <= port <= there.last:
            return warning(
                "ports",
                f"{text}, port {port} of --rdzv-endpoint among them: another process can have it "
                "when the job begins.",
                f"Take a port outside, or set net.ipv4.ip_local_reserved_ports={port}.",
            )
    return ok("ports", f"{text}, {used} in use.")


def clock(clocks: Clocks, config: LaunchConfig) -> Finding:
    """Warnings at most: no decision compares the clocks of two machines."""
    if abs(clocks.jumped) > JUMP:
        return warning(
            "clock",
            f"The wall clock has jumped by {clocks.jumped:+.1f} s while we looked: times in logs "
            "will be wrong.",
            "See what sets it: one of chrony, ntpd and systemd-timesyncd is enough.",
        )
    if clocks.slept > SLEEP:
        return warning(
            "clock",
            f"This machine has slept for {clocks.slept:.0f} s since it was started: a node that "
            "sleeps is lost to its job.",
            "Switch automatic suspend off.",
        )
    if clocks.synchronised is False and config.max_nodes > 1:
        return warning(
            "clock",
            "The wall clock is not synchronised: times in this node's logs will not fit those of "
            "the others.",
            "Run chrony, ntpd or systemd-timesyncd.",
        )
    words = {True: "is synchronised", False: "is not synchronised", None: "does not jump"}
    return ok("clock", f"The wall clock {words[clocks.synchronised]}; no decision depends on it.")


def directory(space: Space, what: str) -> Finding:
    """A directory that is written to while the job runs."""
    check = f"{what} directory"
    if space.trouble:
        return fault(
            check,
            f"Nothing can be written in {space.path} ({space.trouble}).",
            "Name another directory, or make room there.",
        )
    if space.free is None:
        return ok(check, f"{space.path} can be written.")
    text = f"{in_words(space.free)} are free in {space.path}"
    if space.free < NO_SPACE:
        return fault(check, f"Only {text}.", "Make room, or name another directory.")
    if space.free < LITTLE_SPACE:
        return warning(check, f"Only {text}.", "Make room before a long run.")
    if space.free_inodes is not None and space.free_inodes < LITTLE_INODES:
        return warning(
            check,
            f"{space.path} has room for {_count(space.free_inodes, 'more file')} only.",
            "Remove files there, or name another directory.",
        )
    return ok(check, f"{text}.")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
