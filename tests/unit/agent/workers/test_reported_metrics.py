"""What workers report becomes news once, in the right generation."""

from __future__ import annotations

import os

import pytest

from torchelastic.agent.workers.handed_memory import MetricTables, Reported
from torchelastic.metrics.metric_table import MetricTable


def reported(generation: int, rank: int, metrics: dict[str, float], *fresh: str) -> Reported:
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
    assert metric_tables.look({}) == [reported(4, 2, {})]
    worker.put("loss", 2.0)
    worker.put("lr", 0.1)
    both = {"loss": 2.0, "lr": 0.1}
    assert metric_tables.look({}) == [reported(4, 2, both, "loss", "lr")]
    assert metric_tables.look({}) == [reported(4, 2, both)]
    worker.put("lr", 0.1)  # the same, but said again
    assert metric_tables.look({}) == [reported(4, 2, both, "lr")]


@pytest.mark.parametrize(
    ("stepped", "place"),
    [
        ({}, (4, 2)),
        ({0: (5, 1)}, (5, 1)),  # resident: in the next world, with another rank
        ({0: (3, 7)}, (4, 2)),  # what a worker before this one has left on the slate
        ({0: (-1, -1)}, (4, 2)),
        ({1: (9, 9)}, (4, 2)),
    ],
)
def test_a_value_belongs_to_the_world_its_worker_is_in(metric_tables, worker, stepped, place):
    metric_tables.handed(0, (4, 2), os.dup(worker.descriptor))
    worker.put("loss", 2.0)
    assert metric_tables.look(stepped) == [reported(*place, {"loss": 2.0}, "loss")]


def test_a_worker_that_is_gone_reports_nothing(metric_tables, worker):
    own = os.dup(worker.descriptor)
    metric_tables.handed(0, (4, 2), own)
    worker.put("loss", 2.0)
    metric_tables.forget(0)
    metric_tables.forget(0)
    assert metric_tables.look({}) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
