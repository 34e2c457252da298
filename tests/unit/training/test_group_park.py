"""Old groups when the process ends: dropped before that, or never, but not half."""

import contextlib
import subprocess
import sys

#: A script imports torch, which takes its time on a busy machine.
SOON = 110

#: The reaper is in the middle of a drop, and another group waits, when the script ends.
IN_A_DROP = """
import threading, time
from torchelastic.training import group_park
from torchelastic.training.waits import Operation, Waits

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

class Endless:
    def is_completed(self):
        return False

stuck = Waits()
stuck.enter(Operation(stuck, stuck.announce(), Endless()))
group_park.park([Stuck()], stuck, silent=[], aborted=True)
group_park.park([Waiting()], Waits(), silent=[], aborted=False)
group_park.park([Slow()], Waits(), silent=[], aborted=True)
assert begun.wait(30)
"""

#: Ends as soon as its group was put down.
REAL = """
from datetime import timedelta
import torch.distributed as dist
from torchelastic.training.group import Group

store = dist.HashStore()
for generation in range(3):
    group = Group.build(
        store=dist.PrefixStore(str(generation), store), rank=0, size=1, generation=generation,
        timeout=timedelta(seconds=30))
    dist.new_group([0])
    group.abort("the test")
    group.leave()
"""


def ends(script):
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_what_can_be_dropped_is_and_what_is_stuck_is_kept():
    with ends(IN_A_DROP) as process:
        assert process.communicate(timeout=SOON)[0].splitlines() == ["dropped", "this one, too"]
    assert process.returncode == 0


def test_a_script_may_end_right_after_its_training():
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(ends(REAL)) for _ in range(4)]
        for process in processes:
            stack.callback(process.kill)  # whatever happens
        outputs = [process.communicate(timeout=SOON)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
