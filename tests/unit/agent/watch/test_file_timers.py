"""Torch's own timers by a named pipe."""

import asyncio
import json
import os
import signal
import time

import pytest

from tests.unit.agent.support import in_loop
from torchelastic.agent.watch import worker_timers
from torchelastic.agent.watch.worker_timers import FileTimers, PipeRequest, parse_request
from torchelastic.errors import ConfigError


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


def test_what_torch_writes_is_understood():
    from torch.distributed.elastic import timer

    request = timer.FileTimerRequest(17, "load", 1060.5, signal.SIGKILL)
    assert parse_request(request.to_json().encode()) == PipeRequest(17, "load", 1060.5, 9)


def test_what_it_does_not_write_is_nothing():
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


def test_it_is_there_when_the_environment_says_so(tmp_path):
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
