"""Worker process: a script's metrics, sent to the handlers it configures. The names are 0.1's.

from torchelastic import metrics

metrics.configure(metrics.ConsoleMetricHandler())
metrics.put_metric("tokens_per_second", 5300)

Handlers and streams are torch's own, loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.metrics.exporters import OpenTelemetryMetricHandler, TensorBoardMetricHandler
    from torchelastic.metrics.streams import (
        ConsoleMetricHandler,
        MetricData,
        MetricHandler,
        MetricsConfig,
        MetricStream,
        NullMetricHandler,
        configure,
        get_elapsed_time_ms,
        getStream,
        initialize_metrics,
        prof,
        profile,
        publish_metric,
        put_metric,
    )

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


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'torchelastic.metrics' has no attribute '{name}'")
    home = "exporters" if name.startswith(("OpenTelemetry", "TensorBoard")) else "streams"
    return getattr(importlib.import_module(f"torchelastic.metrics.{home}"), name)
