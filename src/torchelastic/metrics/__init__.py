"""Worker process: a script's metrics, sent to the handlers it configures. The names are 0.1's.

from torchelastic import metrics

metrics.configure(metrics.ConsoleMetricHandler())
metrics.put_metric("tokens_per_second", 5300)
"""

from torchelastic.metrics.open_telemetry import OpenTelemetryMetricHandler
from torchelastic.metrics.streams import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    getStream,
    initialize_metrics,
    publish_metric,
    put_metric,
)
from torchelastic.metrics.tensor_board import TensorBoardMetricHandler
from torchelastic.metrics.timing import get_elapsed_time_ms, prof, profile

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "OpenTelemetryMetricHandler",
    "TensorBoardMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]
