"""A process that kills itself at random does so, and leaves the training's random numbers alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest

from torchelastic.compat.release01.fault_injection import start_fault_injection_thread
from torchelastic.errors import ConfigError

DOOMED = """
import time
from torchelastic.compat.release01.fault_injection import start_fault_injection_thread
start_fault_injection_thread(1.0, 0.01)
time.sleep(60)
"""


def test_the_process_kills_itself():
    ended = subprocess.run([sys.executable, "-c", DOOMED], timeout=60, capture_output=True)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_rate_is_a_probability(rate):
    before = random.getstate()
    with pytest.raises(ConfigError, match="must be a probability"):
        start_fault_injection_thread(rate, 1)
    assert random.getstate() == before
