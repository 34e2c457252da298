"""The agent's side of the zygote: start it, ask it for workers, end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from torchelastic.agent.failure_report import exit_words
from torchelastic.agent.spawn import startup
from torchelastic.agent.spawn.processes import WorkerSpawn, command_line, start_program
from torchelastic.errors import SpawnError
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup

logger = logging.getLogger(__name__)

MESSAGE_LIMIT = 64 * 1024
#: Seconds that a fork may take, on a very busy machine.
ANSWER_TIMEOUT = 30.0
#: CPU seconds in which Python reaches our code; see `_stop_the_wrong_program`.
START_CPU_LIMIT = 0.5

#: Variables that take effect during imports: a worker and the zygote must have the same values.
#: (`TORCHELASTIC_` are ours, and read later.)
IMPORT_TIME = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NUMEXPR_",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
)


class Zygote:
    """A process that has imported torch and is copied for each worker."""

    def __init__(
        self, pid: int, control: socket.socket, env: Mapping[str, str], command: Sequence[str]
    ) -> None:
        self.pid = pid
        #: Modules that could not be preloaded, a sentence each.
        self.warnings: list[str] = []
        #: Why it no longer forks; empty while it does.
        self.aside = ""
        #: Requested workers whose pid is not known yet: they may be children of ours already.
        self.in_flight = 0
        self._pidfd = os.pidfd_open(pid)
        self._ending: asyncio.Future[int] | None = None
        self._control = control
        self._env = env
        self._command = tuple(command)
        self._seconds: float | None = None
        self._lock = asyncio.Lock()
        self._requests = 0
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        #: The loop that reads answers, after the first request.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deaf = False
        self._preforks: set[int] = set()

    @classmethod
    def start(
        cls,
        *,
        python: str,
        env: Mapping[str, str],
        preload: Sequence[str],
        command: Sequence[str],
        preforks: int = 0,
    ) -> Zygote:
        """Start it for workers that run `command` in `env`; returns while it still imports.

        `preforks` is the number of copies it makes ahead. Call in the main thread: the zygote dies
        with the thread that started it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = start_program(
                    [python, *command[1:]],
                    env=startup.environment(env, f"{startup.ZYGOTE}:{theirs.fileno()}"),
                    keep=[theirs.fileno()],
                    prepare=_stop_the_wrong_program,
                )
            except SpawnError:
                ours.close()
                raise
        ours.setblocking(False)
        ours.send(json.dumps({"preload": list(preload), "blanks": preforks}).encode())
        return cls(pid, ours, env, command)

    @property
    def usable(self) -> bool:
        """True if it can still fork workers."""
        return not self.aside

    def preforks(self) -> set[int]:
        """Pids of our children that are not workers yet; those of a dead zygote end by themselves.

        Called after `linux.children`, it includes all preforks listed there.
        """
        self._listen()
        return set() if self._deaf else set(self._preforks)

    async def wait_ready(self) -> float | str:
        """Wait for the imports: the seconds they took, or why the zygote cannot be used."""
        async with self._lock:
            if self._seconds is None and not self.aside:
                answer = await self._receive()
                self.warnings = answer.get("warnings", [])
                self._seconds = answer.get("seconds")
        return self.aside or self._seconds or 0.0

    def use_cgroup(self, cgroup: Cgroup) -> None:
        """Put preforks into this cgroup ahead of time: moving a process is slow."""
        with contextlib.suppress(OSError):  # it has ended, as the next request shows
            self._control.send(json.dumps({"cgroup": cgroup.path}).encode())

    async def fork(
        self,
        spawn: WorkerSpawn,
        inherited: Mapping[str, int] | None = None,
        cgroup: Cgroup | None = None,
    ) -> int:
        """Fork a worker, a child of ours in its own session; return its pid.

        `inherited` is as for `spawn_plain`. Raises `SpawnError` if this worker cannot be a copy or,
        if `usable` is False afterwards, no worker can.
        """
        inherited = inherited or {}
        request = {**self._request(spawn, cgroup), "inherited": list(inherited)}
        descriptors = [*spawn.streams, *inherited.values()]
        await self.wait_ready()
        self.in_flight += 1
        try:
            async with self._lock:
                return await self._ask(request, descriptors)
        finally:
            self.in_flight -= 1

    async def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        if self.aside:
            raise SpawnError(self.aside)
        self._requests += 1
        message = {"number": self._requests}
        with open(os.memfd_create("request"), "w+b") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            sent = [file.fileno(), *descriptors]
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], sent)
            except OSError as error:
                logger.debug("cannot send to the zygote: %s", error)
        while True:
            try:
                answer = await asyncio.wait_for(self._receive(), ANSWER_TIMEOUT)
            except asyncio.TimeoutError:
                self._give_up()
                raise SpawnError(self.aside) from None
            if answer.get("number", self._requests) != self._requests:
                continue  # to a request that was cancelled
            if "error" in answer:
                raise SpawnError(answer["error"])
            return int(answer["pid"])

    async def _receive(self) -> dict[str, Any]:
        """The next answer; an error answer if the zygote has ended."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._control, self._listen)
        answer = await self._answers.get()
        if answer is None:
            answer = {"error": f"the zygote has ended ({await self._end()})", "aside": True}
        if answer.get("aside"):
            self.aside = str(answer["error"])
        return answer

    def _listen(self) -> None:
        """Read the answers that have arrived."""
        while not self._deaf:
            try:
                data = self._control.recv(MESSAGE_LIMIT)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if data:
                self._hear(json.loads(data))
            else:
                self._end_of_answers()

    def _hear(self, message: dict[str, Any]) -> None:
        if "blank" in message:
            self._preforks.add(message["blank"])
        else:
            self._preforks.discard(message.get("pid", 0))
            self._answers.put_nowait(message)

    def _end_of_answers(self) -> None:
        self._deaf = True
        if self._loop is not None:
            self._loop.remove_reader(self._control)
        self._answers.put_nowait(None)

    async def _end(self) -> str:
        """Wait for the end of the process: `exit code 1`, `killed by SIGKILL`."""
        exitcode = await self._exitcode()
        if exitcode == -signal.SIGPROF:
            return "its Python does not import sitecustomize, which torchelastic needs to start"
        return exit_words(exitcode)

    async def killed(self) -> str:
        """Wait for the end of the process; describe the signal that killed it. Empty if it exited
        by itself, since another one would do the same."""
        exitcode = await self._exitcode()
        return exit_words(exitcode) if exitcode < 0 and exitcode != -signal.SIGPROF else ""

    async def _exitcode(self) -> int:
        if self._ending is None:
            self._ending = asyncio.ensure_future(_exit_of(self._pidfd))
        return await asyncio.shield(self._ending)

    def _give_up(self) -> None:
        """Stop using it: it is frozen, or the machine is. Plain processes still start."""
        self.aside = f"the zygote has not answered for {ANSWER_TIMEOUT:g} s"
        self._kill()

    def _kill(self) -> None:
        if self._ending is None or not self._ending.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self) -> None:
        """End it. Workers are not its children and live on."""
        self.aside = self.aside or "the zygote was closed"
        self._kill()
        await self._end()
        self._listen()
        for pid in self._preforks.intersection(linux.children()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._preforks.clear()
        async with self._lock:  # pending requests fail first
            self._control.close()

    def _request(self, spawn: WorkerSpawn, cgroup: Cgroup | None) -> dict[str, Any]:
        """The request for a worker; raises `SpawnError` if a copy cannot be this worker."""
        if reason := unlike(spawn, self._env):
            raise SpawnError(reason)
        command = command_line(spawn.entry, self._command[0])
        # A script and a module are one and two words after `python -u`; the rest are arguments.
        words = 3 if spawn.entry.kind == "script" else 4
        native = tuple(command[:words]) == self._command[:words]
        if not native and spawn.entry.kind == "script":
            raise SpawnError(f"the zygote was started to run {self._command[2]}")
        return {
            "command": command,
            "args": command[words:],
            "module": None if native else command[3],
            "env": dict(spawn.env),
            "cpus": None if spawn.cpus is None else sorted(spawn.cpus),
            "cgroup": None if cgroup is None else cgroup.path,
        }


def unlike(spawn: WorkerSpawn, env: Mapping[str, str]) -> str:
    """Why a worker cannot be a copy of a process that imported torch in `env`; empty if it can."""
    if spawn.entry.kind == "program":
        return f"{spawn.entry.target} is not a Python program"
    for name in sorted(env.keys() | spawn.env.keys()):
        ours = name.startswith("TORCHELASTIC_")
        if not ours and name.startswith(IMPORT_TIME) and env.get(name) != spawn.env.get(name):
            return f"{name} takes effect when torch is imported, and the zygote had another value"
    if spawn.cpus is not None and "OMP_NUM_THREADS" not in spawn.env:
        return "without OMP_NUM_THREADS, its CPUs set the thread count when torch is imported"
    return ""


async def _exit_of(pidfd: int) -> int:
    """Wait for a child to end, reap it and close its descriptor."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def look() -> None:
        exitcode = linux.exitcode(pidfd)
        if exitcode is not None and not ended.done():
            ended.set_result(exitcode)

    loop.add_reader(pidfd, look)
    try:
        return await ended
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _stop_the_wrong_program() -> None:
    """Limit the zygote's CPU time until our code runs.

    If Python did not import our `sitecustomize`, the zygote would run the user's program beside
    the workers. The limit is less than it takes to import torch.
    """
    signal.setitimer(signal.ITIMER_PROF, START_CPU_LIMIT)
