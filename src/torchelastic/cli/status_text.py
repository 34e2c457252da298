"""What `torchelastic status` prints: the jobs of this machine, read from their event logs."""

from __future__ import annotations

import dataclasses
import heapq
import json
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchelastic import jobs
from torchelastic.errors import ConfigError
from torchelastic.events import log, view
from torchelastic.events.view import Change, JobView, NodeView
from torchelastic.failure import Failure
from torchelastic.jobs import JobEntry

_WIDTH = 100
#: Nodes of one job that the overview names.
_NODES_SHOWN = 8
_NODES_IN_DETAILS = 100
#: Ended jobs that the overview names.
_RECENT_SHOWN = 10
#: Lines of history that the details show.
_HISTORY_SHOWN = 15


def answer(wanted: str | None, *, as_data: bool) -> str:
    """The text, or the JSON, about one job or all; raises `ConfigError` for an unknown one."""
    found = [(entry, _view(entry)) for entry in _chosen(wanted)]
    if as_data:
        return json.dumps([as_json(entry, seen) for entry, seen in found], indent=2)
    if wanted:
        return "\n\n".join(details(entry, seen, time.time()) for entry, seen in found)
    return overview(found, time.time())


def _chosen(wanted: str | None) -> list[JobEntry]:
    entries = jobs.list_jobs()
    if wanted is None:
        return entries
    exact = [entry for entry in entries if entry.job == wanted]
    found = exact or [entry for entry in entries if entry.job.startswith(wanted)]
    if not found:
        raise ConfigError(
            f"This machine knows no job '{wanted}': `torchelastic status` lists those it knows."
        )
    return found


def _view(entry: JobEntry) -> JobView:
    """Merge the logs of the job's agents; all are of this machine, so one clock orders them."""
    logs = [log.read(agent.events) for agent in entry.agents]
    seen = view.fold(heapq.merge(*logs, key=lambda record: record.mono))
    dead = {agent.node for agent in entry.agents if not agent.alive}
    return dataclasses.replace(view.without(seen, dead), job=entry.job)


# --- for programs --------------------------------------------------------------------------------


def as_json(entry: JobEntry, seen: JobView) -> dict[str, Any]:
    """Everything that is known, as plain data."""
    data = dataclasses.asdict(seen)
    data["alive"] = entry.alive
    data["nodes"] = list(data["nodes"].values())
    data["agents"] = [agent.to_json() | {"alive": agent.alive} for agent in entry.agents]
    return data


# --- for people ----------------------------------------------------------------------------------


def overview(found: Sequence[tuple[JobEntry, JobView]], now: float) -> str:
    """Live jobs in full, recent ones in a line each."""
    live = [pair for pair in found if pair[0].alive]
    recent = [pair for pair in found if not pair[0].alive]
    parts = ["\n".join(_summary(entry, seen, now)) for entry, seen in live]
    if not live:
        parts = ["No job runs on this machine."]
    if recent:
        parts.append("\n".join(_recent(recent, now)))
    elif not live:
        parts.append("Start one with: torchelastic run --nproc-per-node 2 train.py")
    return "\n\n".join(parts)


def details(entry: JobEntry, seen: JobView, now: float) -> str:
    """One job: who, where, what happened so far, and what went wrong."""
    last = entry.agents[-1]
    lines = _headline(entry, seen, now)
    lines += _facts(
        {
            "command": " ".join(last.command),
            "meets at": last.endpoint,
            "nodes wanted": _wanted(seen),
            "last event": _ago(now - max(agent.last_seen for agent in entry.agents)),
            "events": "\n".join(str(agent.events) for agent in entry.agents),
        }
    )
    lines += ["", "  nodes", *_nodes(entry, seen, most=_NODES_IN_DETAILS)]
    if seen.history:
        lines += ["", "  what happened", *_history(seen.history[-_HISTORY_SHOWN:])]
    if seen.cause is not None:
        lines += ["", "  first failure", *_failure(Failure.from_json(dict(seen.cause)))]
    return "\n".join(lines)


def _summary(entry: JobEntry, seen: JobView, now: float) -> list[str]:
    lines = _headline(entry, seen, now)
    lines += _nodes(entry, seen, most=_NODES_SHOWN)
    if seen.last_change is not None:
        change = seen.last_change
        text = f"{_ago(now - change.wall)}: {_sentence(change)}"
        lines += _wrapped(text, "  ", "  ")
    return lines


def _headline(entry: JobEntry, seen: JobView, now: float) -> list[str]:
    began = entry.agents[0].started
    if entry.alive:
        state = f"{seen.phase} for {_duration(now - began)}"
    elif seen.phase == "ended":
        state = f"ended {_ago(now - entry.last_seen)}, exit code {seen.exitcode}"
    else:
        state = f"killed {_ago(now - entry.last_seen)}"
    room = _WIDTH - len(state) - 1
    return [f"{_cut(seen.job, room - 1):<{room}} {state}", *_world_line(seen)]


def _world_line(seen: JobView) -> list[str]:
    if seen.generation is None:
        return []
    members = len(seen.members()) + seen.unnamed
    restarts = f", {_counted(seen.restarts_used, 'restart')} used" if seen.restarts_used else ""
    where = f" on {_counted(members, 'node')}" if members else ""
    return [f"  generation {seen.generation}: {_counted(seen.size, 'worker')}{where}{restarts}"]


def _nodes(entry: JobEntry, seen: JobView, *, most: int) -> list[str]:
    pids = {agent.node: agent.pid for agent in entry.agents}
    nodes = list(seen.nodes.values())
    width = min(40, max((len(node.name) for node in nodes), default=0))
    lines = [_node(node, width, pids.get(node.agent or "")) for node in nodes[:most]]
    more = max(0, len(nodes) - most) + seen.unnamed
    return [*lines, f"    and {_counted(more, 'more node')}"] if more > 0 else lines


def _node(node: NodeView, width: int, pid: int | None) -> str:
    marks = []
    if node.state not in ("ended", "died"):
        marks += ["leader"] if node.leader else []
        marks += ["hosts the rendezvous"] if node.hosting else []
    marks += [f"agent pid {pid}"] if pid is not None else []
    marks += [f"exit code {node.exitcode}"] if node.exitcode is not None else []
    line = f"    {_cut(node.name, width):<{width}}  {node.state:<9}  {', '.join(marks)}"
    return line.rstrip()


def _recent(recent: Sequence[tuple[JobEntry, JobView]], now: float) -> list[str]:
    """A table of the jobs that are no more."""
    rows = [_recent_row(entry, seen, now) for entry, seen in recent[:_RECENT_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["Recent:"]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(_cut("  " + "  ".join(cells).rstrip(), _WIDTH))
    more = len(recent) - len(rows)
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _recent_row(entry: JobEntry, seen: JobView, now: float) -> tuple[str, ...]:
    ended = seen.phase == "ended"
    took = _duration(entry.last_seen - entry.agents[0].started)
    why = seen.last_change.why if ended and seen.last_change else ""
    if not ended and seen.generation is not None:
        why = f"in generation {seen.generation}"
    return (
        _cut(entry.job, 40),
        _ago(now - entry.last_seen),
        f"exit {seen.exitcode}" if ended else "killed",
        f"after {took}",
        _first_line(why),
    )


def _facts(facts: dict[str, str]) -> list[str]:
    width = max(map(len, facts))
    lines = []
    for label, value in facts.items():
        for number, line in enumerate(value.splitlines()):
            lines.append(f"  {label if number == 0 else '':<{width}}  {line}")
    return lines


def _history(changes: Sequence[Change]) -> list[str]:
    lines = []
    before = ""
    for change in changes:
        head = f"    {_clock_time(change.wall)}  "
        # What begins was caused by what ended: do not say the same thing twice.
        told = dataclasses.replace(change, why=change.why.removeprefix(f"{before}; "))
        lines += _wrapped(_sentence(told), head, " " * len(head))
        before = change.why
    return lines


def _failure(failure: Failure) -> list[str]:
    lines = _wrapped(failure.sentence(), "    ", "    ")
    return lines + [f"    {line}" for line in failure.traceback.rstrip().splitlines()]


def _wanted(seen: JobView) -> str:
    if seen.min_nodes == seen.max_nodes:
        return "" if seen.min_nodes is None else str(seen.min_nodes)
    return f"{seen.min_nodes} to {seen.max_nodes}"


def _sentence(change: Change) -> str:
    return f"{change.what}: {_first_line(change.why)}" if change.why else change.what


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _clock_time(wall: float, now: Callable[[], float] = time.time) -> str:
    """The time, with the date if it is not today's."""
    then, today = time.localtime(wall), time.localtime(now())
    same_day = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def _ago(seconds: float) -> str:
    return "just now" if seconds < 2 else f"{_duration(seconds)} ago"


def _duration(seconds: float) -> str:
    """Two units at most: `3 s`, `4 min`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min"
    hours, minutes = divmod(int(seconds // 60), 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
