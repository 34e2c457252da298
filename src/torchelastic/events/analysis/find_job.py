"""Find a job and its event logs, in the registry of this machine or in a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchelastic.errors import ConfigError
from torchelastic.events import job_registry, log
from torchelastic.events.job_registry import AgentEntry, JobEntry
from torchelastic.events.record import Record
from torchelastic.events.types import AgentStarted, Event, JobEnded, Joined


@dataclass(frozen=True)
class JobLogs:
    """A job's logs: those that its agents on this machine registered, or those at a path."""

    entry: JobEntry | None = None
    where: Path | None = None
    job: str | None = None

    @property
    def alive(self) -> bool:
        """True if an agent on this machine is still writing to them."""
        if self.entry is not None:
            return self.entry.alive
        files = {path.resolve() for path in self.files()}
        agents = [agent for entry in job_registry.list_jobs() for agent in entry.agents]
        return any(agent.alive and agent.events.resolve() in files for agent in agents)

    def again(self) -> JobLogs:
        """Return the same job with its current agents."""
        if self.entry is None:
            return self
        found = [entry for entry in job_registry.list_jobs() if entry.job == self.entry.job]
        return JobLogs(entry=found[0]) if found else self

    def files(self) -> list[Path]:
        """Return the event logs that exist."""
        if self.where is not None:
            return log.find_logs(self.where)
        return files_of(self.entry) if self.entry is not None else []

    def records(self, *, thin: bool = False) -> list[Record]:
        """Return all records so far, in the order of time; `thin`: fewer steps of long logs."""
        if self.where is not None:
            return list(log.read_job(self.where, job=self.job, thin=thin))
        return log.read_files(self.files(), thin=thin)


def files_of(entry: JobEntry) -> list[Path]:
    """Return the logs of a job's agents on this machine, leaders' logs of all agents included."""
    own = [agent.events for agent in entry.agents]
    collected = [path.with_name(log.COLLECTED_FILE) for path in own]
    return [path for path in collected if path.exists()] + own


def entry_for(logs: JobLogs, records: Sequence[Record]) -> JobEntry:
    """Return the entry of the job at a path: as registered on this machine or, for a job from
    elsewhere, made from its events."""
    directories = {path.resolve().parent for path in logs.files()}
    nodes = {record.node for record in records}
    here = [
        agent
        for entry in job_registry.list_jobs()
        for agent in entry.agents
        if agent.node in nodes and agent.events.resolve().parent in directories
    ]
    if here:
        return JobEntry(here[0].job, job_registry.latest_run(here))
    assert logs.where is not None, "a registered job has an entry"
    return JobEntry(records[0].job, _agents_in(records, logs.where), registered=False)


def _agents_in(records: Sequence[Record], where: Path) -> tuple[AgentEntry, ...]:
    """Return the agents with records, the oldest first. They count as ended at their last one."""
    found: dict[str, AgentEntry] = {}
    for record in records:
        known = found.get(record.node) or AgentEntry(
            job=record.job,
            node=record.node,
            name=record.node,
            pid=0,
            pid_started=0,
            endpoint="",
            command=(),
            events=where,
            started=record.wall,
        )
        found[record.node] = replace(_updated(known, record.event), ended=record.wall)
    return tuple(found.values())


def _updated(agent: AgentEntry, event: Event | None) -> AgentEntry:
    match event:
        case AgentStarted(pid=pid, endpoint=endpoint, command=command):
            return replace(agent, pid=pid, endpoint=endpoint, command=tuple(command))
        case Joined(name=name):
            return replace(agent, name=name)
        case JobEnded(exitcode=exitcode):
            return replace(agent, exitcode=exitcode)
    return agent


def choose(wanted: str | None, job: str | None = None) -> JobLogs:
    """Find one job: by its id or a prefix of it, by a directory or file, or the running one."""
    if (logs := at_path(wanted, job)) is not None:
        return logs
    name, entries = wanted or job, job_registry.list_jobs()
    return JobLogs(entry=_only(entries if name is None else matching(name, entries)))


def at_path(wanted: str | None, job: str | None = None) -> JobLogs | None:
    """Return the job in a directory or file, if `wanted` is a path and not a job id."""
    if wanted is not None and job is not None:
        return JobLogs(where=_place(wanted), job=job)
    name = wanted if wanted is not None else job
    if not name or not Path(name).exists():
        return None
    is_job = any(entry.job == name for entry in job_registry.list_jobs())
    return None if is_job else JobLogs(where=Path(name))


def matching(name: str, entries: Sequence[JobEntry]) -> list[JobEntry]:
    """Return the jobs with this id or, if there is none, with this prefix."""
    exact = [entry for entry in entries if entry.job == name]
    found = exact or [entry for entry in entries if entry.job.startswith(name)]
    if not found:
        raise ConfigError(
            f"No job '{name}' on this machine: `torchelastic status` lists the known jobs."
        )
    return found


def _only(entries: Sequence[JobEntry]) -> JobEntry:
    """Return the running job, or the last one that ran."""
    if not entries:
        raise ConfigError("No job on this machine: pass the --log-dir of one.")
    alive = [entry for entry in entries if entry.alive]
    if len(alive) > 1:
        names = ", ".join(entry.job for entry in alive)
        raise ConfigError(f"Several jobs are running: choose one of {names}.")
    return alive[0] if alive else entries[0]


def _place(text: str) -> Path:
    place = Path(text)
    if not place.exists():
        raise ConfigError(f"No such file or directory: {text}.")
    return place
