"""Workers are killed and replaced, and each sample is used once.

Samples of a stream, with loading processes; `test_exactly_once_chaos` and `test_fixed_batches`
prove the same for those of a sampler.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from tests.process.jobs import HERE, Job, Node, job
from tests.support import poll_for
from torchelastic.data import checker
from torchelastic.data.verdict import check

SCRIPT = HERE / "sampled.py"
SAMPLES, EPOCHS, SHARD = 300, 2, 13
PATIENCE = 120.0


def start(made: Job, **more: int) -> Node:
    keys = {"samples": SAMPLES, "epochs": EPOCHS, "stream": 1, **more}
    return made.start(ledger=made.directory / "ledger", **keys)


def each_was_used_once(made: Job) -> None:
    """By the test's own record and by the ledger."""
    settled: dict[int, int] = {}  # by step the generation that finished it last, which counts
    for line in made.lines(event="finished"):
        settled[line["step"]] = max(line["generation"], settled.get(line["step"], -1))
    taken: dict[int, Counter[int]] = defaultdict(Counter)
    for line in made.lines(event="took"):
        if line["generation"] == settled.get(line["step"]):
            taken[line["epoch"]].update(line["samples"])
    assert taken == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    expected = {divmod(sample, SHARD) for sample in range(SAMPLES)}
    found = checker.read([made.directory / "ledger"])
    verdict = check(found.lines, expected=expected, epochs=EPOCHS, lost=found.lost)
    assert verdict.ok, str(verdict)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_loading_processes_in_worlds_of_several_sizes(tmp_path):
    """Those who are left take steps before the replacement comes."""
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=3", SCRIPT) as made:
        node = start(made, workers=1, full=3)
        step = 3
        for rank in (1, 0):
            found = victim(made, rank=rank, after=step)
            os.kill(found["pid"], signal.SIGKILL)
            step = found["step"] + 3
        assert node.wait(PATIENCE) == 0, made.said()
    each_was_used_once(made)
    assert set(worlds(made).values()) > {3}, "no step was taken by those who were left"
    weights = {str(line["weights"]) for line in made.lines(event="finished", step=step)}
    assert len(weights) == 1
    assert {line["state"]["epoch"] for line in made.lines(event="done")} == {EPOCHS - 1}


def victim(made: Job, *, rank: int, after: int) -> dict:
    """The last line of a rank in a world of three, some steps after another."""

    def seen() -> dict | None:
        found = [
            line
            for line in made.lines(event="finished", rank=rank)
            if line["step"] >= after and worlds(made).get(line["generation"]) == 3
        ]
        return found[-1] if found else None

    return poll_for(seen, what=f"rank {rank} at step {after}", timeout=PATIENCE)


def worlds(made: Job) -> dict[int, int]:
    return {line["generation"]: line["size"] for line in made.lines(event="took")}


# --- ledgers of processes that end in all ways, and of disks that are full -----------------------

# One is killed; the other meets a limit that cuts a line short, as a disk does that is full (Python
# ignores its signal), and ends.
WRITES = """
import os, resource, signal, sys
from torchelastic.data.ledger import Ledger

def write(ledger, first, end):
    for step in range(first, end):
        ledger.committed(0, step, 0, 0, [step])

if os.fork() == 0:
    ledger = Ledger(sys.argv[1])
    write(ledger, 0, 100)
    ledger.flush()
    os.kill(os.getpid(), signal.SIGKILL)
_, status = os.wait()
assert status == signal.SIGKILL

ledger = Ledger(sys.argv[2])
write(ledger, 0, 100)
ledger.flush()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
size = os.stat(os.path.join(sys.argv[2], "g0-r0.jsonl")).st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, hard))
write(ledger, 100, 110)
ledger.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
write(ledger, 110, 200)
"""


def steps(ledgers):
    return [line.step for line in ledgers.lines]


def test_flushed_lines_survive_sigkill_and_a_full_disk_costs_the_lines_of_that_while(tmp_path):
    killed, ended = tmp_path / "killed", tmp_path / "ended"
    command = [sys.executable, "-c", WRITES, str(killed), str(ended)]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 0, ran.stderr
    assert steps(checker.read([killed])) == list(range(100))
    assert ran.stderr.count("loses lines from step 100 on") == 1
    found = checker.read([ended])
    assert steps(found) == [*range(100), *range(110, 200)], "all others, the last at its end"
    assert (found.lost, found.unreadable) == (10, 1)
