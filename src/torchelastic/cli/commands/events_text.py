"""The output of `torchelastic events`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from torchelastic.agent.output.terminal_text import one_line
from torchelastic.cli.commands import terminal
from torchelastic.errors import EXIT_OK
from torchelastic.events import types as events
from torchelastic.events import words
from torchelastic.events.analysis.find_job import JobLogs, choose
from torchelastic.events.analysis.follow import LOOK, Follower
from torchelastic.events.record import Record

#: Shown with `--all` only, because there are many of them.
_NOISE = ("progress",)
_WIDEST_NAME = 20


class Printer:
    """Prints records as lines; learns the agents' names from them."""

    def __init__(self, *, as_data: bool, everything: bool) -> None:
        self._as_data = as_data
        self._everything = everything
        self._names: dict[str, str] = {}
        self._width = 0

    def show(self, records: Iterable[Record]) -> None:
        records = list(records)
        for record in records:
            if isinstance(record.event, events.Joined):
                self._names[record.node] = one_line(record.event.name)[:_WIDEST_NAME]
        shown = [self._name(record) for record in records]
        self._width = max([self._width, *map(len, shown)])
        for record in records:
            if self._as_data:
                sys.stdout.write(f"{record.line()}\n")
            elif self._everything or record.type not in _NOISE:
                terminal.show(self._line(record), flush=False)
        sys.stdout.flush()

    def _name(self, record: Record) -> str:
        return self._names.get(record.node, one_line(record.node)[:_WIDEST_NAME])

    def _line(self, record: Record) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.wall))
        millis = int(record.wall % 1 * 1000)
        generation = "" if record.generation is None else f"g{record.generation}"
        who = f"{self._name(record):<{self._width}}"
        told = one_line(words.sentence(record))
        return f"{when}.{millis:03}  {who}  {generation:<4}  {told}"


def show_events(
    wanted: str | None, job: str | None, *, follow: bool, as_data: bool, everything: bool
) -> int:
    """Print a job's events and, with `follow`, new ones until the job ends."""
    story = choose(wanted, job)
    printer = Printer(as_data=as_data, everything=everything)
    follower = Follower()
    try:
        # Note the ends of the files first: records written meanwhile are read twice and skipped.
        if follow:
            follower.skip(story.files())
        told = story.records()
        printer.show(told)
        if follow:
            _follow(story, printer, follower, told)
    except BrokenPipeError:
        terminal.nobody_reads()
    finally:
        follower.close()
    return EXIT_OK


def _follow(story: JobLogs, printer: Printer, follower: Follower, told: list[Record]) -> None:
    known = {record.key for record in told}
    #: By agent: True if it has logged the end of the job.
    ended = {record.node: isinstance(record.event, events.JobEnded) for record in told}
    while True:
        more = story.alive if story.where is None else not all(ended.values())
        news: list[Record] = []
        for _, line in follower.new_lines(story.files()):
            record = Record.parse(line)
            if record is None or record.key in known or story.job not in (None, record.job):
                continue
            known.add(record.key)
            ended[record.node] = isinstance(record.event, events.JobEnded)
            news.append(record)
        printer.show(sorted(news, key=lambda record: record.time))
        if not news:
            if not more:
                return
            time.sleep(LOOK)
        story = story.again()
