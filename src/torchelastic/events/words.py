"""Events as sentences; durations, sizes and goodput as people read them. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from torchelastic.events import types as events
from torchelastic.events.analysis.bad_steps import BadStepView, ids_of
from torchelastic.events.analysis.goodput import OVERDUE_AFTER, PARTS, Goodput
from torchelastic.events.analysis.recoveries import Recovery
from torchelastic.events.analysis.view import JobView
from torchelastic.events.failure import Failure, signal_name
from torchelastic.events.record import Record

#: At most this many names or ranks are listed in a sentence.
_NAMES_LIMIT = 8
#: Texts that must fit in a line are cut to this many characters.
_LINE_LENGTH = 200


def sentence(record: Record) -> str:
    """Return the event as a sentence. It contains users' text: strip control characters."""
    event = record.event
    words = _WORDS.get(type(event)) if event is not None else None
    if words is not None:
        return first_line(words(event))
    fields = event.fields() if event is not None else record.fields
    return first_line(f"{record.type} {json.dumps(fields)}")


def first_line(text: str) -> str:
    """Return the first line, cut to the length of a line."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= _LINE_LENGTH else first[: _LINE_LENGTH - 1] + "…"


def listed(items: Sequence[Any], count: int | None = None) -> str:
    """`a, b and 4,080 more`: the first few of `count` items, if there are more than these."""
    shown = items[:_NAMES_LIMIT]
    more = (len(items) if count is None else count) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {more:,} more" if more > 0 else "")


def counted(number: int, noun: str) -> str:
    """`1 node`, `2,048 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds(duration: float) -> str:
    """Return `12 ms`, `3.1 s`, `34 s`, `1 min 37 s`: as exact as is useful.

    Rounded, unlike `span`: parts shown next to their sum have to add up.

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
    """`12.5 steps/s`, or `34 s/step` for slow steps."""
    if steps_per_second >= 0.9995:
        return f"{steps_per_second:.3g} steps/s"
    return f"{1 / steps_per_second:.3g} s/step" if steps_per_second > 0 else "0 steps/s"


def pace(seen: JobView, now: float | None) -> str:
    """`step 1200, 12.5 steps/s`; with `now`, `step 1200, no new step for 4 min` if it is stuck."""
    if seen.step is None:
        return ""
    step = f"step {seen.step}"
    lasts = now - seen.stepped if now is not None and seen.stepped is not None else 0.0
    if not seen.rate and lasts > OVERDUE_AFTER:
        return f"{step}, no new step for {span(lasts)}"
    return f"{step}, {rate(seen.rate)}" if seen.rate is not None else step


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
    last_seen = [node.last_seen for node in seen.nodes.values() if node.last_seen is not None]
    at = seen.ended if ended else max(last_seen, default=None)
    text = "ended" if ended else "killed"
    if at is not None and seen.started is not None:
        text += f" {span(now - at)} ago after {span(at - seen.started)}"
    return f"{text}, exit code {seen.exitcode}" if ended else text


def worker_count(size: int, replica: int) -> str:
    """`8 workers` or, of a sharded model, `2 replicas of 4 workers`.

    >>> worker_count(8, 0), worker_count(8, 4)
    ('8 workers', '2 replicas of 4 workers')
    """
    if replica <= 1:
        return counted(size, "worker")
    return f"{counted(size // replica, 'replica')} of {counted(replica, 'worker')}"


def workers(seen: JobView) -> str:
    """`4 workers on 2 nodes`, for the current or last world."""
    count = len(seen.members()) + seen.unnamed
    if not count and seen.worlds:
        count = seen.worlds[-1].count
    where = f" on {counted(count, 'node')}" if count else ""
    return f"{worker_count(seen.size, seen.replica)}{where}"


def reported(seen: JobView) -> str:
    """`loss 2.31, accuracy 0.874`: the latest values that the script reported."""
    values = {name: _number(value) for name, value in seen.reported.items()}
    return ", ".join(f"{first_line(name)} {value}" for name, value in values.items())


def _number(value: float | None) -> str:
    """Six digits are enough to tell two steps apart."""
    return "not a number" if value is None else f"{value:.6g}"


def checkpoint(seen: JobView, now: float | None) -> str:
    """`checkpoint of step 1200, 3 min and 45 steps old`; pass no `now` if the job has ended."""
    stored = seen.checkpoint
    if stored is None:
        return ""
    age = [] if now is None else [span(now - stored.wall)]
    if seen.step is not None:
        age.append(counted(max(0, seen.step - stored.step), "step"))
    old = f", {' and '.join(age)} old" if age else ""
    return f"checkpoint of step {stored.step}{old}"


def weights(seen: events.WeightsHashed) -> str:
    """`weights sha256 3f2a… at step 1200`."""
    return f"weights sha256 {seen.sha256} at step {seen.step}"


def bad_step(bad: BadStepView) -> str:
    """`step 20 is skipped: the gradient is not finite (norm nan, loss nan) on rank 1, samples 3, 7`

    With a fixed batch `on rank 1 (micro-batch 5)`."""
    numbers = _numbers(bad.norm, bad.loss, bad.deviation)
    what = f"{_DONE[bad.action].format(bad.step)}: {bad.reason} ({numbers})"
    undone = "; undone since" if bad.undone else ""
    if not bad.origins:
        return f"{what} of all ranks together, {counted(bad.samples, 'sample')}{undone}"
    ranks = [f"rank {one.rank}{_parts(one.micro_batches)}" for one in bad.origins]
    more = bad.ranks - len(ranks)
    whose = ", ".join(ranks) + (f" and {more} more" if more > 0 else "")
    if len(bad.origins) > 1:
        return f"{what} on {whose}, {counted(bad.samples, 'sample')}{undone}"
    (one,) = bad.origins
    return f"{what} on {whose}, {_samples(one.ids, one.samples)}{undone}"


def bad_steps(seen: JobView) -> str:
    """`1 bad step: step 20 is skipped: …`, `3 bad steps, the last: step 20 is skipped: …`."""
    if not seen.bad_steps:
        return ""
    last = ", the last" if seen.bad_steps_total > 1 else ""
    return f"{counted(seen.bad_steps_total, 'bad step')}{last}: {bad_step(seen.bad_steps[-1])}"


#: What is done about a bad step.
_DONE = {
    "skip": "step {} is skipped",
    "retry": "step {} is repeated",
    "stop": "training stops at step {}",
}


def _numbers(norm: float | str, loss: float | str | None, deviation: float) -> str:
    """`norm nan, loss 6.31`, of a spike with its size."""
    parts = [f"norm {_exact(norm)}"]
    if loss is not None:
        parts.append(f"loss {_exact(loss)}")
    if deviation:
        parts.append(f"{deviation:.1f} deviations above the median")
    return ", ".join(parts)


def _parts(micro_batches: Sequence[int]) -> str:
    """` (micro-batches 3, 5)`."""
    if not micro_batches:
        return ""
    noun = "micro-batch" if len(micro_batches) == 1 else "micro-batches"
    return f" ({noun} {listed(micro_batches)})"


def _samples(ids: Sequence[Any], number: int) -> str:
    """`samples 3, 7 and 9 more`; of a stream `samples 0:3, 0:4`, the shard first."""
    if not ids:
        return counted(number, "sample")
    shown = [":".join(map(str, one)) if isinstance(one, list | tuple) else one for one in ids]
    more = f" and {number - _NAMES_LIMIT} more" if number > _NAMES_LIMIT else ""
    return f"samples {', '.join(map(str, shown[:_NAMES_LIMIT]))}{more}"


def _exact(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def shares(seen: JobView) -> str:
    """`micro-batches by rank: 6, 4, 6`: how many each worker ran of its last step."""
    known = [one.share for one in seen.ranks]
    if not known or None in known:
        return ""
    return f"micro-batches by rank: {listed(known)}"


def goodput(found: Goodput) -> str:
    """`goodput 87.2% of 12 min, with 1 disruption: training 10 min; start-up 40 s, …`; without a
    step `goodput unknown (no step seen in 12 min): …`."""
    if not found.total:
        return "goodput: no time has passed yet"
    rest = sorted(found.parts.items(), key=lambda item: -item[1])
    losses = [f"{PARTS[part]} {seconds(spent)}" for part, spent in rest if spent >= 0.001]
    times = f", with {counted(found.disruptions, 'disruption')}" if found.disruptions else ""
    if found.ratio is None:
        head = f"goodput unknown (no step seen in {seconds(found.total)}){times}"
        return ": ".join(filter(None, [head, ", ".join(losses)]))
    parts = f"; {', '.join(losses)}" if losses else ""
    again = "" if found.redone_known else "; other redone steps unknown"
    head = f"goodput {found.ratio:.1%} of {seconds(found.total)}{times}"
    return f"{head}: training {seconds(found.productive)}{parts}{again}"


def goodput_in_brief(found: Goodput) -> str:
    """`goodput 87.2%`, `goodput unknown`; empty before any time has passed."""
    if not found.total:
        return ""
    return f"goodput {'unknown' if found.ratio is None else f'{found.ratio:.1%}'}"


def cost(recovery: Recovery, *, over: bool = False) -> str:
    """`1.9 s: detect 100 ms, agree 200 ms, rebuild 750 ms, transfer 250 ms, redo 600 ms`.

    `over`: the job has ended, so an unfinished recovery will never finish. `without redo`: the
    script does not report its steps, so the number of redone steps is unknown.
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
    spent_on = [f"{name} {seconds(spent)}" for name, spent in parts.items() if spent]
    whole = seconds(recovery.cost)
    if not recovery.done:
        whole += " so far"
    elif recovery.redo is None:
        whole += " without redo"
    return f"{whole}: {', '.join(spent_on)}" if spent_on else whole


def cause(recovery: Recovery) -> str:
    """Return the cause of a recovery: the failure, or else why the world changed."""
    if recovery.failure is not None:
        return first_line(Failure.from_json(recovery.failure).sentence())
    return first_line(recovery.why) or "unknown"


# --- the sentences -------------------------------------------------------------------------------


def _because(what: str, why: str) -> str:
    return f"{what}: {why}" if why else what


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


def _formed(event: events.WorldFormed) -> str:
    nodes = event.count or len(event.nodes)
    size = worker_count(event.size, event.replica)
    who = f"{size} on {counted(nodes, 'node')} ({listed(event.nodes)})"
    spares = f", spare: {listed(event.spares)}" if event.spares else ""
    return _because(f"world formed with {who}{spares}", event.reason)


def _exited(event: events.WorkerExited) -> str:
    code = event.exitcode
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    return f"rank {event.rank} (pid {event.worker_pid}) {how}"


def _failed(event: events.WorkerFailed) -> str:
    failure = event.failure
    step = failure.get("step")
    where = f" at step {step}" if step is not None else ""
    return _because(f"rank {failure.get('rank')} failed{where}", str(failure.get("message", "")))


def _progress(event: events.Progress) -> str:
    steps = [step for step in event.steps if step >= 0]
    values = "".join(f", {name} {_number(value)}" for name, value in event.metrics.items())
    if not steps:
        return f"{_ranks(event.ranks)} before the first step{values}"
    low, high = min(steps), max(steps)
    return f"{_ranks(event.ranks)} at step {high if low == high else f'{low} to {high}'}{values}"


def _skipped(event: events.StepSkipped) -> str:
    numbers = _numbers(event.norm, event.loss, event.deviation)
    whose = " on this rank" if event.is_origin else ""
    what = f"{event.reason} ({numbers}){whose}{_parts(event.micro_batches)}"
    ids = ids_of(event)
    samples = f", {_samples(ids, len(ids))}" if ids else ""
    return f"rank {event.rank}, step {event.step}, {event.action}: {what}{samples}"


def _training(event: events.Training) -> str:
    fetched = f", {event.received} bytes fetched in {seconds(event.fetched)}"
    built = f" (group built in {seconds(event.built)}{fetched if event.received else ''})"
    return f"rank {event.rank} trains from step {event.step}{built if event.built else ''}"


_WORDS: dict[type[events.Event], Callable[[Any], str]] = {
    events.AgentStarted: lambda e: f"agent started (pid {e.pid}): {' '.join(e.command)}",
    events.ZygoteReady: lambda e: f"zygote ready in {seconds(e.seconds)}: workers fork from it",
    events.ZygoteUnavailable: lambda e: f"workers start as plain processes: {e.reason}",
    events.Joined: lambda e: f"{'hosts' if e.hosting else 'joined'} the rendezvous at {e.endpoint}",
    events.LeaseLost: lambda e: _because("lost its lease", e.reason),
    events.SignalReceived: lambda e: f"received {e.signal}: {e.action}",
    events.Leaving: lambda e: _because("is leaving", e.reason),
    events.Note: lambda e: e.text,
    events.JobEnded: lambda e: _because(f"ended with exit code {e.exitcode}", e.reason),
    events.BecameLeader: lambda _: "became the leader",
    events.LeaderFound: lambda e: f"{e.name} is the leader",
    events.NodeJoined: lambda e: f"{e.name} joined",
    events.NodeLost: lambda e: _because(f"{e.name} was lost", e.reason),
    events.NodeLeaving: lambda e: _because(f"{e.name} is leaving", e.reason),
    events.RestartDecided: lambda e: _because(
        "the job continues" if e.restart else "the job is not restarted", e.reason
    ),
    events.WorldFormed: _formed,
    events.GenerationOver: lambda e: _because(f"generation ended ({e.kind})", e.reason),
    events.StatesDiffered: lambda e: e.text,
    events.WorldChanging: lambda e: _because("the generation ends at the next step", e.reason),
    events.Waiting: lambda e: _because("no world yet", e.reason),
    events.WorkersStarted: lambda e: f"{_ranks(e.ranks)} started in {seconds(e.seconds)}",
    events.StandbyStarted: lambda e: (
        f"standby worker {e.local_rank} started (pid {e.worker_pid}) for a later world"
    ),
    events.Training: _training,
    events.Progress: _progress,
    events.CheckpointStored: lambda e: (
        f"stored the checkpoint of step {e.step}: {size(e.size)} in {seconds(e.seconds)}"
    ),
    events.WeightsHashed: weights,
    events.StepSkipped: _skipped,
    events.Straggler: lambda e: e.text,
    events.Hang: lambda e: e.text,
    events.WorkerKilled: lambda e: _because(f"killed rank {e.rank}", e.reason),
    events.WorkerExited: _exited,
    events.WorkerFailed: _failed,
    events.WorkersStopped: lambda e: f"workers stopped in {seconds(e.seconds)}",
}
