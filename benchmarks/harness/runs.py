"""What the command lines of the benchmarks share: rows, progress, an orderly end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from benchmarks.harness import processes
from benchmarks.harness.results import Results


def rows_among(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The argparse type of `--rows`."""

    def rows(text: str) -> tuple[str, ...]:
        wanted = tuple(text.split(","))
        if unknown := set(wanted) - set(known):
            raise argparse.ArgumentTypeError(f"no such row: {', '.join(sorted(unknown))}")
        return wanted

    return rows


def add_saving(parser: argparse.ArgumentParser, results: Path) -> None:
    """Where results go, and when."""
    parser.add_argument("--save", action="store_true", help="save a run of some rows, too")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--results", type=Path, default=results, metavar="DIR")


def end_in_order() -> None:
    """Whichever way this process is ended, its jobs are."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Progress:
    """Tells how a run goes, and in the end how long it took."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def tell(self, row: str, who: str, number: int, *values: float | None) -> None:
        shown = ", ".join("failed" if value is None else f"{value:.3g}" for value in values)
        print(f"{self._minutes():5.1f} min  {row}, {who}, {number + 1}: {shown}", file=sys.stderr)

    def finish(self, results: Results) -> None:
        results.about["minutes"] = round(self._minutes(), 1)
        results.about["load_after"] = os.getloadavg()[0]

    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60


class Run(Protocol):
    """A benchmark that performs rows."""

    results: Any

    def perform(self, row: str) -> None: ...

    def finish(self) -> None: ...


def perform_all(run: Run, rows: Iterable[str]) -> bool:
    """Whether all rows were performed; interrupted, what is there is still shown."""
    try:
        for row in rows:
            run.perform(row)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return False
    finally:
        run.finish()
    return True


def carry_out(
    arguments: argparse.Namespace,
    begin: Callable[[argparse.Namespace], Run],
    render: Callable[[Any], str],
    save: Callable[[Any, str], None],
    *,
    everything: bool,
) -> int:
    """Perform the rows that were asked for and print the report; its exit code.

    Saved is a run of `everything`, or one of which it was asked for, if it was not interrupted.
    """
    end_in_order()
    processes.become_subreaper()
    run = begin(arguments)
    whole = perform_all(run, arguments.rows)
    rendered = render(run.results)
    print(rendered)
    if whole and (everything or arguments.save) and not arguments.no_save:
        save(run.results, rendered)
    return 0 if whole else 130


def save(results: Results, rendered: str, directory: Path, name: str) -> None:
    """The raw numbers and the report."""
    stem = f"{results.about['date']}-{results.about['commit']}-{name}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{stem}.json").write_text(results.to_json())
    (directory / f"{stem}.md").write_text(rendered)
    print(f"saved: {directory / stem}.json and .md", file=sys.stderr)
