"""The registry of this machine's jobs: every agent writes an entry, `torchelastic status` reads it.

    $XDG_RUNTIME_DIR/torchelastic/<job>-<hash>/<node>/agent.json
    <temporary directory>/torchelastic-<uid>/...                    without XDG_RUNTIME_DIR

An agent's `events.jsonl` is next to its `agent.json`, unless `--log-dir` is given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchelastic import env
from torchelastic.config import LaunchConfig
from torchelastic.errors import ConfigError
from torchelastic.events.log import EVENTS_FILE

log = logging.getLogger(__name__)

#: Ended jobs are listed until there are this many newer ones.
KEEP_JOBS = 20
#: Ended agents of one job id are listed until there are this many newer ones.
KEEP_AGENTS = 20
#: A node that starts within this many seconds after the job finished does not start it again.
LATE_START_TIME = 600.0

_AGENT_FILE = "agent.json"


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """The registry entry of an agent on this machine."""

    job: str
    node: str
    name: str
    pid: int
    #: Ticks from boot to the start of the process: another process with the same pid differs.
    pid_started: int
    endpoint: str
    command: tuple[str, ...]
    events: Path
    #: Wall clock, for people.
    started: float
    ended: float | None = None
    exitcode: int | None = None
    #: The directory of its workers' logs, if any.
    logs: Path | None = None
    #: It saw the job end.
    closed: bool = False
    #: It saw the job finish: every worker of every node succeeded, at this step; -1: unknown.
    finished: bool = False
    step: int = -1

    @property
    def alive(self) -> bool:
        """True if that process is running."""
        return self.ended is None and _start_ticks(self.pid) == self.pid_started

    @property
    def last_seen(self) -> float:
        """Wall clock of its end or, if it was killed, of its last event."""
        if self.ended is not None:
            return self.ended
        try:
            return max(self.started, self.events.stat().st_mtime)
        except OSError:
            return self.started

    def to_json(self) -> dict[str, object]:
        logs = None if self.logs is None else str(self.logs)
        return dataclasses.asdict(self) | {"events": str(self.events), "logs": logs}

    @classmethod
    def read(cls, path: Path) -> AgentEntry | None:
        """Read an entry; None if there is none, or one of an incompatible version."""
        try:
            data = json.loads(path.read_bytes())
            data["events"] = Path(data["events"])
            data["logs"] = Path(data["logs"]) if data.get("logs") else None
            data["command"] = tuple(data["command"])
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class JobEntry:
    """A job with the agents of its last run on this machine, oldest first."""

    job: str
    agents: tuple[AgentEntry, ...]
    #: False: read from event logs of another machine; whether the job runs is unknown.
    registered: bool = True

    @property
    def alive(self) -> bool:
        return any(agent.alive for agent in self.agents)

    @property
    def last_seen(self) -> float:
        return max(agent.last_seen for agent in self.agents)


class Registration:
    """An agent's entry, from its start to its end."""

    def __init__(self, directory: Path, entry: AgentEntry) -> None:
        self.directory = directory
        self._entry = entry
        self._write()

    def note_closed(self, step: int, *, finished: bool) -> None:
        """Record that the job ended at this step (-1: unknown); the agent is about to end."""
        self._entry = replace(self._entry, closed=True, finished=finished, step=step)
        self._write()

    def close(self, exitcode: int | None = None) -> None:
        """Record that the agent ended; the entry stays among the recent jobs."""
        self._entry = replace(self._entry, ended=time.time(), exitcode=exitcode)
        self._write()

    def _write(self) -> None:
        """Write atomically: `status` may read at any time. A full disk must not end a job."""
        written = self.directory / f"{_AGENT_FILE}.new"
        try:
            written.write_text(json.dumps(self._entry.to_json()))
            written.replace(self.directory / _AGENT_FILE)
        except OSError as error:
            log.warning("`torchelastic status` will not list this job (%s).", error)


def registry() -> Path:
    """Return the directory of all jobs of this user; it may not exist yet.

    `XDG_RUNTIME_DIR` is often left over from another user (sudo, su): it counts only if this user
    owns it.
    """
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime:
        try:
            if os.stat(runtime).st_uid == os.geteuid():
                return Path(runtime) / "torchelastic"
        except OSError:
            pass  # set, but does not exist: as if unset
    return Path(tempfile.gettempdir()) / f"torchelastic-{os.geteuid()}"


def directory_for(job: str, node: str) -> Path:
    """Create the registry directory of one agent."""
    base = registry()
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        _refuse_foreign(base)
        directory = base / _job_name(job) / _node_name(node)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Cannot register the job in {base} ({error.strerror}): set XDG_RUNTIME_DIR or TMPDIR "
            "to a directory that this user may write to."
        ) from error
    return directory


def register(
    job: str,
    node: str,
    *,
    pid: int,
    name: str,
    endpoint: str,
    command: Sequence[str],
    events: Path,
    logs: Path | None = None,
) -> Registration:
    """Register this agent among the jobs of this machine, and remove the oldest ended ones."""
    entry = AgentEntry(
        job=job,
        node=node,
        name=name,
        pid=pid,
        pid_started=_start_ticks(pid) or 0,
        endpoint=endpoint,
        command=tuple(command),
        events=events,
        started=time.time(),
        logs=logs,
    )
    directory = directory_for(job, node)
    registration = Registration(directory, entry)
    _prune(directory.parent.parent)
    return registration


def list_jobs() -> list[JobEntry]:
    """Return live jobs, then recent ones, each newest first."""
    base = registry()
    if not base.exists():
        return []
    _refuse_foreign(base)
    jobs = []
    for directory in _subdirectories(base):
        agents = _agents(directory)
        if agents:
            jobs.append(JobEntry(agents[0].job, latest_run(agents)))
    return sorted(jobs, key=lambda job: (job.alive, job.last_seen), reverse=True)


def agents_of(job: str) -> list[AgentEntry]:
    """Return the agents on this machine that have or had this job id."""
    base = registry()
    if not base.exists():
        return []
    _refuse_foreign(base)
    return _agents(base / _job_name(job))


def latest_run(agents: Iterable[AgentEntry]) -> tuple[AgentEntry, ...]:
    """Return the agents of the last run; a run starts after all earlier agents ended."""
    run: list[AgentEntry] = []
    for agent in sorted(agents, key=lambda agent: agent.started):
        if all(not other.alive and other.last_seen < agent.started for other in run):
            run = []
        run.append(agent)
    return tuple(run)


def finished_before(
    agents: Iterable[AgentEntry], command: Sequence[str], now: float
) -> AgentEntry | None:
    """Return the agent that saw the job finish, if a node that starts now with this command is too
    late for it. None: the node may start.

    A job that failed or was ended by a signal may be started again, and so may one with another
    command, which is another job.
    """
    run = latest_run(agents)
    if any(agent.alive and not agent.finished for agent in run):
        return None
    return next(
        (
            agent
            for agent in reversed(run)
            if agent.finished
            and agent.command == tuple(command)
            and 0 <= now - agent.last_seen < LATE_START_TIME
        ),
        None,
    )


def too_late(job: str, command: Sequence[str]) -> str:
    """Return why a node of this job need not start; empty: it may."""
    now = time.time()
    seen = finished_before(agents_of(job), command, now)
    if seen is None:
        return ""
    step = f" at step {seen.step}," if seen.step >= 0 else ""
    return (
        f"Job '{job}' finished{step} {now - seen.last_seen:.0f} s ago: this node is too late. "
        "To run the same command again, choose another --rdzv-id."
    )


def events_path(config: LaunchConfig, run_dir: Path, registry_dir: Path) -> Path:
    """Return the path of an agent's events: with its logs if the user chose a directory."""
    wanted = config.log_dir is not None and config.log_dir != os.devnull
    return (run_dir if wanted else registry_dir) / EVENTS_FILE


def _refuse_foreign(base: Path) -> None:
    """Refuse a registry that others own: anybody may create a name in the temporary directory."""
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{base} is not a directory owned by this user: remove it, or set XDG_RUNTIME_DIR to "
            "a directory that you own."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        base.chmod(0o700)


def _prune(base: Path) -> None:
    jobs = [(directory, _agents(directory)) for directory in _subdirectories(base)]
    ended = [(_last_seen(path, agents), path) for path, agents in jobs if not _any_alive(agents)]
    alive = len(jobs) - len(ended)
    for _, path in sorted(ended, reverse=True)[max(0, KEEP_JOBS - alive) :]:
        _remove(path)
    for path, agents in jobs:
        old = sorted((agent for agent in agents if not agent.alive), key=lambda a: -a.last_seen)
        for agent in old[KEEP_AGENTS:]:
            _remove(path / _node_name(agent.node))


def _remove(directory: Path) -> None:
    # Another agent may be removing the same directory.
    shutil.rmtree(directory, ignore_errors=True)


def _agents(directory: Path) -> list[AgentEntry]:
    found = (AgentEntry.read(path / _AGENT_FILE) for path in _subdirectories(directory))
    return [agent for agent in found if agent is not None]


def _any_alive(agents: Iterable[AgentEntry]) -> bool:
    return any(agent.alive for agent in agents)


def _last_seen(directory: Path, agents: Sequence[AgentEntry]) -> float:
    if agents:
        return max(agent.last_seen for agent in agents)
    try:
        return directory.stat().st_mtime  # an agent is just being registered, or never was
    except OSError:
        return 0.0


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []  # pruned by an agent that started meanwhile


def _job_name(job: str) -> str:
    """Return a readable directory name that is unique to the job."""
    digest = hashlib.sha256(job.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{_plain(job)}-{digest}"


def _node_name(node: str) -> str:
    return node if re.fullmatch(r"\w[\w.-]{0,80}", node, re.ASCII) else _job_name(node)


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)[:60]


def _start_ticks(pid: int) -> int | None:
    """Return the start of the process in ticks since boot; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The program name, in parentheses, may itself contain spaces and parentheses.
    state, *fields = text.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])
