"""A job's numbers in the formats of Prometheus (extra `prometheus`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torchelastic.metrics.job_metrics import Family

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "torchelastic_"


def missing() -> str:
    """Why there are no metrics without the library, and how to install it; empty if it is there."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        return (
            "No metrics: --metrics-address needs prometheus-client, which is not installed. "
            "Install it with: pip install 'torchelastic[prometheus]'"
        )
    return ""


def chosen(accept: str) -> str:
    """Of the two formats, the one that a scraper says it accepts, as `render` takes it."""
    # Not what the scraper says: the library believes every word of it.
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
