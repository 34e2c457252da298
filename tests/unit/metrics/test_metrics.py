"""Values reach the handler of their group; timed calls say how they ended."""

from __future__ import annotations

import time

import pytest

from torchelastic import metrics
from torchelastic.metrics import streams


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
    monkeypatch.setattr(streams, "_default", streams._default)
    monkeypatch.setattr(streams, "_handlers", {})
    handler = Kept()
    metrics.configure(handler)
    return handler


@metrics.prof
def timed():
    return 5


@metrics.prof(group="mine")
def failing():
    raise KeyError("x")


class Trainer:
    @metrics.prof
    def step(self, size, *, scale):
        return size * scale


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


def test_by_default_values_go_nowhere_and_to_the_console_as_lines(capsys):
    assert isinstance(streams._default, metrics.NullMetricHandler)
    metrics.put_metric("steps", 3)
    assert capsys.readouterr().out == ""
    metrics.ConsoleMetricHandler().emit(metrics.MetricData(1.5, "mine", "loss", 0.25))
    assert capsys.readouterr().out == "[1.5][mine]: loss=0.25\n"


def test_a_timed_call(kept):
    assert timed() == 5
    names = ("test_metrics.timed.success", "test_metrics.timed.duration.ms")
    assert set(kept.values) == {("torchelastic", name) for name in names}
    assert kept.values["torchelastic", names[0]] == 1


def test_a_timed_call_that_fails(kept):
    with pytest.raises(KeyError, match="x"):
        failing()
    assert kept.values["mine", "test_metrics.failing.failure"] == 1
    assert ("mine", "test_metrics.failing.success") not in kept.values
    assert ("mine", "test_metrics.failing.duration.ms") in kept.values


def test_a_timed_method_is_named_after_its_class(kept):
    assert Trainer().step(2, scale=3) == 6
    assert kept.values["torchelastic", "Trainer.step.success"] == 1


def test_the_older_names_work_and_say_so(kept):
    with pytest.warns(DeprecationWarning, match="use prof"):
        decorate = metrics.profile("mine")
    decorate(lambda: None)()
    with pytest.warns(DeprecationWarning, match="put_metric"):
        metrics.publish_metric("mine", "loss", 2)
    assert kept.values["mine", "<lambda>.success"] == 1
    assert kept.values["mine", "loss"] == 2


def test_elapsed_time():
    assert 1000 <= metrics.get_elapsed_time_ms(time.time() - 1) < 60_000
    assert metrics.initialize_metrics() is None
