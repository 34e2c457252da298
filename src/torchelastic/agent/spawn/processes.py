"""Starting plain processes: a worker without a zygote, a program, and the zygote itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torchelastic import env as environment
from torchelastic.agent.spawn import startup
from torchelastic.config import Entry
from torchelastic.errors import SpawnError
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup


@dataclass(frozen=True, kw_only=True)
class WorkerSpawn:
    """The description of a worker to start."""

    local_rank: int
    #: With its arguments already substituted.
    entry: Entry
    #: The whole environment, not additions to ours.
    env: Mapping[str, str]
    #: Descriptors to become 0, 1 and 2; None: the agent's own.
    stdin: int | None = None
    stdout: int | None = None
    stderr: int | None = None
    #: CPU affinity; None: the agent's own.
    cpus: frozenset[int] | None = None

    @property
    def streams(self) -> tuple[int, int, int]:
        """The descriptors of standard input, output and error."""
        return (
            0 if self.stdin is None else self.stdin,
            1 if self.stdout is None else self.stdout,
            2 if self.stderr is None else self.stderr,
        )


def default_python() -> str:
    """The Python that runs scripts: `PYTHON_EXEC`, else the agent's own."""
    return environment.get("PYTHON_EXEC", sys.executable)


def command_line(entry: Entry, python: str) -> list[str]:
    """The command that runs an entry, as a user would have typed it and as `ps` shows it."""
    if entry.kind == "program":
        return [entry.target, *entry.args]
    if entry.kind == "script":
        return [python, "-u", entry.target, *entry.args]
    if entry.kind == "module":
        return [python, "-u", "-m", entry.target, *entry.args]
    return [python, "-u", "-m", "torchelastic.worker", entry.target, *entry.args]


def spawn_plain(
    spawn: WorkerSpawn,
    *,
    python: str,
    inherited: Mapping[str, int] | None = None,
    cgroup: Cgroup | None = None,
) -> int:
    """Start a worker as a child of this process, in a session of its own; returns its pid.

    It dies with this process. `inherited` are descriptors it gets, by the name of the variable
    that holds their number. Raises `SpawnError` if the program cannot be run.
    """
    inherited = inherited or {}
    env = {**spawn.env, **{name: str(number) for name, number in inherited.items()}}
    if spawn.entry.kind != "program":
        env = startup.environment(env, "worker")

    def prepare() -> None:
        if cgroup is not None:
            cgroup.join()
        if spawn.cpus is not None:
            os.sched_setaffinity(0, spawn.cpus)

    keep = tuple(inherited.values())
    command = command_line(spawn.entry, python)
    return start_program(command, env=env, streams=spawn.streams, keep=keep, prepare=prepare)


def start_program(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    streams: tuple[int, int, int] = (0, 1, 2),
    keep: Sequence[int] = (),
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Fork and exec a child that dies with us and has only its streams and `keep` open.

    Not `subprocess.Popen`: it reaps its children itself, and a signal to the child before exec
    would reach us through asyncio's wake-up descriptor, which both share.
    """
    parent = os.getpid()
    read_end, write_end = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def separate() -> None:
        linux.die_with_parent(parent)
        os.setsid()
        _default_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        prepare()
        redirect(streams)
        _close_all_but((*keep, write_end))
        for descriptor in keep:
            os.set_inheritable(descriptor, True)

    try:
        pid = os.fork()
        if pid == 0:
            _exec(command, env, separate, write_end)
    except OSError as error:
        os.close(read_end)
        raise SpawnError(f"{command[0]} cannot be started: {error}.") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write_end)
    with open(read_end, encoding="utf-8", errors="replace") as file:
        problem = file.read()  # ends when exec has closed the other end
    if problem:
        os.waitpid(pid, 0)
        raise SpawnError(f"{command[0]} cannot be started: {problem}.")
    return pid


def _exec(
    command: Sequence[str], env: Mapping[str, str], separate: Callable[[], None], write_end: int
) -> NoReturn:
    """Set up the child and exec the program."""
    try:
        separate()
        os.execvpe(command[0], list(command), env)
    except BaseException as error:
        os.write(write_end, str(error).encode())
    finally:
        os._exit(127)


#: A worker never starts with these ignored: Python ignores the first two itself, and the others end
#: a worker. A shell without job control ignores SIGINT and SIGQUIT in what it starts in the
#: background (cron and CI systems do that), and `nohup` ignores SIGHUP.
_NEVER_IGNORED = {
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
}


def _default_signals() -> None:
    """Do to signal handlers what exec would do. Other ignored signals stay ignored."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signum in _NEVER_IGNORED or signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)


def redirect(streams: tuple[int, int, int]) -> None:
    """Make these descriptors 0, 1 and 2, inherited by exec, whatever their numbers are."""
    copies = [os.dup(descriptor) for descriptor in streams]  # first: they may be 0 to 2 themselves
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
        os.close(copy)


def _close_all_but(keep: Sequence[int]) -> None:
    """Close everything above 2 but `keep`: what our own parent left open is not for a worker."""
    begin = 3
    for descriptor in sorted(keep):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
