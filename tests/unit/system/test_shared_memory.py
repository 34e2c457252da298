"""The bytes of the memories that processes share: both ends may be of different releases."""

import hashlib
import os
import time
from array import array

from torchelastic.metrics.metric_table import MetricTable
from torchelastic.snapshot import layout
from torchelastic.timer.timer_table import TimerTable
from torchelastic.worker import status_page
from torchelastic.worker_counters import milestones, stalls


def digest(descriptor):
    size = os.fstat(descriptor).st_size
    return size, hashlib.sha256(os.pread(descriptor, size, 0)).hexdigest()[:16]


def test_a_status_page(monkeypatch):
    clock = iter(range(1, 100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(
        stalls, "seconds", array("d", [0.5 * n for n in range(len(stalls.COUNTED))])
    )
    monkeypatch.setattr(milestones, "samples", 640)
    descriptor = status_page.create()
    try:
        page = status_page.StatusPage(descriptor)
        page.rank = 3
        page.taken_before(7)
        page.entered(2, 40)
        page.entered(2, 41)
        page.publish(1, (2, 41), b"changing" * 600, b"steady" * 9)
        page.publish(4, (2, 42), b"brief")
        page.collectives.enter(2)
        row = page.collectives.row_of("dp")
        page.collectives.launched(5, row, 9, b"ALLREDUCE")
        page.collectives.waits(row, 9, b"ALLREDUCE")
        page.close()
        assert digest(descriptor) == (45056, "937eb585a7049feb")
    finally:
        os.close(descriptor)


def test_a_metric_table():
    table = MetricTable()
    for name, value in (("loss", 0.5), ("accuracy", 1.0), ("loss", 0.25), ("é" * 80, 3)):
        table.put(name, value)
    assert digest(table.descriptor) == (1024, "c7f6adac2b867496")
    table.close()


def test_a_timer_table():
    table = TimerTable()
    first = table.set("a.py:1", 2.5, 100.0)
    table.set("long/" * 80, 1.0, 200.0)
    table.clear(first)
    assert digest(table.descriptor) == (262144, "3d3179dfa5c7d1f6")
    table.close()


def test_a_snapshot_memory():
    descriptor = layout.create(layout.Sizes(10_000, 100, buffers=3))
    memory = layout.Memory(descriptor)
    for step in range(2):
        memory.begin((1, step))[:8] = b"tensors%d" % step
        memory.seal((1, step), b'{"tree":1}', 8, 99, rank=2, size=4)
    memory.pin(memory.freshest())
    memory.note_replicated((1, 0))
    assert digest(descriptor) == (53248, "82fc1890ef788f2b")
    memory.close()
    os.close(descriptor)
