"""An event in one sentence, and durations and goodput as people read them. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.analysis.goodput import PARTS, Goodput
from torchelastic.events.analysis.recoveries import Recovery
from torchelastic.events.analysis.view import JobView
from torchelastic.events.failure import Failure, signal_name
from torchelastic.events.record import Record

#: Names and ranks that a sentence lists.
_LISTED = 8
#: Longer texts are cut where they have to fit in a line.
_LINE = 200
#: A step has taken too long after so many seconds, and so many times what steps take.
_LONG, _TOO_LONG = 10.0, 5.0


def sentence(record: Record) -> str:
    """What happened. The texts in it are users': show it through what strips control characters."""
    event = record.event
    words = _WORDS.get(type(event)) if event is not None else None
    if words is not None:
        return first_line(words(event))
    fields = event.fields() if event is not None else record.fields
    return first_line(f"{record.type} {json.dumps(fields)}")


def first_line(text: str) -> str:
    """The first line, cut where it gets too long."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= _LINE else first[: _LINE - 1] + "…"


def listed(items: Sequence[Any]) -> str:
    """`a, b and 40 more`."""
    shown = ", ".join(str(item) for item in items[:_LISTED])
    more = len(items) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds(duration: float) -> str:
    """`12 ms`, `3.1 s`, `34 s`, `1 min 37 s`: as exact as it is of use.

    Rounded, unlike `span`: parts that are shown beside their sum have to add up.

    >>> seconds(0.0123), seconds(3.14159), seconds(13.9), seconds(97), seconds(8000)
    ('12 ms', '3.1 s', '14 s', '1 min 37 s', '2 h 13 min')
    """
    if duration < 0.9995:
        return f"{max(0.0, duration) * 1000:.0f} ms"
    if duration < 9.95:
        return f"{duration:.1f} s"
    if (whole := round(duration)) < 600:
        rest = f" {whole % 60} s" if whole > 60 and whole % 60 else ""
        return f"{span(whole)}{rest}"
    return span(round(duration / 60) * 60)


def span(duration: float) -> str:
    """Two units at most: `3 s`, `4 min`, `2 h 5 min`, `3 d 4 h`."""
    if duration < 60:
        return f"{max(0, int(duration))} s"
    if duration < 3600:
        return f"{int(duration // 60)} min"
    hours, minutes = divmod(int(duration // 60), 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def size(count: int) -> str:
    """`890 bytes`, `6.9 kB`, `5.0 MB`, `12.3 GB`."""
    for unit, most in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= most:
            return f"{count / most:.1f} {unit}"
    return counted(count, "byte")


def rate(steps_per_second: float) -> str:
    """`12.5 steps/s`, or `34 s/step` where that says more."""
    if steps_per_second >= 0.9995:
        return f"{steps_per_second:.3g} steps/s"
    return f"{1 / steps_per_second:.3g} s/step" if steps_per_second > 0 else "0 steps/s"


def pace(seen: JobView, now: float | None) -> str:
    """`step 1200, 12.5 steps/s`; with `now`, how long it has been in a step that takes too long."""
    if seen.step is None:
        return ""
    told = f"step {seen.step}"
    lasts = now - seen.stepped if now is not None and seen.stepped is not None else 0.0
    if lasts > max(_LONG, _TOO_LONG / seen.rate if seen.rate else 0.0):
        return f"{told}, for {span(lasts)} now"
    return f"{told}, {rate(seen.rate)}" if seen.rate is not None else told


def standing(seen: JobView, now: float) -> str:
    """`running for 2 h`, `waiting, started 9 min ago`, `ended 3 min ago after 2 h, exit code 0`."""
    if seen.phase in ("ended", "died"):
        return _over(seen, now)
    since = span(now - seen.started) if seen.started is not None else ""
    if not since or seen.phase in ("starting", "running"):
        return f"{seen.phase} for {since}" if since else seen.phase
    return f"{seen.phase}, started {since} ago"


def _over(seen: JobView, now: float) -> str:
    ended = seen.phase == "ended"
    heard = [node.last_seen for node in seen.nodes.values() if node.last_seen is not None]
    at = seen.ended if ended else max(heard, default=None)
    told = "ended" if ended else "killed"
    if at is not None and seen.started is not None:
        told += f" {span(now - at)} ago after {span(at - seen.started)}"
    return f"{told}, exit code {seen.exitcode}" if ended else told


def workers(seen: JobView) -> str:
    """`4 workers on 2 nodes`: of the world, or of the last one."""
    count = len(seen.members()) + seen.unnamed
    if not count and seen.worlds:
        count = seen.worlds[-1].count
    where = f" on {counted(count, 'node')}" if count else ""
    return f"{counted(seen.size, 'worker')}{where}"


def reported(seen: JobView) -> str:
    """`loss 2.31, accuracy 0.874`: what the script reports, as it stands."""
    values = {name: _number(value) for name, value in seen.reported.items()}
    return ", ".join(f"{first_line(name)} {value}" for name, value in values.items())


def _number(value: float | None) -> str:
    """Six digits tell two steps apart."""
    return "not a number" if value is None else f"{value:.6g}"


def checkpoint(seen: JobView, now: float | None) -> str:
    """`checkpoint of step 1200, 3 min and 45 steps old`; without `now`, of a job that is over."""
    stored = seen.checkpoint
    if stored is None:
        return ""
    age = [] if now is None else [span(now - stored.wall)]
    if seen.step is not None:
        age.append(counted(max(0, seen.step - stored.step), "step"))
    old = f", {' and '.join(age)} old" if age else ""
    return f"checkpoint of step {stored.step}{old}"


def goodput(found: Goodput) -> str:
    """`goodput 87.2% of 12 min, with 1 disruption: training 10 min; start-up 40 s, …`; without a
    step `goodput unknown, since no step was seen in 12 min: …`."""
    if not found.total:
        return "goodput: no time has passed yet"
    rest = sorted(found.parts.items(), key=lambda item: -item[1])
    told = [f"{PARTS[part]} {seconds(spent)}" for part, spent in rest if spent >= 0.001]
    times = f", with {counted(found.disruptions, 'disruption')}" if found.disruptions else ""
    if found.ratio is None:
        head = f"goodput unknown, since no step was seen in {seconds(found.total)}{times}"
        return ": ".join(filter(None, [head, ", ".join(told)]))
    parts = f"; {', '.join(told)}" if told else ""
    again = "" if found.redone_known else "; what else was done again is not known"
    head = f"goodput {found.ratio:.1%} of {seconds(found.total)}{times}"
    return f"{head}: training {seconds(found.productive)}{parts}{again}"


def goodput_in_brief(found: Goodput) -> str:
    """`goodput 87.2%`, `goodput unknown`; empty before any time has passed."""
    if not found.total:
        return ""
    return f"goodput {'unknown' if found.ratio is None else f'{found.ratio:.1%}'}"


def cost(recovery: Recovery, *, over: bool = False) -> str:
    """`1.9 s: detect 100 ms, agree 200 ms, rebuild 750 ms, transfer 250 ms, redo 600 ms`.

    `over`: the job is, so that what has not been recovered from never will be. `without redo`: a
    script that tells no steps does some of them again, and nobody knows how many.
    """
    if over and not recovery.done:
        return "the job ended"
    parts = {
        "detect": recovery.detect,
        "wait": recovery.wait,
        "agree": recovery.agree,
        "rebuild": recovery.rebuild,
        "transfer": recovery.transfer,
        "redo": recovery.redo,
    }
    told = [f"{name} {seconds(spent)}" for name, spent in parts.items() if spent]
    whole = seconds(recovery.cost)
    if not recovery.done:
        whole += " so far"
    elif recovery.redo is None:
        whole += " without redo"
    return f"{whole}: {', '.join(told)}" if told else whole


def cause(recovery: Recovery) -> str:
    """What a recovery was from: the failure, if there was one, else why the world changed."""
    if recovery.failure is not None:
        return first_line(Failure.from_json(recovery.failure).sentence())
    return first_line(recovery.why) or "not known"


# --- the sentences -------------------------------------------------------------------------------


def _because(what: str, why: str) -> str:
    return f"{what}: {why}" if why else what


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


def _formed(event: events.WorldFormed) -> str:
    nodes = event.count or len(event.nodes)
    who = f"{counted(event.size, 'worker')} on {counted(nodes, 'node')} ({listed(event.nodes)})"
    spares = f", spare: {listed(event.spares)}" if event.spares else ""
    return _because(f"a world of {who}{spares}", event.reason)


def _exited(event: events.WorkerExited) -> str:
    code = event.exitcode
    how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    return f"rank {event.rank} (pid {event.worker_pid}) has ended: {how}"


def _failed(event: events.WorkerFailed) -> str:
    failure = event.failure
    step = failure.get("step")
    where = f" at step {step}" if step is not None else ""
    return _because(f"rank {failure.get('rank')} failed{where}", str(failure.get("message", "")))


def _progress(event: events.Progress) -> str:
    steps = [step for step in event.steps if step >= 0]
    values = "".join(f", {name} {_number(value)}" for name, value in event.metrics.items())
    if not steps:
        return f"{_ranks(event.ranks)} in no step yet{values}"
    low, high = min(steps), max(steps)
    return f"{_ranks(event.ranks)} at step {high if low == high else f'{low} to {high}'}{values}"


def _training(event: events.Training) -> str:
    fetched = f", {event.received} bytes fetched in {seconds(event.fetched)}"
    built = f" (group built in {seconds(event.built)}{fetched if event.received else ''})"
    return f"rank {event.rank} trains from step {event.step}{built if event.built else ''}"


#: Of every type.
_WORDS: dict[type[events.Event], Callable[[Any], str]] = {
    events.AgentStarted: lambda e: f"the agent starts (pid {e.pid}): {' '.join(e.command)}",
    events.ZygoteReady: lambda e: f"workers can be forked warm, after {seconds(e.seconds)}",
    events.ZygoteUnavailable: lambda e: f"workers start as plain processes: {e.reason}",
    events.Joined: lambda e: f"{'hosts' if e.hosting else 'joined'} the job at {e.endpoint}",
    events.LeaseLost: lambda e: _because("given up by the others", e.reason),
    events.SignalReceived: lambda e: f"got {e.signal}: {e.action}",
    events.Leaving: lambda e: _because("leaves", e.reason),
    events.Note: lambda e: e.text,
    events.JobEnded: lambda e: _because(f"ended with exit code {e.exitcode}", e.reason),
    events.BecameLeader: lambda _: "leads the job",
    events.LeaderFound: lambda e: f"{e.name} leads the job",
    events.NodeJoined: lambda e: f"{e.name} joined",
    events.NodeLost: lambda e: _because(f"{e.name} was lost", e.reason),
    events.NodeLeaving: lambda e: _because(f"{e.name} leaves", e.reason),
    events.RestartDecided: lambda e: _because(
        "the job goes on" if e.restart else "the job is not restarted", e.reason
    ),
    events.WorldFormed: _formed,
    events.GenerationOver: lambda e: _because(f"the generation is over ({e.kind})", e.reason),
    events.WorldChanging: lambda e: _because("the generation ends at the next step", e.reason),
    events.Waiting: lambda e: _because("no world yet", e.reason),
    events.WorkersStarted: lambda e: f"{_ranks(e.ranks)} started in {seconds(e.seconds)}",
    events.StandbyStarted: lambda e: (
        f"worker {e.local_rank} starts (pid {e.worker_pid}), to enter a later world"
    ),
    events.Training: _training,
    events.Progress: _progress,
    events.CheckpointStored: lambda e: (
        f"checkpoint of step {e.step} in storage: {size(e.size)} in {seconds(e.seconds)}"
    ),
    events.Straggler: lambda e: e.text,
    events.Hang: lambda e: e.text,
    events.WorkerKilled: lambda e: _because(f"rank {e.rank} is killed", e.reason),
    events.WorkerExited: _exited,
    events.WorkerFailed: _failed,
    events.WorkersStopped: lambda e: f"the workers are gone, after {seconds(e.seconds)}",
}
