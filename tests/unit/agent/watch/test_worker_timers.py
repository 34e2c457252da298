"""Who has not come out of a block in time: decided from memory, without the worker's help."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import poll_for
from tests.unit.agent.support import in_loop
from torchelastic.agent.watch import stack_reader, worker_timers
from torchelastic.agent.watch.worker_timers import FileTimers, Timers, first, pause
from torchelastic.timer.timer_table import STACKS_AT, Timer, TimerTable, read

SIGNUM = signal.SIGRTMIN + 7
MESSAGE = {"type": "timers", "signal": int(SIGNUM)}


def timer(expires_at, scope="scope", after=60.0):
    return Timer(1, expires_at, after, scope)


@pytest.mark.parametrize(
    ("found", "scope"),
    [
        ([], None),
        ([timer(101)], None),
        ([timer(100)], "scope"),
        ([timer(99, "b"), timer(98, "a"), timer(500, "c")], "a"),
        ([timer(float("nan"))], None),
    ],
)
def test_the_timer_that_expired_first(found, scope):
    expired = first(found, now=100)
    assert (expired and expired.scope) == scope


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        ([], worker_timers.LOOK),
        ([timer(100.125)], 0.125),
        ([timer(400), timer(100.125)], 0.125),
        ([timer(400)], worker_timers.LOOK),
        ([timer(50)], worker_timers.LOOK),
    ],
)
def test_when_to_look_again(found, seconds):
    assert pause(found, now=100) == seconds


class Workers:
    """What timers know of the workers of a node."""

    def __init__(self, *pids):
        self.stopping, self.killed, self.condemned, self.helpers = False, [], {}, set()
        self.some = asyncio.Event()
        self.pids = dict(enumerate(pids))
        self.pid = self.pids.get

    @property
    def alive(self):
        return tuple(self.pids)

    def condemn(self, local_rank, why, stack=""):
        self.condemned[local_rank] = why, stack

    def kill(self, local_rank, why, stack):
        self.killed.append((local_rank, why, stack))
        self.some.set()


@pytest.fixture
def table():
    made = TimerTable()
    yield made
    made.close()


@pytest.fixture
def sleeper():
    """A process to get signals, which it takes no notice of."""
    code = f"import signal, time; signal.signal({int(SIGNUM)}, signal.SIG_IGN); print(flush=True); "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(600)"], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


async def watched_until_killed(watch, workers):
    watching = asyncio.create_task(watch.watch(workers))
    try:
        await asyncio.wait_for(workers.some.wait(), 30)
    finally:
        watching.cancel()
        watch.close()
    return workers.killed


def watching(table, process):
    """Timers of one worker, of which one has expired."""
    watch, workers = Timers(), Workers(process.pid)
    watch.handed(0, process.pid, MESSAGE, os.dup(table.descriptor))
    table.set("x", 1.0, time.monotonic() - 1)
    return watch, workers


@pytest.fixture
def stack(table, sleeper, monkeypatch):
    """The stack that is read of a worker that writes this at the signal."""

    def read_stack(written):
        def write(*_):
            os.pwrite(table.descriptor, written, STACKS_AT)

        monkeypatch.setattr(worker_timers.os, "kill", write)
        watched = worker_timers.TimedWorker(sleeper.pid, table.descriptor, int(SIGNUM))
        return asyncio.run(worker_timers._stack(watched, set()))

    return read_stack


@in_loop
async def test_an_expired_timer_ends_its_worker_and_no_other(table, sleeper, monkeypatch):
    """The stack is what the worker writes; a stack from before does not count."""
    os.pwrite(table.descriptor, b"an older stack\n", STACKS_AT)
    innocent = TimerTable()
    innocent.set("in time", 600.0, time.monotonic() + 600)

    def write_stacks(pid, signum):
        assert (pid, signum) == (sleeper.pid, SIGNUM)
        os.pwrite(table.descriptor, b"in train.py\n", os.fstat(table.descriptor).st_size)

    watch, workers = Timers(), Workers(os.getpid(), sleeper.pid)
    watch.handed(0, os.getpid(), MESSAGE, os.dup(innocent.descriptor))
    watch.handed(1, sleeper.pid, MESSAGE, os.dup(table.descriptor))
    table.set("long", 600.0, time.monotonic() + 600)
    table.set("short", 0.05, time.monotonic() + 0.05)
    monkeypatch.setattr(worker_timers.os, "kill", write_stacks)
    words = "timer 'short' expired after 0.05 s"
    assert await watched_until_killed(watch, workers) == [(1, words, "in train.py")]
    assert workers.condemned == {1: (words, "in train.py")}
    innocent.close()


@pytest.mark.parametrize("frozen", [False, True])
@in_loop
async def test_a_worker_that_writes_no_stack_is_ended_anyway(frozen, table, sleeper, monkeypatch):
    monkeypatch.setattr(stack_reader.shutil, "which", lambda name: None)
    if frozen:
        monkeypatch.setattr(worker_timers, "is_frozen", lambda pid: True)
        monkeypatch.setattr(
            worker_timers.os, "kill", lambda *_: pytest.fail("it was sent a signal")
        )
    else:
        monkeypatch.setattr(worker_timers, "STACKS_TIMEOUT", 0.05)
    found = await watched_until_killed(*watching(table, sleeper))
    stack = "no stack could be read"
    stack = f"it is frozen: {stack}" if frozen else stack
    assert found == [(0, "timer 'x' expired after 1 s", stack)]


@in_loop
async def test_a_mistake_in_reading_its_stack_does_not_spare_a_worker(table, sleeper, monkeypatch):
    async def stack(watched, helpers):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(worker_timers, "_stack", stack)
    [(local_rank, words, _)] = await watched_until_killed(*watching(table, sleeper))
    assert (local_rank, words) == (0, "timer 'x' expired after 1 s")


@in_loop
async def test_workers_that_are_being_stopped_are_left_to_that(table, sleeper, monkeypatch):
    looks = []
    monkeypatch.setattr(worker_timers, "LOOK", 0.001)
    monkeypatch.setattr(worker_timers, "read", lambda fd: looks.append(fd) or read(fd))
    watch, workers = watching(table, sleeper)
    workers.stopping = True
    task = asyncio.create_task(watch.watch(workers))
    while len(looks) < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    watch.close()
    assert workers.killed == []


@in_loop
async def test_one_that_ends_while_its_stack_is_read_is_not_killed_again(
    table, sleeper, monkeypatch
):
    watch, workers = watching(table, sleeper)
    ended = asyncio.Event()

    async def stack(watched, helpers):
        watch.ended(0)
        workers.pids.clear()
        assert read(watched.descriptor), "its table can be read all the same"
        words = "timer 'x' expired after 1 s"
        assert workers.condemned == {0: (words, "")}, "its words are not lost"
        ended.set()
        return ""

    monkeypatch.setattr(worker_timers, "_stack", stack)
    task = asyncio.create_task(watch.watch(workers))
    await asyncio.wait_for(ended.wait(), 30)
    await asyncio.sleep(0)
    task.cancel()
    assert workers.killed == []


@in_loop
async def test_torchs_timers_end_their_worker_too(tmp_path, sleeper, monkeypatch):
    monkeypatch.setattr(stack_reader.shutil, "which", lambda name: None)
    watch, workers = Timers(), Workers(os.getpid(), sleeper.pid)
    watch.take_also(FileTimers(tmp_path / "pipe"))
    ask = {"pid": sleeper.pid, "scope_id": "torch", "signal": 9}
    with open(tmp_path / "pipe", "w") as pipe:
        print(json.dumps(ask | {"expiration_time": time.time() + 0.05}), file=pipe)
    ((local_rank, why, stack),) = await watched_until_killed(watch, workers)
    assert (local_rank, stack) == (1, "no stack could be read")
    assert why.startswith("timer 'torch' expired after ")
    assert not (tmp_path / "pipe").exists()


def test_junk_is_closed_and_forgotten(table):
    """Also a descriptor that could be waited for: a table is memory."""
    watch, (read_end, write_end) = Timers(), os.pipe()
    for message, handed in (
        ({}, os.dup(table.descriptor)),
        ({"type": "other", "signal": int(SIGNUM)}, os.dup(table.descriptor)),
        ({"type": "timers"}, os.dup(table.descriptor)),
        ({"type": "timers", "signal": "41"}, os.dup(table.descriptor)),
        ({"type": "timers", "signal": int(signal.SIGKILL)}, os.dup(table.descriptor)),
        (MESSAGE, read_end),
    ):
        watch.handed(0, os.getpid(), message, handed)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handed)
    os.close(write_end)


def test_a_stack_is_read_when_all_of_it_is_written(table, stack, monkeypatch):
    """A worker that waits for a processor in the middle of writing is waited for."""
    busy = iter([True, True, False])
    looks = []

    def is_busy(pid):
        looks.append(pid)
        if len(looks) == 2:
            os.pwrite(table.descriptor, b"second line\n", os.fstat(table.descriptor).st_size)
        return next(busy)

    monkeypatch.setattr(worker_timers, "is_busy", is_busy)
    assert stack(b"first line\n") == "first line\nsecond line"


def test_one_that_is_always_busy_is_not_waited_for_in_vain(stack, monkeypatch):
    monkeypatch.setattr(worker_timers, "is_busy", lambda pid: True)
    monkeypatch.setattr(worker_timers, "LOOK_AGAIN", 0.0001)
    assert stack(b"a line\n") == "a line"


def test_who_is_busy(sleeper):
    def sleeps():
        return not stack_reader.is_busy(sleeper.pid)

    poll_for(sleeps, what="it sleeps")
    assert stack_reader.is_busy(os.getpid())
    assert not stack_reader.is_busy(2**22 + 1), "no such process"


def test_of_a_long_stack_the_end_is_shown(stack, monkeypatch):
    monkeypatch.setattr(worker_timers, "STACK_BYTES", 12)
    assert stack(b"x" * 99 + b"main thread\n") == "main thread"


def test_a_stack_is_shown_as_those_of_a_hang(stack):
    written = b'Current thread 0x7f00 (most recent call first):\n  File "t.py", line 12 in load\n'
    assert stack(written) == 'main thread, most recent call first:\n  File "t.py", line 12 in load'
