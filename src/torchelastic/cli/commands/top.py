"""`torchelastic top`: watch a job in the terminal.

Every text is a `Text`: rich would read square brackets in a plain string as markup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchelastic.agent.output.terminal_text import one_line
from torchelastic.cli import failure_text
from torchelastic.cli.parser import Parsed
from torchelastic.errors import EXIT_OK
from torchelastic.events import words
from torchelastic.events.analysis.find_job import choose
from torchelastic.events.analysis.goodput import PARTS, Goodput, Part
from torchelastic.events.analysis.last_failure import FailureView
from torchelastic.events.analysis.live_view import LiveView
from torchelastic.events.analysis.view import JobView

#: Seconds between two updates.
_REFRESH = 0.5
#: Maximum number of rows of each table, and the width of the bar.
_NODES, _RANKS, _RECOVERIES, _EVENTS = 8, 16, 5, 8
_BAR = 60
_WIDEST = 40

_COLOURS: dict[Part, str] = {
    "productive": "green",
    "startup": "blue",
    "rendezvous": "magenta",
    "restore": "cyan",
    "redone": "red",
    "skipped": "bright_red",
    "checkpoint": "yellow",
    "data": "bright_yellow",
    "waiting": "bright_black",
    "other": "white",
    "unknown": "bright_black",
}
_STATES = {"running": "green", "lost": "red", "died": "red", "leaving": "yellow", "spare": "cyan"}


def main(parsed: Parsed) -> int:
    """Show a job until it ends, or Ctrl-C."""
    picture = LiveView(choose(parsed.argument, parsed["job"]))
    console = Console()
    try:
        if parsed["once"] or not console.is_terminal:
            console.print(screen(picture.look(), time.time()))
            return EXIT_OK
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                alive = picture.alive
                live.update(screen(picture.look(), time.time()), refresh=True)
                if not alive:
                    return EXIT_OK
                time.sleep(_REFRESH)
    except KeyboardInterrupt:
        return EXIT_OK
    finally:
        picture.close()


def screen(seen: JobView, now: float) -> RenderableType:
    """Return the whole screen."""
    parts: list[RenderableType] = [_head(seen, now), *_achieved(seen, now)]
    if seen.goodput is not None and seen.goodput.total:
        parts += [_bar(seen.goodput), _legend(seen.goodput)]
    parts += [Text(), _nodes(seen)]
    if seen.ranks:
        parts += [Text(), _ranks(seen)]
    if seen.failure is not None:
        parts += [Text(), Text("last failure", "bold"), *_failure(seen.failure)]
    if seen.recoveries:
        parts += [Text(), _recoveries(seen)]
    if seen.history:
        parts += [Text(), _history(seen)]
    return Group(*parts)


def _text(text: object, style: str = "") -> Text:
    return Text(one_line(str(text)), style=style, overflow="ellipsis", no_wrap=True)


def _head(seen: JobView, now: float) -> Text:
    head = _text(seen.job, "bold")
    head.append(f"  {words.standing(seen, now)}")
    if seen.generation is not None:
        head.append(f"  generation {seen.generation}: {words.workers(seen)}")
    head.append(f"  {words.pace(seen, now if seen.phase == 'running' else None)}", "bold")
    return head


def _achieved(seen: JobView, now: float) -> list[Text]:
    """Show what the script reports, the samples and the last checkpoint; with a fixed batch, the
    shares and the hash of the weights; the last step with bad numbers."""
    samples = f"{seen.samples:,} samples" if seen.samples is not None else ""
    stored = words.checkpoint(seen, now if seen.ended is None else None)
    line = "  ".join(filter(None, (words.reported(seen), samples, stored)))
    hashed = words.weights(seen.weights) if seen.weights is not None else ""
    shown = [_text(one) for one in (line, words.shares(seen), hashed) if one]
    return [*shown, *(_text(one, "yellow") for one in [words.bad_steps(seen)] if one)]


def _bar(goodput: Goodput) -> Text:
    """Draw the job's time as a bar, each part as wide as its share."""
    bar, total, drawn, passed = Text(), sum(goodput.micros.values()), 0, 0
    for part, micros in goodput.micros.items():
        passed += micros
        width = round(_BAR * passed / total) - drawn
        bar.append("█" * width, _COLOURS[part])
        drawn += width
    return bar


def _legend(goodput: Goodput) -> Text:
    legend = Text(words.goodput_in_brief(goodput), "bold")
    for part, micros in goodput.micros.items():
        if micros >= 1000:
            legend.append(f"  {PARTS[part]} {words.seconds(micros / 1e6)}", _COLOURS[part])
    return legend


def _table(heads: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """Make a table in which only the last column wraps on a narrow screen."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, head in enumerate(heads):
        widest = max([len(head), *(row[place].cell_len for row in rows)])
        last = place == len(heads) - 1
        room = None if last else min(widest, _WIDEST)
        table.add_column(
            head, no_wrap=not last, overflow="ellipsis", min_width=room, max_width=room
        )
    for row in rows:
        table.add_row(*row)
    return table


def _nodes(seen: JobView) -> Table:
    rows = []
    for node in list(seen.nodes.values())[:_NODES]:
        marks = ["leader"] * node.leader + ["hosts the rendezvous"] * node.hosting
        marks += filter(None, [node.held])
        state = _text(node.state, _STATES.get(node.state, ""))
        rows.append([_text(node.name), state, _text(", ".join(marks))])
    more = len(seen.nodes) - _NODES + seen.unnamed
    if more > 0:
        rows.append([_text(f"and {more} more"), _text(""), _text("")])
    return _table(("node", "state", ""), rows)


def _ranks(seen: JobView) -> Table:
    """Show the ranks; the slowest first if there are too many."""
    slow = {straggler.rank: straggler for straggler in seen.stragglers}
    ranks = list(seen.ranks)
    if len(ranks) > _RANKS:
        ranks.sort(key=lambda rank: (rank.rank not in slow, rank.rate or 0.0, rank.rank))
    rows = [
        [
            _text(rank.rank),
            _text(rank.node),
            _text("" if rank.step is None else rank.step),
            _text("" if rank.rate is None else words.rate(rank.rate)),
            _text("" if rank.own is None else words.seconds(rank.own)),
            _text(slow[rank.rank].text if rank.rank in slow else "", "yellow"),
        ]
        for rank in ranks[:_RANKS]
    ]
    if len(ranks) > _RANKS:
        rows.append([_text(f"and {len(ranks) - _RANKS} more"), *[_text("")] * 5])
    return _table(("rank", "node", "step", "rate", "own/step", ""), rows)


def _failure(failure: FailureView) -> list[Text]:
    first, *others = failure_text.in_brief(failure)
    return [_text(f"{_time(failure.wall)}  {first}", "red"), *(_text(f"  {one}") for one in others)]


def _recoveries(seen: JobView) -> Table:
    rows = []
    for recovery in reversed(seen.recoveries[-_RECOVERIES:]):
        kind = _text(recovery.kind, "red" if recovery.is_failure else "")
        cost = words.cost(recovery, over=seen.phase in ("ended", "died"))
        rows.append([_text(_time(recovery.wall)), kind, _text(cost)])
        rows.append([_text(""), _text(""), _text(words.cause(recovery), "bright_black")])
    return _table(("when", "recovery", "cost and cause"), rows)


def _history(seen: JobView) -> Table:
    rows = []
    for change in reversed(seen.history[-_EVENTS:]):
        why = f": {words.first_line(change.why)}" if change.why else ""
        rows.append([_text(_time(change.wall)), _text(f"{change.what}{why}")])
    return _table(("when", "what happened"), rows)


def _time(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))
