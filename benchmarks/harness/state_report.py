"""The results of `state.py` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import state_bars as bars
from benchmarks.harness import state_rows as rows
from benchmarks.harness.bars import Bar
from benchmarks.harness.report import NOT_MEASURED, Row, about, judged, load, table
from benchmarks.harness.state_results import StateResults
from benchmarks.harness.summary import RatioInterval, Summary, ratio_interval

HEAD = ("measure", "torchelastic", "against", "ratio", "wanted")
SPREAD_HEAD = ("measure", "what", "repetitions", "median", "quartiles", "min to max")
FOOTNOTE = (
    "Milliseconds are medians (min to max). Blocked is the time in which the training thread can "
    "do nothing else: in `commit()`, and before the optimizer's write until the copy is done. "
    "Steps with and without snapshots take turns in one process; their ratio is a geometric mean "
    "with its 95 % interval, and A/A compares steps without any snapshot with each other. All ways "
    "to storage end with an fsync, and are blocked until the parameters may be written to again. "
    "Files that are loaded are in the page cache."
)


def render(results: StateResults) -> str:
    """The whole report."""
    lines = [
        *_blocked(results),
        *_sharded(results),
        *_overheads(results),
        *_checkpoints(results),
        *_restores(results),
        *_peer(results),
    ]
    parts = [_head(results), table(HEAD, lines), FOOTNOTE]
    if results.faults:
        parts.append(table(SPREAD_HEAD, _spread(results)))
    if results.failed_rows:
        parts.append(f"What went wrong: no job of {', '.join(results.failed_rows)} ended well.")
    return "\n\n".join(parts) + "\n"


def _head(results: StateResults) -> str:
    return (
        f"{about(results)}\n\nState of {results.bytes / 1e6:,.0f} MB: parameters and momentum in "
        f"single precision. {load(results)}{_free(results)}"
    )


def _free(results: StateResults) -> str:
    known = results.settings.get(rows.OVERHEAD)
    if known is None:
        return ""
    return f" While steps were compared, {known['free']:.1f} cores were free beside the training."


def milliseconds(summary: Summary) -> str:
    """`31.2 ms (28.0 to 40.1)`."""
    if not summary.times:
        return NOT_MEASURED
    values = (summary.median, min(summary.times), max(summary.times))
    median, low, high = (_short(1000 * each) for each in values)
    return f"{median} ms ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _line(title: str, ours: Summary, basis: Summary, name: str, bar: Bar | None) -> Row:
    found = bars.times(ours, basis)
    return (
        title,
        milliseconds(ours),
        f"{name}: {milliseconds(basis)}" if name else "",
        f"{found:.2f}" if found is not None and name else "",
        judged(bar),
    )


# --- snapshots ------------------------------------------------------------------------------------


def _blocked(results: StateResults) -> list[Row]:
    if rows.BLOCKED not in results.faults:
        return []
    name = "one-thread copy"
    copy = results.summary(rows.BLOCKED, rows.COPY)
    alone, hidden, repeated = (
        results.summary(rows.BLOCKED, each)
        for each in (rows.SNAPSHOT, rows.HIDDEN, rows.BACK_TO_BACK)
    )
    bar = bars.in_copies(alone, copy, bars.BLOCKED_COPIES, "a copy")
    return [
        _line("blocked per snapshot, nothing to hide behind", alone, copy, name, bar),
        _line("blocked per snapshot, behind forward and backward", hidden, copy, name, None),
        _line("blocked per snapshot, one right after the other", repeated, copy, name, None),
    ]


def _sharded(results: StateResults) -> list[Row]:
    if rows.SHARDED not in results.faults:
        return []
    ours, least, copy = (
        results.summary(rows.SHARDED, each)
        for each in (rows.SNAPSHOT, rows.VOTE_AND_COPY, rows.COPY)
    )
    bar = bars.in_copies(ours, copy, bars.BLOCKED_COPIES, "a copy")
    title = "blocked per snapshot, FSDP2 over tensor parallelism (2 x 2)"
    return [
        _line(title, ours, copy, "one-thread copy of a rank's shards", bar),
        _line(f"{title}, beside its least", ours, least, "bare all-reduce, then that copy", None),
    ]


def _overheads(results: StateResults) -> list[Row]:
    found: list[Row] = []
    for row in (rows.OVERHEAD, rows.ONE_CORE):
        if row not in results.settings:
            continue
        inside = results.summary(row, rows.IN_A_STEP)
        copy = Summary((results.settings[row]["copy"],))
        for name in [name for name in results.pairs if name.startswith(row)]:
            found.append(_overhead(results, row, name))
            if row == rows.OVERHEAD and name.endswith("every step") and _within_steps(results, row):
                found.append(_overhead(results, row, name, every=10))
        title = f"blocked per snapshot{_where(row)}, in those steps"
        found.append(_line(title, inside, copy, "one-thread copy", None))
    return found


def _within_steps(results: StateResults, row: str) -> bool:
    """Whether every snapshot was sealed when its step ended."""
    return all(results.details(row, rows.IN_A_STEP, "sealed").times)


def _overhead(results: StateResults, row: str, name: str, every: int = 1) -> Row:
    """Of single steps what it would be at every tenth follows, too: a tenth."""
    settings, pairs = results.settings[row], bars.every(results.pairs[name], every)
    copies = settings["step"] / settings["copy"]
    interval = ratio_interval(pairs)
    with_it, without = (Summary(tuple(each)) for each in zip(*pairs, strict=True))
    bar = None
    if row == rows.OVERHEAD and "A/A" not in name:
        most = bars.EVERY_TEN if "10" in name or every == 10 else bars.EVERY_STEP
        bar = bars.overhead(pairs, most, copies=copies, free=settings["free"])
    what = name.removeprefix(f"{row}, ")
    if every > 1:
        what = f"every {every} steps, by those of single steps"
    return (
        f"overhead of a snapshot {what}{_where(row)}, steps of {copies:.0f} copies",
        milliseconds(with_it),
        f"{'the same' if 'A/A' in name else 'without'}: {milliseconds(without)}",
        _percent(interval),
        judged(bar),
    )


def _percent(interval: RatioInterval) -> str:
    """`+3.1 % (+2.0 to +4.2), 16 pairs`."""
    low, mean, high = (100 * (each - 1) for each in (interval.low, interval.ratio, interval.high))
    spread = f" ({low:+.1f} to {high:+.1f})" if interval.pairs > 1 else ""
    return f"{mean:+.1f} %{spread}, {interval.pairs} pairs"


def _where(row: str) -> str:
    return ", no free core" if row == rows.ONE_CORE else ""


# --- storage --------------------------------------------------------------------------------------


def _checkpoints(results: StateResults) -> list[Row]:
    if rows.CHECKPOINT not in results.faults:
        return []
    found = []
    title = "blocked per checkpoint"
    for row, where in (
        (rows.CHECKPOINT, "behind forward and backward"),
        (rows.CHECKPOINT_ALONE, "nothing to hide behind"),
    ):
        found += _checkpoint(results, row, f"{title}, {where}")
    first = results.summary(rows.FIRST_CHECKPOINT, rows.OURS_SAVED)
    for name in (rows.TORCH_SAVE, *rows.DCP_SAVED):
        basis = results.summary(rows.FIRST_CHECKPOINT, name)
        found.append(_line(f"{title}, the first one", first, basis, name, None))
    stored = results.details(rows.CHECKPOINT, rows.OURS_SAVED, "stored")
    for name in (rows.TORCH_SAVE, *rows.DCP_SAVED):
        basis = results.details(rows.CHECKPOINT, name, "stored")
        found.append(_line("until a checkpoint is in storage", stored, basis, name, None))
    return found


def _checkpoint(results: StateResults, row: str, title: str) -> list[Row]:
    """Against `torch.save`, and against the best of DCP's; the others of them are reported."""
    ours = results.summary(row, rows.OURS_SAVED)
    saved = results.summary(row, rows.TORCH_SAVE)
    theirs = [results.summary(row, name) for name in rows.DCP_SAVED]
    best = min(theirs, key=lambda each: each.median)
    return [
        _line(title, ours, saved, rows.TORCH_SAVE, bars.less_than_saving(ours, saved)),
        *(
            _line(title, ours, each, name, bars.not_more(ours, theirs) if each is best else None)
            for name, each in zip(rows.DCP_SAVED, theirs, strict=True)
        ),
    ]


def _restores(results: StateResults) -> list[Row]:
    ours = results.summary(rows.RESTORE, rows.OWN_MEMORY)
    if not ours.times:
        return []
    title = "restore from own memory"
    found = []
    for name in (rows.MEMCPY, rows.MEMCPY_FRESH, *rows.LOADED):
        basis = results.summary(rows.RESTORE, name)
        copied = name not in rows.LOADED
        bar = bars.in_copies(ours, basis, bars.RESTORE_COPIES, "it") if copied else None
        found.append(_line(title, ours, basis, name, bar))
    return found


def _peer(results: StateResults) -> list[Row]:
    ours = results.summary(rows.PEER, rows.FROM_PEER)
    if not ours.times:
        return []
    carried = results.summary(rows.PEER, rows.CARRIED)
    pairs = zip(carried.times, ours.times, strict=False)
    both = Summary(tuple(sum(each) for each in pairs))
    found = []
    for name in (rows.SOCKET, rows.SOCKET_FRESH):
        socket = results.summary(rows.PEER, name)
        named = f"{name}, {_rate(results, socket)}"
        for title, took, is_judged in (
            ("restore from a peer's memory", ours, True),
            ("from the memory of an agent to that of another", carried, False),
            ("one after the other, without a head start", both, True),
        ):
            bar = bars.bandwidth_share(took, socket) if is_judged else None
            found.append(_line(f"{title}, {_rate(results, took)}", took, socket, named, bar))
    return found


def _rate(results: StateResults, summary: Summary) -> str:
    return f"{results.bytes / summary.median / 1e9:.2f} GB/s" if summary.times else NOT_MEASURED


def _spread(results: StateResults) -> Sequence[Row]:
    return [
        _spread_row(row, name, results.summary(row, name))
        for row, many in results.faults.items()
        for name in many
    ]


def _spread_row(row: str, name: str, summary: Summary) -> Row:
    low, high = (f"{each:.4f}" for each in summary.quartiles)
    ends = f"{min(summary.times):.4f} to {max(summary.times):.4f}"
    median = f"{summary.median:.4f}"
    return (row, name, str(summary.count), median, f"{low} to {high}", ends)
