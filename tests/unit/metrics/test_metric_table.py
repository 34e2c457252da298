"""What a worker reports: the last values of a few metrics, in memory that somebody else reads."""

from __future__ import annotations

import logging
import math
import os
import struct

import pytest

from torchelastic.metrics import metric_table
from torchelastic.metrics.metric_table import MOST, ROW_BYTES, MetricRow, MetricTable, read


@pytest.fixture
def shown():
    made = MetricTable()
    yield made
    made.close()


class Tensor:
    """As much of one as is asked for; it counts how often it was waited for."""

    def __init__(self, value: float) -> None:
        self.value, self.waited = value, 0

    def detach(self) -> Tensor:
        return self

    def __float__(self) -> float:
        self.waited += 1
        return self.value


def test_the_last_value_of_each_name_is_there(shown):
    assert read(shown.descriptor) == []
    shown.put("loss", 2.5)
    shown.put("epoch", 3)
    shown.put("loss", 2.25)
    assert read(shown.descriptor) == [MetricRow("loss", 2, 2.25), MetricRow("epoch", 1, 3.0)]


def test_every_float_comes_through(shown):
    for value in (math.nan, math.inf, -math.inf, -0.0, 1e-320):
        shown.put("loss", value)
        [row] = read(shown.descriptor)
        assert struct.pack("d", row.value) == struct.pack("d", value)


def test_names_are_as_the_user_gave_them_and_a_long_one_is_cut(shown):
    names = ["", "loss/train", "ä" * 20, "\x1b[31m\n", 'a"b\\', "\ud800", "x" * 1000]
    for name in names:
        shown.put(name, 1.0)
    assert [row.name for row in read(shown.descriptor)] == [
        name.encode(errors="backslashreplace").decode()[:102] for name in names
    ]


def test_a_name_too_many_is_left_to_handlers_and_that_is_reported_once(shown, caplog):
    for n in range(MOST + 3):
        shown.put(f"name-{n}", n)
    assert [row.name for row in read(shown.descriptor)] == [f"name-{n}" for n in range(MOST)]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "'name-8'" in record.getMessage()


def test_a_tensor_is_not_waited_for_with_every_step(shown, monkeypatch):
    now = 100.0
    monkeypatch.setattr(metric_table.time, "monotonic", lambda: now)
    loss = Tensor(4.0)
    for _ in range(10):
        shown.put("loss", loss)
    assert loss.waited == 1
    now, loss.value = 100.0 + metric_table.CONVERSION_INTERVAL, 3.0
    shown.put("loss", loss)
    assert read(shown.descriptor) == [MetricRow("loss", 2, 3.0)]


class Raises:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error("no number")


def test_metric_without_a_number_goes_to_handlers_only(shown):
    import torch

    tensors = torch.zeros(2), torch.ones(()) * 1j, torch.ones((), device="meta")
    raising = Raises(RuntimeError), Raises(OverflowError)
    for value in ("text", None, [1.0], {}, 10**400, -(10**400), 1j, *raising, *tensors):
        shown.put("note", value)
        assert read(shown.descriptor) == []
    shown.put("note", 1.0)
    assert read(shown.descriptor) == [MetricRow("note", 1, 1.0)]


def test_a_row_that_is_being_written_is_left_out(shown):
    shown.put("loss", 2.5)
    shown.put("epoch", 1)
    os.pwrite(shown.descriptor, struct.pack("@q", 2), 0)
    assert [row.name for row in read(shown.descriptor)] == ["epoch"]


def test_junk_and_memory_of_another_size_are_no_reason_to_fail(shown):
    os.pwrite(shown.descriptor, b"\xff" * ROW_BYTES, 0)
    os.pwrite(shown.descriptor, struct.pack("@qdqH", 7, 1.0, 7, 65535) + b"\xff" * 102, ROW_BYTES)
    assert read(shown.descriptor) == [MetricRow("", 7, 1.0)]
    descriptor = os.memfd_create("test")
    try:
        for size in (0, 1, ROW_BYTES - 1, ROW_BYTES + 1):
            os.ftruncate(descriptor, size)
            assert read(descriptor) == []
    finally:
        os.close(descriptor)
