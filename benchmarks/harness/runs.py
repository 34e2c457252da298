"""What the command lines of the benchmarks share: rows, progress, an orderly end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from benchmarks.harness import processes, steady
from benchmarks.harness.report import Contestant
from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import Attempt, Repetition, attempts, interleave
from benchmarks.harness.steady import Comparison, Cost

R = TypeVar("R", bound=Results)
C = TypeVar("C", bound=Contestant)
Costs = tuple[Cost, Cost]

RESULTS = Path(__file__).resolve().parent.parent / "results"


def rows_among(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The argparse type of `--rows`."""

    def rows(text: str) -> tuple[str, ...]:
        wanted = tuple(text.split(","))
        if unknown := set(wanted) - set(known):
            raise argparse.ArgumentTypeError(f"no such row: {', '.join(sorted(unknown))}")
        return wanted

    return rows


def parser(
    about: str | None, rows: Sequence[str], *, quick: str = "", contest: str = ""
) -> argparse.ArgumentParser:
    """The command line of a benchmark: its rows, where results go and when; `quick` says what a
    short run is, `contest` what contestants meet, if there is such a thing."""
    made = argparse.ArgumentParser(description=about)
    if quick:
        made.add_argument("--quick", action="store_true", help=f"{quick}; not saved")
    if contest:
        made.add_argument("--repetitions", type=int, help=f"at most as many per {contest}")
        made.add_argument("--only", metavar="NAME", help="contestants whose name contains this")
    known = tuple(rows)
    made.add_argument("--rows", type=rows_among(known), default=known, help=",".join(known))
    made.add_argument("--save", action="store_true", help="save a run of some rows, too")
    made.add_argument("--no-save", action="store_true", help="print only")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    return made


def is_whole(arguments: argparse.Namespace, rows: Sequence[str]) -> bool:
    """Return whether nothing was left out."""
    given = vars(arguments)
    short = any(given.get(name) for name in ("quick", "only", "repetitions", "agents"))
    return not short and arguments.rows == tuple(rows)


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

    def keep(
        self,
        results: Results,
        row: str,
        who: str,
        number: int,
        found: Repetition,
        *more: float | None,
    ) -> None:
        """Add a repetition to the results, and tell it; one that failed, with what was said."""
        results.add(row, who, found)
        self.tell(row, who, number, found.seconds, *more)
        if found.seconds is None:
            print(f"  {found.note}\n{found.output}", file=sys.stderr)

    def finish(self, results: Results) -> None:
        results.about["minutes"] = round(self._minutes(), 1)
        results.about["load_after"] = os.getloadavg()[0]

    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60


class Run(ABC, Generic[R]):
    """One run of a benchmark: performs rows, keeps their results, tells how it goes."""

    def __init__(self, arguments: argparse.Namespace, results: R) -> None:
        self.arguments, self.results = arguments, results
        self._progress = Progress()

    @abstractmethod
    def perform(self, row: str) -> None: ...

    def finish(self) -> None:
        self._progress.finish(self.results)

    def _often(self, count: int) -> int:
        most = self.arguments.repetitions
        return count if most is None else min(count, most)

    def _contest(
        self, row: str, counts: Iterable[tuple[C, int]], attempt: Callable[[C], Attempt]
    ) -> None:
        """Let the contestants take turns, those that were asked for and as often."""
        only = self.arguments.only
        wanted = [
            (each, self._often(count))
            for each, count in counts
            if only is None or only in each.name
        ]
        for each, numbers in interleave(wanted, block=5):
            for number, found in zip(numbers, attempts(attempt(each), numbers), strict=True):
                self._progress.keep(self.results, row, each.name, number, found)

    def _compare(
        self, kept: dict[str, list[Costs]], comparison: Comparison, count: int, shown: str
    ) -> None:
        """Add pairs of jobs without failures to those that are kept."""
        pairs = kept.setdefault(comparison.name, [])
        for pair in steady.compare(comparison, count):
            pairs.append(pair)
            values = [getattr(each, shown) for each in pair]
            self._progress.tell("no failures", comparison.name, len(pairs) - 1, *values)


def perform_all(run: Run[Any], rows: Iterable[str]) -> bool:
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
    begin: Callable[[argparse.Namespace], Run[Any]],
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
