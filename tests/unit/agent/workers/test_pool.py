"""What is known of workers without asking them, and what is told of the end of one."""

import math
import os
import time
from types import SimpleNamespace

import pytest

from tests.unit.agent.support import in_loop
from tests.unit.worker import entering
from torchelastic.agent.lifecycle.node_state import WorkerSucceeded
from torchelastic.agent.telemetry.progress_sampler import ProgressSampler
from torchelastic.agent.workers import pool as module
from torchelastic.agent.workers.oom import OomKills, Sources
from torchelastic.agent.workers.pool import WorkerPool
from torchelastic.agent.workers.supervisor import WorkerExit
from torchelastic.clock import FakeClock
from torchelastic.config import Entry, LaunchConfig
from torchelastic.worker import collective_log, error_file, optimizer_steps, orders, status_page
from torchelastic.worker.orders import Erred, Keeps, PeerLost, Stopped, Up


@pytest.fixture
def told():
    """Progress and failures, as they are told."""
    return []


@pytest.fixture
def killed(tmp_path):
    """Makes the kernel count so many kills for want of memory."""

    def tell(number):
        (tmp_path / "memory.events").write_text(f"oom_kill {number}\n")

    tell(0)
    return tell


@pytest.fixture
def workers(monkeypatch, told, killed, tmp_path):
    """Without processes; local rank 0 has a slate."""
    sources = Sources(tmp_path, vmstat=tmp_path / "no", log=tmp_path / "no")
    monkeypatch.setattr(module, "OomKills", lambda: OomKills(sources))
    monkeypatch.setattr(module.Cgroup, "create", lambda: None)
    made = WorkerPool(
        LaunchConfig(nproc_per_node=2),
        Entry("script", "train.py"),
        {},
        factory=SimpleNamespace(zygote=None, serve=lambda supervisor: None),
        node_logs=None,
        reporter=SimpleNamespace(
            name="node-a",
            training=lambda *_: None,
            worker_failed=told.append,
            worker_exited=lambda *_: None,
            worker_killed=lambda *_, **__: None,
        ),
        clock=None,
        tell_event=lambda event: None,
        secret=None,
        snapshots=None,
        sampling=ProgressSampler(lambda *progress: told.append(progress), FakeClock()),
    )
    made._records[0].page = status_page.create()
    yield made
    for record in made._records.values():
        if record.page is not None:
            os.close(record.page)
    made._memory.close()


@pytest.fixture
def worker(workers):
    """What the worker writes to."""
    made = status_page.StatusPage(workers._records[0].page)
    yield made
    made.close()


def test_added_helper_is_not_reaped(workers):
    workers.helpers.add(os.getpid())
    assert os.getpid() in workers._supervisor.exempt


def place(workers, local_rank, generation, rank):
    workers._records[local_rank] = workers._records[local_rank].successor(generation, rank)


def enter(workers, generation):
    workers.tell(0, entering.enter(generation))


def test_on_the_way_from_the_order_to_the_first_step(workers, worker):
    assert workers.entering_since(0) is None
    before = time.monotonic()
    enter(workers, 0)
    assert before <= workers.entering_since(0) <= time.monotonic()
    worker.entered(0, 0)
    assert workers.entering_since(0) is None
    enter(workers, 1)
    workers._records[0] = workers._records[0].successor(-1, 1)
    assert workers.entering_since(0) is None, "a replacement is told first"


def test_a_last_step_of_the_world_before_is_progress(workers, worker):
    enter(workers, 0)
    worker.entered(0, 0)
    enter(workers, 1)
    told = workers.entering_since(0)
    worker.entered(0, 1)
    assert workers.entering_since(0) > told
    worker.unhurried()  # it has left that world
    assert workers.entering_since(0) <= told


def test_an_unhurried_last_step_of_the_world_before_may_take_any_time(workers, worker):
    """The next world is known, and an evaluation goes on in this one: nobody hangs."""
    enter(workers, 0)
    workers._heard(0, orders.to_json(Up(0, 0)))
    worker.entered(0, 0)
    enter(workers, 1)
    told = workers.entering_since(0)
    worker.unhurried()
    assert workers.entering_since(0) == math.inf
    worker.hurried()
    assert told < workers.entering_since(0) < math.inf
    worker.unhurried()  # it has left that world, and says so: only now it sets out
    before = time.monotonic()
    workers._heard(0, orders.to_json(Stopped(0, 1)))
    assert before <= workers.entering_since(0) <= time.monotonic()


@pytest.mark.parametrize(
    ("report", "on_the_way"),
    [
        (Stopped(0, 3), True),
        (Stopped(1, 3), False),
        (PeerLost(1, 3, "gone"), False),
        (Erred(1, 3, "boom", "traceback"), False),
        (PeerLost(0, 3, "gone"), True),
    ],
)
def test_worker_that_stopped_is_not_entering(workers, report, on_the_way):
    enter(workers, 1)
    workers._heard(0, orders.to_json(report))
    assert (workers.entering_since(0) is not None) is on_the_way


def test_a_workers_garbage_changes_nothing(workers):
    enter(workers, 1)
    for garbage in (
        {"type": "stopped", "generation": 1},
        {"type": "stopped", "generation": 1, "step": "three"},
        {"type": "up", "generation": None, "step": 3},
        {"type": ["stopped"], "generation": 1, "step": 3},
        {"type": "progress", "step": "three"},
        {},
    ):
        workers._heard(0, garbage)
        assert workers.entering_since(0) is not None, garbage
    assert workers.seen().step == -1


# --- how far they are ----------------------------------------------------------------------------


def test_when_a_worker_has_stopped_its_last_step_is_reported(workers, worker, told):
    enter(workers, 0)
    worker.rank = 2
    worker.entered(0, 7)
    workers._heard(0, orders.to_json(Stopped(0, 8)))
    [(generation, progress)] = told
    assert (generation, progress.ranks, progress.steps) == (0, [2], [7])


@pytest.mark.parametrize(
    ("steps", "counted", "trained"),
    [([], -1, -1), ([(4, 7)], -1, -1), ([(4, 7), (4, 8)], -1, 4), ([(3, 7), (3, 8)], 4, 4)],
    ids=["nothing is told", "in its first step", "past it", "by its optimizer"],
)
def test_a_generation_has_trained_once_a_worker_is_past_its_first_step(
    workers, worker, steps, counted, trained
):
    for step in steps:
        worker.entered(*step)
    workers.counted.newest = counted
    assert workers.seen().trained == trained
    worker.entered(5, 8)
    workers.counted.newest = -1
    assert workers.seen().trained == trained, "it is remembered"


def test_the_state_of_a_generation_is_held_by_who_has_entered_a_step_of_it(in_world, worker):
    worker.entered(4, 7)
    assert in_world.seen().holds == 4
    place(in_world, 0, 5, 4)
    in_world._heard(0, orders.to_json(Keeps()))
    assert in_world.seen().holds == -1, "only the worker before it had entered a step"
    worker.entered(5, 7)
    assert in_world.seen().holds == 5
    in_world._supervisor.alive = (1,)
    assert in_world.seen().holds == -1


@pytest.fixture
def counting(workers):
    """What a plain script's worker, local rank 1, has handed over with its first step."""
    place(workers, 1, 3, 5)
    descriptor = status_page.create()
    workers._handed(1, {"type": optimizer_steps.MESSAGE}, descriptor)
    made = status_page.StatusPage(descriptor)
    made.taken_before(40)
    made.entered(0, 41)
    yield made
    made.close()
    workers.counted.close()


def test_steps_of_a_plain_script_are_reported_and_named_and_give_no_restarts(
    workers, counting, told
):
    counting.entered(0, 47)
    workers.look()
    [(generation, progress)] = told
    assert (generation, progress.ranks, progress.steps, progress.before) == (3, [5], [47], 40)
    workers._fail(1, pid=7, exitcode=1, message="boom")
    assert told[1].step == 47
    assert workers.seen().step == -1
    assert workers.counted.newest == 3
    assert workers.progress(1) is None, "nobody is ended by it"
    assert workers.counted.seen(1)[:2] == (3, 47)


def test_worker_that_reports_steps_is_not_counted(workers, counting, told):
    workers._heard(1, orders.to_json(Keeps()))
    workers.look()
    assert told == []


def test_a_worker_that_cuts_its_memory_off_is_not_counted(workers, counting, told):
    os.ftruncate(counting._descriptor, 8)
    workers.look()
    assert (told, workers.counted.seen(1)) == ([], None)


def test_a_script_with_snapshots_gets_a_status_page_and_shows_its_step(workers):
    given = []
    workers._supervisor.tell = lambda local_rank, message, fds: given.append((message, *fds))
    place(workers, 1, 4, 1)
    workers._heard(1, orders.to_json(Keeps()))
    [(message, descriptor)] = given
    assert message == orders.to_json(orders.StatusPage(silence=workers._config.lease))
    assert workers.seen().step == -1
    shown = status_page.StatusPage(descriptor)
    shown.entered(3, 50)  # of a generation before: nothing of this one
    assert workers.seen().step == -1
    shown.entered(4, 12)
    assert workers.seen().step == 12
    shown.close()


@in_loop
async def test_closed_pool_reads_no_closed_descriptor(workers, worker, caplog):
    """The sampler's task is cancelled later, and another file may have the number by then."""
    worker.entered(3, 7)
    page = workers._records[0].page
    await workers.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(page)
    workers.look()
    assert (caplog.messages, workers.progress(0), workers.seen().step) == ([], None, -1)


# --- how they end --------------------------------------------------------------------------------

EARLY = error_file.ErrorRecord("ValueError: early", "Traceback")


@pytest.fixture
def in_world(workers):
    """Two of them, in generation 3: ranks 4 and 5."""
    place(workers, 0, 3, 4)
    place(workers, 1, 3, 5)
    ended = workers.ended = set()
    workers._supervisor = SimpleNamespace(
        alive=(0, 1),
        has_ended=lambda rank: rank in ended,
        pid=lambda rank: None,
        kill=lambda _: 0,
        tell=lambda *_: None,
    )
    return workers


def ends(workers, exitcode: int, local_rank: int = 0) -> None:
    workers._exited(WorkerExit(local_rank, 42, exitcode))


def test_the_time_of_a_failure_is_that_in_the_error_file(in_world, told, tmp_path):
    path = tmp_path / "error.json"
    path.write_text('{"message": "boom", "timestamp": 7}')
    streams = {0: SimpleNamespace(error_file=str(path)), 1: SimpleNamespace(error_file="")}
    logs = SimpleNamespace(streams=streams, last_lines=lambda *_: ())
    in_world._records[0].logs = in_world._records[1].logs = logs
    ends(in_world, 1)
    before = time.time()
    ends(in_world, 1, local_rank=1)
    assert told[0].wall_time == 7
    assert told[1].wall_time >= before


def test_a_kill_by_the_kernel(in_world, killed, told):
    killed(1)
    ends(in_world, -9)
    assert told[0].message == "killed by SIGKILL: out of memory"
    assert (told[0].generation, told[0].rank, told[0].stopped) == (3, 4, False)
    assert told[0].out_of_memory


def test_a_kill_from_outside(in_world, told):
    ends(in_world, -9)
    assert told[0].message == "killed by SIGKILL"
    assert told[0].hint.startswith("the kernel reports no out-of-memory kill")


def test_a_kill_of_ours_is_not_the_kernel_s(in_world, killed, told):
    killed(1)
    in_world.kill(0, "it hangs", "its stack")
    ends(in_world, -9)
    assert (told[0].message, told[0].traceback, told[0].hint) == ("it hangs", "its stack", "")
    assert not told[0].stopped


def test_of_who_crashes_before_we_kill_it_our_word_stands(in_world, told):
    assert in_world.last_stack(0) is None
    in_world.condemn(0, "timer 'data' expired after 3 s", "its stack")
    assert in_world.last_stack(0) == "its stack"
    ends(in_world, -11)
    assert (told[0].message, told[0].exitcode) == ("timer 'data' expired after 3 s", -11)


def test_worker_killed_after_end_of_world_counts_as_stopped(in_world, told):
    in_world.kill(0, "not free 100 ms after its world was over", over=True)
    ends(in_world, -9)
    assert told[0].stopped


def test_exit_after_order_to_stop_counts_as_stopped(in_world, told):
    in_world.begin_to_stop()
    in_world._records[0].sent_error = EARLY
    ends(in_world, 1)
    ends(in_world, -15, local_rank=1)
    assert [(one.rank, one.stopped) for one in told] == [(4, True)]


def test_failure_before_order_to_stop_counts_as_failure(in_world, killed, told):
    in_world._records[0].sent_error = EARLY
    in_world.ended.add(1)
    killed(1)
    in_world.begin_to_stop()
    ends(in_world, 1)
    ends(in_world, -9, local_rank=1)
    assert [(one.rank, one.stopped, one.message) for one in told] == [
        (4, False, EARLY.message),
        (5, False, "killed by SIGKILL: out of memory"),
    ]


def test_an_error_of_a_worker_that_lives_on(in_world, told):
    in_world._erred(0, Erred(3, 7, "MemoryError: ", "Traceback", True))
    in_world._erred(0, PeerLost(3, 7, "Connection closed by peer"))
    refused = "out of memory: an allocation in main memory failed"
    assert [(one.hint, one.alive) for one in told] == [(refused, True), ("", True)]


def test_error_in_last_step_of_generation_before_says_so(in_world, told):
    """The worker was told to enter generation 3, and had not: its newcomers are not to blame."""
    in_world._erred(0, PeerLost(2, 7, "Connection closed by peer"))
    in_world._erred(0, PeerLost(3, 7, "Connection closed by peer"))
    assert [one.before for one in told] == [True, False]


def test_a_peer_that_left_because_training_is_done_is_not_lost(in_world, told):
    lost = orders.to_json(PeerLost(3, 7, "Connection closed by peer"))
    in_world.tell(0, orders.Over(3, "the training is done", finished=True, through=7))
    in_world._reported(0, lost)
    assert told == []
    in_world.tell(0, entering.enter(4))
    in_world._reported(0, lost)
    assert [one.message for one in told] == ["lost a peer: Connection closed by peer"]


def test_the_event_of_an_exit_says_how_long_it_took_after_the_program_had_returned(in_world):
    took = []
    in_world._reporter.worker_exited = lambda *exited: took.append(exited[-1])
    in_world._reported(0, orders.to_json(orders.Returned()))
    ends(in_world, 0)
    ends(in_world, 0, local_rank=1)
    assert took[0] > 0 == took[1]


def test_the_last_collective_of_a_worker(in_world, worker, told):
    shown = worker.collectives
    shown.enter(3)
    row = shown.row_of("0")
    shown.launched(1, row, 14, b"all_reduce")
    ends(in_world, -9)
    shown.waits(row, 14, b"all_reduce")
    ends(in_world, 1)
    shown.enter(4)
    shown.launched(1, shown.row_of("0"), 1, b"broadcast")
    ends(in_world, 1)
    ends(in_world, 1, local_rank=1)  # it shows nothing
    assert [(one.collective, one.entered, one.waited) for one in told] == [
        ("all_reduce #14", 14, False),
        ("all_reduce #14, waiting for others", 14, True),
        ("", -1, False),
        ("", -1, False),
    ]


# --- watching costs nothing ----------------------------------------------------------------------


def fails(*_, **__):
    raise ValueError("what only looks has failed")


def make_unreadable(descriptor):
    unreadable = os.open(os.devnull, os.O_WRONLY)
    os.dup2(unreadable, descriptor)
    os.close(unreadable)


SABOTAGE = {
    "a truncated slate": lambda them, patch: os.ftruncate(them._records[0].page, 0),
    "a slate cut in two": lambda them, patch: os.ftruncate(them._records[0].page, 20),
    "an unreadable slate": lambda them, patch: make_unreadable(them._records[0].page),
    "sampling": lambda them, patch: patch.setattr(them._sampling, "look", fails),
    "boards": lambda them, patch: patch.setattr(them._metric_tables, "look", fails),
    "closing boards": lambda them, patch: patch.setattr(them._metric_tables, "forget", fails),
    "timers": lambda them, patch: patch.setattr(them.timers, "ended", fails),
    "the kernel": lambda them, patch: patch.setattr(them._memory, "look", fails),
    "logs": lambda them, patch: patch.setattr(them, "_last_lines", fails),
    "error files": lambda them, patch: patch.setattr(them._records[0], "error", fails),
    "collectives": lambda them, patch: patch.setattr(collective_log, "read", fails),
}


@pytest.mark.parametrize("sabotage", SABOTAGE.values(), ids=list(SABOTAGE))
def test_an_end_is_told_whatever_is_wrong_with_what_is_observed(in_world, monkeypatch, sabotage):
    events = []
    monkeypatch.setattr(in_world, "_tell_event", events.append)
    sabotage(in_world, monkeypatch)
    ends(in_world, -9)
    ends(in_world, 0, local_rank=1)
    in_world._heard(1, orders.to_json(Stopped(3, 8)))
    in_world._heard(1, orders.to_json(Erred(3, 8, "ValueError: boom", "Traceback")))
    failed, succeeded, stopped, erred = events
    assert (failed.failure.exitcode, failed.failure.rank) == (-9, 4)
    assert succeeded == WorkerSucceeded(3, 1)
    assert stopped.report == Stopped(3, 8)
    assert erred.failure.message == "ValueError: boom"


def test_an_end_is_reported_before_anything_is_observed(in_world, monkeypatch):
    story = []
    monkeypatch.setattr(in_world, "_tell_event", lambda event: story.append("told"))
    monkeypatch.setattr(in_world._sampling, "look", lambda *_: story.append("observed"))
    for exitcode in (0, -9):
        ends(in_world, exitcode)
    assert story == ["told", "observed"] * 2
