"""One job under test: its nodes on this machine, its workers' logs, its end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import processes
from benchmarks.harness.launchers import Launcher
from benchmarks.harness.step_logs import StepLogs

T = TypeVar("T")

SCRIPTS = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.1
HEAD_START_SECONDS = 0.3
#: Variables of the caller that would change what is measured.
_FOREIGN = ("PET_", "TORCH", "GLOO_", "OMP_", "MKL_", "MASTER_", "RANK", "WORLD_", "XDG_RUNTIME_")


class JobFailed(Exception):
    """The job did not get to where a measurement can begin or end."""


@dataclass(frozen=True)
class Node:
    """A launcher's process and when it was started."""

    process: subprocess.Popen[bytes]
    started: float

    def kill(self) -> float:
        """SIGKILL to the launcher and everything below it at once; return the time before it."""
        pids = [self.process.pid, *processes.descendants(self.process.pid)]
        killed = time.monotonic()
        processes.kill(pids)
        self.process.wait()
        return killed

    def freeze(self) -> float:
        """SIGSTOP to all of the node, the launcher first; return the time before it."""
        pids = [self.process.pid, *processes.descendants(self.process.pid)]
        stopped = time.monotonic()
        processes.send(pids, signal.SIGSTOP)
        return stopped


@dataclass(frozen=True)
class Place:
    """Where on this machine a node runs, if not like all others."""

    prefix: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Job:
    """Starts nodes, reads what their workers log, and leaves nothing behind.

    One job lives at a time: ending it ends every process that descends from this one.
    """

    def __init__(
        self,
        launcher: Launcher,
        script: str = "ddp_train.py",
        arguments: Sequence[str] = (),
        *,
        workers: int = 2,
        elastic: bool = True,
        nodes: str = "1:3",
        address: str = "127.0.0.1",
        parent: Path | None = None,
    ) -> None:
        self.launcher = launcher
        self.workers = workers
        self.nodes: list[Node] = []
        # Short: Unix sockets below it may have paths of 107 bytes at most.
        self.directory = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
        self.script = [
            str(SCRIPTS / script),
            f"--record={self.directory / 'logs'}",
            f"--checkpoint={self.directory / 'checkpoint.pt'}",
            *arguments,
        ]
        self._nodes = nodes
        #: Where the processes of the job meet.
        self.endpoint = f"{address}:{free_port(address)}" if elastic else ""
        self._logs = StepLogs(self.directory / "logs")
        self.history = self._logs.history

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start_node(self, workers: int | None = None, place: Place | None = None) -> Node:
        """A node of the job, with as many workers as the others unless told."""
        place = place or Place()
        launcher = replace(self.launcher, flags=(*self.launcher.flags, *place.flags))
        count = workers or self.workers
        if self.endpoint:
            job = self.directory.name
            command = launcher.elastic(self._nodes, count, self.endpoint, job, self.script)
        else:
            command = launcher.single(count, self.script)
        return self.start([*place.prefix, *command], place.environment)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Node:
        """Any process of the job."""
        with (self.directory / f"node-{len(self.nodes)}.out").open("wb") as output:
            started = time.monotonic()
            process = subprocess.Popen(
                command,
                env={**self._environment(), **environment},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we end the job in order
            )
        self.nodes.append(Node(process, started))
        return self.nodes[-1]

    def start_two_nodes(self) -> None:
        """Two nodes, the first with a head start: it most likely hosts the rendezvous.

        Waiting until it does would be unfair: torchrun then forms a world of one node first.
        """
        self.start_node()
        time.sleep(HEAD_START_SECONDS)
        self.start_node()

    def guest(self) -> Node:
        """The node of two that does not host the rendezvous."""
        port = int(self.endpoint.split(":")[1])
        hosts = [node for node in self.nodes if processes.listens(node.process.pid, port)]
        guests = [node for node in self.nodes if node not in hosts]
        if len(hosts) != 1 or len(guests) != 1:
            raise JobFailed(f"{len(hosts)} of {len(self.nodes)} nodes host the rendezvous")
        return guests[0]

    def wait_for(
        self, probe: Callable[[], T | None], seconds: float, poll: float = POLL_SECONDS
    ) -> T | None:
        """Read the logs and ask `probe` until it answers; None when time or the nodes are up."""
        deadline = time.monotonic() + seconds
        while True:
            alive = any(node.process.poll() is None for node in self.nodes)
            self.read_logs()
            if (answer := probe()) or not alive or time.monotonic() > deadline:
                return answer or None
            time.sleep(poll)

    def wait_training(self, size: int, quiet: float) -> None:
        """Until a world of `size` has trained without a break for `quiet` seconds."""

        def trained() -> bool:
            return self.history.trained_for(size, time.monotonic()) >= quiet

        if not self.wait_for(trained, self.launcher.start_patience):
            raise JobFailed(f"no world of {size} within {self.launcher.start_patience:g} s")

    def read_logs(self) -> None:
        """Take in what the workers have written since the last time."""
        self._logs.read()

    def worlds(self, known: Container[int] = ()) -> list[dict[str, Any]]:
        """Every world that trained and is not `known`, in seconds since the first node's start."""
        spans = sorted(self.history.spans.values(), key=lambda span: span.began)
        origin = self.nodes[0].started
        return [span.to_json(origin) for span in spans if span.world not in known]

    def output(self, lines: int = 15) -> str:
        """The end of what each node printed."""
        parts = []
        for path in sorted(self.directory.glob("node-*.out")):
            tail = [line[:300] for line in path.read_text(errors="replace").splitlines()[-lines:]]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)

    def last_words(self) -> str:
        """How processes ended that we have not killed, and the last line each has printed."""
        found = [
            f"exit code {code}, {_last_line(self.directory / f'node-{number}.out')}"
            for number, node in enumerate(self.nodes)
            if (code := node.process.poll()) not in (None, 0, -signal.SIGKILL)
        ]
        return "; ".join(dict.fromkeys(found))

    def close(self) -> None:
        """Ask the nodes to end, end what is left, remove every file."""
        running = [node.process for node in self.nodes if node.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        try:
            for process in running:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # what does not end is ended below
        finally:
            processes.end_descendants()
            self._logs.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        given = self.launcher.environment
        paths = [str(SCRIPTS), given.get("PYTHONPATH"), kept.get("PYTHONPATH")]
        return {
            **kept,
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self.directory),
            **given,
            # Where the workload, a preloaded module and a peer are found.
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n")
    told = [line.strip() for line in lines if line.strip()]
    return f"last line: {told[-1][:300]}" if told else "nothing printed"


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
