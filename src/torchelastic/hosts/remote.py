"""`python -m torchelastic.hosts.remote`: the program that `run --hosts` starts on each host.

The first line on stdin names the job. This program answers `READY`, and the second line is a
request: the job, the environment and the secret, none of which may be on a command line. Each
further line is a signal for the agent. The agent outlives the connection: when stdin and stdout are
lost, because the launcher or its network is gone, training continues, and only the output is
dropped.

One host runs one agent of a job. If it runs already, because of an earlier launcher, this program
says so, hands signals to it, and ends when it ends, with its exit code.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchelastic import env
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import (
    EXIT_NOT_ENOUGH_NODES,
    EXIT_OK,
    EXIT_RENDEZVOUS_LOST,
    EXIT_SIGNAL_BASE,
    EXIT_USAGE,
    FAILED,
    ConfigError,
)
from torchelastic.events import job_registry
from torchelastic.launcher.launch_job import AgentProcess
from torchelastic.system.devices import workers_for
from torchelastic.transport.credentials import VARIABLE as SECRET

#: What this program writes on stdout, once each: not a line of any worker.
READY = "\x00torchelastic: ready"
STARTED = "\x00torchelastic: agent started"
TAKEN_OVER = "\x00torchelastic: agent was running"
#: The whole job has ended, and the exit code of this program is that of the job.
ENDED = "\x00torchelastic: job ended"
MARKS = (READY, STARTED, TAKEN_OVER, ENDED)

#: Seconds to hand on the last output.
LAST_OUTPUT_TIMEOUT = 5.0
#: Ends of the whole job, if the nodes have agreed on it; others concern this host only.
_OF_THE_JOB = (EXIT_OK, EXIT_NOT_ENOUGH_NODES, *FAILED)


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sshd may send it when the connection ends
    hello: dict[str, Any] = json.loads(sys.stdin.readline())
    with _sole_agent(hello["run_id"], hello["host"]) as lock:
        if not lock.is_held:
            return _follow(lock)
        print(READY, flush=True)
        line = sys.stdin.readline()
        if not line:  # this host is not needed any more
            return EXIT_SIGNAL_BASE + signal.SIGTERM
        return _start(json.loads(line), lock)


def _start(request: dict[str, Any], lock: _Lock) -> int:
    """Run the agent that the launcher requests; return its exit code."""
    env.update(request["environ"])
    with contextlib.suppress(FileNotFoundError):  # then relative paths are those of the home
        os.chdir(request["directory"])
    config = LaunchConfig.from_json(request["config"])
    asked = request["entry"]
    entry = Entry(asked["kind"], asked["target"], tuple(asked["args"]))
    if late := job_registry.too_late(config.run_id, [entry.target, *entry.args]):
        print(late, file=sys.stderr)
        print(ENDED, flush=True)
        return EXIT_OK
    try:
        workers = workers_for(request["workers"], env.snapshot())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    return _run(replace(config, nproc_per_node=workers), entry, request["secret"], lock)


def _run(config: LaunchConfig, entry: Entry, secret: str, lock: _Lock) -> int:
    environ = {**env.snapshot(), SECRET: secret}
    with _outliving_readers(), tempfile.TemporaryDirectory(prefix="torchelastic_host_") as name:
        agent = AgentProcess(config, entry, Path(name), environ)
        lock.write(str(agent.pid))
        # A machine that shuts down sends it to this process, too: the agent leaves the job.
        signal.signal(signal.SIGTERM, lambda signum, frame: agent.signal(signum))
        print(STARTED, flush=True)
        _hand_on_signals(agent.signal)
        ended = agent.wait()
        if ended.exitcode in FAILED and (ended.place is None or ended.place.node_rank == 0):
            print(ended.told(entry.name), file=sys.stderr, flush=True)
        closed = ended.world is not None and ended.world.phase == "closed"
        if closed and ended.exitcode in _OF_THE_JOB:
            lock.write(f" {ended.exitcode}")
            print(ENDED, flush=True)
    return ended.exitcode


def _follow(lock: _Lock) -> int:
    """Wait for the end of the agent that an earlier launcher has started."""
    print(TAKEN_OVER, flush=True)
    _hand_on_signals(lock.signal)
    exitcode = lock.wait()
    if exitcode is None:  # unknown, or only this host's: the launcher starts another agent
        return EXIT_RENDEZVOUS_LOST
    print(ENDED, flush=True)
    return exitcode


def _hand_on_signals(send: Callable[[int], None]) -> None:
    """Send the agent each signal that the launcher names, until the connection ends."""

    def read() -> None:
        for line in sys.stdin:
            with contextlib.suppress(ValueError, ProcessLookupError):
                send(int(line))

    threading.Thread(target=read, name="torchelastic-signals", daemon=True).start()


@contextlib.contextmanager
def _outliving_readers() -> Iterator[None]:
    """Put a pipe before stdout and stderr, so that the agent never notices a lost connection."""
    copies = []
    for stream in (1, 2):
        out = os.dup(stream)
        readable, writable = os.pipe()
        os.dup2(writable, stream)
        os.close(writable)
        thread = threading.Thread(target=_copy, args=(readable, out), daemon=True)
        thread.start()
        copies.append((stream, out, thread))
    yield
    for stream, out, thread in copies:
        os.dup2(out, stream)  # closes the pipe, so that the copy comes to its end
        thread.join(LAST_OUTPUT_TIMEOUT)


def _copy(source: int, target: int) -> None:
    lost = False
    while data := os.read(source, 1 << 16):
        while data and not lost:
            try:
                data = data[os.write(target, data) :]
            except OSError:
                lost = True


class _Lock:
    """The right to run an agent of a job on this host: a locked file with what `write` says."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")
        #: Whether this process has it.
        self.is_held = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_held = False
        else:
            self._file.truncate(0)  # the pid of an agent that has ended may be another process now

    def write(self, text: str) -> None:
        """Add to the file: the pid of the agent, and at the end of the job its exit code."""
        self._file.write(text)
        self._file.flush()

    def signal(self, signum: int) -> None:
        """Send a signal to the agent of whoever has the lock; until it runs there is none."""
        if words := self._words():
            os.kill(int(words[0]), signum)

    def wait(self) -> int | None:
        """Wait for the end of whoever has the lock; return the exit code of the job, if known."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        words = self._words()
        return int(words[1]) if len(words) > 1 else None

    def _words(self) -> list[str]:
        self._file.seek(0)
        return self._file.read().split()

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _sole_agent(run_id: str, host: str) -> Iterator[_Lock]:
    directory = job_registry.registry()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The host, too: the directory may be on storage that several of them share.
    name = hashlib.sha256(f"{run_id}\n{host}".encode()).hexdigest()[:16]
    lock = _Lock(directory / f"host-{name}.lock")
    try:
        yield lock
    finally:
        lock.close()


if __name__ == "__main__":
    sys.exit(main())
