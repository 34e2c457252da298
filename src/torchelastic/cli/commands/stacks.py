"""`torchelastic stacks`: print the current stack of each rank of a running job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from torchelastic.agent.watch import inspector
from torchelastic.agent.watch.inspector import WorldActivity
from torchelastic.cli import terminal
from torchelastic.cli.parser import Parsed
from torchelastic.errors import EXIT_FAILED, EXIT_OK, ConfigError
from torchelastic.events import job_registry
from torchelastic.events.analysis import hangs
from torchelastic.events.analysis.find_job import JobLogs, choose
from torchelastic.events.analysis.hangs import RankActivity
from torchelastic.events.job_registry import AgentEntry


def main(parsed: Parsed) -> int:
    """Run the `stacks` command; return the exit code."""
    found = ask(parsed.argument, parsed["job"])
    if parsed["rank"] is not None:
        found = only(found, parsed["rank"])
    terminal.show(as_json(found) if parsed["json"] else text(found))
    return EXIT_OK if found.activities else EXIT_FAILED


def ask(wanted: str | None, job: str | None) -> WorldActivity:
    """Ask the first agent of a job here that answers for the stacks of all ranks."""
    agents = _agents(choose(wanted, job))
    if not agents:
        raise ConfigError(
            "No agent of that job runs on this machine: run this on one of its nodes."
        )
    problems = []
    for agent in agents:
        try:
            return inspector.ask(job_registry.directory_for(agent.job, agent.node))
        except OSError as error:
            problems.append(f"the agent with pid {agent.pid} does not answer ({error})")
    raise ConfigError(f"Cannot get the stacks of the job: {'; '.join(problems)}.")


def _agents(job_logs: JobLogs) -> list[AgentEntry]:
    """Return the live agents of this machine that write this job's events."""
    if job_logs.entry is not None:
        return [agent for agent in job_logs.entry.agents if agent.alive]
    files = {path.resolve() for path in job_logs.files()}
    every = [agent for entry in job_registry.list_jobs() for agent in entry.agents]
    return [agent for agent in every if agent.alive and agent.events.resolve() in files]


def only(found: WorldActivity, rank: int) -> WorldActivity:
    """Keep only this rank; raise `ConfigError` if only others were seen."""
    chosen = tuple(doing for doing in found.activities if doing.rank == rank)
    if not chosen and found.activities:
        raise ConfigError(_not_there(found, rank))
    return replace(found, activities=chosen)


def _not_there(found: WorldActivity, rank: int) -> str:
    seen = hangs.listed(doing.rank for doing in found.activities)
    if found.unheard:
        silent = ", ".join(found.unheard)
        return f"Rank {rank} not found. Found: {seen}; not reached: {silent}."
    return f"Rank {rank} does not exist: the world has {seen}."


def text(found: WorldActivity) -> str:
    """Describe all ranks, grouped by stack, the larger groups first."""
    if not found.activities:
        return _with_unheard("no ranks to show: no worker is in a world right now", found)
    groups: dict[str, list[RankActivity]] = {}
    for doing in found.activities:
        groups.setdefault(doing.stack, []).append(doing)
    blocks = [
        _block(stack, who)
        for stack, who in sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0].rank))
    ]
    return _with_unheard("\n\n".join(blocks), found)


def _with_unheard(text: str, found: WorldActivity) -> str:
    return f"{text}\n\nnot reached: {', '.join(found.unheard)}" if found.unheard else text


def _block(stack: str, who: Sequence[RankActivity]) -> str:
    head = hangs.listed(doing.rank for doing in who)
    same = ", the same stack" if len(who) > 1 else ""
    lines = [f"{head}{same}", *(f"  {line}" for line in _where(who))]
    return "\n".join([*lines, *(f"    {line}" for line in stack.splitlines())])


def _where(who: Sequence[RankActivity]) -> list[str]:
    """Describe node, step and collective; ranks with equal ones together."""
    alike: dict[str, list[int]] = {}
    for doing in who:
        alike.setdefault(_words(doing), []).append(doing.rank)
    if len(alike) == 1:
        return list(alike)
    return [f"{hangs.listed(ranks)}: {words}" for words, ranks in alike.items()]


def _words(doing: RankActivity) -> str:
    parts = [f"node {doing.node}"] if doing.node else []
    parts += [f"step {doing.step}"] if doing.step is not None else []
    parts += ["frozen"] if doing.frozen else []
    if doing.in_collective is not None:
        parts.append(f"waiting in {doing.in_collective}")
    elif doing.last is not None:
        parts.append(f"last collective {doing.last}")
    return ", ".join(parts)


def as_json(found: WorldActivity) -> str:
    """Return JSON: for each rank the fields of a `hang` event, and the stack."""
    shown = {
        "generation": found.generation,
        "ranks": [{**hangs.row(doing), "stack": doing.stack} for doing in found.activities],
        "unheard": list(found.unheard),
    }
    return json.dumps(shown, indent=2)
