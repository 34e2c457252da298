"""Three nodes of a real Slurm cluster: one is drained, one killed, and the job is requeued.

    python benchmarks/slurm.py [--repetitions 3]

Prints what each event cost: steps that were done again, and the time to the next step. The record
that the workers keep of themselves says whether each sample was used once. Needs root, Debian's
slurm-wlm and munge; see tests/slurm.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.report import median_range, table
from tests.process.slurm_jobs import run_the_bar
from tests.slurm import SlurmCluster

EVENTS = ("drained", "killed", "requeued")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    redone: dict[str, list[int]] = {event: [] for event in EVENTS}
    seconds: dict[str, list[float]] = {event: [] for event in EVENTS}
    wrong = 0
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as directory, SlurmCluster(3) as cluster:
            training, took = run_the_bar(cluster, Path(directory, "training"))
            found = training.proven()
            print("\n".join(found) or "each sample was used once", flush=True)
            wrong += bool(found)
            _, *costs = training.redone().values()
            for event, steps in zip(EVENTS, costs, strict=True):
                redone[event].append(steps)
                seconds[event].append(took[event])
    head = ("event", "steps done again", "seconds to the next step")
    rows = [
        (each, str(max(redone[each])), median_range(seconds[each], digits=1)) for each in EVENTS
    ]
    print("\n" + table(head, rows))
    print(f"\nEach sample used once: {repetitions - wrong} of {repetitions}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
