"""Handlers that pass metrics on: to TensorBoard and OpenTelemetry (extras `tensorboard`,
`opentelemetry`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
                "OpenTelemetryMetricHandler needs OpenTelemetry: pip install opentelemetry-sdk.",
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


class TensorBoardMetricHandler(MetricHandler):
    """Writes every value as a scalar `group/name`, below `log_dir`.

    `step` returns the current step; without it the values of a name are numbered. A restarted
    process writes into the same directory: pass `purge_step`, the step it continues from, to hide
    the values of that step and later ones, which are done again. A thread writes the file, so a
    value costs microseconds. Let one rank write.
    """

    def __init__(
        self,
        log_dir: str,
        step: Callable[[], int] | None = None,
        purge_step: int | None = None,
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError(
                "TensorBoardMetricHandler needs TensorBoard: pip install tensorboard.",
                name="tensorboard",
            ) from None
        writer: Any = SummaryWriter
        self._writer = writer(log_dir, purge_step=purge_step)
        self._step = step
        self._next: defaultdict[str, int] = defaultdict(lambda: purge_step or 0)

    def emit(self, metric_data: MetricData) -> None:
        when, group, name, value = metric_data
        tag = f"{group}/{name}"
        self._writer.add_scalar(tag, value, self._step_of(tag), when)

    def _step_of(self, tag: str) -> int:
        if self._step is not None:
            return self._step()
        self._next[tag] += 1
        return self._next[tag] - 1

    def close(self) -> None:
        """Write the remaining values and close the file."""
        self._writer.close()
