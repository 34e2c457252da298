"""Metrics into OpenTelemetry and TensorBoard, by the libraries themselves."""

import sys

import pytest

from torchelastic import metrics


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    from torchelastic.metrics import streams

    monkeypatch.setattr(streams, "_default", streams._default)
    monkeypatch.setattr(streams, "_handlers", {})


@pytest.mark.needs("opentelemetry")
def test_open_telemetry_gets_a_gauge_for_every_name():
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
def test_tensor_board_gets_scalars_at_their_steps(tmp_path):
    handler = metrics.TensorBoardMetricHandler(str(tmp_path), step=iter([10, 11]).__next__)
    metrics.configure(handler)
    metrics.put_metric("loss", 0.5)
    metrics.put_metric("loss", 0.25, "my_app")
    handler.close()
    assert scalars(tmp_path) == {"torchelastic/loss": [(10, 0.5)], "my_app/loss": [(11, 0.25)]}


@pytest.mark.needs("tensorboard")
def test_tensor_board_hides_redone_steps_after_a_restart(tmp_path):
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
    ("module", "make", "extra"),
    [
        ("opentelemetry.metrics", metrics.OpenTelemetryMetricHandler, "opentelemetry"),
        (
            "torch.utils.tensorboard",
            lambda: metrics.TensorBoardMetricHandler("unused"),
            "tensorboard",
        ),
    ],
)
def test_without_the_library_there_is_a_sentence(monkeypatch, module, make, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'torchelastic\[{extra}\]'"):
        make()
