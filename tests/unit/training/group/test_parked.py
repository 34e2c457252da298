"""Old groups when the process ends: dropped before that, or never, but not half."""

import subprocess
import sys

import pytest

from tests.support import SOAK

#: A script imports torch, which takes its time on a busy machine.
SOON = 110

#: Runs scripts, each in a fork that ends as an interpreter does: torch is imported once.
FORKING = """
import gc, os, sys
gc.disable()  # until it is imported, which takes a fifth less then
from torchelastic.training.group.group import Group  # imports torch
gc.enable()

for script in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
else:
    script = ""
exec(script)
"""

#: The reaper is in the middle of a drop, and another group waits, when the script ends.
IN_A_DROP = """
import threading, time
from torchelastic.training.group import parked
from torchelastic.training.group.abortable_waits import AbortableOperation, Waits

begun = threading.Event()

class Slow:
    def __del__(self):
        begun.set()
        time.sleep(0.1)  # gives the interpreter's lock up, as gloo's destructor does
        print("dropped", flush=True)

class Waiting:
    def __del__(self):
        print("this one, too", flush=True)

class Stuck:
    def __del__(self):
        print("never this one", flush=True)

class Silent:  # closed, it frees gloo's thread, which Python then ends in C++ code
    def __del__(self):
        print("never closed", flush=True)

class Endless:
    def is_completed(self):
        return False

class Late:
    until = time.monotonic() + 0.5  # on a machine that is busy

    def is_completed(self):
        return time.monotonic() > self.until

    def wait(self):
        return True

class Freed:
    def __del__(self):
        print("late", flush=True)

stuck, late = Waits(), Waits()
stuck.enter(AbortableOperation(stuck, stuck.announce(), Endless()))
late.enter(AbortableOperation(late, late.announce(), Late()))
parked.park([Freed()], late, silent=[], rank=1, aborted=True)
parked.park([Stuck()], stuck, silent=[Silent()], rank=1, aborted=True)
parked.park([Waiting()], Waits(), silent=[], rank=1, aborted=False)
parked.park([Slow()], Waits(), silent=[], rank=1, aborted=True)
assert begun.wait(30)
"""

#: No thread can be started any more, and gloo is stuck.
WITHOUT_A_THREAD = """
import threading
from torchelastic.training.group import parked
from torchelastic.training.group.abortable_waits import AbortableOperation, Waits

def start(self):
    raise RuntimeError("can't start new thread")

class Stuck:
    def __del__(self):
        threading.Event().wait()  # as gloo's destructor, which joins a thread that never ends

class Endless:
    def is_completed(self):
        return False

threading.Thread.start = start
stuck = Waits()
stuck.enter(AbortableOperation(stuck, stuck.announce(), Endless()))
parked.park([Stuck()], stuck, silent=[], rank=0, aborted=True)
"""

#: Ends as soon as its group was put down.
REAL = """
from datetime import timedelta
import torch.distributed as dist

store = dist.HashStore()
for generation in range(3):
    group = Group.build(
        store=dist.PrefixStore(str(generation), store), rank=0, size=1, generation=generation,
        timeout=timedelta(seconds=30))
    dist.new_group([0])
    group.abort("the test")
    group.leave()
"""


@pytest.mark.slow  # imports torch in a process of its own
def test_a_script_may_end_while_groups_are_dropped_or_stuck():
    """What can be dropped is, what is stuck is kept, and the exit code is the script's. Without a
    thread to drop it, nothing is."""
    real = SOAK
    command = [sys.executable, "-c", FORKING, IN_A_DROP, WITHOUT_A_THREAD, *[REAL] * real]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SOON
    )
    dropped = ["dropped", "this one, too", "late", "ended 0"]
    warning = "Groups of earlier worlds stay open until the next one ends: can't start new thread."
    expected = [*dropped, warning, "ended 0", *["ended 0"] * real]
    assert (done.stdout.splitlines(), done.returncode) == (expected, 0)
