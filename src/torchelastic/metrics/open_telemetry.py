"""Metrics into OpenTelemetry (extra `opentelemetry`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchelastic.metrics.streams import MetricData, MetricHandler

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider


class OpenTelemetryMetricHandler(MetricHandler):
    """Sets a gauge for every value; the group is the name of the meter.

    `provider` defaults to the one set with `opentelemetry.metrics.set_meter_provider`. `attributes`
    are added to every value, for example the rank. Exporters run in background threads, so a value
    costs microseconds.
    """

    def __init__(
        self,
        provider: MeterProvider | None = None,
        attributes: dict[str, str | int | float | bool] | None = None,
    ) -> None:
        try:
            from opentelemetry.metrics import get_meter_provider
        except ImportError:
            raise ModuleNotFoundError(
                "OpenTelemetryMetricHandler needs OpenTelemetry: pip install "
                "'torchelastic[opentelemetry]'.",
                name="opentelemetry",
            ) from None
        self._provider = provider or get_meter_provider()
        self._attributes = dict(attributes or {})
        self._gauges: dict[tuple[str, str], Any] = {}

    def emit(self, metric_data: MetricData) -> None:
        _, group, name, value = metric_data
        gauge = self._gauges.get((group, name))
        if gauge is None:
            gauge = self._provider.get_meter(group).create_gauge(name)
            self._gauges[(group, name)] = gauge
        gauge.set(value, self._attributes)
