"""Inside the zygote: import once, then be copied for every worker.

The zygote is `python -u train.py`, held up while it starts (`startup`). `serve` imports what every
worker would import, forks on request, and returns in the copies, which then run train.py and are
indistinguishable from a plain process.

Copying a process that has torch takes milliseconds, so some copies are made ahead: *preforks*,
which wait for the request that makes them a worker.

The agent's first message is `{"preload": […], "blanks": …}`; the answer `{"seconds": …}` comes when
the imports are done. `{"cgroup": …}` names the preforks' cgroup. `{"number": …}` is a request;
its descriptors are its JSON in a file, standard input, output and error, and those that the worker
inherits. The answer is `{"number": …, "pid": …}`. `{"error": …}` says why there is
no worker; with `"aside": true` the zygote ends. `{"blank": pid}` comes
before a prefork becomes the agent's child.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import glob
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, FileIO, TextIOWrapper
from typing import Any, NoReturn

from torchelastic import env, torch_versions
from torchelastic.agent.spawn import preload_probe, startup
from torchelastic.agent.spawn.processes import redirect
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup
from torchelastic.worker import bootstrap

#: The last one speeds up a worker's first optimizer or DDP.
MODULES = ("torch", "torch.distributed", "torch._dynamo")
#: Used by scripts that call `torchelastic.train` or keep their state: 0.2 s of CPU time per worker.
#: Imported when there is no request, so that replacements after a failure find them imported.
OWN_MODULES = ("torchelastic.training.torch_state", "torchelastic.training.loop")
#: With it torch counts GPUs without touching the driver, which does not survive a fork.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
TITLE = "torchelastic-zygote"
MESSAGE_LIMIT = 64 * 1024
DESCRIPTOR_LIMIT = 8
#: Seconds without a request before preforks are made: starting workers need the CPU.
QUIET = 0.5
#: What torch begins with in releases that do not seed at random.
CONSTANT_SEED = 67280421310721


def serve(descriptor: int, *, careful: bool = False) -> None:
    """Make a worker for every request on this socket; returns in the workers, and only there.

    A careful zygote preloads only what can be in a process that forks.
    """
    signal.setitimer(signal.ITIMER_PROF, 0)  # see `zygote_client._stop_the_wrong_program`
    linux.block_signals_for_agent()
    agent = os.getppid()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    linux.write_command_line([TITLE])
    # It stays there for a second start (`_start_over`).
    config = json.loads(control.recv(MESSAGE_LIMIT, socket.MSG_PEEK))
    env_changes = _warm_up(control, config["preload"], careful)
    control.recv(MESSAGE_LIMIT)
    linux.outlive_parent()  # the closed socket tells, and leaves time to clean up
    descriptors = _Server(control, agent, config["blanks"]).run()
    become(descriptors, agent, env_changes)


def _send(control: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(ConnectionError):  # the agent is gone, as the next read shows
        control.send(json.dumps(answer).encode())


def _step_aside(control: socket.socket, reason: str) -> NoReturn:
    _send(control, error=reason, aside=True)
    # The agent could not read that if a message to us were left unread.
    with contextlib.suppress(OSError):
        while control.recv(MESSAGE_LIMIT, socket.MSG_DONTWAIT):
            pass
    os._exit(0)


@dataclass(frozen=True)
class _Prefork:
    pid: int
    #: The socket for its request.
    socket: socket.socket


class _Server:
    """The zygote once it is warm."""

    def __init__(self, control: socket.socket, agent: int, wanted: int) -> None:
        self._control = control
        self._agent = agent
        self._wanted = wanted
        self._preforks: list[_Prefork] = []
        self._quiet_from = time.monotonic() + QUIET
        self._cgroup: Cgroup | None = None
        self._has_own_modules = False

    def run(self) -> list[int]:
        """Serve until the agent is gone; returns in new processes, with a request's descriptors."""
        while True:
            descriptors = self._prepare() if self._quiet() else self._hear()
            if descriptors is not None:
                return descriptors

    def _quiet(self) -> bool:
        """Wait for a request; True if there was none for a while and preforks are missing."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if len(self._preforks) >= self._wanted:
            return not poll.poll()
        return not poll.poll(max(0.0, self._quiet_from - time.monotonic()) * 1000)

    def _prepare(self) -> list[int] | None:
        """Prepare for the next request; returns in a prefork, when it becomes a worker."""
        if self._has_own_modules:
            return self._add_prefork()
        self._has_own_modules = True
        import_all(OWN_MODULES)  # a failure here is reported by the worker that needs it
        _spare_pages()
        return None

    def _hear(self) -> list[int] | None:
        """Handle one message; None unless this is a new process."""
        data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_LIMIT, DESCRIPTOR_LIMIT)
        if not data:  # agent and guard may have been killed at once
            if self._cgroup is not None:
                self._cgroup.remove()
            os._exit(0)
        message = json.loads(data)
        if "cgroup" in message:
            self._cgroup = Cgroup(message["cgroup"])
            return None
        return self._answer(message["number"], descriptors)

    def _answer(self, number: int, descriptors: list[int]) -> list[int] | None:
        if reason := unfit_to_fork():
            _step_aside(self._control, f"an imported module {reason}")
        answer: dict[str, Any] = {"number": number}
        try:
            answer["pid"] = self._use_prefork(descriptors) or fork_orphan()
        except OSError as error:
            answer["error"] = f"the zygote cannot fork: {error}"
        if answer.get("pid") == 0:
            self._close_all()
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        _send(self._control, **answer)
        self._quiet_from = time.monotonic() + QUIET
        return None

    def _use_prefork(self, descriptors: Sequence[int]) -> int | None:
        """Make a prefork the worker; return its pid, None if none is alive."""
        while self._preforks:
            prefork = self._preforks.pop(0)
            with prefork.socket:
                try:
                    socket.send_fds(prefork.socket, [b"be"], descriptors)
                    return prefork.pid
                except OSError:
                    continue  # it was killed while it waited
        return None

    def _add_prefork(self) -> list[int] | None:
        """Fork one; returns in the prefork, when it becomes a worker."""
        if unfit_to_fork():  # the next request gets the error
            self._wanted = 0
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = fork_orphan(lambda pid: _send(self._control, blank=pid))
            except OSError:
                self._wanted = 0  # processes or memory are short: workers come first
                ours.close()
                return None
            if pid == 0:
                ours.close()
                self._close_all()
                return self._wait_to_be_told(theirs)
        self._preforks.append(_Prefork(pid, ours))
        return None

    def _wait_to_be_told(self, by_zygote: socket.socket) -> list[int]:
        linux.die_with_parent(self._agent)
        if self._cgroup is not None:
            try:
                self._cgroup.join()
            except OSError:  # removed: the agent is about to end
                os._exit(0)
        data, descriptors, _, _ = socket.recv_fds(by_zygote, MESSAGE_LIMIT, DESCRIPTOR_LIMIT)
        if not data:  # the zygote has ended
            os._exit(0)
        return descriptors

    def _close_all(self) -> None:
        """Close the zygote's sockets in a copy: it must not read from them, nor hide the zygote's
        end from others."""
        self._control.close()
        for prefork in self._preforks:
            prefork.socket.close()


# --- importing -----------------------------------------------------------------------------------


def _warm_up(
    control: socket.socket, preload: Sequence[str], careful: bool
) -> dict[str, str | None]:
    """Import everything; return the changes that preloaded modules made to the environment."""
    began = time.monotonic()
    env.update({NVML_CHECK: "1"})
    bootstrap.ignore_missing_numpy()
    gc.disable()  # importing torch leaves little garbage; looking for it takes a fifth of the time
    told = import_all(MODULES)
    gc.enable()
    if "torch" not in sys.modules:
        _step_aside(control, told[0])
    version = str(getattr(sys.modules["torch"], "__version__", ""))
    told += filter(None, (torch_versions.too_old(version), torch_versions.too_new(version)))
    before = env.snapshot()
    with _path_of_main():
        told += (
            [line for name in preload for line in _import_safe(name)]
            if careful
            else (import_all(preload))
        )
    _fork_once()
    _spare_pages()
    if reason := unfit_to_fork():
        if preload and not careful:
            _start_over(control, before)
        _step_aside(control, f"an imported module {reason}")
    _send(control, seconds=time.monotonic() - began, warnings=told)
    return changes(before, env.snapshot())


def import_all(names: Iterable[str]) -> list[str]:
    """Import modules; return a sentence for each that cannot be imported."""
    told = []
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            told.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return told


def _start_over(control: socket.socket, environ: Mapping[str, str]) -> NoReturn:
    """Become a careful zygote: nothing else ends the threads of a module."""
    control.set_inheritable(True)
    role = f"{startup.CAREFUL_ZYGOTE}:{control.fileno()}"
    os.execve(sys.executable, sys.orig_argv, startup.environment(environ, role))


def _import_safe(name: str) -> list[str]:
    """Import a module, or as much of it as can be forked; return a sentence if that is not all."""
    found = preload_probe.probe(name, _unfit_after_fork)
    if not found.culprit:
        return import_all([name])
    complete = preload_probe.safe(found, sys.modules)
    import_all(complete)  # one that fails alone is imported by the worker
    rest = preload_probe.probe(name, str).seconds
    return [
        f"--preload {name}: {found.culprit} {found.reason}. {len(complete)} modules that it "
        f"imports before are preloaded; every worker imports the rest when it starts ({rest:.1f} s)"
        "."
    ]


def _unfit_after_fork() -> str:
    if len(linux.thread_names()) > 1:
        _fork_once()
    return unfit_to_fork()


@contextlib.contextmanager
def _path_of_main() -> Iterator[None]:
    """Have on `sys.path` the entry Python adds itself when it runs the program."""
    entry = path_of_main()
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, entry)
    yield
    if entry in sys.path:
        sys.path.remove(entry)


def path_of_main() -> str:
    """The directory of the program; the current one for a module."""
    if sys.argv[0] == "-m":
        return os.getcwd()
    program = os.path.realpath(sys.argv[0])
    return program if os.path.isdir(program) else os.path.dirname(program)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables to set, or delete (None), to turn one environment into another.

    >>> changes({"A": "1", "B": "2"}, {"A": "1", "C": "3"}) == {"B": None, "C": "3"}
    True
    """
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _fork_once() -> None:
    """Make OpenBLAS, which starts threads when it is imported, give them up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork with threads, rightly
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _spare_pages() -> None:
    """Hide objects from the garbage collector, so that their pages stay shared with copies."""
    gc.collect()
    gc.freeze()


# --- forking -------------------------------------------------------------------------------------


def unfit_to_fork() -> str:
    """Return what a module did that breaks copies of this process; empty if none did."""
    threads = linux.thread_names()
    if len(threads) > 1:
        return (
            f"has started threads, which do not survive a fork: {len(threads)} "
            f"({', '.join(sorted(set(threads)))})"
        )
    if sys.modules["torch"].cuda.is_initialized() or _devices():
        return (
            "has used the GPU driver, which does not survive a fork"
            f" ({', '.join(_devices()) or 'torch.cuda is initialized'})"
        )
    return ""


def _devices() -> list[str]:
    """Accelerators this process has open."""
    names = []
    for link in glob.glob("/proc/self/fd/*"):
        try:
            names.append(os.readlink(link))
        except FileNotFoundError:
            continue  # the one that listed the directory
    return sorted({name for name in names if name.startswith(("/dev/nvidia", "/dev/kfd"))})


def fork_orphan(announce: Callable[[int], None] = lambda pid: None) -> int:
    """Fork a process whose parent leaves at once, so that the agent, a subreaper, takes its place.

    0 in the new process, when it is the agent's child, or that of another if the agent is gone. In
    the zygote its pid; `announce` gets it before.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        between = os.fork()
        if between == 0:
            ours.close()
            _fork_and_leave(theirs)
            return 0
        theirs.close()
        pid = int(ours.recv(32) or 0)
        if pid:
            announce(pid)
        ours.close()  # `between` may go
        os.waitpid(between, 0)
    if not pid:
        raise OSError("no more processes can be created")
    return pid


def _fork_and_leave(to_zygote: socket.socket) -> None:
    """Returns in the child only: a second zygote must not come out of here, whatever happens."""
    pid, between = -1, os.getpid()
    try:
        pid = os.fork()
        if pid:
            to_zygote.send(str(pid).encode())
            to_zygote.recv(1)  # until the zygote closes its end
    finally:
        if pid:
            os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0001)


# --- becoming a worker ---------------------------------------------------------------------------


def become(descriptors: Sequence[int], agent: int, env_changes: Mapping[str, str | None]) -> None:
    """Turn a copy of the zygote into this worker; exit the process if that fails."""
    try:
        linux.die_with_parent(agent)
        os.setsid()
        linux.unblock_signals_for_agent()
        request = _read(descriptors[0])
        _take_streams(descriptors[1:4])
        inherited = dict(zip(request["inherited"], descriptors[4:], strict=True))
        _take_environment(request["env"], env_changes, inherited)
        if request["cgroup"]:
            Cgroup(request["cgroup"]).join()
        if request["cpus"] is not None:
            os.sched_setaffinity(0, request["cpus"])
        _take_command(request["command"], request["args"])
        _reseed()
        if "triton" in sys.modules:
            # Python collects nothing that is frozen when it ends, and nanobind, which is below
            # triton, prints a page about whatever is left.
            atexit.register(gc.unfreeze)
    except BaseException as error:
        traceback.print_exc()
        bootstrap.report(error, error.__traceback__)
        os._exit(1)
    bootstrap.attach()
    if request["module"]:
        _run_here(request["module"])


def _read(descriptor: int) -> dict[str, Any]:
    with open(descriptor, "rb") as file:
        file.seek(0)  # the agent, with the same open file, has written to its end
        request: dict[str, Any] = json.load(file)
        return request


def _take_streams(descriptors: Sequence[int]) -> None:
    """Standard input, output and error, and Python's objects for them.

    The objects stay the same, since loggers made by imports hold them, but forget what they have
    found out about the zygote's streams.
    """
    redirect((descriptors[0], descriptors[1], descriptors[2]))
    for descriptor in descriptors:
        os.close(descriptor)
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if isinstance(stream, TextIOWrapper):
            _renew(stream, number)


def _renew(stream: TextIOWrapper, number: int) -> None:
    """Set up one stream as Python does at its start with `-u`."""
    raw = FileIO(number, "wb" if number else "rb", closefd=False)
    raw.name = stream.name
    TextIOWrapper.__init__(
        stream,
        raw if number else BufferedReader(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _take_environment(
    wanted: Mapping[str, str], env_changes: Mapping[str, str | None], inherited: Mapping[str, int]
) -> None:
    """Set the requested environment, plus the changes that imports have made."""
    values: dict[str, str | None] = {**wanted, **env_changes}
    values.update((name, str(descriptor)) for name, descriptor in inherited.items())
    env.replace({name: value for name, value in values.items() if value is not None})


def _take_command(command: Sequence[str], args: Sequence[str]) -> None:
    """`sys.argv[0]` is as Python wants it to be already."""
    sys.argv[1:] = args
    sys.orig_argv[:] = command
    linux.write_command_line(command)


def _reseed() -> None:
    """Reseed the generators that a new process would seed at random."""
    torch = sys.modules["torch"]
    if torch.initial_seed() != CONSTANT_SEED:
        torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def _run_here(module: str) -> NoReturn:
    """Run a helper module of ours instead of the zygote's program."""
    exitcode = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        exitcode = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        bootstrap.report(error, error.__traceback__)
        exitcode = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exitcode)
