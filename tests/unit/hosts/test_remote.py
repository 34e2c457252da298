"""The program on a host: one agent of a job, its last output, and its end as others learn it."""

import os
import subprocess
import sys

import pytest

from torchelastic.hosts import remote


def test_only_the_agent_that_runs_gets_signals(tmp_path, monkeypatch):
    """The file may have the pid of an agent that has ended, and that is another process now."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda *words: sent.append(words))
    path = tmp_path / "lock"
    path.write_text("1")
    holder, follower = remote._Lock(path), remote._Lock(path)
    assert (holder.is_held, follower.is_held) == (True, False)
    follower.signal(15)
    assert sent == []
    holder.write("4321")
    follower.signal(15)
    assert sent == [(4321, 15)]
    holder.close()
    follower.close()


@pytest.mark.parametrize(("written", "exitcode"), [("4321", None), ("4321 1", 1), ("4321 0", 0)])
def test_who_follows_an_agent_learns_how_the_job_ended(tmp_path, written, exitcode):
    holder, follower = remote._Lock(tmp_path / "lock"), remote._Lock(tmp_path / "lock")
    holder.write(written)
    holder.close()
    assert follower.wait() == exitcode
    follower.close()


def test_the_last_output_is_not_lost():
    """It is in a pipe when the agent has ended: more than the pipe to the reader holds."""
    program = (
        "import sys\n"
        "from torchelastic.hosts import remote\n"
        "with remote._outliving_readers():\n"
        "    sys.stdout.write('x' * 1_000_000)\n"
        "    sys.stdout.flush()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=30)
    assert len(ran.stdout) == 1_000_000


#: An agent that ends when it gets a signal, with the code and the world of the arguments.
AGENT = """
import json, os, signal, sys, threading
from types import SimpleNamespace
from torchelastic.config import LaunchConfig, Entry
from torchelastic.hosts import remote
code, phase = int(sys.argv[2]), sys.argv[3]
class Agent:
    pid = 1
    def __init__(self, *given):
        self.told = threading.Event()
    def signal(self, signum):
        print("agent got", signum, flush=True)
        self.told.set()
    def wait(self):
        while not self.told.wait(0.01):
            pass
        world = SimpleNamespace(phase=phase) if phase else None
        return SimpleNamespace(exitcode=code, world=world, place=None, told=lambda name: "why")
remote.AgentProcess = Agent
lock = remote._Lock(remote.Path(sys.argv[1]))
sys.exit(remote._run(LaunchConfig(1, 1, 1), Entry("script", "t.py"), "secret", lock))
"""


@pytest.mark.parametrize(
    ("code", "phase", "ends_job"),
    [(143, "running", False), (1, "closed", True), (64, "", False), (0, "closed", True)],
)
def test_sigterm_makes_the_agent_leave_and_its_end_is_told(tmp_path, code, phase, ends_job):
    """A machine that shuts down signals this program; without it, the agent would be killed."""
    lock = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(lock), str(code), phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == remote.STARTED + "\n"
        ran.terminate()
        out, err = ran.communicate(timeout=30)
    assert ran.returncode == code
    assert out.startswith("agent got 15\n")
    assert (remote.ENDED in out) == ends_job
    assert (lock.read_text() == f"1 {code}") == ends_job
    assert ("why" in err) == (code in (1, 64))
