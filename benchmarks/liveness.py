"""Whether a job trains again after faults that once left it waiting, and how soon.

Each fault is repeated in a fresh job every time. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import liveness_rows, runs
from benchmarks.harness.etcd import EtcdServer
from benchmarks.harness.in_process_faults import LEASE
from benchmarks.harness.job import Job
from benchmarks.harness.launchers import OURS
from benchmarks.harness.liveness_rows import Row
from benchmarks.harness.network import Network
from benchmarks.harness.report import about, failures, load, seconds, table, verdict
from benchmarks.harness.results import Results, about_this_run
from benchmarks.harness.scenarios import Attempt, Repetition, attempts
from benchmarks.harness.summary import Summary, summarize
from tests import netns

HERE = Path(__file__).resolve().parent
ROWS = {row.name: row for row in liveness_rows.ROWS}
REPETITIONS, QUICK = 20, 3
HEAD = (
    "row",
    "what is done",
    "passed",
    "time from",
    "to the next step",
    "quartiles",
    "to a step of all",
    "failed starts",
    "wanted",
)
FOOTNOTE = (
    "Seconds are medians (min to max), until every rank of a new world has finished a step. A job "
    f"passes when it trains again within {liveness_rows.LAUNCHER.patience:g} s, trains on, and no "
    "two of its worlds made steps at the same time."
)


class Run(runs.Run[Results]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, Results({**about_this_run(), "lease": LEASE}))

    def perform(self, row: str) -> None:
        wanted = ROWS[row]
        if why := missing(wanted):
            print(f"{row}: not measured, it needs {why}", file=sys.stderr)
            return
        network = netns.Network(wanted.hosts)
        with network if wanted.hosts else nullcontext():
            attempt = self._keeping_logs(wanted, wanted.attempt(network))
            for number, found in enumerate(attempts(attempt, range(self.arguments.repetitions))):
                self._progress.keep(self.results, row, OURS.name, number, found)

    def _keeping_logs(self, row: Row, attempt: Attempt) -> Attempt:
        """What the nodes of a job that fails have written is kept, where it was asked for."""

        def fault(job: Job, index: int) -> Repetition:
            found = None
            try:
                found = attempt.fault(job, index)
                return found
            finally:
                if self.arguments.logs and (found is None or found.seconds is None):
                    kept = self.arguments.logs / f"{row.name}-{index + 1}-{job.directory.name}"
                    shutil.copytree(job.directory, kept, symlinks=True, ignore=_sockets)

        return replace(attempt, fault=fault)


def _sockets(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(directory, name).is_socket()]


def missing(row: Row) -> str:
    """What the machine lacks for a row."""
    if row.hosts and not Network.available():
        return "root and the ip command"
    if row.name == "etcd-cut" and EtcdServer.program() is None:
        return "etcd"
    return ""


def render(results: Results) -> str:
    """The whole report."""
    facts = results.about
    rows = [_line(row, results) for row in ROWS.values() if row.name in results.faults]
    lease = f"Every node has a lease of {facts.get('lease', LEASE):g} s (the default)."
    head = f"{about(results)}\n\n{lease} {load(results)}"
    return "\n\n".join([head, table(HEAD, rows), FOOTNOTE, *failures(results)]) + "\n"


def _line(row: Row, results: Results) -> Sequence[str]:
    found = results.repetitions(row.name, OURS.name)
    summary = results.summary(row.name, OURS.name)
    whole = summarize([each.details.get("whole") for each in found if each.seconds is not None])
    quartiles = " to ".join(f"{each:.2f}" for each in summary.quartiles) if summary.times else ""
    return (
        f"`{row.name}`",
        row.title,
        f"{len(summary.times)} of {summary.count}",
        row.since,
        seconds(Summary(summary.times)),
        quartiles,
        seconds(whole),
        str(sum(each.details.get("failed_starts", 0) for each in found)),
        judge(row, summary),
    )


def judge(row: Row, summary: Summary) -> str:
    """What is wanted, and whether it is there; fewer repetitions can only miss it."""
    wanted = f"{REPETITIONS} of {REPETITIONS}"
    met = not summary.failed
    if row.limit is not None:
        wanted += f", worst at most {row.limit:g} s"
        met = met and max(summary.times) <= row.limit
    return verdict(wanted, met if summary.count >= REPETITIONS or not met else None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, tuple(ROWS), quick=f"{QUICK} repetitions")
    parser.add_argument("--repetitions", type=int, help=f"of each (default {REPETITIONS})")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep files of failed jobs here")
    parsed = parser.parse_args(arguments)
    parsed.repetitions = parsed.repetitions or (QUICK if parsed.quick else REPETITIONS)
    return parsed


def main() -> int:
    arguments = parse(None)
    keep = partial(runs.save, directory=arguments.results, name="liveness")
    everything = arguments.repetitions >= REPETITIONS and arguments.rows == tuple(ROWS)
    return runs.carry_out(arguments, Run, render, keep, everything=everything)


if __name__ == "__main__":
    sys.exit(main())
