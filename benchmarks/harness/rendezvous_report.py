"""The results of `rendezvous.py` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import bars
from benchmarks.harness.bars import Bar
from benchmarks.harness.crowd import EMBEDDED, ETCD, SYSTEMS, TORCHRUN, System
from benchmarks.harness.host_faults import KILL_LIMIT, NOBODY_LEFT, SILENCE_LIMIT
from benchmarks.harness.report import (
    Row,
    about,
    failures,
    how_they_ran,
    judged,
    load,
    seconds,
    spread,
    table,
)
from benchmarks.harness.results import Results
from benchmarks.harness.summary import Summary, growth_exponent, summarize

JOIN, FAIL = "join", "fail"
#: Sizes at which something is wanted.
COMPARED, LARGEST, SMALLEST = 128, 4096, 8
FAILED_OF, BYTES_FROM = 1024, 64

FACTOR = 20
JOIN_LIMIT = 5.0
EXPONENT = 1.15
FAILURE_LIMIT = 0.200
#: How much more the dearest size may cost a member than the cheapest one to count as constant.
BYTES_SPREAD = 1.25

HEAD = ("measure", "torchelastic", "torchrun", "ratio", "wanted")
FOOTNOTE = (
    "Seconds are medians (min to max). A join is timed from the first agent's first step until "
    "the last one has the world (CPU: of all their processes, etcd's aside); a failure from the "
    "SIGKILL until the last survivor has the next world; a lost host until the first step that "
    "the survivors have committed in a new world, minus one median step."
)
SETTINGS = "lost hosts: three nodes of one worker under `torchelastic.train`, no flags."


def key(row: str, agents: int) -> str:
    """Under which name the results of one size are kept."""
    return f"{row} {agents}"


def sizes(results: Results, row: str, system: System) -> list[int]:
    """The numbers of agents at which a system was measured."""
    found = [name.split() for name, by in results.faults.items() if system.name in by]
    return sorted(int(name[1]) for name in found if name[0] == row and len(name) == 2)


def medians(results: Results, row: str, system: System) -> list[tuple[float, float]]:
    """Agents and median seconds, where it finished."""
    summaries = [
        (n, results.summary(key(row, n), system.name)) for n in sizes(results, row, system)
    ]
    return [(float(n), each.median) for n, each in summaries if each.times]


def render(results: Results) -> str:
    """The whole report."""
    rows = [*_joins(results), *_failures(results), *_bytes(results), *_hosts(results)]
    parts = [_head(results), table(HEAD, rows), FOOTNOTE]
    parts += [part for part in (_join_table(results), _bytes_table(results)) if part]
    parts.append(how_they_ran(results, SYSTEMS, SETTINGS))
    parts += [*spread(results), *failures(results)]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    facts = results.about
    network = "a network of its own" if facts.get("isolated") else "the machine's own network"
    return (
        f"{about(results)}\n\nAgents share {facts.get('processes')} processes; one more has the "
        f"host of the store, or is etcd. Everything ran on {network}; a process may have "
        f"{facts.get('descriptors')} open files. {load(results)}"
    )


def _line(title: str, ours: str, theirs: str, ratio: float | None, bar: Bar | None) -> Row:
    return (
        title,
        ours,
        theirs,
        f"{ratio:.1f} times faster" if ratio is not None else "",
        judged(bar),
    )


# --- joining -------------------------------------------------------------------------------------


def _joins(results: Results) -> list[Row]:
    rows = []
    if results.repetitions(key(JOIN, COMPARED), EMBEDDED.name):
        rows += [_compared(results, system) for system in (EMBEDDED, ETCD)]
    if results.repetitions(key(JOIN, LARGEST), EMBEDDED.name):
        ours = results.summary(key(JOIN, LARGEST), EMBEDDED.name)
        bar = median_below(ours, JOIN_LIMIT, f"under {JOIN_LIMIT:g} s")
        rows.append(_line(f"{LARGEST:,} agents join", seconds(ours), "", None, bar))
    for system in (EMBEDDED, ETCD):
        if len(medians(results, JOIN, system)) > 1:
            rows.append(_growth(results, system))
    return rows


def _compared(results: Results, system: System) -> Row:
    ours, theirs = (results.summary(key(JOIN, COMPARED), each.name) for each in (system, TORCHRUN))
    title = f"{COMPARED} agents join, {system.name}"
    limit = given_up_after(results, COMPARED)
    if limit is not None:
        theirs = Summary((limit,))  # it would have taken longer still
    bar = bars.faster(ours, theirs, FACTOR) if system is EMBEDDED else None
    line = _line(title, seconds(ours), seconds(theirs), bars.ratio(ours, theirs), bar)
    return line if limit is None else (*line[:2], f"not finished after {limit:g} s", *line[3:])


def given_up_after(results: Results, agents: int) -> float | None:
    """The limit at which torchrun was given up, if it never finished."""
    found = results.repetitions(key(JOIN, agents), TORCHRUN.name)
    limits = [each.details["limit"] for each in found if "limit" in each.details]
    return max(limits) if limits and not any(each.seconds for each in found) else None


def median_below(summary: Summary, limit: float, wanted: str) -> Bar:
    met = summary.median < limit and not summary.failed if summary.count else None
    return Bar(wanted, bool(met) if summary.count else None)


def _growth(results: Results, system: System) -> Row:
    points = medians(results, JOIN, system)
    exponent = growth_exponent(points)
    first, last = points[0][0], points[-1][0]
    met = exponent <= EXPONENT if (first, last) == (SMALLEST, LARGEST) else None
    bar = Bar(f"at most {EXPONENT:g}", met) if system is EMBEDDED else None
    title = f"time to join grows as agents to the power of, {system.name}"
    return _line(title, f"{exponent:.2f} ({first:,.0f} to {last:,.0f})", "", None, bar)


def _join_table(results: Results) -> str:
    every = sorted({n for system in SYSTEMS for n in sizes(results, JOIN, system)})
    if not every:
        return ""
    rows = [[f"{n:,}", *(_joined(results, n, system) for system in SYSTEMS)] for n in every]
    return table(("agents join", *(system.name for system in SYSTEMS)), rows)


def _joined(results: Results, agents: int, system: System) -> str:
    found = results.repetitions(key(JOIN, agents), system.name)
    if not found:
        return ""
    summary = summarize([each.seconds for each in found])
    if not summary.times:
        return found[0].note
    cpu = Summary(tuple(each.details["cpu"] for each in found if "cpu" in each.details))
    return seconds(summary, 3) + (f"; CPU {cpu.median:.2f} s" if cpu.times else "")


# --- failing -------------------------------------------------------------------------------------


def _failures(results: Results) -> list[Row]:
    rows = []
    for system in (EMBEDDED, ETCD):
        for agents in sizes(results, FAIL, system):
            ours = results.summary(key(FAIL, agents), system.name)
            wanted = agents == FAILED_OF and system is EMBEDDED
            bar = bars.median_below(ours, FAILURE_LIMIT) if wanted else None
            title = f"one of {agents:,} fails, known to all others, {system.name}"
            rows.append(_line(title, seconds(ours, 3), "", None, bar))
    return rows


def member_bytes(results: Results, system: System) -> dict[int, tuple[float, float]]:
    """Median bytes a member sent and received for one failure, by number of agents."""
    found = {}
    for agents in sizes(results, FAIL, system):
        many = [
            each.details
            for each in results.repetitions(key(FAIL, agents), system.name)
            if "sent" in each.details
        ]
        if many:
            sent, received = (
                Summary(tuple(each[way] for each in many)).median for way in ("sent", "received")
            )
            found[agents] = (sent, received)
    return found


def constant(values: Sequence[float]) -> bool:
    return max(values) <= BYTES_SPREAD * min(values)


def _bytes(results: Results) -> list[Row]:
    rows = []
    for system in (EMBEDDED, ETCD):
        found = {n: pair for n, pair in member_bytes(results, system).items() if n >= BYTES_FROM}
        if len(found) < 2:
            continue
        totals = {n: sum(pair) for n, pair in found.items()}
        whole = (min(found), max(found)) == (BYTES_FROM, FAILED_OF)
        wanted = f"the most at most {BYTES_SPREAD:g} times the least"
        bar = Bar(wanted, constant(list(totals.values())) if whole else None)
        shown = ", ".join(f"{total:,.0f} ({n:,})" for n, total in totals.items())
        title = f"bytes per member for one failure (of so many), {system.name}"
        rows.append(_line(title, shown, "", None, bar if system is EMBEDDED else None))
    return rows


def _bytes_table(results: Results) -> str:
    rows = [
        (f"{agents:,}", system.name, f"{sent:,.0f}", f"{received:,.0f}")
        for system in (EMBEDDED, ETCD)
        for agents, (sent, received) in member_bytes(results, system).items()
    ]
    return table(("one of", "", "bytes sent per member", "received"), rows) if rows else ""


# --- losing the host -----------------------------------------------------------------------------


def _hosts(results: Results) -> list[Row]:
    rows = []
    for name, title, limit in (
        ("host-kill", "host of the store killed, training again", KILL_LIMIT),
        ("host-freeze", "host frozen, training again", SILENCE_LIMIT),
        ("host-cut", "host cut off, training again", SILENCE_LIMIT),
    ):
        if name in results.faults:
            rows.append(_host(results, name, title, limit))
    return rows


def _host(results: Results, name: str, title: str, limit: float) -> Row:
    repetitions = [each for by in results.faults[name].values() for each in by]
    ours = summarize([each.seconds for each in repetitions])
    gone = not ours.times and any(each.note == NOBODY_LEFT for each in repetitions)
    shown = f"not available: {NOBODY_LEFT}" if gone else seconds(ours, 3)
    met = not ours.failed and max(ours.times) <= limit if ours.times else False
    split = any(each.overlaps for each in repetitions)
    bar = Bar(f"worst of {ours.count} under {limit:g} s", met and not split if ours.count else None)
    return _line(title, shown, "", None, bar)
