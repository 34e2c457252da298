"""Timers by a queue: processes that no agent looks after."""

import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support import poll_for
from torchelastic.timer import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    TimerRequest,
    TimerServer,
    expires,
)
from torchelastic.timer.timer_requests import RequestQueue


@pytest.fixture
def requests():
    """A queue of one process in place of multiprocessing's, which has the same methods."""
    return queue.Queue()


@pytest.fixture
def server(requests):
    made = LocalTimerServer(requests, max_interval=60)
    yield made
    made.stop()


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_the_client_speaks_of_its_own_process(requests):
    client = LocalTimerClient(requests)
    before = time.monotonic()
    with expires(after=60, scope="load", client=client):
        acquired = requests.get_nowait()
        assert (acquired.worker_id, acquired.scope_id) == (os.getpid(), "load")
        assert before + 60 <= acquired.expiration_time <= time.monotonic() + 60
    assert requests.get_nowait() == TimerRequest(os.getpid(), "load", -1)
    with pytest.raises(ValueError, match="is a wall clock time"):
        client.acquire("load", time.time() + 60)


def test_the_queue_gives_what_there_is(requests):
    it = MultiprocessingRequestQueue(requests)
    assert it.get(1, timeout=0) == []
    for number in range(3):
        requests.put(TimerRequest(number, "", 1))
    assert it.size() == 3
    assert [request.worker_id for request in it.get(2, timeout=60)] == [0, 1]
    it.wake()
    assert [request.worker_id for request in it.get(5, timeout=60)] == [2]


def test_expired_timers_by_worker(server):
    me, parent = os.getpid(), os.getppid()
    timers = [(me, "a", 10), (me, "b", 20), (parent, "a", 5), (me, "c", 30)]
    server.register_timers([TimerRequest(*timer) for timer in timers])
    assert server.next_deadline() == 5
    assert server.get_expired_timers(4) == {}
    expired = server.get_expired_timers(20)
    assert {pid: [item.scope_id for item in items] for pid, items in expired.items()} == {
        me: ["a", "b"],
        parent: ["a"],
    }
    server.clear_timers({me})
    assert server.next_deadline() == 5


def test_a_release_ends_the_timer_acquired_last_in_that_scope(server):
    me = os.getpid()
    for scope, at in (("a", 10), ("a", 20), ("a", -1)):
        server.register_timers([TimerRequest(me, scope, at)])
    assert server.next_deadline() == 10
    server.register_timers([TimerRequest(me, scope, -1) for scope in ("never", "a", "a")])
    assert server.next_deadline() is None
    assert server._watched == {}, "no descriptor is kept of a process without timers"


def test_timers_of_processes_that_are_gone_are_none(server, sleeper):
    sleeper.kill()
    sleeper.wait()
    server.register_timers([TimerRequest(sleeper.pid, "a", 10), TimerRequest(os.getpid(), "b", 20)])
    assert server.next_deadline() == 20


def test_a_pid_that_has_become_anothers_is_not_held_to_the_timers_of_the_first(server, sleeper):
    server.register_timers([TimerRequest(sleeper.pid, "old", 10)])
    sleeper.kill()  # but not waited for: its pid is as good as another's
    poll_for(lambda: server._watched[sleeper.pid].has_ended(), what="its end")
    server.register_timers([TimerRequest(sleeper.pid, "new", 20)])
    assert server.next_deadline() == 20


def test_a_released_process_lives(server, sleeper, requests):
    server.start()
    requests.put(TimerRequest(sleeper.pid, "nap", time.monotonic() + 600))
    requests.put(TimerRequest(sleeper.pid, "nap", -1))
    poll_for(lambda: requests.empty() and not server._watched, what="the release")
    assert sleeper.poll() is None


def test_stop_is_at_once_and_start_again_is_possible(server):
    for _ in range(2):
        server.start()
        with pytest.raises(RuntimeError, match="stop it first"):
            server.start()
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 30
    server.stop()  # nothing to do


def test_a_process_is_killed_when_its_time_is_up_not_when_it_pleases_the_server():
    """`max_interval` is a minute, and nobody sends another request, by a real queue."""
    context = multiprocessing.get_context("spawn")
    requests = context.Queue()
    server = LocalTimerServer(requests)
    server.start()
    try:
        worker = context.Process(target=hang, args=(requests,))
        worker.start()
        worker.join(50)
        assert worker.exitcode == -signal.SIGKILL
        poll_for(lambda: not server._watched, what="its timers are forgotten")
    finally:
        server.stop()
        requests.close()
        requests.join_thread()


def hang(requests):
    with expires(after=0.05, client=LocalTimerClient(requests)):
        time.sleep(600)


class Scripted(TimerServer):
    """A server of one's own, as the 0.2 API lets one write it."""

    def __init__(self, answers):
        super().__init__(Endless(), max_interval=0.01)
        self.answers = answers
        self.cleared = []
        self.tried = threading.Event()

    def register_timers(self, timer_requests):
        assert timer_requests == []

    def clear_timers(self, worker_ids):
        self.cleared.append(worker_ids)
        if not self.answers:
            self.tried.set()

    def get_expired_timers(self, deadline):
        return {"w": [TimerRequest("w", "scope", deadline)]} if self.answers else {}

    def _reap_worker(self, worker_id):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Endless(RequestQueue):
    def size(self):
        return 0

    def get(self, size, timeout):
        time.sleep(timeout)
        return []


@pytest.mark.parametrize(
    ("answers", "cleared"), [([False, True], [set(), {"w"}]), ([OSError("no")], [{"w"}])]
)
def test_a_worker_that_cannot_be_ended_is_tried_again(answers, cleared, caplog):
    caplog.set_level(logging.WARNING)
    server = Scripted(list(answers))
    server.start()
    assert server.tried.wait(30)
    server.stop()
    assert server.cleared[: len(cleared)] == cleared
    assert "timer 'scope' expired" in caplog.text


def test_an_error_in_the_server_does_not_end_the_watch(caplog, monkeypatch):
    monkeypatch.setattr("torchelastic.timer.timer_server.TRY_AGAIN", 0.001)
    server = Scripted([])
    monkeypatch.setattr(server, "register_timers", lambda requests: calls.append(1) or 1 / 0)
    calls = []
    server.start()
    poll_for(lambda: len(calls) > 2, what="it goes on")
    server.stop()
    assert "continues after an error" in caplog.text
