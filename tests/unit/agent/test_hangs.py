"""Who hangs: how long a worker has, what it is asked, and when it is killed."""

import asyncio
import math
import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.unit.agent.cast import Workers, in_loop
from torchelastic.agent.lifecycle.in_process import InProcessState, Status, Worker
from torchelastic.agent.watch import hang_watchdog
from torchelastic.agent.watch.hang_watchdog import (
    HangReport,
    HangWatchdog,
    WorkerPace,
    limit_for,
    verdict,
)
from torchelastic.agent.watch.inspector import WorldActivity
from torchelastic.agent.watch.stack_reader import NOTHING
from torchelastic.events.analysis.hangs import Collective, RankActivity
from torchelastic.worker.orders import Pong

# --- pure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "longest", "is_first"),
    [
        pytest.param([(0, 5, 1.0)], 0.0, True, id="first"),
        pytest.param([(0, 5, 1.0), (0, 6, 3.0)], 2.0, False, id="second"),
        pytest.param([(0, 5, 1.0), (0, 6, 3.0), (0, 7, 3.5)], 2.0, False, id="the longest"),
        pytest.param([(0, 5, 1.0), (0, 9, 3.0)], 0.5, False, id="unseen between"),
        pytest.param([(0, 5, 1.0), (0, 5, 9.0)], 0.0, True, id="hurried"),
        pytest.param([(0, 5, 1.0), (0, 6, 3.0), (1, 6, 90.0)], 2.0, True, id="another"),
        pytest.param([(0, 7, 1.0)], 0.0, False, id="unseen before"),
    ],
)
def test_the_pace_of_a_worker(seen, longest, is_first):
    pace = WorkerPace()
    for one in seen:
        pace.saw(*one, first=max(5, 5 + one[0]))
    assert pace.longest == longest
    assert (pace.step == pace.first_step) is is_first


def test_the_way_into_a_world_is_no_step():
    pace = WorkerPace()
    pace.saw(0, 1, 1.0, first=1)
    pace.saw(0, 2, 2.0, first=1)
    pace.told = "of step 2"
    pace.set_out(1, 50.0)
    assert pace.told == ""
    assert pace.words(53.0) == "no progress for 3.0 s on the way into generation 1"
    pace.saw(1, 2, 60.0, first=2)
    assert pace.longest == 1.0
    assert pace.words(62.0) == "no progress for 2.0 s"


FIRST, LATER = WorkerPace(step=3, first_step=3), WorkerPace(step=4, first_step=3)
ENTERING = WorkerPace(step=4, first_step=3, entering=1)


@pytest.mark.parametrize(
    ("pace", "given", "frozen", "limit"),
    [
        (LATER, 0, False, None),
        (ENTERING, 0, True, None),
        (LATER, 2, False, 2),
        (FIRST, 2, False, 20),
        (ENTERING, 2, False, 20),
        (FIRST, 2, True, 2),
        (ENTERING, 2, True, 2),
        (LATER, None, False, 600),
        (FIRST, None, False, 6000),
        (WorkerPace(step=4, first_step=3, longest=100), None, False, 1000),
    ],
)
def test_how_long_a_worker_has(pace, given, frozen, limit):
    assert limit_for(pace, given, frozen=frozen) == limit


FRAME = 'main thread, most recent call first:\n  File "/job/data.py", line 12 in load'
MISSING = "rank 1 is missing from all_reduce #17, in which rank 0 waits"
FROZEN_ONE = MISSING.replace("rank 1", "rank 1 (frozen)")


@pytest.mark.parametrize(
    ("doing", "stack", "missing", "words"),
    [
        ("working", FRAME, MISSING, f"it is in load (data.py, line 12); {MISSING}"),
        ("working", FRAME, "", "it is in load (data.py, line 12)"),
        ("working", NOTHING, "", "it is busy outside any collective"),
        ("silent", FRAME, MISSING, f"it does not answer, in load (data.py, line 12); {MISSING}"),
        ("silent", NOTHING, "", "it does not answer"),
        ("frozen", FRAME, FROZEN_ONE, FROZEN_ONE),
        ("frozen", NOTHING, "", "it is frozen (stopped by a signal or a debugger)"),
    ],
)
def test_the_message_about_a_hung_worker(doing, stack, missing, words):
    assert verdict(doing, stack, missing) == words


# --- a node with one worker ----------------------------------------------------------------------

REDUCE, BEFORE = Collective("all_reduce", 17), Collective("all_reduce", 16)


class OneWorker(Workers):
    """Local rank 0, told to enter generation 1."""

    def __init__(self, *, answers=None, seen=(0, 7, math.inf), since=None, dumps="", first=7):
        super().__init__(
            os.getpid(),
            rank=0,
            pid=lambda local_rank: None if self.killed else os.getpid(),
            progress=lambda local_rank: self.seen,
            first_step=first,
            generation=1,
            entering_since=since,
            doing=lambda *_: RankActivity(rank=0, node="a", step=self.step),
        )
        self.answers, self.seen, self.dumps = answers, seen, dumps
        self.told, self.asked, self.step = [], 0, None

    async def look(self):
        """At all ranks of the world: this one, and one that waits for it."""
        mine = RankActivity(rank=0, node="a", launched=(BEFORE,), stack=self.dumps or NOTHING)
        other = RankActivity(rank=1, node="b", waits=REDUCE, launched=(REDUCE,))
        if self.answers == Pong(waiting=True):
            mine = replace(other, rank=0)
        return WorldActivity(1, (mine, other))

    def tell(self, local_rank, order, fds=()):
        self.asked += 1
        if self.answers is not None:
            self.pongs[local_rank] = replace(self.answers, number=order.number)


def watch(workers, *, limit=0.1, until):
    @in_loop
    async def main():
        trains = Worker(status=Status.TRAINING)

        def state():
            return InProcessState(workers={} if workers.killed else {0: trains})

        report = HangReport(workers.look, lambda generation, event: workers.told.append(event))
        task = asyncio.create_task(HangWatchdog(workers, report, limit).run(state))
        while not until() and not task.done():
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    main()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(hang_watchdog, "LOOK", 0.02)


def long_ago():
    return time.monotonic() - 50


MINE = "rank 0 is missing from all_reduce #17, in which rank 1 waits"
ON_THE_WAY = " s on the way into generation 1: "


@pytest.mark.parametrize(
    ("way", "facts", "limit", "does", "stack"),
    [
        (
            ON_THE_WAY,
            {"dumps": FRAME},
            0.1,
            "it does not answer, in load (data.py, line 12)",
            FRAME,
        ),
        (
            ON_THE_WAY,
            {"dumps": FRAME, "answers": Pong(waiting=False)},
            0.1,
            "it is in load (data.py, line 12)",
            FRAME,
        ),
        (" s: ", {}, 0.1, "it does not answer", NOTHING),
        # The steps before that were too quick to be seen; else it would have 100 s.
        (" s: ", {"first": 3}, 10, "it does not answer", NOTHING),
    ],
    ids=["on the way, silent", "on the way, busy", "in a step", "before it was looked at first"],
)
def test_hung_worker_is_killed(way, facts, limit, does, stack):
    when = {"since": long_ago()} if way == ON_THE_WAY else {"seen": (1, 7, long_ago())}
    workers = OneWorker(**when, **facts)
    watch(workers, limit=limit, until=lambda: workers.killed)
    [(_, why, found)] = workers.killed
    assert found == stack
    assert why.startswith("no progress for ")
    assert why.endswith(f"{way}{does}; {MINE}")
    assert "at step" not in why, "which is said of every failure"
    assert [event.text for event in workers.told] == [MINE]


def test_worker_that_answers_late_and_waits_is_spared():
    workers = OneWorker(seen=(1, 7, long_ago()))
    look = workers.look

    async def late():
        workers.answers = Pong(waiting=True)
        return await look()

    workers.look = late
    watch(workers, until=lambda: workers.asked >= 4)
    assert workers.killed == []


def test_waiting_worker_is_spared_and_hang_reported_once():
    workers = OneWorker(since=long_ago(), answers=Pong(waiting=True))
    watch(workers, until=lambda: workers.told and workers.asked >= 5)
    [event] = workers.told
    assert event.text.startswith("ranks 0, 1 wait in all_reduce #17; no rank is missing")
    assert workers.killed == []


@pytest.mark.parametrize(
    ("steps", "changes", "ended"),
    [((8, 7), False, True), ((7, 7), False, True), ((7, 8), False, False), ((7, 7), True, False)],
    ids=["the other one is new", "the same step", "the other one tells", "they go on"],
)
def test_the_world_of_ranks_that_wait_for_each_other_ends(monkeypatch, steps, changes, ended):
    """One of them is in the all-reduce of a checkpoint, the other one in the next step."""
    monkeypatch.setattr(hang_watchdog, "FRESH", 0.05)
    workers, looks = OneWorker(seen=(1, 8, long_ago()), answers=Pong(waiting=True)), []

    async def look():
        looks.append(True)
        number = 13 + changes * len(looks)
        waits = [Collective(name, number) for name in ("all_gather", "all_reduce")]
        return WorldActivity(
            1,
            tuple(
                RankActivity(rank=rank, node="a", step=steps[rank], waits=at, launched=(at,))
                for rank, at in enumerate(waits)
            ),
        )

    workers.look = look
    watch(workers, limit=10, until=lambda: len(looks) >= 5)
    assert workers.killed == []
    assert len(workers.failed) == ended
    assert bool(workers.told) is (steps != (7, 8))
    if ended:
        [(_, why, alive)] = workers.failed
        assert alive, "nobody is to blame"
        assert re.match(r"no progress for \d+\.\d s: the ranks call different collectives", why)


def test_worker_with_progress_during_inspection_is_spared():
    workers = OneWorker(seen=(1, 7, long_ago()))

    async def look():
        workers.seen = (1, 8, time.monotonic() + 3600)
        return WorldActivity()

    workers.look = look
    watch(workers, until=lambda: workers.seen[1] == 8)
    assert (workers.killed, workers.told) == ([], [])


@pytest.mark.parametrize(
    "facts",
    [{"seen": None, "since": 0.0}, {"since": None}, {"seen": (1, 7, math.inf)}],
    ids=["no status page", "it has told that it does not go there", "unhurried"],
)
def test_of_whom_nothing_is_expected_is_not_asked(facts):
    workers, looks = OneWorker(**facts), []
    workers.pid = lambda local_rank: looks.append(local_rank) or os.getpid()
    watch(workers, until=lambda: len(looks) >= 3)
    assert (workers.asked, workers.killed) == (0, [])


def test_a_frozen_worker_on_the_way_has_the_plain_limit(monkeypatch):
    monkeypatch.setattr(hang_watchdog, "is_frozen", lambda pid: True)
    workers = OneWorker(since=long_ago())
    watch(workers, limit=10, until=lambda: workers.killed)  # else it would have 100 s
    [(_, why, _)] = workers.killed
    assert f"{ON_THE_WAY}rank 0 " in why
    assert workers.asked == 0


@pytest.fixture
def world_over(monkeypatch):
    """Tell the watchdog that its worker's world is over, and wait for what it does."""
    monkeypatch.setattr(hang_watchdog, "FREED_TIMEOUT", 0.01)

    def run(*watched, finished=False):
        @in_loop
        async def main():
            watching = HangWatchdog(*watched)
            watching.told_over(0, finished=finished)
            await asyncio.gather(*watching._tasks)

        main()

    return run


@pytest.mark.parametrize("looks", [1, 2, 99])
def test_worker_stuck_twice_after_end_of_world_is_killed(world_over, looks):
    """On a busy machine a thread may need more than one to run on."""
    workers = OneWorker(answers=Pong(waiting=True, aborted=True))
    workers.has_stopped = lambda local_rank: workers.asked >= looks
    world_over(workers, None, 10)
    assert workers.asked == min(looks, 2)
    assert len(workers.killed) == (looks > 2)
    for _, why, _ in workers.killed:
        assert re.fullmatch(r"not free \d+ ms after its world was over \(stuck\)", why)


def test_worker_told_to_enter_next_world_has_left_the_last(world_over, monkeypatch):
    monkeypatch.setattr(hang_watchdog, "is_frozen", lambda pid: True)
    workers, generations = OneWorker(), [1, 1, 2]
    workers.has_stopped = lambda local_rank: False
    workers.generation = lambda local_rank: generations.pop(0) if generations[1:] else 2
    world_over(workers, None, 10)
    assert workers.killed == []


@pytest.mark.parametrize(
    ("step", "finished", "elsewhere", "limit", "killed", "said"),
    [
        pytest.param(7, False, [False, False, True], 10, True, True, id="until another can"),
        pytest.param(7, False, [True], 10, True, False, id="another can"),
        pytest.param(7, False, [False] * 9, 0.06, True, True, id="until its limit"),
        pytest.param(7, False, [False] * 3 + ["it stops"], 10, False, True, id="until it stops"),
        pytest.param(0, False, [], 10, True, False, id="new"),
        pytest.param(7, True, [], 10, True, False, id="done"),
    ],
)
def test_worker_with_only_copy_of_state_is_waited_for(
    world_over, monkeypatch, step, finished, elsewhere, limit, killed, said
):
    monkeypatch.setattr(hang_watchdog, "is_frozen", lambda pid: True)
    workers, told, answers = OneWorker(), [], list(elsewhere)
    workers.step, stopped = step, []
    workers.has_stopped = lambda local_rank: bool(stopped)

    async def others_can_go_on(generation):
        assert generation == 1
        answer = answers.pop(0)
        if answer == "it stops":
            stopped.append(True)
        return answer is True

    world_over(workers, None, limit, others_can_go_on, told.append, finished=finished)
    assert bool(workers.killed) is killed
    expected = (
        f"Rank 0 is frozen and has the only copy of the state after 7 steps: the job waits for "
        f"it, at most {limit:g} s. To resume it: kill -CONT {os.getpid()}."
    )
    assert told == ([expected] if said else [])
    if said and limit == 10:
        assert answers == [], "they are asked until one can"


def test_a_worker_of_this_node_that_is_free_can_go_on():
    workers = OneWorker()
    workers.step, workers.has_stopped = 7, lambda local_rank: True
    watching = HangWatchdog(workers, None, 10)
    assert watching.can_go_on(1)
    assert not watching.can_go_on(2)
    workers.last_stack = lambda local_rank: "it is to be killed"
    assert not watching.can_go_on(1)


# --- replacements --------------------------------------------------------------------------------


@pytest.mark.parametrize(("cpus", "looks"), [(3, 1), (2, 3), (1, 5)])
@in_loop
async def test_a_replacement_waits_only_where_cpus_are_short(monkeypatch, cpus, looks):
    """Three survivors, of which two train in the next world, and commit a step there."""
    monkeypatch.setattr(hang_watchdog, "RECOVERY_LOOK", 0.0)
    monkeypatch.setattr(hang_watchdog.devices, "cpus", lambda: cpus)
    over, entered = dict.fromkeys(range(3), (0, 7, 0.0)), dict.fromkeys(range(2), (1, 7, 0.0))
    committed = dict.fromkeys(range(2), (1, 8, 0.0))
    shown = iter([over, over, over, entered, entered, committed])
    seen = {}

    def state():
        seen.update(taken := next(shown))
        state.looks += 1
        workers = {rank: Worker(status=Status.TRAINING) for rank in taken}
        return InProcessState(node="a", workers=workers)

    state.looks = -1  # the first asks for the generation that failed
    workers = SimpleNamespace(progress=seen.get)
    await HangWatchdog(workers, report=None).recovered(state)
    assert state.looks == looks


# --- What is found out of a hang is told once; and who only looks ends nothing -------------------


FOUND = WorldActivity(3, (RankActivity(rank=0, node="a", stack="x"),))


def report_of(*seen):
    """A report that finds these, one after the other, or raises them; what it tells; its looks."""
    told, left = [], list(seen)

    async def look():
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return HangReport(look, lambda generation, event: told.append(generation)), told, left


@in_loop
async def test_hang_report_ignores_findings_of_earlier_world():
    report, _, _ = report_of(FOUND, WorldActivity(4))
    assert (await report.found(3), await report.found(4)) == (FOUND, WorldActivity(4))


@in_loop
async def test_an_error_in_looking_is_logged_and_nothing_is_reported(caplog):
    report, told, _ = report_of(RecursionError("too deep"))
    found = await report.found(0)
    report.tell(found)
    assert (found, told) == (WorldActivity(), [])
    assert "Could not find out" in caplog.text
    assert "too deep" in caplog.text


# --- Scripts: judged by what all ranks do ---------------------------------------------------------


IN_COLLECTIVE = '  File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n'
ALONE = '  File "train.py", line 3 in evaluate\n'


def waits(rank, node="a"):
    return RankActivity(rank=rank, node=node, step=7, stack=IN_COLLECTIVE)


def works(rank, node="a", **more):
    return RankActivity(rank=rank, node=node, step=7, stack=ALONE, **more)


def unread(rank, node="a"):
    return RankActivity(rank=rank, node=node, step=7, stack=NOTHING)


class ScriptWorkers(Workers):
    """Local ranks 0 and 1, which have committed step 7 long ago in generation 1."""

    def __init__(self, *activities, first=0, since=100.0):
        super().__init__(
            *[os.getpid()] * 2,
            generation=1,
            first_step=3,
            rank=lambda local_rank: first + local_rank,
        )
        self.activities, self.told, self.looks = activities, [], 0
        self.seen = (1, 7, time.monotonic() - since)
        #: Whether the script commits: otherwise its optimizer's steps are counted.
        self.commits = True
        self.counted = SimpleNamespace(seen=self.steps)

    def progress(self, local_rank):
        self.looks += 1
        return self.seen if self.commits else None

    def steps(self, local_rank):
        return (*self.seen, 3)

    async def everywhere(self):
        return WorldActivity(1, self.activities)


def watch_script(workers, limit, monkeypatch, looks=100):
    """Until it has looked so often, or a few times at a worker, or killed."""
    monkeypatch.setattr(hang_watchdog, "LOOK", 0.001)
    ends = iter([False] * looks)

    async def main():
        report = HangReport(workers.everywhere, lambda _, event: workers.told.append(event))
        watchdog = HangWatchdog(workers, report, limit)
        await watchdog.watch_script(
            lambda: next(ends, True) or workers.looks > 40 or bool(workers.killed)
        )
        report.close()

    asyncio.run(main())


ENDED = {
    "missing": ([waits(0), works(1)], 0, [1], 1),
    "frozen": ([waits(0), works(1, frozen=True)], 0, [1], 1),
    "missing elsewhere, whose agent tells": ([waits(0), waits(1), works(2, "b")], 0, [], 0),
    "missing elsewhere, rank 0": ([works(0, "b"), waits(1), waits(2)], 1, [], 0),
    "all wait": ([waits(0), waits(1)], 0, [], 1),
    "all wait, and another node has rank 0": ([waits(0, "b"), waits(1), waits(2)], 1, [], 0),
    "nobody waits, as in an evaluation": ([works(0), works(1)], 0, [], 1),
    "missing, and one elsewhere unseen": ([waits(0), works(1), unread(2, "b")], 0, [1], 1),
    "unseen": ([waits(0), unread(1)], 0, [], 1),
    "missing, and one here unseen": ([waits(0, "b"), works(1), unread(2)], 1, [1], 1),
    "nothing is known": ([], 0, [], 0),
}


@pytest.mark.parametrize(("activities", "first", "killed", "told"), ENDED.values(), ids=ENDED)
def test_script_worker_that_causes_hang_is_killed(activities, first, killed, told, monkeypatch):
    workers = ScriptWorkers(*activities, first=first)
    watch_script(workers, 50, monkeypatch)
    assert [workers.rank(each) for each, *_ in workers.killed] == killed
    assert len(workers.told) == told
    for _, why, stack in workers.killed:
        assert why.startswith("no progress for 1")
        assert why.count("rank 1") == 1
        assert why.count("rank 1 (frozen)") == activities[1].frozen
        assert ("s: it is in " in why) is not activities[1].frozen
        assert stack == ALONE


#: What is told of a script that commits nothing.
TOLD = {
    "missing": ([waits(0), works(1)], 50, 1),
    "missing, by the limit that is learned": ([waits(0), works(1)], None, 1),
    "frozen": ([waits(0), works(1, frozen=True)], 50, 1),
    "all wait": ([waits(0), waits(1)], 50, 1),
    "missing elsewhere, whose agent tells": ([waits(0), waits(1), works(2, "b")], 50, 0),
    "nobody waits, as in an evaluation": ([works(0), works(1)], 50, 0),
    "looked at again and again, and told once": ([waits(0), works(1), unread(2, "b")], 50, 1),
    "off": ([waits(0), works(1)], 0, 0),
}


@pytest.mark.parametrize(("activities", "limit", "told"), TOLD.values(), ids=TOLD)
def test_optimizer_steps_report_hang_and_kill_no_worker(activities, limit, told, monkeypatch):
    monkeypatch.setattr(hang_watchdog, "FRESH", 0.0)
    workers = ScriptWorkers(*activities, since=10_000.0)
    workers.commits = False
    watch_script(workers, limit, monkeypatch)
    assert (workers.killed, len(workers.told)) == ([], told)


def test_unreadable_rank_is_inspected_again(monkeypatch):
    monkeypatch.setattr(hang_watchdog, "FRESH", 0.0)
    workers = ScriptWorkers(waits(0), unread(1))
    looks = iter([[waits(0), unread(1)]] * 3)

    async def everywhere():
        return WorldActivity(1, tuple(next(looks, [waits(0), works(1)])))

    monkeypatch.setattr(workers, "everywhere", everywhere)
    watch_script(workers, 50, monkeypatch)
    assert workers.killed[0][0] == 1
    assert [event.missing for event in workers.told[:2]] == [[], [1]], "the same is told once"


LEFT_ALONE = {
    "within the given limit": (500, 100.0, {}),
    "off": (0, 100.0, {}),
    "within the learned limit": (None, 100_000.0, {}),
    "no step in this world": (50, 100.0, {"generation": lambda local_rank: 2}),
    "being stopped": (50, 100.0, {"stopping": True}),
}


@pytest.mark.parametrize(("limit", "since", "facts"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_script_worker_that_is_not_overdue_is_left_alone(limit, since, facts, monkeypatch):
    workers = ScriptWorkers(waits(0), works(1), since=since)
    vars(workers).update(facts)
    watch_script(workers, limit, monkeypatch, looks=5)
    assert (workers.killed, workers.told) == ([], [])


def test_a_learned_limit_counts_for_who_is_frozen(monkeypatch):
    monkeypatch.setattr(hang_watchdog, "is_frozen", lambda pid: True)
    workers = ScriptWorkers(waits(0), works(1, frozen=True), since=700.0)
    watch_script(workers, None, monkeypatch)
    assert [rank for rank, *_ in workers.killed] == [1]
