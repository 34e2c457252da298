"""Real agents on this machine, and a worker script that does as it is told.

The script (`obedient.py`) imports no torch: it writes a line when it starts and then looks for
orders, files named after its generation and rank. What all worker scripts share is in
`worker_side.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.light import with_light_torch
from tests.ports import free_port
from tests.support import poll_for

HERE = Path(__file__).parent
SCRIPT = HERE / "obedient.py"
#: Scripts that use no torch: their agents have a light one.
LIGHT = [HERE / name for name in ("obedient.py", "linked.py", "holding.py", "rounds.py")]

T = TypeVar("T")


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
    """Nodes of one job and what its workers wrote; `keys` are the script's."""

    def __init__(
        self, directory: Path, flags: str = "", script: Path = SCRIPT, port: int = 0, **keys: Any
    ) -> None:
        self.directory = directory
        self.flags = flags.split()
        self.script = script
        self.keys = keys
        self.port = port or free_port()
        self.nodes: list[Node] = []
        #: What is run as `torchelastic`.
        self.program = ["-m", "torchelastic"]
        self.written, self.orders = directory / "lines", directory / "orders"
        self.written.mkdir(parents=True)
        self.orders.mkdir()

    def command(self, **keys: Any) -> list[str]:
        """The script and its arguments."""
        words = [f"{name}={value}" for name, value in {**self.keys, **keys}.items()]
        return [str(self.script), str(self.written), str(self.orders), *words]

    @property
    def environ(self) -> dict[str, str]:
        return with_light_torch() if self.script in LIGHT else dict(os.environ)

    def start(self, flags: str = "", *, script: list[str] | None = None, **keys: Any) -> Node:
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
        command += [*self.flags, *flags.split(), *(script or self.command(**keys))]
        node = Node(command, directory, dict(os.environ) if script else self.environ)
        self.nodes.append(node)
        return node

    def order(self, what: str, *, rank: int | str = "any", generation: int | str = "any") -> None:
        """`raise`, `exit 3`, `finish`, `ignore-term`, `train 2` (and raise where there are more
        than two workers): for one worker or for all."""
        path = self.orders / f"{generation}-{rank}"
        path.with_suffix(".part").write_text(what)
        path.with_suffix(".part").rename(path)

    def give(self, name: str) -> None:
        """Give an order that is a name alone, as `go-4`."""
        (self.orders / name).touch()

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.written.iterdir()):
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

        lines = self.wait_for(complete, f"{size} workers of generation {generation}", timeout)
        return sorted(lines, key=lambda line: line["rank"])

    def begun(self, size: int, after: int = -1, timeout: float = 60.0) -> int:
        """Wait until all workers of a later world of this size have started; its generation."""

        def found() -> list[int]:
            lines = self.lines(event="start", world_size=size)
            generations = [line["generation"] for line in lines]
            return [one for one in generations if one > after and generations.count(one) == size]

        return max(self.wait_for(found, f"{size} workers after generation {after}", timeout))

    def steps(self, **wanted: Any) -> list[dict[str, Any]]:
        return self.lines(event="step", **wanted)

    def newest(self) -> int:
        """The generation of the last steps."""
        return max(line["generation"] for line in self.steps())

    def wait_steps(
        self, number: int = 3, *, after: int = -1, timeout: float = 60.0, **wanted: Any
    ) -> int:
        """Wait until a generation later than `after` has made so many steps; which one it is."""

        def stepped() -> list[int]:
            made: dict[int, set[int]] = defaultdict(set)
            for line in self.steps(**wanted):
                if line["generation"] > after:
                    made[line["generation"]].add(line["step"])
            return [generation for generation, steps in made.items() if len(steps) >= number]

        what = f"{number} steps of a world after generation {after}, with {wanted}"
        return max(self.wait_for(stepped, what, timeout))

    def wait_for(self, probe: Callable[[], T], what: str, timeout: float = 60.0) -> T:
        """`poll_for` that shows what the nodes have said."""
        try:
            return poll_for(probe, what=what, timeout=timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

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
def job(directory: Path, flags: str = "", script: Path = SCRIPT, **keys: Any) -> Iterator[Job]:
    made = Job(directory, flags, script, **keys)
    try:
        yield made
    finally:
        made.close()


def torchelastic(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run another command to its end, as a user types it."""
    command = [sys.executable, "-m", "torchelastic", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def status(run_id: str) -> dict[str, Any]:
    """The output of `torchelastic status` for programs."""
    (told,) = json.loads(torchelastic("status", "--json", run_id).stdout)
    return told


def state_of(pid: int) -> str:
    """The letter that /proc has for the state of a process; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return state_of(pid) not in ("", "Z")


def words_of(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def tree(*pids: int) -> list[int]:
    """These processes and all below them, without those that have just ended."""
    found: list[int] = []
    for pid in pids:
        try:
            tasks = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if tasks:
            found += [pid, *tree(*(int(child) for text in tasks for child in text.split()))]
    return list(dict.fromkeys(found))


def child_running(pid: int, what: str) -> int:
    """The process below another one whose command line has `what` in it."""
    for child in tree(pid)[1:]:
        if what in " ".join(words_of(child)):
            return child
    raise AssertionError(f"{pid} has no child that runs {what}")


@contextmanager
def dashboard(*argv: str) -> Iterator[str]:
    """`torchelastic dashboard` at a free port; its address."""
    command = [sys.executable, "-m", "torchelastic", "dashboard", *argv, "--address=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
            process.send_signal(signal.SIGINT)
            assert process.wait(100) == 0
        finally:
            process.kill()
