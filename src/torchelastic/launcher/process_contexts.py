"""A group of processes without an agent: if one fails, the others are stopped.

Each runs in its own session and dies with the thread that started it. pidfds report their end
without polling.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic import env
from torchelastic.agent.output.log_files import WorkerStreams
from torchelastic.agent.spawn.processes import WorkerSpawn, default_python, spawn_plain
from torchelastic.config import Entry, LaunchConfig, Std, std_for
from torchelastic.errors import ProcessesError, ProgramMissing
from torchelastic.launcher.function_call import function_entry, read_result
from torchelastic.launcher.output_thread import Output
from torchelastic.multiprocessing.errors import ProcessFailure
from torchelastic.system import linux
from torchelastic.worker import channel, handed_secret
from torchelastic.worker.bootstrap import result_path

logger = logging.getLogger(__name__)

#: Seconds between two warnings about a process that does not die.
WARNING_INTERVAL = 10.0

Args = Mapping[int, Sequence[Any]]
Envs = Mapping[int, Mapping[str, str]]
Streams = Std | Mapping[int, Std]


@dataclass
class RunProcsResult:
    """The result of a group of processes, by local rank.

    Either every process has a return value (None if it was a program), or `failures` has those
    that failed before the others were stopped.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    #: Paths of the log files; empty for a stream that has none.
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return bool(self.failures)


class _Process:
    """A child of ours, the leader of its own process group."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.exitcode: int | None = None

    def signal(self, signum: int) -> None:
        """Signal the whole group. Its id stays reserved until we have collected the leader."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def collect(self) -> None:
        """Kill the rest of its group and record its exit code, after it has ended."""
        self.signal(signal.SIGKILL)
        self.exitcode = linux.exitcode(self.pidfd)
        os.close(self.pidfd)


class PContext(abc.ABC):
    """A group of processes."""

    def __init__(
        self,
        name: str,
        entrypoint: Any,
        args: Args,
        envs: Envs,
        log_dir: str,
        redirects: Streams = Std.NONE,
        tee: Streams = Std.NONE,
    ) -> None:
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        self._log_dir = Path(log_dir)
        self._streams = LaunchConfig(
            log_copy=False,
            nproc_per_node=self.nprocs,
            role=name,
            redirects=redirects,
            tee=tee,
            log_dir=log_dir,
        )
        #: Paths by local rank; empty for a stream that goes to no file.
        self.stdouts = {rank: self._log_file(rank, Std.OUT, "stdout.log") for rank in args}
        self.stderrs = {rank: self._log_file(rank, Std.ERR, "stderr.log") for rank in args}
        self.error_files = {rank: str(self._log_dir / str(rank) / "error.json") for rank in args}
        self._output: Output | None = None
        self._processes: dict[int, _Process] = {}
        self._result: RunProcsResult | None = None

    def _log_file(self, rank: int, stream: Std, name: str) -> str:
        streams = self._streams
        to_file = stream in std_for(streams.redirects, rank) | std_for(streams.tee, rank)
        return str(self._log_dir / str(rank) / name) if to_file else ""

    def start(self) -> None:
        """Start all processes, or none. `start_processes` calls this."""
        self._output = Output(self._streams, self._log_dir)
        try:
            streams = self._output.open()
            for rank in range(self.nprocs):
                self._processes[rank] = _Process(self._spawn(rank, streams[rank]))
            self._output.started()
        except BaseException:
            self.close(signal.SIGKILL)
            raise

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all processes have succeeded, or one has failed and the others are stopped.

        None if that takes longer than `timeout` seconds (0: do not wait; negative: forever).
        `period` is ignored: an end is seen at once.
        """
        deadline = time.monotonic() + timeout if timeout >= 0 else None
        self._collect(0)
        while self._result is None:
            if self._failed() or not self._running():
                self._result = self._end()
            elif deadline is not None and time.monotonic() >= deadline:
                return None
            else:
                self._collect(deadline)
        return self._result

    def pids(self) -> dict[int, int]:
        """The pid of each process, also when it has ended."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """Stop the processes and their process groups; kill them after `timeout` seconds.

        Returns when they are gone.
        """
        self._signal(death_sig or signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process would not see the signal
        deadline = time.monotonic() + timeout
        while self._running() and time.monotonic() < deadline:
            self._collect(deadline)
        self._signal(signal.SIGKILL)
        while self._running():
            self._collect(time.monotonic() + WARNING_INTERVAL)
            if left := self._running():
                pids = [process.pid for process in left.values()]
                logger.warning("Processes are still alive after SIGKILL: pids %s.", pids)
        self._clean_up()

    @abc.abstractmethod
    def _entry(self, rank: int) -> Entry:
        """Return the entry that a process runs."""

    @abc.abstractmethod
    def _return_value(self, rank: int) -> Any:
        """Return the result of a successful process."""

    def _env(self, rank: int) -> dict[str, str]:
        whole = {**env.snapshot(), **self.envs[rank]}
        whole["TORCHELASTIC_ERROR_FILE"] = self.error_files[rank]
        # If we are a worker, only we may use the channel to the agent and the job's secret.
        for name in (channel.VARIABLE, handed_secret.VARIABLE, "TORCHELASTIC_SECRET"):
            whole.pop(name, None)
        return whole

    def _spawn(self, rank: int, streams: WorkerStreams) -> int:
        spawn = WorkerSpawn(
            local_rank=rank,
            entry=self._entry(rank),
            env=self._env(rank),
            stdout=streams.stdout,
            stderr=streams.stderr,
        )
        return spawn_plain(spawn, python=default_python())

    def _running(self) -> dict[int, _Process]:
        return {rank: each for rank, each in self._processes.items() if each.exitcode is None}

    def _failed(self) -> dict[int, _Process]:
        return {rank: each for rank, each in self._processes.items() if each.exitcode}

    def _signal(self, signum: int) -> None:
        for process in self._running().values():
            process.signal(signum)

    def _collect(self, deadline: float | None) -> None:
        """Wait until `deadline` (None: forever) for a process to end; collect all that have."""
        poll = select.poll()
        running = {process.pidfd: process for process in self._running().values()}
        for pidfd in running:
            poll.register(pidfd, select.POLLIN)
        patience = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        for pidfd, _ in poll.poll(patience) if running else ():
            running[pidfd].collect()

    def _end(self) -> RunProcsResult:
        ended = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        for rank, process in self._failed().items():
            assert process.exitcode is not None
            ended.failures[rank] = ProcessFailure(
                rank, process.pid, process.exitcode, self.error_files[rank]
            )
        if not ended.failures:
            ended.return_values = {rank: self._return_value(rank) for rank in self._processes}
        self.close()
        return ended

    def _clean_up(self) -> None:
        if self._output is not None:
            self._output.finish()
            self._output = None


class MultiprocessContext(PContext):
    """A function, called in a new Python for each process, like multiprocessing's spawn."""

    def start(self) -> None:
        self._calls = tempfile.TemporaryDirectory(prefix="torchelastic_calls_")
        super().start()

    def _entry(self, rank: int) -> Entry:
        return function_entry(Path(self._call(rank)), self.entrypoint, self.args[rank])

    def _return_value(self, rank: int) -> Any:
        whole = self._env(rank)
        generation = int(whole.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return read_result(result_path(self._call(rank), generation, int(whole.get("RANK", "0"))))

    def _call(self, rank: int) -> str:
        return os.path.join(self._calls.name, f"call-{rank}")

    def _clean_up(self) -> None:
        super()._clean_up()
        self._calls.cleanup()


class SubprocessContext(PContext):
    """A program, run once for each process."""

    def start(self) -> None:
        for rank in self.args:  # looked for as the process itself does
            path = self._env(rank).get("PATH")
            if shutil.which(self.entrypoint, os.F_OK, path) is None:
                raise ProgramMissing(
                    f"Program not found: {self.entrypoint}. Install it, or give its full path."
                )
        super().start()

    def _entry(self, rank: int) -> Entry:
        return Entry("program", self.entrypoint, tuple(str(arg) for arg in self.args[rank]))

    def _return_value(self, rank: int) -> None:
        """A program has none."""


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Args,
    envs: Envs,
    log_dir: str,
    start_method: str = "spawn",
    redirects: Streams = Std.NONE,
    tee: Streams = Std.NONE,
) -> PContext:
    """Start a function or a program once for every local rank in `args`.

    `envs` are added to this process's environment. In the empty directory `log_dir` every process
    gets `<local rank>/`, with `stdout.log` and `stderr.log` for streams that are redirected or
    tee'd (shown as well, each line after `[<name><local rank>]:`) and `error.json` if it fails.
    `start_method` is ignored: a function always gets a new Python, as with spawn.
    """
    if not args or set(args) != set(range(len(args))) or set(envs) != set(args):
        raise ProcessesError(
            "args and envs must both have an entry for every local rank, starting at 0; "
            f"args has {_listed(args)}, envs has {_listed(envs)}."
        )
    if os.listdir(log_dir):
        raise ProcessesError(
            f"log_dir {log_dir} is not empty: use an empty directory for every group."
        )
    kind = SubprocessContext if isinstance(entrypoint, str) else MultiprocessContext
    context: PContext = kind(name, entrypoint, args, envs, log_dir, redirects, tee)
    context.start()
    return context


def to_map(val_or_map: Streams, local_world_size: int) -> dict[int, Std]:
    """The streams of every local rank.

    >>> to_map({1: Std.OUT}, 2)
    {0: <Std.NONE: 0>, 1: <Std.OUT: 1>}
    """
    return {rank: std_for(val_or_map, rank) for rank in range(local_world_size)}


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
