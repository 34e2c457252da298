"""Ledgers of processes that end in all ways, and of disks that are full for a while."""

import subprocess
import sys

from torchelastic.data import checker

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
