"""The workers' log files, in torchrun's layout:

    <log-dir>/<job>_<random>/attempt_<generation>/<local rank>/{stdout.log,stderr.log,error.json}
    <log-dir>/<job>_<random>/attempt_<generation>/filtered_{stdout,stderr}.log

A generation never touches the directory of another one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Literal

from torchelastic.agent.output.output_stream import OutputStream
from torchelastic.agent.output.tee import TAIL, LineFile, Tee
from torchelastic.config import LaunchConfig, Std, std_for
from torchelastic.errors import ConfigError
from torchelastic.events.failure import LOG_LINES_LIMIT, last_lines

log = logging.getLogger(__name__)

Route = Literal["inherit", "discard", "file", "tee", "copy"]

_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}


@dataclass(frozen=True)
class WorkerStreams:
    """A worker's descriptors (None: the agent's own) and its error file."""

    stdout: int | None
    stderr: int | None
    #: Empty when files are switched off.
    error_file: str


def route(
    config: LaunchConfig, local_rank: int, stream: Std, *, is_terminal: bool = False
) -> Route:
    """Decide where one stream of one worker goes.

    Without log files (`--log-dir /dev/null`) a redirected stream stays on the console, as with
    torchrun: output is never lost for lack of a file. Output to a terminal is not copied, so that a
    script still finds a terminal there.
    """
    shown = not config.local_ranks_filter or local_rank in config.local_ranks_filter
    if shown and stream in std_for(config.tee, local_rank):
        return "tee"
    to_file = stream in (std_for(config.tee, local_rank) | std_for(config.redirects, local_rank))
    if to_file and has_files(config):
        return "file"
    if shown and config.log_copy and has_files(config) and not is_terminal:
        return "copy"
    return "inherit" if shown else "discard"


def line_prefix(config: LaunchConfig, local_rank: int, rank: int) -> str:
    """`[default0]:`, with the role and the *local* rank, or from the user's template.

    >>> line_prefix(LaunchConfig(log_line_prefix_template="${role_name}/${rank}|"), 0, 8)
    'default/8|'
    """
    template = config.log_line_prefix_template or "[${role_name}${local_rank}]:"
    return Template(template).safe_substitute(
        role_name=config.role, rank=rank, local_rank=local_rank, hostname=socket.gethostname()
    )


def has_files(config: LaunchConfig) -> bool:
    """False with `--log-dir /dev/null`."""
    return config.log_dir != os.devnull


def make_run_dir(config: LaunchConfig) -> Path:
    """Make the directory of this node's logs; `/dev/null` if log files are off."""
    if not has_files(config):
        return Path(os.devnull)
    job = re.sub(r"[^\w.-]", "_", config.run_id)[:100]
    try:
        base = config.log_dir or tempfile.mkdtemp(prefix="torchelastic_")
        os.makedirs(base, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{job}_", dir=os.path.abspath(base)))
    except OSError as error:
        where = f"--log-dir {config.log_dir}" if config.log_dir else "The temporary directory"
        raise ConfigError(
            f"{where} cannot be used for logs ({error.strerror}): give a directory this user may "
            "write to with --log-dir, or switch log files off with --log-dir /dev/null."
        ) from error


def _end_of(path: Path) -> bytes:
    """The last bytes of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read(TAIL)
    except OSError as error:
        log.debug("cannot read %s: %s", path, error)
        return b""


def _are_one(stdout: int, stderr: int) -> bool:
    """True if two descriptors lead to the same file or pipe."""
    try:
        return os.path.samestat(os.fstat(stdout), os.fstat(stderr))
    except OSError:
        return False  # started without one of them


class NodeLogs:
    """The logs of all generations on this node."""

    def __init__(
        self, config: LaunchConfig, run_dir: Path, *, consoles: tuple[int, int] = (1, 2)
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._consoles = {
            stream: OutputStream(fd)
            for stream, fd in zip((Std.OUT, Std.ERR), consoles, strict=True)
        }
        self._terminals = frozenset(
            stream for stream, fd in zip(self._consoles, consoles, strict=True) if os.isatty(fd)
        )
        self._are_one = _are_one(*consoles)

    def open(self, generation: int, ranks: Mapping[int, int]) -> GenerationLogs:
        """Open the logs of a generation's workers; `ranks` maps local ranks to global ones.

        If no file can be created, the generation runs without log files.
        """
        directory = self._run_dir / f"attempt_{generation}" if has_files(self._config) else None
        try:
            return self._made(self._config, directory, ranks)
        except OSError as error:
            if directory is None:
                raise
            log.warning(
                "Generation %d has no log files: cannot create %s (%s).",
                generation,
                error.filename or directory,
                error.strerror,
            )
        return self._made(replace(self._config, log_dir=os.devnull), None, ranks)

    def _made(
        self, config: LaunchConfig, directory: Path | None, ranks: Mapping[int, int]
    ) -> GenerationLogs:
        made = GenerationLogs(config, directory, self._consoles, self._terminals, self._are_one)
        try:
            made.make(ranks)
        except OSError:
            made.close()  # a half-made generation would leak every descriptor it has
            raise
        return made

    def close(self, success: bool) -> None:
        """Close the console. Delete a temporary directory, unless a failure points to it."""
        for console in self._consoles.values():
            console.close()
        if self._config.log_dir is not None:
            return
        if success or not any(path.is_file() for path in self._run_dir.rglob("*")):
            try:
                shutil.rmtree(self._run_dir.parent)
            except OSError as error:
                log.warning("Could not delete %s (%s).", self._run_dir.parent, error.strerror)


class GenerationLogs:
    """The logs of one generation's workers on this node."""

    def __init__(
        self,
        config: LaunchConfig,
        directory: Path | None,
        consoles: Mapping[Std, OutputStream],
        terminals: frozenset[Std] = frozenset(),
        are_one: bool = False,
    ) -> None:
        """`terminals` are the consoles that are terminals; `are_one` if both are the same file."""
        self._terminals = terminals
        self._are_one = are_one
        self.streams: dict[int, WorkerStreams] = {}
        self._config = config
        self._directory = directory
        self._consoles = consoles
        self._handed_out: list[int] = []
        self._tees: list[Tee] = []
        self._filtered: dict[Std, LineFile] = {}
        #: By local rank: functions that return the end of its streams, standard output first.
        self._ends: dict[int, list[Callable[[], bytes]]] = {}

    def make(self, ranks: Mapping[int, int]) -> None:
        """Open everything these workers write to; `NodeLogs.open` calls it."""
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._open_filtered(self._directory)
        for local_rank, rank in ranks.items():
            self._add(local_rank, rank)

    def started(self) -> None:
        """The workers have their copies: close ours, or their streams would never end."""
        while self._handed_out:
            os.close(self._handed_out.pop())
        while self._filtered:
            self._filtered.popitem()[1].close()

    def last_lines(self, local_rank: int, besides: str = "") -> tuple[str, ...]:
        """The last lines of a worker's output and errors, without its traceback; none if it writes
        to a terminal, which the agent does not see."""
        texts = [end().decode(errors="replace") for end in self._ends.get(local_rank, ())]
        told = [lines for text in texts if (lines := last_lines(text, besides))]
        if len(told) < 2:
            return told[0] if told else ()
        return last_lines(
            "\n".join(line for lines in told for line in lines[-LOG_LINES_LIMIT // 2 :])
        )

    async def drained(self, timeout: float) -> None:
        """The workers are gone: wait until all they wrote is in the files and on the console.

        After `timeout` seconds the rest is dropped: another process holds a stream open, or the
        console is not read.
        """
        self.started()
        try:
            await asyncio.wait_for(self._all_shown(), timeout)
        except asyncio.TimeoutError:
            log.debug("Not all output had arrived %g s after the workers' end.", timeout)
        finally:
            self.close()

    def close(self) -> None:
        """Close everything now, with what has arrived so far."""
        self.started()
        while self._tees:
            self._tees.pop().close()

    def _add(self, local_rank: int, rank: int) -> None:
        directory = None
        if self._directory is not None:
            directory = self._directory / str(local_rank)
            directory.mkdir(exist_ok=True)
        stdout = self._stream(Std.OUT, directory, local_rank, rank)
        # One pipe if both go to one place, to keep the order of their lines.
        routes = {self._route(local_rank, stream) for stream in _NAMES}
        is_shared = self._are_one and routes == {"copy"}
        stderr = stdout if is_shared else self._stream(Std.ERR, directory, local_rank, rank)
        self.streams[local_rank] = WorkerStreams(
            stdout=stdout,
            stderr=stderr,
            error_file=str(directory / "error.json") if directory else "",
        )

    def _route(self, local_rank: int, stream: Std) -> Route:
        return route(self._config, local_rank, stream, is_terminal=stream in self._terminals)

    async def _all_shown(self) -> None:
        for tee in self._tees:
            await tee.finished.wait()
        if self._tees:
            for console in self._consoles.values():
                await console.flushed()

    def _open_filtered(self, directory: Path) -> None:
        wanted = {
            Std.OUT: self._config.duplicate_stdout_filters,
            Std.ERR: self._config.duplicate_stderr_filters,
        }
        for stream, needles in wanted.items():
            if needles:
                path = directory / f"filtered_{_NAMES[stream]}.log"
                self._filtered[stream] = LineFile(path, needles)

    def _stream(
        self, stream: Std, directory: Path | None, local_rank: int, rank: int
    ) -> int | None:
        path = directory / f"{_NAMES[stream]}.log" if directory else None
        chosen = self._route(local_rank, stream)
        if chosen == "inherit":
            return None
        if chosen in ("tee", "copy"):
            prefix = line_prefix(self._config, local_rank, rank) if chosen == "tee" else None
            fd = self._tee(stream, path, local_rank, prefix)
        else:
            target = os.devnull if chosen == "discard" or path is None else path
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if chosen == "file" and path is not None:
                self._ends.setdefault(local_rank, []).append(partial(_end_of, path))
        self._handed_out.append(fd)
        return fd

    def _tee(self, stream: Std, path: Path | None, local_rank: int, prefix: str | None) -> int:
        filtered = self._filtered.get(stream) if prefix is not None else None
        tee = Tee(
            prefix=prefix,
            path=path,
            console=self._consoles[stream],
            filtered=filtered.shared() if filtered is not None else None,
        )
        self._tees.append(tee)
        self._ends.setdefault(local_rank, []).append(tee.tail)
        return tee.write_end
