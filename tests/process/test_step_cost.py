"""What a step costs for being seen: no system call, and next to no time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

#: Of a worker, in each step: what it waited for, and where it is.
STEPS = """
import gc, os, time
from torchelastic import stalls
from torchelastic.worker import slate

shown = slate.Slate(slate.create())
shown.rank = 0

def step(number):
    stalls.add("data", 0.001)
    with stalls.Counted("snapshot"):
        pass
    shown.entered(0, number)

for number in range(100):
    step(number)
gc.disable()
os.write(1, b"begin\\n")
began = time.thread_time()
for number in range(COUNT):
    step(number)
took = time.thread_time() - began
os.write(1, b"end\\n")
os.write(1, b"%d ns\\n" % (took * 1e9 / COUNT))
"""
#: Python asks for memory now and then, and asks how much time a thread has had.
HARMLESS = {"brk", "mmap", "munmap", "madvise", "clock_gettime"}


def program(count: int) -> list[str]:
    return [sys.executable, "-c", STEPS.replace("COUNT", str(count))]


def test_a_step_makes_no_system_call(tmp_path):
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    output = tmp_path / "calls"
    traced = subprocess.run(
        ["strace", "-o", str(output), *program(500)], capture_output=True, text=True, timeout=60
    )
    if "ptrace" in traced.stderr.lower():
        pytest.skip("nobody may be traced here")
    assert traced.returncode == 0, traced.stderr
    lines = output.read_text().splitlines()
    ends = [number for number, line in enumerate(lines) if re.search(r'"(begin|end)', line)]
    between = {line.partition("(")[0] for line in lines[ends[0] + 1 : ends[1]]}
    assert between <= HARMLESS
    assert len(lines[ends[0] + 1 : ends[1]]) < 50, "nor one of these in every step"


def test_a_step_takes_no_more_than_a_few_microseconds():
    ran = subprocess.run(program(5000), capture_output=True, text=True, timeout=60, check=True)
    [nanoseconds] = re.findall(r"(\d+) ns", ran.stdout)
    assert int(nanoseconds) < 20_000
