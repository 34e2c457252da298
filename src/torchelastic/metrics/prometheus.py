"""Metrics of a job in the formats of Prometheus (extra `prometheus`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torchelastic.metrics.job_metrics import Family

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "torchelastic_"


def missing() -> str:
    """Return an error if prometheus-client is not installed; empty if it is."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        return (
            "No metrics: --metrics-address needs prometheus-client, which is not installed. "
            "Install it with: pip install prometheus-client"
        )
    return ""


def chosen(accept: str) -> str:
    """Choose one of the two formats by a scraper's Accept header, as `render` takes it."""
    # Not the header itself: the library trusts all of it.
    newer = "application/openmetrics-text"
    return f"{newer}; version=1.0.0" if newer in accept else ""


def render(families: Iterable[Family], chosen: str) -> tuple[str, bytes]:
    """The content type and the page."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector

    class Once(Collector):  # type: ignore[misc, unused-ignore]
        def collect(self) -> Iterator[Metric]:
            return map(_translated, families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    encode, content_type = choose_encoder(chosen)
    return content_type, encode(registry)


def _translated(family: Family) -> Metric:
    from prometheus_client import core

    name = PREFIX + family.name
    if family.kind == "histogram":
        return core.HistogramMetricFamily(
            name, family.help, buckets=list(family.buckets), sum_value=family.sum
        )
    if family.kind == "info":
        ((labels, _),) = family.values.items()
        return core.InfoMetricFamily(name, family.help, value=dict(labels))
    made = core.CounterMetricFamily if family.kind == "counter" else core.GaugeMetricFamily
    names = [key for key, _ in next(iter(family.values), ())]
    metric = made(name, family.help, labels=names)
    for labels, value in family.values.items():
        metric.add_metric([text for _, text in labels], value)
    return metric
