"""The same weights, to the bit, whatever happens to a job with a fixed batch; and what that costs.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import bits_plans, bits_rows, processes, runs
from benchmarks.harness.bits_hashes import Outcome, control, perform, reference
from benchmarks.harness.bits_report import BitsResults, render
from benchmarks.harness.results import about_this_run

ROWS = ("hashes", "control", "cost", "bytes", "copies", "inside", "speed")
RUNS, PARALLEL = 200, 3
#: Seconds of one run at most, in which its references may be made.
LONGEST = 400.0


def one(seed: int, references: Path | None, logs: Path | None) -> int:
    """A run in a process of its own: print how it ended and leave nothing behind."""
    runs.end_in_order()
    processes.become_subreaper()
    plan = bits_plans.plan(seed)
    try:
        outcome = perform(plan, _expected(plan.reference, references), logs)
    finally:
        processes.end_descendants()
    print(json.dumps(asdict(outcome)), flush=True)
    return 1 if outcome.note else 0


def _expected(key: tuple[str, int], references: Path | None) -> list[str]:
    """The hashes of one worker, made once."""
    path = references / "-".join(map(str, key)) if references else None
    if path is None:
        return reference(*key)
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(reference(*key)))
        part.rename(path)
    found: list[str] = json.loads(path.read_text())
    return found


class Run(runs.Run[BitsResults]):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, BitsResults(about_this_run()))

    def perform(self, row: str) -> None:
        if row in ("hashes", "control"):
            {"hashes": self._hashes, "control": self._control}[row]()
        else:
            self.results.found[row] = getattr(bits_rows, row)(self.arguments.quick)

    def _hashes(self) -> None:
        """Several at a time: nothing is timed. Runs of a file of outcomes are not repeated."""
        kept: Path | None = self.arguments.outcomes
        done = [Outcome(**json.loads(line)) for line in _lines(kept)]
        first = self.arguments.first
        wanted = range(first, first + (10 if self.arguments.quick else self.arguments.runs))
        known = {outcome.seed for outcome in done}
        self.results.outcomes = [outcome for outcome in done if outcome.seed in wanted]
        until = time.monotonic() + self.arguments.minutes * 60
        with tempfile.TemporaryDirectory(prefix="bits-") as made:
            references = self.arguments.references or Path(made)
            references.mkdir(exist_ok=True)
            with ThreadPoolExecutor(self.arguments.parallel) as pool:
                left = [seed for seed in wanted if seed not in known]
                for outcome in pool.map(partial(self._one, references, until), left):
                    if outcome is not None:
                        self._keep(outcome, kept)

    def _control(self) -> None:
        self.results.controls = control()

    def _one(self, references: Path, until: float, seed: int) -> Outcome | None:
        if time.monotonic() > until:
            return None
        command = [sys.executable, __file__, "--one", str(seed), "--references", str(references)]
        command += ["--logs", str(self.arguments.logs)] if self.arguments.logs else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return Outcome(seed, f"not done after {LONGEST:g} s")
        lines = done.stdout.splitlines()
        if not lines:
            return Outcome(seed, f"failed: {done.stderr[-400:]}")
        return Outcome(**json.loads(lines[-1]))

    def _keep(self, outcome: Outcome, kept: Path | None) -> None:
        self.results.outcomes.append(outcome)
        self._progress.tell("hashes", f"seed {outcome.seed}", 0, outcome.seconds)
        if outcome.note:
            print("\n".join([f"  {outcome.note}", *outcome.story]), file=sys.stderr)
        if kept:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def _lines(path: Path | None) -> Iterator[str]:
    if path is not None and path.exists():
        yield from path.read_text().splitlines()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = runs.parser(__doc__, ROWS, quick="ten seeds and a few steps")
    parser.add_argument("--runs", type=int, default=RUNS, help="seeds of `hashes`")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--parallel", type=int, default=PARALLEL, help="runs at a time")
    parser.add_argument("--one", type=int, metavar="SEED", help="perform one run and print it")
    parser.add_argument("--outcomes", type=Path, help="append to it, and continue from it")
    parser.add_argument("--references", type=Path, help="directory to keep references in")
    parser.add_argument("--logs", type=Path, help="keep the files of runs that failed here")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after as long")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse(None)
    if arguments.one is not None:
        return one(arguments.one, arguments.references, arguments.logs)
    save = partial(runs.save, directory=arguments.results, name="bits")
    whole = arguments.rows == ROWS and not arguments.quick and arguments.runs >= RUNS
    return runs.carry_out(arguments, Run, render, save, everything=whole)


if __name__ == "__main__":
    sys.exit(main())
