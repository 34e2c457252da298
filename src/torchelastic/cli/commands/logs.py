"""`torchelastic logs`: print the output of a job's workers, by rank.

A worker always writes to the files of the generation it was started in, also in later generations:
in-process workers outlive theirs. So the files of rank r in generation g are those of its local
rank on its node, in the last directory `attempt_<k>` with k <= g that has any.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchelastic.cli import terminal
from torchelastic.cli.commands import kubernetes
from torchelastic.cli.parser import Parsed
from torchelastic.cluster.kubernetes.job_summary import JobHandle
from torchelastic.errors import EXIT_OK, ConfigError
from torchelastic.events import log, words
from torchelastic.events.analysis.find_job import JobLogs, choose
from torchelastic.events.analysis.follow import POLL_INTERVAL, Follower
from torchelastic.events.analysis.ranks import RankLocation, RankLocations
from torchelastic.events.record import Record

_STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, kw_only=True)
class WantedLogs:
    """The output to show. None: all."""

    ranks: frozenset[int] | None = None
    generation: int | None = None
    lines: int | None = None
    raw: bool = False


def main(parsed: Parsed) -> int:
    """Print the output of workers and, with `--follow`, new output until the job ends or Ctrl-C."""
    if JobHandle.parse(parsed.argument) is not None:
        return kubernetes.logs(parsed)
    wanted = WantedLogs(
        ranks=parsed["rank"],
        generation=parsed["generation"],
        lines=parsed["lines"],
        raw=parsed["raw"],
    )
    shown = LogView(choose(parsed.argument, parsed["job"]), wanted)
    follow = parsed["follow"]
    try:
        more = shown.look()
        if not (follow and more):
            shown.check()
        shown.show_all()
        while follow and (shown.show_new() or more):
            time.sleep(POLL_INTERVAL)
            more = shown.look()
        shown.finish()
    except BrokenPipeError:
        terminal.discard_output()
    except KeyboardInterrupt:
        pass
    finally:
        shown.close()
    return EXIT_OK


@dataclass(frozen=True)
class LogFile:
    """A file that a worker writes one of its streams to."""

    rank: int
    stream: str
    path: Path

    def prefix(self) -> str:
        return f"rank {self.rank}: " if self.stream == "stdout" else f"rank {self.rank} stderr: "


def run_dirs(job_logs: JobLogs) -> dict[str, Path]:
    """Return the directory of the workers' logs by agent id, for agents with files here."""
    if job_logs.entry is not None:
        agents = job_logs.entry.agents
        return {agent.node: agent.logs or agent.events.parent for agent in agents}
    found = {}
    for path in job_logs.files():
        if path.name == log.EVENTS_FILE:
            first = next(log.read(path, steps=False), None)
            if first is not None and job_logs.job in (None, first.job):
                found[first.node] = path.parent
    return found


def files_for(
    places: Iterable[RankLocation], generation: int, dirs: dict[str, Path]
) -> list[LogFile]:
    """Return the existing log files of these workers."""
    found = []
    for place in places:
        attempt = _attempt(dirs.get(place.agent), generation, place.local_rank)
        if attempt is not None:
            paths = [(stream, attempt / f"{stream}.log") for stream in _STREAMS]
            found += [LogFile(place.rank, name, path) for name, path in paths if path.exists()]
    return found


def _attempt(run_dir: Path | None, generation: int, local_rank: int) -> Path | None:
    if run_dir is None or not run_dir.is_dir():
        return None
    numbers = [
        int(path.name.removeprefix("attempt_"))
        for path in run_dir.glob("attempt_*")
        if path.name.removeprefix("attempt_").isdigit() and (path / str(local_rank)).is_dir()
    ]
    last = max((number for number in numbers if number <= generation), default=None)
    return None if last is None else run_dir / f"attempt_{last}" / str(local_rank)


class LogView:
    """Prints the logs of a job and remembers how much it has printed."""

    def __init__(self, job_logs: JobLogs, wanted: WantedLogs) -> None:
        self._job_logs = job_logs
        self._wanted = wanted
        self._places = RankLocations(wanted.generation)
        self._dirs: dict[str, Path] = {}
        self._events = Follower()
        self._logs = Follower()
        self._files: dict[Path, LogFile] = {}
        self._events.skip(job_logs.files())
        for record in job_logs.records():
            self._places.feed(record)

    def look(self) -> bool:
        """Find new files; return True if more may be written to them."""
        self._job_logs = self._job_logs.again()
        alive = self._job_logs.alive
        for _, line in self._events.new_lines(self._job_logs.files()):
            record = Record.parse(line)
            if record is not None and self._job_logs.job in (None, record.job):
                self._places.feed(record)
        self._dirs = run_dirs(self._job_logs)
        self._files |= {file.path: file for file in self._now()}
        return alive

    def _now(self) -> list[LogFile]:
        chosen = [place for place in self._places.known() if self._is_wanted(place.rank)]
        return files_for(chosen, self._places.generation, self._dirs)

    def _is_wanted(self, rank: int) -> bool:
        return self._wanted.ranks is None or rank in self._wanted.ranks

    def check(self) -> None:
        """Raise `ConfigError` if there is nothing to show; warn about ranks without logs here."""
        known = {place.rank for place in self._places.known() if self._is_wanted(place.rank)}
        if self._files:
            if elsewhere := sorted(known - {file.rank for file in self._files.values()}):
                ranks = words.listed(elsewhere)
                print(
                    f"torchelastic logs: no logs on this machine for ranks {ranks}", file=sys.stderr
                )
            return
        known = {place.rank for place in self._places.known()}
        if self._wanted.ranks is not None and not known & self._wanted.ranks:
            if not known:
                raise ConfigError("The job has no workers yet.")
            have = f"ranks 0 to {max(known)}" if max(known) else "rank 0 only"
            raise ConfigError(
                f"No such rank: generation {self._places.generation} has {have}. Use --generation "
                "N for an earlier one."
            )
        raise ConfigError(
            "No logs of these workers on this machine. Either their output went to a terminal "
            "(--tee 3 also writes it to files), or they ran on another node, or the job succeeded "
            "and its temporary files were removed (--log-dir DIR keeps them)."
        )

    def show_all(self) -> None:
        """Print the files, rank by rank."""
        for path in list(self._files):
            lines: deque[bytes] = deque(maxlen=self._wanted.lines)
            while portion := self._logs.new_lines([path]):
                if self._wanted.lines is None:
                    self._show(portion)
                else:
                    lines.extend(line for _, line in portion)
            self._show((path, line) for line in lines)

    def show_new(self) -> bool:
        """Print what has been written since; return True if there was anything."""
        new = self._logs.new_lines(list(self._files))
        self._show(new)
        return bool(new)

    def finish(self) -> None:
        """Print last lines that have no line break."""
        self._show(self._logs.unfinished())

    def close(self) -> None:
        self._events.close()
        self._logs.close()

    def _show(self, lines: Iterable[tuple[Path, bytes]]) -> None:
        many = len({file.rank for file in self._files.values()}) > 1
        for path, line in lines:
            if self._wanted.raw:
                sys.stdout.buffer.write(line + b"\n")
                continue
            file = self._files[path]
            # A carriage return ends a line, so that a progress bar does not overwrite its prefix.
            for part in line.decode("utf-8", "replace").rstrip("\r").split("\r"):
                terminal.show(f"{file.prefix() if many else ''}{part}", flush=False)
        sys.stdout.flush()
