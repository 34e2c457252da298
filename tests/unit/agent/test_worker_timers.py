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
from tests.unit.agent.cast import Workers, in_loop
from torchelastic.agent.watch import stack_reader, worker_timers
from torchelastic.agent.watch.worker_timers import (
    FileTimers,
    PipeRequest,
    Timers,
    first,
    parse_request,
    pause,
)
from torchelastic.errors import ConfigError
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


def test_busy_worker_is_told_by_its_threads(sleeper):
    def sleeps():
        return not stack_reader.is_busy(sleeper.pid)

    poll_for(sleeps, what="it sleeps")
    assert stack_reader.is_busy(os.getpid())
    assert not stack_reader.is_busy(2**22 + 1), "no such process"


# --- Torch's own timers by a named pipe ----------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    it = FileTimers(tmp_path / "pipe")
    yield it
    asyncio.run(closed(it))


async def closed(it):
    it.close()


def ask(pid=1, scope="load", at=1060.0, signum=9):
    fields = {"pid": pid, "scope_id": scope, "expiration_time": at, "signal": signum}
    return json.dumps({"version": 1, **fields}).encode() + b"\n"


def test_request_of_torch_timer_is_parsed():
    from torch.distributed.elastic import timer

    request = timer.FileTimerRequest(17, "load", 1060.5, signal.SIGKILL)
    assert parse_request(request.to_json().encode()) == PipeRequest(17, "load", 1060.5, 9)


def test_junk_in_timer_pipe_is_no_request():
    junk = [b"", b"{}", b"[]", b"7", b"\xff", ask()[:20], ask(pid="x"), ask(at=None), b"[" * 9999]
    assert [parse_request(line) for line in junk] == [None] * len(junk)


def test_the_wall_clock_is_left_behind(made):
    made._take(ask(at=1060.0), wall=1000.0, now=50.0)
    (timer,) = made.of(1)
    assert (timer.expires_at, timer.after, timer.scope) == (110.0, 60.0, "load")
    made._take(ask(at=990.0), wall=1000.0, now=50.0)
    assert made.of(1)[0].expires_at == 50.0, "a late one is due at once"


def test_timers_are_acquired_and_released_by_process_and_scope(made):
    """One without a signal ends nobody."""
    released, harmless = ask(1, "a", -1, 0), ask(2, "c", signum=0)
    made._take(ask(1, "a") + ask(1, "b") + ask(2, "a") + released + harmless, 1000.0, 50.0)
    assert [timer.scope for timer in made.of(1)] == ["b"]
    assert [timer.scope for timer in made.of(2)] == ["a"]
    made.keep({2})
    assert made.of(1) == []
    made.forget(2)
    assert made.of(2) == []


def test_lines_come_in_pieces_and_with_junk(made):
    made._take(b"junk\n" + ask()[:10], 1000.0, 50.0)
    assert made.of(1) == []
    made._take(ask()[10:] + b"x" * 5000, 1000.0, 50.0)
    assert [timer.scope for timer in made.of(1)] == ["load"]
    made._take(b"\n" + ask(2), 1000.0, 50.0)
    assert len(made.of(2)) == 1, "a line without an end is given up"


def test_scopes_are_bounded_and_can_be_shown(made, monkeypatch):
    monkeypatch.setattr(worker_timers, "MOST_TIMERS", 2)
    made._take(ask(1, "a\nb") + ask(1, "c") + ask(1, "d") + ask(1, "c", 1070.0), 1000.0, 50.0)
    assert [(timer.scope, timer.after) for timer in made.of(1)] == [("a?b", 60.0), ("c", 70.0)]


@in_loop
async def test_a_client_that_opens_the_pipe_as_torchs_does_is_heard(tmp_path):
    it, heard = FileTimers(tmp_path / "pipe"), asyncio.Event()
    it.listen(heard.set)
    pipe = os.open(it.path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(pipe, ask(at=time.time() + 60))
    os.close(pipe)
    await heard.wait()
    (timer,) = it.of(1)
    it.close()
    assert timer.after <= 60
    assert not (tmp_path / "pipe").exists()


def test_file_timers_exist_if_environment_asks(tmp_path):
    for environ in ({}, {"TORCHELASTIC_TIMER_FILE": "x"}, {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}):
        assert FileTimers.wanted(environ, tmp_path) is None
    enabled = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    it = FileTimers.wanted(enabled, tmp_path)
    assert it.path == tmp_path / "timers"
    asyncio.run(closed(it))
    nowhere = {"TORCHELASTIC_TIMER_FILE": str(tmp_path / "no" / "where")}
    with pytest.raises(
        ConfigError, match=r"cannot be used as a named pipe .*: choose another path"
    ):
        FileTimers.wanted(enabled | nowhere, tmp_path)
