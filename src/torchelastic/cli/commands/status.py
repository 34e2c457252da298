"""`torchelastic status`: show the live and recent jobs of this machine, or one job."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchelastic.agent.output.terminal_text import one_line
from torchelastic.cli import failure_text, terminal
from torchelastic.cli.commands import kubernetes
from torchelastic.cli.parser import Parsed
from torchelastic.cluster.kubernetes.job_summary import JobHandle
from torchelastic.errors import EXIT_OK, FAILED
from torchelastic.events import job_registry, log, words
from torchelastic.events.analysis import view
from torchelastic.events.analysis.find_job import at_path, entry_for, files_of, matching
from torchelastic.events.analysis.view import HistoryEntry, JobFold, JobView, NodeView
from torchelastic.events.job_registry import JobEntry
from torchelastic.events.record import Record

_WIDTH = 100
#: Maximum number of nodes per job in the overview and in the details.
_NODES_SHOWN = 8
_NODES_IN_DETAILS = 100
#: Maximum number of ended jobs in the overview.
_RECENT_SHOWN = 10
#: Maximum number of lines of history, of recoveries, bad steps and stragglers in the details.
_HISTORY_SHOWN = 15
_RECOVERIES_SHOWN = 5
_BAD_STEPS_SHOWN = 5
_STRAGGLERS_SHOWN = 8


def main(parsed: Parsed) -> int:
    """Run the `status` command; return the exit code."""
    if JobHandle.parse(parsed.argument) is not None:
        return kubernetes.status(parsed)
    terminal.show(answer(parsed.argument, parsed["job"], as_data=parsed["json"]))
    return EXIT_OK


def answer(wanted: str | None, job: str | None = None, *, as_data: bool) -> str:
    """Return the text or JSON about one job or all; raise `ConfigError` for an unknown one."""
    name = wanted or job
    if (job_logs := at_path(wanted, job)) is not None:
        records = job_logs.records(thin=True)
        entry = entry_for(job_logs, records)
        found = [(entry, picture(entry, records))]
    else:
        entries = job_registry.list_jobs()
        known = entries if name is None else matching(name, entries)
        in_full = as_data or name is not None
        found = [(entry, _as_logged(entry, steps=in_full or entry.alive)) for entry in known]
    if as_data:
        return json.dumps([as_json(entry, seen) for entry, seen in found], indent=2)
    if name is not None:
        return "\n\n".join(details(entry, seen, time.time()) for entry, seen in found)
    return overview(found, time.time())


def _as_logged(entry: JobEntry, *, steps: bool) -> JobView:
    """Return the state of a job from its logs on this machine."""
    return picture(entry, log.read_files(files_of(entry), steps=steps, thin=True))


def picture(entry: JobEntry, records: Iterable[Record]) -> JobView:
    """Return the state of a job from these records and from its processes on this machine."""
    fold = JobFold()
    for record in records:
        fold.feed(record)
    seen = fold.view(now=time.time() if entry.alive else None)
    if entry.registered:
        seen = view.without(seen, {agent.node for agent in entry.agents if not agent.alive})
    return dataclasses.replace(seen, job=entry.job)


# --- as JSON --------------------------------------------------------------------------------


def as_json(entry: JobEntry, seen: JobView) -> dict[str, Any]:
    """Return everything that is known, as plain data."""
    data = seen.to_json()
    data["alive"] = entry.alive
    data["agents"] = [agent.to_json() | {"alive": agent.alive} for agent in entry.agents]
    return data


# --- as text ----------------------------------------------------------------------------------


def overview(found: Sequence[tuple[JobEntry, JobView]], now: float) -> str:
    """Describe live jobs in full and recent ones in a line each."""
    live = [pair for pair in found if pair[0].alive]
    recent = [pair for pair in found if not pair[0].alive]
    parts = ["\n".join(_summary(entry, seen, now)) for entry, seen in live]
    if not live:
        parts = ["No job is running on this machine."]
    if recent:
        parts.append("\n".join(_recent(recent, now)))
    elif not live:
        parts.append("Start one with: torchelastic run --nproc-per-node 2 train.py")
    return "\n\n".join(parts)


def details(entry: JobEntry, seen: JobView, now: float) -> str:
    """Describe one job: its nodes, files, history and failures."""
    last = entry.agents[-1]
    lines = _headline(entry, seen, now)
    lines += _facts(
        {
            "command": one_line(" ".join(last.command)),
            "rendezvous": one_line(last.endpoint),
            "nodes wanted": _wanted(seen),
            "last event": _ago(now - max(agent.last_seen for agent in entry.agents)),
            "events": "\n".join(dict.fromkeys(one_line(str(one.events)) for one in entry.agents)),
        }
    )
    if seen.goodput is not None and seen.generation is not None:
        lines += ["", *_goodput(seen)]
    lines += ["", "  nodes", *_nodes(entry, seen, most=_NODES_IN_DETAILS)]
    if seen.recoveries:
        lines += ["", *_recoveries(seen, over=not entry.alive)]
    if len(seen.bad_steps) > 1:
        lines += ["", *_bad_steps(seen)]
    if seen.history:
        lines += ["", "  what happened", *_history(seen.history[-_HISTORY_SHOWN:])]
    return "\n".join([*lines, *_causes(seen)])


def _summary(entry: JobEntry, seen: JobView, now: float) -> list[str]:
    lines = _headline(entry, seen, now)
    lines += _nodes(entry, seen, most=_NODES_SHOWN)
    if seen.last_change is not None:
        change = seen.last_change
        text = f"{_ago(now - change.wall)}: {_sentence(change)}"
        lines += _wrapped(text, "  ", "  ")
    if seen.last_recovery is not None:
        last = seen.last_recovery
        text = f"last recovery, {_ago(now - last.wall)}, cost {words.cost(last)}"
        lines += _wrapped(f"{text}; cause: {words.cause(last)}", "  ", "  ")
    return lines


def _headline(entry: JobEntry, seen: JobView, now: float) -> list[str]:
    if entry.alive:
        began = seen.started if seen.started is not None else entry.agents[0].started
        state = words.standing(dataclasses.replace(seen, started=began), now)
    elif seen.phase == "ended":
        state = f"ended {_ago(now - entry.last_seen)}, exit code {seen.exitcode}"
    else:
        state = f"{_end_unheard(entry, seen)} {_ago(now - entry.last_seen)}"
    room = _WIDTH - len(state) - 1
    head = f"{_cut(one_line(seen.job), room - 1):<{room}} {state}"
    live = now if entry.alive else None
    return [head, *_world_line(seen), *_pace_line(seen, live), *_progress_lines(seen, live)]


def _end_unheard(entry: JobEntry, seen: JobView) -> str:
    """Describe how a job ended whose logs do not say it. "killed" needs a log and local agents."""
    if not entry.registered:
        return f"last seen {seen.phase}"
    return "killed" if seen.started is not None else "gone"


def _world_line(seen: JobView) -> list[str]:
    if seen.generation is None:
        return []
    restarts = (
        f", {words.counted(seen.restarts_used, 'restart')} used" if seen.restarts_used else ""
    )
    return [f"  generation {seen.generation}: {words.workers(seen)}{restarts}"]


def _pace_line(seen: JobView, now: float | None) -> list[str]:
    """Return `step 1200, 12.5 steps/s, goodput 93.1%`; without a step `goodput unknown`."""
    if seen.generation is None:
        return []
    parts = [pace] if (pace := words.pace(seen, now)) else []
    if seen.goodput is not None and (brief := words.goodput_in_brief(seen.goodput)):
        parts.append(brief)
    return [f"  {', '.join(parts)}"] if parts else []


def _progress_lines(seen: JobView, now: float | None) -> list[str]:
    """Describe what the script reports, the samples, the last checkpoint; with a fixed batch, the
    shares and the hash of the weights; the last step with bad numbers."""
    samples = f"{seen.samples:,} samples" if seen.samples is not None else ""
    parts = (words.reported(seen), samples, words.checkpoint(seen, now))
    lines = _wrapped("; ".join(filter(None, parts)), "  ", "    ")
    lines += _wrapped(words.shares(seen), "  ", "    ")
    if seen.weights is not None:
        lines.append(f"  {words.weights(seen.weights)}")
    return lines + _wrapped(words.bad_steps(seen), "  ", "    ")


def _goodput(seen: JobView) -> list[str]:
    """Describe the goodput with nodes and stragglers."""
    assert seen.goodput is not None
    lines = _wrapped(words.goodput(seen.goodput), "  ", "    ")
    active, available = seen.goodput.active_nodes, seen.goodput.available_nodes
    most = seen.max_nodes or 1
    if active is not None and available is not None and most > 1:
        trained, present = active * most, available * most
        text = f"on average {trained:.1f} of {most} nodes trained, {present:.1f} were available"
        lines += _wrapped(text, "  ", "    ")
    return [*lines, *_stragglers(seen)]


def _stragglers(seen: JobView) -> list[str]:
    """Describe the costliest stragglers, and the cost of all, earlier worlds included."""
    lines = []
    costly = sorted(seen.stragglers, key=lambda slow: -slow.cost)
    for slow in costly[:_STRAGGLERS_SHOWN]:
        lines += _wrapped(one_line(slow.text), "  ", "    ")
    if len(costly) > _STRAGGLERS_SHOWN:
        lines.append(f"  and {len(costly) - _STRAGGLERS_SHOWN} more stragglers")
    if seen.straggler_seconds:
        lost = words.seconds(seen.straggler_seconds)
        lines.append(f"  waiting for stragglers has cost {lost} in total")
    return lines


def _recoveries(seen: JobView, *, over: bool) -> list[str]:
    shown = seen.recoveries[-_RECOVERIES_SHOWN:]
    lines = ["  recoveries"]
    if len(shown) < seen.recovery_totals.changes:
        lines = [f"  recoveries, the last {len(shown)} of {seen.recovery_totals.changes}"]
    for recovery in shown:
        head = f"    {_clock_time(recovery.wall)}  "
        margin = " " * len(head)
        cost = words.cost(recovery, over=over)
        text = f"generation {recovery.generation}, {recovery.kind}: {cost}"
        lines += _wrapped(text, head, margin)
        lines += _wrapped(f"cause: {words.cause(recovery)}", margin, margin)
    return lines


def _bad_steps(seen: JobView) -> list[str]:
    shown = seen.bad_steps[-_BAD_STEPS_SHOWN:]
    lines = ["  bad steps"]
    if len(shown) < seen.bad_steps_total:
        lines = [f"  bad steps, the last {len(shown)} of {seen.bad_steps_total}"]
    for bad in shown:
        head = f"    {_clock_time(bad.wall)}  "
        lines += _wrapped(words.bad_step(bad), head, " " * len(head))
    return lines


def _causes(seen: JobView) -> list[str]:
    if seen.failure is None:
        return []
    # A job that was interrupted, or ran out of nodes, may have recovered from its last failure.
    title = "first failure" if seen.exitcode in FAILED else "last failure"
    lines = failure_text.in_full(seen.failure, _WIDTH - 4)
    return ["", f"  {title}", *(f"    {line}" for line in lines)]


def _nodes(entry: JobEntry, seen: JobView, *, most: int) -> list[str]:
    pids = {agent.node: agent.pid for agent in entry.agents}
    nodes = [dataclasses.replace(node, name=one_line(node.name)) for node in seen.nodes.values()]
    width = min(40, max((len(node.name) for node in nodes), default=0))
    lines = [_node(node, width, pids.get(node.agent or "")) for node in nodes[:most]]
    more = max(0, len(nodes) - most) + seen.unnamed
    return [*lines, f"    and {words.counted(more, 'more node')}"] if more > 0 else lines


def _node(node: NodeView, width: int, pid: int | None) -> str:
    marks = []
    if node.state not in ("ended", "died"):
        marks += ["leader"] if node.leader else []
        marks += ["hosts the rendezvous"] if node.hosting else []
    marks += [f"agent pid {pid}"] if pid is not None else []
    marks += [f"exit code {node.exitcode}"] if node.exitcode is not None else []
    marks += [one_line(node.held)] if node.held else []
    line = f"    {_cut(node.name, width):<{width}}  {node.state:<9}  {', '.join(marks)}"
    return line.rstrip()


def _recent(recent: Sequence[tuple[JobEntry, JobView]], now: float) -> list[str]:
    """Return a table of the ended jobs."""
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
    took = words.span(entry.last_seen - entry.agents[0].started)
    why = seen.last_change.why if ended and seen.last_change else ""
    if not ended and seen.generation is not None:
        why = f"in generation {seen.generation}"
    if seen.started is None:
        why = "its event log is gone"
    return (
        _cut(one_line(entry.job), 40),
        _ago(now - entry.last_seen),
        f"exit {seen.exitcode}" if ended else _end_unheard(entry, seen),
        f"after {took}",
        one_line(_first_line(why)),
    )


def _facts(facts: dict[str, str]) -> list[str]:
    width = max(map(len, facts))
    lines = []
    for label, value in facts.items():
        for number, line in enumerate(value.splitlines()):
            lines.append(f"  {label if number == 0 else '':<{width}}  {line}")
    return lines


def _history(changes: Sequence[HistoryEntry]) -> list[str]:
    lines = []
    before = ""
    for change in changes:
        head = f"    {_clock_time(change.wall)}  "
        # A begin repeats the cause of the end before it: show it once.
        shown = dataclasses.replace(change, why=change.why.removeprefix(f"{before}; "))
        lines += _wrapped(_sentence(shown), head, " " * len(head))
        before = change.why
    return lines


def _wanted(seen: JobView) -> str:
    if seen.min_nodes == seen.max_nodes:
        return "" if seen.min_nodes is None else str(seen.min_nodes)
    return f"{seen.min_nodes} to {seen.max_nodes}"


def _sentence(change: HistoryEntry) -> str:
    return f"{change.what}: {_first_line(change.why)}" if change.why else change.what


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        one_line(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _clock_time(wall: float, now: Callable[[], float] = time.time) -> str:
    """Return the time, with the date unless it is today."""
    then, today = time.localtime(wall), time.localtime(now())
    same_day = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def _ago(seconds: float) -> str:
    return "just now" if seconds < 2 else f"{words.span(seconds)} ago"
