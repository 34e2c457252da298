"""Who hangs among the workers of a script: judged by what all ranks do."""

import asyncio
import os
import time
from types import SimpleNamespace

import pytest

from torchelastic.agent.watch import hang_watchdog
from torchelastic.agent.watch.hang_watchdog import HangReport, HangWatchdog, is_cause
from torchelastic.agent.watch.inspector import WorldActivity
from torchelastic.agent.watch.stack_reader import NOTHING
from torchelastic.events.analysis.hangs import HangDiagnosis, RankActivity

IN_COLLECTIVE = '  File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce\n'
ALONE = '  File "train.py", line 3 in evaluate\n'


def waits(rank, node="a"):
    return RankActivity(rank=rank, node=node, step=7, stack=IN_COLLECTIVE)


def works(rank, node="a", **more):
    return RankActivity(rank=rank, node=node, step=7, stack=ALONE, **more)


def unread(rank, node="a"):
    return RankActivity(rank=rank, node=node, step=7, stack=NOTHING)


class Workers:
    """Local ranks 0 and 1, which have committed step 7 long ago in generation 1."""

    def __init__(self, *activities, first=0, since=100.0):
        self.activities, self.alive, self.stopping = activities, (0, 1), False
        self.killed, self.told, self.looks = [], [], 0
        self.seen = (1, 7, time.monotonic() - since)
        self.pid = lambda local_rank: os.getpid()
        self.generation = lambda local_rank: 1
        self.first_step = lambda local_rank: 3
        self.rank = lambda local_rank: first + local_rank
        #: Whether the script commits: otherwise its optimizer's steps are counted.
        self.commits = True
        self.counted = SimpleNamespace(seen=self.steps)

    def progress(self, local_rank):
        self.looks += 1
        return self.seen if self.commits else None

    def steps(self, local_rank):
        return (*self.seen, 3)

    def kill(self, local_rank, why, stack=""):
        self.killed.append((self.rank(local_rank), why, stack))

    async def everywhere(self):
        return WorldActivity(1, self.activities)


def watch(workers, limit, monkeypatch, looks=100):
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
    workers = Workers(*activities, first=first)
    watch(workers, 50, monkeypatch)
    assert [rank for rank, *_ in workers.killed] == killed
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
    workers = Workers(*activities, since=10_000.0)
    workers.commits = False
    watch(workers, limit, monkeypatch)
    assert (workers.killed, len(workers.told)) == ([], told)


def test_unreadable_rank_is_inspected_again(monkeypatch):
    monkeypatch.setattr(hang_watchdog, "FRESH", 0.0)
    workers = Workers(waits(0), unread(1))
    looks = iter([[waits(0), unread(1)]] * 3)

    async def everywhere():
        return WorldActivity(1, tuple(next(looks, [waits(0), works(1)])))

    monkeypatch.setattr(workers, "everywhere", everywhere)
    watch(workers, 50, monkeypatch)
    assert workers.killed[0][0] == 1
    assert [event.missing for event in workers.told[:2]] == [[], [1]], "the same is told once"


@pytest.mark.parametrize(
    ("limit", "since"), [(500, 100.0), (0, 100.0), (None, 100_000.0)], ids=["given", "off", "auto"]
)
def test_script_worker_within_limit_is_left_alone(limit, since, monkeypatch):
    workers = Workers(waits(0), works(1), since=since)
    watch(workers, limit, monkeypatch)
    assert (workers.killed, workers.told) == ([], [])


def test_a_learned_limit_counts_for_who_is_frozen(monkeypatch):
    monkeypatch.setattr(hang_watchdog, "is_frozen", lambda pid: True)
    workers = Workers(waits(0), works(1, frozen=True), since=700.0)
    watch(workers, None, monkeypatch)
    assert [rank for rank, *_ in workers.killed] == [1]


def test_worker_without_steps_in_this_world_is_not_watched(monkeypatch):
    workers = Workers(waits(0), works(1))
    workers.generation = lambda local_rank: 2
    watch(workers, 50, monkeypatch)
    assert workers.told == []


def test_workers_that_are_being_stopped_do_not_hang(monkeypatch):
    workers = Workers(waits(0), works(1))
    workers.stopping = True
    watch(workers, 50, monkeypatch, looks=3)
    assert workers.killed == []


def test_cause_of_hang_is_frozen_or_missing_rank():
    certain = HangDiagnosis("", (1,), True)
    assert is_cause(works(1), certain)
    assert is_cause(works(1, frozen=True), HangDiagnosis("", (), False))
    assert not is_cause(None, certain)
    assert not is_cause(works(1), HangDiagnosis("", (1,), False))
    assert not is_cause(works(1), HangDiagnosis("", (2,), True))
