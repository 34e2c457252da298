"""The check that other tests rely on is itself a test subject."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from tests.leaks import Leaks, Snapshot
from tests.support import poll_for


@pytest.fixture
def mark(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("LEAK_MARK", str(tmp_path))
    return f"LEAK_MARK={tmp_path}\0"


@pytest.fixture
def leaks(mark) -> Leaks:
    return Leaks(Snapshot.take(), mark)


def test_a_child_is_found_and_killed(leaks):
    child = subprocess.Popen(["sleep", "600"])
    assert leaks.find() == [f"process {child.pid}: sleep 600"]
    leaks.kill_processes()
    assert leaks.wait_for_none(10) == []
    child.wait()


def test_a_child_that_nobody_waited_for_is_found(leaks):
    pid = os.posix_spawn("/bin/true", ["true"], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert leaks.processes() == [pid]
    os.waitpid(pid, 0)


def test_an_orphan_is_found(leaks):
    """Its parent is gone, and it is in a session of its own."""
    script = "setsid sleep 600 > /dev/null & echo $!"
    made = subprocess.run(["sh", "-c", script], check=True, stdout=subprocess.PIPE)
    # While it is about to become `sleep` it shows no environment.
    poll_for(lambda: leaks.processes() == [int(made.stdout)], what="the orphan")
    leaks.kill_processes()
    poll_for(lambda: not leaks.processes(), what="the end of the orphan")


def test_a_thread_and_a_descriptor_are_found(leaks):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    fd = os.open("/dev/null", os.O_RDONLY)
    assert leaks.find() == ["thread forgotten", f"descriptor {fd}: /dev/null"]
    stop.set()
    os.close(fd)
    assert leaks.wait_for_none(10) == []
    thread.join()


def test_leak_check_ignores_what_existed_before(mark):
    fd = os.open("/dev/null", os.O_RDONLY)
    child = subprocess.Popen(["sleep", "600"], env={})
    leaks = Leaks(Snapshot.take(), mark)
    assert leaks.find() == []
    child.kill()
    child.wait()
    os.close(fd)
