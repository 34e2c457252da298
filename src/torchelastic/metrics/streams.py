"""Metric streams: named values in groups, each group with its handler. The streams are torch's own
(`torch.distributed.elastic.metrics`); here, a value is also reported to the job.

Loaded when the first of its names is used: agents import no torch.
"""

from __future__ import annotations

from torch.distributed.elastic.metrics import api
from torch.distributed.elastic.metrics.api import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    prof,
    profile,
    publish_metric,
)

from torchelastic.metrics.reporting import report

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

DEFAULT_GROUP = "torchelastic"


def put_metric(metric_name: str, metric_value: float, metric_group: str = DEFAULT_GROUP) -> None:
    """Pass a value to the group's handler; in a worker, also report it to the job."""
    report(metric_name, metric_value)
    api.getStream(metric_group).add_value(metric_name, metric_value)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing; kept for callers of 0.1."""
