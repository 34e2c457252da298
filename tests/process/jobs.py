"""Real agents on this machine, and a worker script that does as it is told.

The script (`obedient.py`) imports no torch: it writes a line when it starts and then looks for
orders, files named after its generation and rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.light import with_light_torch
from tests.ports import free_port
from tests.support import poll_for

SCRIPT = Path(__file__).with_name("obedient.py")


class Node:
    """One `torchelastic run` process."""

    def __init__(self, command: list[str], directory: Path, env: dict[str, str]) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self._stderr_path = directory / "stderr"
        with self._stderr_path.open("wb") as stderr, (directory / "stdout").open("wb") as stdout:
            self.process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, env=env
            )

    @property
    def pid(self) -> int:
        """The guard: the process the user sees."""
        return self.process.pid

    @property
    def agent_pid(self) -> int:
        started = poll_for(lambda: self.events("agent-started"), what="agent-started")
        return started[0]["pid"]

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text(errors="replace")

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text(errors="replace")

    def events(self, *types: str) -> list[dict[str, Any]]:
        found = []
        for path in (self.directory / "logs").rglob("events.jsonl"):
            # What comes after the last line's end is being written, or its writer was killed.
            for line in path.read_text().split("\n")[:-1]:
                record = json.loads(line)
                if not types or record["type"] in types:
                    found.append(record)
        return found

    def wait(self, timeout: float = 60.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running; it said:\n{self.stderr}") from None

    def kill(self) -> None:
        """The whole node at once, as when the power goes: agent first, then its guard."""
        os.kill(self.agent_pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)


class Job:
    """Nodes of one job and what its workers wrote."""

    def __init__(
        self, directory: Path, flags: str = "", script: Path = SCRIPT, port: int = 0
    ) -> None:
        self.directory = directory
        self.flags = flags.split()
        self.script = script
        self.port = port or free_port()
        self.nodes: list[Node] = []
        #: What is run as `torchelastic`.
        self.program = ["-m", "torchelastic"]
        self._lines = directory / "lines"
        self._orders = directory / "orders"
        self._lines.mkdir(parents=True)
        self._orders.mkdir()

    def start(self, flags: str = "", *, script: list[str] | None = None) -> Node:
        """Start another node; the first one hosts, so the others come when it does.

        Of a job of 1 to n nodes the first may begin alone, on a busy machine. If all n are started
        `--settle=60` keeps it from that, and costs nothing.
        """
        if self.nodes:
            poll_for(lambda: self.nodes[0].events("agent-started"), what="the first agent")
            if "is_host=false" not in str(self.nodes[0].process.args):
                poll_for(lambda: self.nodes[0].events("joined"), what="the first node hosts")
        directory = self.directory / f"node{len(self.nodes)}"
        command = [sys.executable, *self.program, "run", f"--log-dir={directory}/logs"]
        if not any(flag == "--nnodes=1" or flag == "--standalone" for flag in self.flags):
            command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id=job{self.port}"]
        command += [*self.flags, *flags.split()]
        command += script or [str(self.script), str(self._lines), str(self._orders)]
        light = script is None and self.script == SCRIPT
        node = Node(command, directory, with_light_torch() if light else dict(os.environ))
        self.nodes.append(node)
        return node

    def order(self, what: str, *, rank: int | str = "any", generation: int | str = "any") -> None:
        """`raise`, `exit 3`, `finish`, `ignore-term`, `train 2` (and raise where there are more
        than two workers): for one worker or for all."""
        path = self._orders / f"{generation}-{rank}"
        path.with_suffix(".part").write_text(what)
        path.with_suffix(".part").rename(path)

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self._lines.iterdir()):
            # What comes after the last line's end is being written, or its writer was killed.
            for text in path.read_text().split("\n")[:-1]:
                line = json.loads(text)
                if all(line.get(key) == value for key, value in wanted.items()):
                    found.append(line)
        return found

    def world(self, generation: int, size: int, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Wait until every worker of a generation has started; their first lines, by rank."""

        def complete() -> list[dict[str, Any]]:
            lines = self.lines(generation=generation, event="start", world_size=size)
            return lines if len(lines) == size else []

        try:
            lines = poll_for(
                complete, what=f"{size} workers of generation {generation}", timeout=timeout
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None
        return sorted(lines, key=lambda line: line["rank"])

    def world_is(self, generation: int) -> bool:
        """Whether no newer generation has been formed than this one."""
        formed = self.nodes[0].events("world-formed")
        return max(record["generation"] for record in formed) == generation

    def said(self) -> str:
        return "\n".join(f"--- node {i}:\n{node.stderr}" for i, node in enumerate(self.nodes))

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.terminate()
        for node in self.nodes:
            try:
                node.process.wait(15)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()


@contextmanager
def job(directory: Path, flags: str = "", **more: Any) -> Iterator[Job]:
    made = Job(directory, flags, **more)
    try:
        yield made
    finally:
        made.close()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def child_running(pid: int, what: str) -> int:
    """The child of a process whose command line has `what` in it."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if what in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise AssertionError(f"{pid} has no child that runs {what}")
