"""What an agent tells of the end of a worker: whose doing it was, and what else it knows."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from torchelastic.agent import workers as module
from torchelastic.agent.oom import Memory, Sources
from torchelastic.agent.sampling import Sampling
from torchelastic.agent.supervisor import WorkerExit
from torchelastic.agent.workers import Workers
from torchelastic.clock import FakeClock
from torchelastic.config import Entry, LaunchConfig
from torchelastic.worker import error_file, slate
from torchelastic.worker.orders import Erred, PeerLost


class Kernel:
    """Says that so many processes were killed for want of memory."""

    def __init__(self, directory) -> None:
        self._counts = directory / "memory.events"
        self.killed(0)
        sources = Sources(directory, vmstat=directory / "no", log=directory / "no")
        self.memory = Memory(sources)

    def killed(self, number: int) -> None:
        self._counts.write_text(f"oom_kill {number}\n")


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


@pytest.fixture
def told():
    """Failures, as they are told."""
    return []


@pytest.fixture
def workers(monkeypatch, told, kernel):
    """Two workers in generation 3: ranks 4 and 5."""
    monkeypatch.setattr(module.Cgroup, "create", lambda: None)
    monkeypatch.setattr(module, "Memory", lambda: kernel.memory)
    made = Workers(
        LaunchConfig(),
        Entry("script", "train.py"),
        {},
        nursery=SimpleNamespace(zygote=None, pids=set()),
        node_logs=None,
        narrator=SimpleNamespace(
            name="node-a",
            worker_failed=told.append,
            worker_exited=lambda *_: None,
            worker_killed=lambda *_, **__: None,
        ),
        clock=None,
        tell_event=lambda event: None,
        secret=None,
        snapshots=None,
        sampling=Sampling(lambda *_: None, FakeClock()),
    )
    made._places.update({0: (3, 4), 1: (3, 5)})
    made._supervisor = SimpleNamespace(
        alive=(0, 1), has_ended=lambda rank: rank in ended, pid=lambda rank: None, kill=lambda _: 0
    )
    ended = made.ended = set()
    made._slates[0] = slate.create()
    yield made
    os.close(made._slates[0])


def ends(workers, exitcode: int, local_rank: int = 0) -> None:
    workers._exited(WorkerExit(local_rank, 42, exitcode))


def test_a_kill_by_the_kernel(workers, kernel, told):
    kernel.killed(1)
    ends(workers, -9)
    assert told[0].message == "killed by SIGKILL: out of memory"
    assert told[0].out_of_memory
    assert (told[0].generation, told[0].rank, told[0].stopped) == (3, 4, False)


def test_a_kill_from_outside(workers, told):
    ends(workers, -9)
    assert told[0].message == "killed by SIGKILL"
    assert told[0].hint.startswith("somebody sent SIGKILL: the kernel counts no kill")


def test_a_kill_of_ours_is_not_the_kernel_s(workers, kernel, told):
    kernel.killed(1)
    workers.kill(0, "it hangs", "its stack")
    ends(workers, -9)
    assert (told[0].message, told[0].traceback, told[0].hint) == ("it hangs", "its stack", "")
    assert not told[0].stopped


def test_of_who_crashes_before_we_kill_it_our_word_stands(workers, told):
    assert workers.last_stack(0) is None
    workers.condemn(0, "timer 'data' expired after 3 s", "its stack")
    assert workers.last_stack(0) == "its stack"
    ends(workers, -11)
    assert (told[0].message, told[0].exitcode) == ("timer 'data' expired after 3 s", -11)


def test_who_is_killed_because_its_world_is_over_was_stopped(workers, told):
    workers.kill(0, "not free 100 ms after its world was over", over=True)
    ends(workers, -9)
    assert told[0].stopped


def test_who_ends_after_the_order_to_stop_was_stopped(workers, told):
    workers.begin_to_stop()
    workers._last_words_of[0] = error_file.ErrorRecord("ValueError: late", "Traceback")
    ends(workers, 1)
    ends(workers, -15, local_rank=1)
    assert [(one.rank, one.stopped) for one in told] == [(4, True)]


def test_who_had_told_why_before_the_order_to_stop_was_not_stopped(workers, told):
    workers._last_words_of[0] = error_file.ErrorRecord("ValueError: early", "Traceback")
    workers.begin_to_stop()
    ends(workers, 1)
    assert [(one.message, one.stopped) for one in told] == [("ValueError: early", False)]


def test_who_was_dead_before_the_order_to_stop_was_not_stopped(workers, kernel, told):
    workers.ended.add(0)
    kernel.killed(1)
    workers.begin_to_stop()
    ends(workers, -9)
    assert [(one.rank, one.stopped, one.out_of_memory) for one in told] == [(4, False, True)]


def test_an_error_of_a_worker_that_lives_on(workers, told):
    workers._erred(0, Erred(3, 7, "MemoryError: ", "Traceback", True))
    workers._erred(0, PeerLost(3, 7, "Connection closed by peer"))
    assert [one.hint for one in told] == [
        "out of memory: an allocation in main memory was refused",
        "",
    ]
    assert all(one.alive for one in told)


def test_the_last_collective_of_a_worker(workers, told):
    worker = slate.Slate(workers._slates[0])
    shown = worker.collectives
    shown.enter(3)
    row = shown.row_of("0")
    shown.launched(1, row, 14, b"all_reduce")
    ends(workers, -9)
    shown.waits(row, 14, b"all_reduce")
    ends(workers, 1)
    shown.enter(4)
    shown.launched(1, shown.row_of("0"), 1, b"broadcast")
    ends(workers, 1)
    worker.close()
    assert [(one.collective, one.entered, one.waited) for one in told] == [
        ("all_reduce #14", 14, False),
        ("all_reduce #14, in which it waited", 14, True),
        ("", -1, False),
    ]


def test_who_shows_nothing(workers, told):
    ends(workers, 1, local_rank=1)
    assert (told[0].collective, told[0].entered, told[0].waited) == ("", -1, False)
