"""The pool: facts about workers without asking them, and the report of a worker's end."""

import asyncio
import math
import os
import time
from types import SimpleNamespace

import pytest

from tests.support import FakeClock
from tests.unit.agent.cast import place
from tests.unit.worker import entering
from torchelastic.agent.lifecycle.node_state import WorkerSucceeded
from torchelastic.agent.telemetry.progress_sampler import ProgressSampler
from torchelastic.agent.workers import pool as module
from torchelastic.agent.workers.oom import OomKills, Sources
from torchelastic.agent.workers.supervisor import WorkerExit
from torchelastic.agent.workers.worker_record import WorkerRecord
from torchelastic.config import Entry, LaunchConfig
from torchelastic.rendezvous.world import World
from torchelastic.worker import collective_log, optimizer_steps, orders, status_page
from torchelastic.worker.orders import Erred, Keeps, PeerLost, Stopped, Up


class Logs:
    """Of one generation: nothing but the error files of its workers."""

    def __init__(self):
        nothing = {"stdout": None, "stderr": None, "error_file": ""}
        self.streams = {rank: SimpleNamespace(**nothing) for rank in range(2)}
        self.started = self.close = lambda: None

    def last_lines(self, local_rank, besides):
        return ()


class Node:
    """Two workers without processes: their supervisor, the factory, the logs and the reporter."""

    name, zygote = "node-a", None

    def __init__(self):
        self.events, self.failures, self.progress, self.sent = [], [], [], []
        self.logs, self.took = Logs(), []
        self.alive, self.ended, self.exempt, self.closed = (0, 1), set(), set(), False
        self.sampling = ProgressSampler(lambda *told: self.progress.append(told), FakeClock())
        self.worker_failed = self.failures.append
        self.worker_exited = lambda *exited: self.took.append(exited[-1])

    def __getattr__(self, name):
        """Anything else is told to nobody."""
        return lambda *_, **__: None

    def supervisor(self, *, on_exit, on_message, on_handed, **_):
        self.hears, self.handed = on_message, on_handed
        self.ends = lambda exitcode, local_rank=0: on_exit(WorkerExit(local_rank, 42, exitcode))
        return self

    async def start(self, spawns):
        return {spawn.local_rank: 42 for spawn in spawns}

    async def stop(self, *_, **__):
        self.alive = ()

    def open(self, attempt, ranks):
        return self.logs

    def close(self):
        self.closed = True

    def pid(self, local_rank):
        return None

    def has_ended(self, local_rank):
        return local_rank in self.ended

    def tell(self, local_rank, message, fds=()):
        self.sent.append((message, *fds))

    def says(self, report, local_rank=0):
        self.hears(local_rank, orders.to_json(report))

    def page(self, local_rank=0):
        """The agent's end of what a worker shows, once that keeps its state."""
        self.says(Keeps(), local_rank)
        _, descriptor = self.sent.pop()
        return descriptor


@pytest.fixture
def node():
    return Node()


@pytest.fixture
def killed(tmp_path):
    """Makes the kernel count so many kills for want of memory."""

    def tell(number):
        (tmp_path / "memory.events").write_text(f"oom_kill {number}\n")

    tell(0)
    return tell


@pytest.fixture
def workers(monkeypatch, node, killed, tmp_path):
    sources = Sources(tmp_path, vmstat=tmp_path / "no", log=tmp_path / "no")
    monkeypatch.setattr(module, "OomKills", lambda: OomKills(sources))
    monkeypatch.setattr(module.Cgroup, "create", lambda: None)
    monkeypatch.setattr(module, "Supervisor", node.supervisor)
    made = module.WorkerPool(
        LaunchConfig(nproc_per_node=2, rdzv_endpoint="a:1", run_id="job"),
        Entry("script", "train.py"),
        {},
        factory=node,
        node_logs=node,
        reporter=node,
        clock=FakeClock(),
        tell_event=node.events.append,
        secret=None,
        snapshots=None,
        sampling=node.sampling,
    )
    yield made
    if not node.closed:
        asyncio.run(made.close())


@pytest.fixture
def page(workers, node):
    return node.page()


@pytest.fixture
def worker(page):
    """The descriptors that the worker of local rank 0 writes to."""
    made = status_page.StatusPage(page)
    yield made
    made.close()


def world(generation):
    """In which these two are ranks 4 and 5."""
    nodes = [place("other", nproc=4), place("node-a", 1, first_rank=4)]
    return World(generation=generation, phase="running", store="a:1").with_nodes(nodes)


def start(workers, generation):
    assert asyncio.run(workers.start_all(world(generation), "node-a"))


@pytest.fixture
def in_world(workers, node):
    """In generation 3."""
    start(workers, 3)
    node.events.clear()
    return workers


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
    assert asyncio.run(workers.start_standby(0, world(0), 0))
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


def test_an_unhurried_last_step_of_the_world_before_may_take_any_time(workers, node, worker):
    """The next world is known, and an evaluation goes on in this one: nobody hangs."""
    enter(workers, 0)
    node.says(Up(0, 0))
    worker.entered(0, 0)
    enter(workers, 1)
    told = workers.entering_since(0)
    worker.unhurried()
    assert workers.entering_since(0) == math.inf
    worker.hurried()
    assert told < workers.entering_since(0) < math.inf
    worker.unhurried()  # it has left that world, and says so: only now it sets out
    before = time.monotonic()
    node.says(Stopped(0, 1))
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
def test_worker_that_stopped_is_not_entering(workers, node, report, on_the_way):
    enter(workers, 1)
    node.says(report)
    assert (workers.entering_since(0) is not None) is on_the_way


def test_a_workers_garbage_changes_nothing(workers, node):
    enter(workers, 1)
    for garbage in (
        {"type": "stopped", "generation": 1},
        {"type": "stopped", "generation": 1, "step": "three"},
        {"type": "up", "generation": None, "step": 3},
        {"type": ["stopped"], "generation": 1, "step": 3},
        {"type": "progress", "step": "three"},
        {},
    ):
        node.hears(0, garbage)
        assert workers.entering_since(0) is not None, garbage
    assert workers.seen().step == -1


# --- how far they are ----------------------------------------------------------------------------


def test_when_a_worker_has_stopped_its_last_step_is_reported(workers, node, worker):
    enter(workers, 0)
    worker.rank = 2
    worker.entered(0, 7)
    node.says(Stopped(0, 8))
    [(generation, progress)] = node.progress
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


def test_the_state_of_a_generation_is_held_by_who_has_entered_a_step_of_it(in_world, node, worker):
    worker.entered(4, 7)
    assert in_world.seen().holds == 4
    start(in_world, 5)
    node.says(Keeps())
    assert in_world.seen().holds == -1, "only the worker before it had entered a step"
    worker.entered(5, 7)
    assert in_world.seen().holds == 5
    node.alive = (1,)
    assert in_world.seen().holds == -1


@pytest.fixture
def counting(in_world, node):
    """The memory that a script's worker, local rank 1, has handed over with its first step."""
    descriptor = status_page.create()
    node.handed(1, {"type": optimizer_steps.MESSAGE}, descriptor)
    made = status_page.StatusPage(descriptor)
    made.taken_before(40)
    made.entered(0, 41)
    yield made
    made.close()


def test_steps_of_a_plain_script_are_reported_and_named_and_give_no_restarts(
    in_world, node, counting
):
    counting.entered(0, 47)
    in_world.look()
    [(generation, progress)] = node.progress
    assert (generation, progress.ranks, progress.steps, progress.before) == (3, [5], [47], 40)
    in_world.fail(1, "boom")
    assert node.failures[0].step == 47
    assert in_world.seen().step == -1
    assert in_world.counted.newest == 3
    assert in_world.progress(1) is None, "nobody is ended by it"
    assert in_world.counted.seen(1)[:2] == (3, 47)


def test_a_script_with_snapshots_gets_a_status_page_and_shows_its_step(in_world, node):
    node.says(Keeps(), 1)
    [(message, descriptor)] = node.sent
    assert message == orders.to_json(orders.StatusPage(silence=LaunchConfig().lease))
    assert in_world.seen().step == -1
    shown = status_page.StatusPage(descriptor)
    shown.entered(2, 50)  # of a generation before: nothing of this one
    assert in_world.seen().step == -1
    shown.entered(3, 12)
    assert in_world.seen().step == 12
    shown.close()


def test_closed_pool_reads_no_closed_descriptor(workers, page, worker, caplog):
    """The sampler's task is cancelled later, and another file may have the number by then."""
    worker.entered(3, 7)
    asyncio.run(workers.close())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(page)
    workers.look()
    assert (caplog.messages, workers.progress(0), workers.seen().step) == ([], None, -1)


# --- how they end --------------------------------------------------------------------------------

EARLY = {"type": "failure", "message": "ValueError: early", "traceback": "Traceback"}


def test_the_time_of_a_failure_is_that_in_the_error_file(in_world, node, tmp_path):
    path = tmp_path / "error.json"
    path.write_text('{"message": "boom", "timestamp": 7}')
    node.logs.streams[0].error_file = str(path)
    node.ends(1)
    before = time.time()
    node.ends(1, local_rank=1)
    assert node.failures[0].wall_time == 7
    assert node.failures[1].wall_time >= before


TIMER = "timer 'data' expired after 3 s"
OOM_KILLED = "killed by SIGKILL: out of memory"
#: Kills that the kernel counts, what the agent does to the worker, its exit code, and the report.
KILLED = {
    "by the kernel": (1, None, -9, {"message": OOM_KILLED, "stopped": False, "rank": 4}),
    "from outside": (0, None, -9, {"message": "killed by SIGKILL", "stopped": False}),
    "by the agent": (
        1,
        lambda pool: pool.kill(0, "it hangs", "its stack"),
        -9,
        {"message": "it hangs", "traceback": "its stack", "hint": "", "stopped": False},
    ),
    "it crashed before the agent killed it": (
        0,
        lambda pool: pool.condemn(0, TIMER, "its stack"),
        -11,
        {"message": TIMER, "traceback": "its stack", "exitcode": -11},
    ),
    "after its world was over": (
        0,
        lambda pool: pool.kill(0, "not free", "its stack", over=True),
        -9,
        {"stopped": True, "traceback": "its stack"},
    ),
}
HINTS = {OOM_KILLED: "out of memory: the kernel killed it"}
HINTS["killed by SIGKILL"] = "the kernel reports no out-of-memory kill"


@pytest.mark.parametrize(("kills", "act", "exitcode", "expected"), KILLED.values(), ids=KILLED)
def test_killed_worker_is_reported_with_who_killed_it(
    in_world, node, killed, kills, act, exitcode, expected
):
    killed(kills)
    assert in_world.last_stack(0) is None
    if act is not None:
        act(in_world)
        assert in_world.last_stack(0) == expected.get("traceback", "")
    node.ends(exitcode)
    [told] = node.failures
    assert {name: getattr(told, name) for name in expected} == expected
    assert told.hint.startswith(HINTS.get(told.message, ""))
    assert told.out_of_memory == (told.message == OOM_KILLED)


def test_exit_after_order_to_stop_counts_as_stopped(in_world, node):
    in_world.begin_to_stop()
    node.hears(0, EARLY)
    node.ends(1)
    node.ends(-15, local_rank=1)
    assert [(one.rank, one.stopped) for one in node.failures] == [(4, True)]


def test_failure_before_order_to_stop_counts_as_failure(in_world, node, killed):
    node.hears(0, EARLY)
    node.ended.add(1)
    killed(1)
    in_world.begin_to_stop()
    node.ends(1)
    node.ends(-9, local_rank=1)
    assert [(one.rank, one.stopped, one.message) for one in node.failures] == [
        (4, False, EARLY["message"]),
        (5, False, "killed by SIGKILL: out of memory"),
    ]


def test_an_error_of_a_worker_that_lives_on(in_world, node):
    node.says(Erred(3, 7, "MemoryError: ", "Traceback", True))
    node.says(PeerLost(3, 7, "Connection closed by peer"))
    refused = "out of memory: an allocation in main memory failed"
    assert [(one.hint, one.alive) for one in node.failures] == [(refused, True), ("", True)]


def test_error_in_last_step_of_generation_before_says_so(in_world, node):
    """The worker was told to enter generation 3, and had not: its newcomers are not to blame."""
    node.says(PeerLost(2, 7, "Connection closed by peer"))
    node.says(PeerLost(3, 7, "Connection closed by peer"))
    assert [one.before for one in node.failures] == [True, False]


def test_a_peer_that_left_because_training_is_done_is_not_lost(in_world, node):
    in_world.tell(0, orders.Over(3, "the training is done", finished=True, through=7))
    node.says(PeerLost(3, 7, "Connection closed by peer"))
    assert node.failures == []
    enter(in_world, 4)
    node.says(PeerLost(3, 7, "Connection closed by peer"))
    assert [one.message for one in node.failures] == ["lost a peer: Connection closed by peer"]


def test_the_event_of_an_exit_says_how_long_it_took_after_the_program_had_returned(in_world, node):
    node.says(orders.Returned())
    node.ends(0)
    node.ends(0, local_rank=1)
    assert node.took[0] > 0 == node.took[1]


def test_the_last_collective_of_a_worker(in_world, node, worker):
    shown = worker.collectives
    shown.enter(3)
    row = shown.row_of("0")
    shown.launched(1, row, 14, b"all_reduce")
    node.ends(-9)
    shown.waits(row, 14, b"all_reduce")
    node.ends(1)
    shown.enter(4)
    shown.launched(1, shown.row_of("0"), 1, b"broadcast")
    node.ends(1)
    node.ends(1, local_rank=1)  # it shows nothing
    assert [(one.collective, one.entered, one.waited) for one in node.failures] == [
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


#: What is done to the page of a worker, or fails.
SABOTAGE = {
    "a truncated page": lambda page: os.ftruncate(page, 0),
    "a page cut in two": lambda page: os.ftruncate(page, 20),
    "an unreadable page": make_unreadable,
    "sampling": (ProgressSampler, "look"),
    "metrics": (module.MetricTables, "look"),
    "closing metrics": (module.MetricTables, "forget"),
    "timers": (module.Timers, "ended"),
    "the kernel": (OomKills, "look"),
    "logs": (Logs, "last_lines"),
    "error files": (WorkerRecord, "error"),
    "collectives": (collective_log, "read"),
}


@pytest.mark.parametrize("sabotage", SABOTAGE.values(), ids=SABOTAGE)
def test_an_end_is_told_whatever_is_wrong_with_what_is_observed(
    in_world, node, page, monkeypatch, sabotage
):
    if callable(sabotage):
        sabotage(page)
    else:
        monkeypatch.setattr(*sabotage, fails)
    node.ends(-9)
    node.ends(0, local_rank=1)
    node.says(Stopped(3, 8), 1)
    node.says(Erred(3, 8, "ValueError: boom", "Traceback"), 1)
    failed, succeeded, stopped, erred = node.events
    assert (failed.failure.exitcode, failed.failure.rank) == (-9, 4)
    assert succeeded == WorkerSucceeded(3, 1)
    assert stopped.report == Stopped(3, 8)
    assert erred.failure.message == "ValueError: boom"
