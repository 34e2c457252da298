"""Metrics of a script: to handlers, exporters and the job."""

from __future__ import annotations

import logging
import math
import os
import struct
import sys
import time

import pytest
from torch.distributed.elastic.metrics import api

from torchelastic import metrics
from torchelastic.metrics import metric_table
from torchelastic.metrics.metric_table import MOST, ROW_BYTES, MetricRow, MetricTable, read


class Kept(metrics.MetricHandler):
    def __init__(self):
        self.data = []

    def emit(self, metric_data):
        self.data.append(metric_data)

    @property
    def values(self):
        return {(item.group_name, item.name): item.value for item in self.data}


@pytest.fixture
def kept(monkeypatch):
    """The handler of all groups, until the end of the test."""
    monkeypatch.setattr(api, "_default_metrics_handler", api._default_metrics_handler)
    monkeypatch.setattr(api, "_metrics_map", {})
    handler = Kept()
    metrics.configure(handler)
    return handler


def test_values_go_to_the_handler_of_their_group_or_else_the_default_one(kept):
    metrics.getStream("mine").add_value("loss", 0.5)
    metrics.put_metric("steps", 3)
    assert kept.values == {("mine", "loss"): 0.5, ("torchelastic", "steps"): 3}
    assert abs(kept.data[0].timestamp - time.time()) < 60
    own = Kept()
    metrics.configure(own, "mine")
    metrics.put_metric("loss", 1, "mine")
    metrics.put_metric("loss", 2, "other")
    assert own.values == {("mine", "loss"): 1}
    assert kept.values["other", "loss"] == 2
    assert ("mine", "loss") not in {(one.group_name, one.name) for one in kept.data[2:]}


def test_handlers_are_those_of_torch(kept):
    for name in ("MetricHandler", "ConsoleMetricHandler", "prof", "publish_metric"):
        assert getattr(metrics, name) is getattr(api, name)
    assert metrics.initialize_metrics() is None
    api.put_metric("steps", 7)
    assert kept.values["torchelastic", "steps"] == 7


# --- exporters ------------------------------------------------------------------------------------


@pytest.mark.needs("opentelemetry")
def test_open_telemetry_gets_a_gauge_for_every_name(kept):
    from opentelemetry.sdk import metrics as sdk
    from opentelemetry.sdk.metrics import export

    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    metrics.configure(metrics.OpenTelemetryMetricHandler(provider, {"rank": 3}))
    metrics.put_metric("loss", 0.5)
    metrics.put_metric("loss", 0.25)
    metrics.put_metric("tokens", 7, "my_app")
    found = {
        (scope.scope.name, metric.name): [
            (point.value, dict(point.attributes)) for point in metric.data.data_points
        ]
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()
    assert found == {
        ("torchelastic", "loss"): [(0.25, {"rank": 3})],
        ("my_app", "tokens"): [(7, {"rank": 3})],
    }


@pytest.mark.needs("tensorboard")
def test_tensor_board_gets_scalars_at_their_steps(kept, tmp_path):
    handler = metrics.TensorBoardMetricHandler(str(tmp_path), step=iter([10, 11]).__next__)
    metrics.configure(handler)
    metrics.put_metric("loss", 0.5)
    metrics.put_metric("loss", 0.25, "my_app")
    handler.close()
    assert scalars(tmp_path) == {"torchelastic/loss": [(10, 0.5)], "my_app/loss": [(11, 0.25)]}


@pytest.mark.needs("tensorboard")
def test_tensor_board_hides_redone_steps_after_a_restart(kept, tmp_path):
    for first, value in ((None, 1.0), (2, 2.0)):
        handler = metrics.TensorBoardMetricHandler(str(tmp_path), purge_step=first)
        metrics.configure(handler)
        for _ in range(4):
            metrics.put_metric("loss", value)
        handler.close()
    steps = [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert scalars(tmp_path) == {"torchelastic/loss": steps}


def scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory))
    found.Reload()
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


@pytest.mark.parametrize(
    ("module", "make", "package"),
    [
        ("opentelemetry.metrics", metrics.OpenTelemetryMetricHandler, "opentelemetry-sdk"),
        (
            "torch.utils.tensorboard",
            lambda: metrics.TensorBoardMetricHandler("unused"),
            "tensorboard",
        ),
    ],
)
def test_handler_without_its_library_names_the_package(monkeypatch, module, make, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        make()


# --- the table that the agent reads --------------------------------------------------------------


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
