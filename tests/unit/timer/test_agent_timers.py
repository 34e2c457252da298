"""The client of a worker: what its agent gets to read."""

import os
import signal
import socket
import time

import pytest

from tests.support import poll_for
from torchelastic import env, timer
from torchelastic.timer import agent_timers, countdown
from torchelastic.timer.timer_table import STACKS_AT, TimerTable, read
from torchelastic.worker import channel


@pytest.fixture
def agent(monkeypatch):
    """The agent's end of a channel that this process takes for its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = []
    with ours:
        monkeypatch.setattr(channel, "_opened", (os.getpid(), theirs))
        monkeypatch.setattr(agent_timers, "_client", None)
        monkeypatch.setattr(countdown, "_configured", None)
        monkeypatch.setattr(
            agent_timers, "TimerTable", lambda: made.append(TimerTable()) or made[-1]
        )
        yield ours
        theirs.close()
        for table in made:
            agent_timers.faulthandler.unregister(agent_timers.STACKS_SIGNAL)
            table.close()


def handed(agent):
    data, (descriptor,), _, _ = socket.recv_fds(agent, 4096, 1, socket.MSG_DONTWAIT)
    return data, descriptor


def test_the_first_timer_hands_over_the_table_and_no_other_sends_anything(agent):
    with timer.expires(after=60, scope="first"):
        data, descriptor = handed(agent)
        assert data == b'{"type": "timers", "signal": %d}\n' % agent_timers.STACKS_SIGNAL
        assert [found.scope for found in read(descriptor)] == ["first"]
    assert read(descriptor) == []
    before = time.monotonic()
    with timer.expires(after=60, scope="second"):
        (found,) = read(descriptor)
        assert (found.scope, found.after) == ("second", 60)
        assert before + 60 <= found.expires_at <= time.monotonic() + 60
    with pytest.raises(BlockingIOError):
        agent.recv(1, socket.MSG_DONTWAIT)
    os.close(descriptor)


def test_at_the_signal_the_stacks_are_written_and_the_thread_stands_still(agent):
    with timer.expires(after=60):
        _, descriptor = handed(agent)
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(agent_timers.STACKS_SIGNAL)
        os._exit(0)
    stack = poll_for(lambda: os.pread(descriptor, 9999, STACKS_AT), what="a stack")
    assert b"test_at_the_signal_the_stacks_are_written" in stack
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    os.close(descriptor)


def test_overlapping_timers_of_one_scope_are_not_mixed_up(agent):
    """As two threads, or two tasks of one, in the same line: the first may end first."""
    one, other = timer.expires(60, "same"), timer.expires(70, "same")
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    _, descriptor = handed(agent)
    assert [found.after for found in read(descriptor)] == [70]
    other.__exit__(None, None, None)
    assert read(descriptor) == []
    os.close(descriptor)


def test_a_forked_child_leaves_its_parents_timers_alone(agent):
    holding = timer.expires(60, "parent")
    holding.__enter__()
    _, descriptor = handed(agent)
    pid = os.fork()
    if pid == 0:
        holding.__exit__(None, None, None)
        os._exit(agent_timers._client is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [found.scope for found in read(descriptor)] == ["parent"]
    holding.__exit__(None, None, None)
    os.close(descriptor)


def test_a_child_is_told_that_it_is_one(agent, monkeypatch):
    client = agent_timers.connect()
    client.disown()
    with pytest.raises(RuntimeError, match="put `expires` into the worker"):
        client.start("x", 1)
    monkeypatch.setattr(channel, "_opened", (os.getpid(), None))
    monkeypatch.setattr(agent_timers, "_client", None)
    monkeypatch.setattr(env, "get", lambda name, default="": "17")
    with (
        pytest.raises(RuntimeError, match="put `expires` into the worker"),
        timer.expires(after=1),
    ):
        raise AssertionError("not reached")
