"""Progress: what workers show and report becomes events, once and seldom enough."""

import os
from dataclasses import replace

import pytest

from tests.support import FakeClock
from torchelastic.agent.telemetry.progress_sampler import ProgressSampler, interval, progress_of
from torchelastic.agent.workers.handed_memory import MetricTables, Reported
from torchelastic.events.types import CheckpointStored, Progress, WeightsHashed
from torchelastic.metrics.metric_table import MetricTable
from torchelastic.worker.orders import Hashed, Stored
from torchelastic.worker.status_page import ShownStatus

NOTHING = (0.0, 0.0, 0.0, 0.0)


def shown(
    rank: int, step: int, *, generation: int = 0, at: float = 1.0, stalled=NOTHING, own: float = 0.0
) -> ShownStatus:
    return ShownStatus(generation, rank, step, at, stalled, own)


@pytest.mark.parametrize(
    ("age", "nodes", "expected"),
    [
        (599.0, 1, 1.0),
        (3600.0, 1, 6.0),
        (86400.0, 1, 15.0),
        (0.0, 32, 1.0),
        (0.0, 256, 8.0),
        (86400.0, 1024, 60.0),
        (0.0, 100_000, 60.0),
    ],
)
def test_the_longer_it_lasts_and_the_more_tell_the_rarer(age, nodes, expected):
    assert interval(age, nodes) == expected


def test_workers_are_reported_together_by_generation_and_rank_with_the_sum_of_their_stalls():
    told = progress_of(
        [
            shown(3, 7, at=2.0, stalled=(1.0, 0.0, 0.0, 0.5), own=1.5),
            shown(2, 8, at=2.5, stalled=(0.25, 0.0, 0.0, 0.0), own=0.5),
            shown(1, 6, generation=1),
            shown(-1, -1, generation=-1),  # it has entered no step
        ]
    )
    stalls = {"data": 1.25, "restore": 0.5}
    both = Progress(ranks=[2, 3], steps=[8, 7], at=[2.5, 2.0], stalls=stalls, own=[0.5, 1.5])
    assert (told.keys(), told[0], told[1].ranks) == ({0, 1}, both, [1])


@pytest.mark.parametrize(
    ("field", "of_ranks", "expected"),
    [
        ("before", [None, None], None),
        ("before", [50, 50], 50),
        ("before", [0, 0], 0),
        ("before", [50, 0], 0),
        ("before", [50, 60], 0),
        ("before", [50, -1], -1),
        ("before", [None, 50], None),
        # Samples are counted by whoever knows them, shares only if all do.
        ("samples", [64, -1], 64),
        ("samples", [-1, -1], -1),
        ("share", [6, 0], [6, 0]),
        ("share", [6, -1], ()),
    ],
)
def test_counts_of_ranks_are_reported_as_one(field, of_ranks, expected):
    ones = [replace(shown(rank, 60), **{field: one}) for rank, one in enumerate(of_ranks)]
    reported = progress_of(ones)[0]
    assert getattr(reported, "shares" if field == "share" else field) == expected


@pytest.fixture
def told():
    return []


@pytest.fixture
def sampling(told):
    return ProgressSampler(
        lambda generation, one: told.append((generation, one.steps)), FakeClock()
    )


BOTH_AT_5 = [shown(0, 5), shown(1, 5)]
NEXT = [shown(0, 5), shown(1, 5, generation=1)]


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([BOTH_AT_5], []),
        ([[shown(0, 6), shown(1, 5)]], [(0, [6, 5])]),
        ([NEXT, [replace(one, generation=1, step=6) for one in NEXT]], [(1, [5]), (1, [6, 6])]),
    ],
    ids=["nothing new", "one gets on", "not again what is of the generation before"],
)
def test_new_progress_is_reported_once_for_all_workers(sampling, told, looks, expected):
    for look in [BOTH_AT_5, *looks]:
        sampling.look(look)
    assert told == [(0, [5, 5]), *expected]


# --- what the script reports ---------------------------------------------------------------------


def reported(generation: int, rank: int, metrics: dict[str, float], fresh: str = "all"):
    """`fresh` are names between commas."""
    news = metrics if fresh == "all" else fresh.split(",")
    return Reported(generation, rank, metrics, frozenset(news))


@pytest.mark.parametrize(
    ("seen", "told", "expected"),
    [
        ([], [], {}),
        # Of several workers, the lowest rank's.
        (
            [shown(0, 5), shown(1, 5)],
            [reported(0, 1, {"loss": 3.0, "lr": 0.1}), reported(0, 0, {"loss": 2.0})],
            {0: ([0, 1], [5, 5], {"loss": 2.0, "lr": 0.1})},
        ),
        # Not another one's, because that one is quicker to say something new.
        (
            [shown(0, 5), shown(1, 5)],
            [
                reported(0, 1, {"loss": 3.0, "lr": 0.1}),
                reported(0, 0, {"loss": 2.0, "epoch": 1.0}, fresh="epoch"),
            ],
            {0: ([0, 1], [5, 5], {"lr": 0.1, "epoch": 1.0})},
        ),
        # A script that tells no steps.
        ([], [reported(2, 3, {"loss": 1.0})], {2: ([3], [-1], {"loss": 1.0})}),
        # One that tells them from its next world on.
        (
            [shown(0, 5)],
            [reported(1, 0, {"loss": 1.0})],
            {0: ([0], [5], {}), 1: ([0], [-1], {"loss": 1.0})},
        ),
        # A worker that is in no world yet.
        ([], [reported(-1, 4, {"loss": 1.0})], {}),
        # JSON has no others than finite numbers.
        (
            [],
            [reported(0, 0, {"a": float("nan"), "b": float("inf"), "c": 1.0})],
            {0: ([0], [-1], {"a": None, "b": None, "c": 1.0})},
        ),
    ],
)
def test_reported_metrics_go_with_progress(seen, told, expected):
    found = progress_of(seen, told)
    got = {key: (list(one.ranks), list(one.steps), one.metrics) for key, one in found.items()}
    assert got == expected


def test_reported_metrics_are_news_without_steps(sampling, told):
    sampling.look([shown(0, 5)])
    sampling.look([shown(0, 5)], [reported(0, 0, {"loss": 1.0})])
    sampling.look([shown(0, 5)], [reported(0, 0, {"loss": 1.0}, fresh="")])
    assert told == [(0, [5]), (0, [5])]


def test_of_checkpoints_the_last_is_reported_with_the_next_look():
    told, clock = [], FakeClock(7.0)
    sampling = ProgressSampler(lambda generation, event: told.append((generation, event)), clock)
    sampling.look([])
    for step in (10, 20):
        sampling.stored(3, 1, Stored(step, 0.5, 1000))
        sampling.hashed(3, 1, Hashed(step, "3f2a"))
        clock.advance(1.0)
    assert told == []
    sampling.look([])
    sampling.look([])
    assert told == [
        (3, CheckpointStored(1, 20, at=8.0, seconds=0.5, size=1000)),
        (3, WeightsHashed(1, 20, "3f2a")),
    ]


# --- Metric tables --------------------------------------------------------------------------------


def news_of(generation: int, rank: int, metrics: dict[str, float], *fresh: str) -> Reported:
    return Reported(generation, rank, metrics, frozenset(fresh))


@pytest.fixture
def worker():
    table = MetricTable()
    yield table
    table.close()


@pytest.fixture
def metric_tables():
    made = MetricTables()
    yield made
    made.close()


def test_metrics_since_last_look_are_fresh(metric_tables, worker):
    metric_tables.handed(0, (4, 2), os.dup(worker.descriptor))
    assert metric_tables.look({}) == [news_of(4, 2, {})]
    worker.put("loss", 2.0)
    worker.put("lr", 0.1)
    both = {"loss": 2.0, "lr": 0.1}
    assert metric_tables.look({}) == [news_of(4, 2, both, "loss", "lr")]
    assert metric_tables.look({}) == [news_of(4, 2, both)]
    worker.put("lr", 0.1)  # the same, but said again
    assert metric_tables.look({}) == [news_of(4, 2, both, "lr")]


@pytest.mark.parametrize(
    ("stepped", "place"),
    [
        ({}, (4, 2)),
        ({0: (5, 1)}, (5, 1)),  # resident: in the next world, with another rank
        ({0: (3, 7)}, (4, 2)),  # what a worker before this one has left on the status page
        ({0: (-1, -1)}, (4, 2)),
        ({1: (9, 9)}, (4, 2)),
    ],
)
def test_a_value_belongs_to_the_world_its_worker_is_in(metric_tables, worker, stepped, place):
    metric_tables.handed(0, (4, 2), os.dup(worker.descriptor))
    worker.put("loss", 2.0)
    assert metric_tables.look(stepped) == [news_of(*place, {"loss": 2.0}, "loss")]


def test_a_worker_that_is_gone_reports_nothing(metric_tables, worker):
    own = os.dup(worker.descriptor)
    metric_tables.handed(0, (4, 2), own)
    worker.put("loss", 2.0)
    metric_tables.forget(0)
    metric_tables.forget(0)
    assert metric_tables.look({}) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
