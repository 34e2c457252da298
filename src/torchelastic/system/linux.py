"""Linux calls that Python lacks, and the tree of processes below this one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: The niceness of helpers: a tenth of the CPU share of others.
POLITE = 10

#: The number of tgkill, by machine: older C libraries have no name for it.
_TGKILL = {"x86_64": 234, "aarch64": 131, "riscv64": 131, "ppc64le": 250, "s390x": 241}

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """From now on, a descendant whose parent dies becomes a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `signum` when its parent dies.

    If `parent` is not the parent any more, it died before the call and the signal would never
    come: the process ends here and now. A fork forgets the setting, exec keeps it.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def signal_thread(pid: int, thread: int, signum: int) -> None:
    """Send a signal to one thread of a process; the main thread has the process's pid.

    `os.kill` leaves to the kernel which thread gets it.
    """
    number = _TGKILL.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "The tgkill system call number of this machine is not known")
    if _libc.syscall(ctypes.c_long(number), pid, thread, int(signum)) != 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))


def give_way() -> None:
    """Lower this process's priority for the CPU and when memory is short."""
    os.nice(POLITE)
    _write("/proc/self/oom_score_adj", "1000")
    if os.getsid(0) == os.getpid():
        # The kernel gives each session a share of its own, however nice those in it are.
        _write("/proc/self/autogroup", str(POLITE))


def _write(path: str, text: str) -> None:
    """Write to a kernel file; ignore errors."""
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)


def children(pid: int | None = None) -> list[int]:
    """The processes whose parent is `pid` (default: this process), zombies included.

    Read while children end, the list may lack one that lives; it is never empty by mistake.
    """
    pid = os.getpid() if pid is None else pid
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        if not os.path.exists("/proc/thread-self/children"):
            return _children_by_stat(pid)  # a kernel without CONFIG_PROC_CHILDREN
    return found


def _children_by_stat(pid: int) -> list[int]:
    """The same from every process's `stat`: slow on a busy machine, but always there."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) and int(fields[1]) == pid:
            found.append(int(entry))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/<pid>/stat` from the third on (state, ppid, …); empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot: with its pid, a unique name."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def thread_names() -> list[str]:
    """The names of this process's threads, including those unknown to Python."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            names.append(file.read().strip())
    return names


def exitcode(pidfd: int) -> int | None:
    """Reap a child: its exit code or minus the signal that ended it; None while it runs.

    255 if it was already reaped, which should not happen.
    """
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return 255
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def has_ended(pidfd: int) -> bool:
    """True if a child that is not reaped yet has ended."""
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PIDFD, pidfd, flags) is not None
    except ChildProcessError:
        return True


def reap(keep: Collection[int] = ()) -> None:
    """Reap ended children, except `keep`, which others wait for."""
    for pid in children():
        if pid not in keep:
            _reap(pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # reaped between the listing and now


def kill_round(keep: Callable[[], Collection[int]]) -> bool:
    """SIGKILL and reap every child but `keep`, asked when all are listed; True if there was none.

    Only children are killed: their pids cannot be reused before we reap them. Whatever they had
    started is ours, the subreaper's, as soon as they are dead, and falls in the next round.
    """
    there = children()
    kept = keep()
    found = [pid for pid in there if pid not in kept and _kill(pid)]
    for pid in found:
        _reap(pid)
    return not found


def _kill(pid: int) -> bool:
    """False if we may not: it has become another user, by a set-uid program."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def kill_descendants(keep: Collection[int] = ()) -> None:
    """End everything below this process except `keep` and what is below those; returns when done.

    Needs `become_subreaper`; without it grandchildren escape.
    """
    clean = 0
    while clean < 2:  # twice: see `children`
        clean = clean + 1 if kill_round(lambda: keep) else 0
        if not clean:
            time.sleep(0.001)


def write_command_line(argv: Sequence[str]) -> bool:
    """Make `/proc/self/cmdline` show `argv`, within the memory of the original one.

    False where the kernel does not let a process do that to itself.
    """
    fields = _stat(os.getpid())
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)
    room = end - begin
    # The last byte stays NUL: with another there, the kernel takes the environment for arguments.
    text = text[: room - 1].ljust(room, b"\0")
    try:
        memory = os.open("/proc/self/mem", os.O_WRONLY)
    except OSError:
        return False
    try:
        return os.pwrite(memory, text, begin) == room
    except OSError:
        return False
    finally:
        os.close(memory)


def is_memory(descriptor: int) -> bool:
    """True if it is memory: not a pipe, nor a file on a slow disk."""
    return os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")


#: What a scheduler may send to every process of a node, and what is for the agent. Processes that
#: help it block it, and do not ignore it: a worker that is forked from such a process inherits
#: that, and a signal that is sent to it before it is unblocked must not be lost.
_SENT_TO_ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def block_signals_for_agent() -> None:
    """Block them in a process that helps the agent: it ends with the agent, and not before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)


def unblock_signals_for_agent() -> None:
    """Undo it, in a worker that is forked from such a process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT_TO_ALL)
