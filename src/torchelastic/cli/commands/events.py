"""`torchelastic events`: print the events of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from torchelastic.agent.output.terminal_text import one_line
from torchelastic.cli import terminal
from torchelastic.cli.parser import Parsed
from torchelastic.errors import EXIT_OK
from torchelastic.events import types as events
from torchelastic.events import words
from torchelastic.events.analysis.find_job import JobLogs, choose
from torchelastic.events.analysis.follow import POLL_INTERVAL, Follower
from torchelastic.events.record import Record

#: Shown with `--all` only, because there are many of them.
_NOISE = ("progress",)
_WIDEST_NAME = 20


def main(parsed: Parsed) -> int:
    """Print a job's events and, with `--follow`, new ones until the job ends or Ctrl-C."""
    job_logs = choose(parsed.argument, parsed["job"])
    printer = Printer(as_data=parsed["json"], everything=parsed["all"])
    follower = Follower()
    try:
        # Note the ends of the files first: records written meanwhile are read twice and skipped.
        if parsed["follow"]:
            follower.skip(job_logs.files())
        records = job_logs.records()
        printer.show(records)
        if parsed["follow"]:
            _follow(job_logs, printer, follower, records)
    except BrokenPipeError:
        terminal.discard_output()
    except KeyboardInterrupt:
        pass
    finally:
        follower.close()
    return EXIT_OK


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
        text = one_line(words.sentence(record))
        return f"{when}.{millis:03}  {who}  {generation:<4}  {text}"


def _follow(job_logs: JobLogs, printer: Printer, follower: Follower, shown: list[Record]) -> None:
    known = {record.key for record in shown}
    #: By agent: True if it has logged the end of the job.
    ended = {record.node: isinstance(record.event, events.JobEnded) for record in shown}
    while True:
        more = job_logs.alive if job_logs.where is None else not all(ended.values())
        news: list[Record] = []
        for _, line in follower.new_lines(job_logs.files()):
            record = Record.parse(line)
            if record is None or record.key in known or job_logs.job not in (None, record.job):
                continue
            known.add(record.key)
            ended[record.node] = isinstance(record.event, events.JobEnded)
            news.append(record)
        printer.show(sorted(news, key=lambda record: record.time))
        if not news:
            if not more:
                return
            time.sleep(POLL_INTERVAL)
        job_logs = job_logs.again()
