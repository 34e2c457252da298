"""Ledgers of processes that end in all ways, and of disks that are full for a while."""

import signal
import subprocess
import sys

from torchelastic.data import checker

WRITES = """
import os, resource, signal, sys
from torchelastic.data.ledger import Ledger

ledger = Ledger(sys.argv[1])
for step in range(100):
    ledger.committed(0, step, 0, 0, [step])
"""

KILLED = WRITES + "ledger.flush(); os.kill(os.getpid(), signal.SIGKILL)"

# The limit cuts a line short, as a disk does that is full; Python ignores its signal.
FULL_FOR_A_WHILE = """
ledger.flush()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
size = os.stat(os.path.join(sys.argv[1], "g0-r0.jsonl")).st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, hard))
for step in range(100, 110):
    ledger.committed(0, step, 0, 0, [step])
ledger.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for step in range(110, 120):
    ledger.committed(0, step, 0, 0, [step])
"""


def run(directory, code):
    return subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def steps(directory):
    return [line.step for line in checker.read([directory]).lines]


def test_a_process_that_ends_writes_all_its_lines(tmp_path):
    ended = run(tmp_path, WRITES)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps(tmp_path) == list(range(100))


def test_flushed_lines_survive_sigkill(tmp_path):
    assert run(tmp_path, KILLED).returncode == -signal.SIGKILL
    assert steps(tmp_path) == list(range(100))


def test_a_disk_that_is_full_for_a_while_costs_the_lines_of_that_while(tmp_path):
    ended = run(tmp_path, WRITES + FULL_FOR_A_WHILE)
    assert ended.returncode == 0
    assert ended.stderr.count("are lost, from step 100 on") == 1
    assert steps(tmp_path) == [*range(100), *range(110, 120)]
    found = checker.read([tmp_path])
    assert (found.lost, found.unreadable) == (10, 1)
