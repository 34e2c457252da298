"""Timers of a worker: what it asks a client for, what its agent reads, and the table in between."""

import math
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import poll_for
from torchelastic import env, timer
from torchelastic.timer import countdown, expires, timer_table
from torchelastic.timer.timer_table import STACKS_AT, Timer, TimerTable, read
from torchelastic.worker import channel


class Kept(timer.TimerClient):
    def __init__(self):
        self.said = []

    def acquire(self, scope_id, expiration_time):
        self.said.append(("acquire", scope_id, expiration_time))

    def release(self, scope_id):
        self.said.append(("release", scope_id))


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(countdown, "_configured", None)
    return Kept()


def test_expires_holds_a_timer_while_its_block_runs(client):
    before = time.time()
    with expires(after=10, scope="load", client=client):
        ((what, scope, at),) = client.said
    assert (what, scope) == ("acquire", "load")
    assert before + 10 <= at <= time.time() + 10
    assert client.said[1:] == [("release", "load")]
    with pytest.raises(KeyError), expires(10, "load", client):
        raise KeyError
    assert client.said[3:] == [("release", "load")]


def test_expires_names_its_file_and_line(client):
    with expires(after=10, client=client):
        pass
    assert client.said[0][1] == f"{__file__}#{line_of('with expires(after=10, client=client):')}"


def test_expires_uses_the_configured_client_unless_given_one(client):
    timer.configure(client)
    with expires(after=10, scope="all"):
        pass
    own = Kept()
    with expires(after=10, scope="one", client=own):
        pass
    assert [said[1] for said in client.said] == ["all", "all"]
    assert [said[1] for said in own.said] == ["one", "one"]


def test_expires_on_a_function_sets_a_timer_per_call(client):
    @expires(after=10, client=client)
    def count(depth):
        """Down."""
        return count(depth - 1) + 1 if depth else 0

    assert count(2) == 2
    assert count.__doc__ == "Down."
    assert [said[0] for said in client.said] == ["acquire"] * 3 + ["release"] * 3
    assert client.said[0][1].endswith(f"#{line_of('@expires(after=10, client=client)')}")


def test_expires_without_agent_and_client_is_an_error(client):
    with (
        pytest.raises(RuntimeError, match=r"`torchelastic run`, or call torchelastic\.timer\.conf"),
        expires(after=10),
    ):
        raise AssertionError("not reached")


def test_expires_refuses_a_duration_that_is_not_positive(client):
    for after in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be a number of seconds above 0"):
            expires(after, client=client)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


# --- the agent -----------------------------------------------------------------------------------


@pytest.fixture
def agent(monkeypatch):
    """The agent's end of a channel that this process takes for its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = []
    with ours:
        monkeypatch.setattr(channel, "_opened", (os.getpid(), theirs))
        monkeypatch.setattr(countdown, "_client", None)
        monkeypatch.setattr(countdown, "_configured", None)
        monkeypatch.setattr(countdown, "TimerTable", lambda: made.append(TimerTable()) or made[-1])
        yield ours
        theirs.close()
        for table in made:
            countdown.faulthandler.unregister(countdown.STACKS_SIGNAL)
            table.close()


def handed(agent):
    data, (descriptor,), _, _ = socket.recv_fds(agent, 4096, 1, socket.MSG_DONTWAIT)
    return data, descriptor


def test_first_timer_hands_over_the_table_and_later_ones_send_nothing(agent):
    with timer.expires(after=60, scope="first"):
        data, descriptor = handed(agent)
        assert data == b'{"type": "timers", "signal": %d}\n' % countdown.STACKS_SIGNAL
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


def test_signal_writes_the_stacks_and_stops_the_thread(agent):
    with timer.expires(after=60):
        _, descriptor = handed(agent)
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(countdown.STACKS_SIGNAL)
        os._exit(0)
    stack = b"test_signal_writes_the_stacks"
    poll_for(lambda: stack in os.pread(descriptor, 9999, STACKS_AT), what="a stack")
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    os.close(descriptor)


def test_overlapping_timers_of_one_scope_are_kept_apart(agent):
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


def test_forked_child_leaves_its_parents_timers_alone(agent):
    holding = timer.expires(60, "parent")
    holding.__enter__()
    _, descriptor = handed(agent)
    pid = os.fork()
    if pid == 0:
        holding.__exit__(None, None, None)
        os._exit(countdown._client is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [found.scope for found in read(descriptor)] == ["parent"]
    holding.__exit__(None, None, None)
    os.close(descriptor)


def test_child_of_a_worker_is_told_why_it_has_no_timers(agent, monkeypatch):
    client = countdown.connect()
    client.disown()
    with pytest.raises(RuntimeError, match="put `expires` into the worker"):
        client.start("x", 1)
    monkeypatch.setattr(channel, "_opened", (os.getpid(), None))
    monkeypatch.setattr(countdown, "_client", None)
    monkeypatch.setattr(env, "get", lambda name, default="": "17")
    with pytest.raises(RuntimeError, match="put `expires` into the worker"), timer.expires(after=1):
        raise AssertionError("not reached")


# --- the table -----------------------------------------------------------------------------------


@pytest.fixture
def made():
    it = TimerTable()
    yield it
    it.close()


def test_a_timer_is_read_while_it_is_set(made):
    assert read(made.descriptor) == []
    row = made.set("load", 60.0, 1060.5)
    assert read(made.descriptor) == [Timer(row, 1060.5, 60.0, "load")]
    made.clear(row)
    assert read(made.descriptor) == []
    assert made.set("load", 60.0, 1061.5) == row
    assert read(made.descriptor) == [Timer(row, 1061.5, 60.0, "load")], "another timer"


def test_row_has_the_scope_and_duration_set_last(made):
    for scope, after in (("a", 1.0), ("a", 2.0), ("long " * 9, 2.0), ("b", 2.0)):
        row = made.set(scope, after, 1.0)
        assert read(made.descriptor) == [Timer(row, 1.0, after, scope)]
        made.clear(row)


def test_scope_of_any_text_can_be_shown(made):
    for scope, shown in {
        "": "",
        "x" * 1000 + "/train.py#12": "/train.py#12",
        "ä" * 300: "ä" * 100,
        "two\nlines \x1b[31m": "two?lines ?[31m",
        "half \udce4 letter": "half \\udce4 letter",
    }.items():
        row = made.set(scope, 1.0, 1.0)
        (timer,) = read(made.descriptor)
        assert timer.scope.endswith(shown)
        assert timer.scope.isprintable()
        assert len(timer.scope.encode()) <= timer_table.ROW_BYTES
        made.clear(row)


def test_table_refuses_a_timer_when_it_is_full(made):
    rows = [made.set(f"scope {number}", 1.0, 1.0) for number in range(timer_table.MOST)]
    assert len(set(rows)) == timer_table.MOST == len(read(made.descriptor))
    with pytest.raises(RuntimeError, match="1023 timers, the maximum: release some"):
        made.set("one more", 1.0, 1.0)
    made.clear(rows[5])
    assert made.set("one more", 1.0, 1.0) == rows[5]


def test_threads_do_not_get_in_each_others_way(made):
    def use(number):
        for _ in range(300):
            mine = made.set(f"thread {number}", float(number + 1), 1000.0 + number)
            found = {timer.row: timer for timer in read(made.descriptor)}
            seen.append(found[mine] == Timer(mine, 1000.0 + number, number + 1, f"thread {number}"))
            made.clear(mine)

    seen = []
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    assert seen == [True] * 1200
    assert read(made.descriptor) == []


def test_junk_is_no_error(made):
    for junk in (b"", b"\x01", b"\xff" * 4096, random.Random(7).randbytes(8192)):
        os.ftruncate(made.descriptor, 0)
        os.pwrite(made.descriptor, junk, 0)
        assert all(timer.scope.isprintable() for timer in read(made.descriptor))
        os.ftruncate(made.descriptor, timer_table.STACKS_AT)  # the mapping stays whole
