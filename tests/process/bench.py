"""This test process as an agent: a subreaper with an event loop, a zygote and a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.process.jobs import words_of
from torchelastic.agent.spawn.processes import command_line
from torchelastic.agent.spawn.zygote_client import Zygote
from torchelastic.agent.workers.supervisor import Supervisor, WorkerExit, WorkerSpawn
from torchelastic.config import Entry
from torchelastic.system import linux
from torchelastic.system.cgroup import Cgroup
from torchelastic.transport.auth import Secret

#: Long, for a busy machine: a torch that is imported from a cold disk cache takes its time.
DEADLINE = 90.0


@dataclass
class Ran:
    """The result of a program."""

    exitcode: int
    stdout: str
    stderr: str
    messages: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Be one for a while; other tests want their orphans to go to init."""
    before = set(linux.children())
    linux.become_subreaper()
    try:
        yield
    finally:
        linux.kill_descendants(keep=before)
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


class Bench:
    """Starts workers and waits for them, within `DEADLINE`."""

    def __init__(self, directory: Path, cgroup: Cgroup | None = None) -> None:
        self.directory = directory
        self.loop = asyncio.new_event_loop()
        self.exits: list[WorkerExit] = []
        self.messages: list[tuple[int, dict[str, Any]]] = []
        self.zygote: Zygote | None = None
        self.cgroup = cgroup
        #: The job's, for workers that are started from now on.
        self.secret: Secret | None = None
        self._supervisor: Supervisor | None = None

    def start_zygote(
        self,
        entry: Entry,
        environ: Mapping[str, str],
        preload: Sequence[str] = (),
        preforks: int = 0,
    ) -> float | str:
        self.zygote = Zygote.start(
            python=sys.executable,
            env=environ,
            preload=preload,
            command=command_line(entry, sys.executable),
            preforks=preforks,
        )
        return self.do(self.zygote.wait_ready())

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            self._supervisor = Supervisor(
                zygote=self.zygote,
                cgroup=self.cgroup,
                on_exit=self.exits.append,
                on_message=lambda local_rank, message: self.messages.append((local_rank, message)),
                secret=self.secret,
            )
        return self._supervisor

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, DEADLINE))

    def until(self, done: Any, what: str) -> None:
        """Let the loop run until `done()`."""

        async def wait() -> None:
            while not done():
                await asyncio.sleep(0.002)

        try:
            self.do(wait())
        except asyncio.TimeoutError:
            raise AssertionError(f"not seen within {DEADLINE:g} s: {what}") from None

    def start(self, entry: Entry, environ: Mapping[str, str], **more: Any) -> int:
        """One worker; returns its pid."""
        spawn = WorkerSpawn(local_rank=0, entry=entry, env=environ, **more)
        return self.do(self.supervisor.start([spawn]))[0]

    def run(
        self, entry: Entry, environ: Mapping[str, str], stdin: str | None = None, **more: Any
    ) -> Ran:
        """One worker to its end, and then everything that it has left."""
        self.exits.clear()
        self.messages.clear()
        with Files(self.directory, stdin) as files:
            self.start(
                entry,
                environ,
                stdin=files.stdin.fileno(),
                stdout=files.stdout.fileno(),
                stderr=files.stderr.fileno(),
                **more,
            )
            self.until(lambda: self.exits, f"the end of {entry.target}")
            self.do(self.supervisor.stop(timeout=0.0))
            return Ran(
                self.exits[0].exitcode, *files.read(), [message for _, message in self.messages]
            )

    def close(self) -> None:
        if self._supervisor is not None:
            self.do(self._supervisor.stop(timeout=0.0))
            self._supervisor.close()
        if self.zygote is not None:
            self.do(self.zygote.close())
        self.loop.close()


class Files:
    """A worker's standard streams: regular files."""

    def __init__(self, directory: Path, stdin: str | None) -> None:
        (directory / "stdin").write_text(stdin or "")
        self.stdin = (directory / "stdin").open("rb")
        self.stdout = (directory / "stdout").open("wb+")
        self.stderr = (directory / "stderr").open("wb+")

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            file.close()

    def read(self) -> tuple[str, str]:
        for file in (self.stdout, self.stderr):
            file.seek(0)
        return self.stdout.read().decode(), self.stderr.read().decode()


def run_plain(
    command: Sequence[str], environ: Mapping[str, str], directory: Path, stdin: str | None = None
) -> Ran:
    """The same program as anybody would start it."""
    with Files(directory, stdin) as files:
        ended = subprocess.run(
            command,
            env=dict(environ),
            stdin=files.stdin,
            stdout=files.stdout,
            stderr=files.stderr,
            start_new_session=True,
            timeout=DEADLINE,
        )
        return Ran(ended.returncode, *files.read())


@contextlib.contextmanager
def bench(directory: Path, cgroup: Cgroup | None = None) -> Iterator[Bench]:
    with subreaper():
        made = Bench(directory, cgroup)
        try:
            yield made
        finally:
            made.close()


def pids_of(*names: str) -> list[int]:
    """Processes whose command line has all these words."""
    every = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in every if {*names} <= {*words_of(pid)}]
