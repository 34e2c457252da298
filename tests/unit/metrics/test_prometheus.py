"""A job's numbers as Prometheus reads them."""

import sys
from importlib import import_module

import pytest

from torchelastic.metrics import prometheus
from torchelastic.metrics.job_metrics import Family

pytestmark = pytest.mark.needs("prometheus_client")

HOSTILE = 'a"b\\c\nevil{x="1"} 7'

FAMILIES = [
    Family("job", "info", "The job.", {(("run_id", HOSTILE),): 1.0}),
    Family("generation", "gauge", "Its number.", {(): 3.0}),
    Family("step", "gauge", "By rank.", {(("rank", "0"),): 5.0, (("rank", "1"),): 6.0}),
    Family("straggler_cost_seconds", "gauge", "None."),
    Family("failures", "counter", "So far.", {(): 2.0}),
    Family("seconds", "histogram", "How long.", buckets=(("1.0", 1.0), ("+Inf", 4.0)), sum=9.5),
]


@pytest.mark.parametrize(
    ("accept", "parser"),
    [
        ("", "parser"),
        ("text/plain;version=0.0.4", "parser"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "openmetrics.parser"),
        ("application/openmetrics-text; version=evil; escaping=\0", None),
    ],
)
def test_a_scraper_reads_what_it_asked_for(accept, parser):
    content_type, page = prometheus.render(FAMILIES, prometheus.chosen(accept))
    assert content_type.startswith(
        "application/openmetrics-text" if "openmetrics" in accept else "text/plain"
    )
    if parser is None:
        return
    parse = import_module(f"prometheus_client.{parser}").text_string_to_metric_families
    found = {
        (sample.name, *sample.labels.items()): sample.value
        for family in parse(page.decode())
        for sample in family.samples
    }
    assert found[("torchelastic_job_info", ("run_id", HOSTILE))] == 1
    assert found[("torchelastic_generation",)] == 3
    assert found[("torchelastic_step", ("rank", "1"))] == 6
    assert found[("torchelastic_failures_total",)] == 2
    assert found[("torchelastic_seconds_bucket", ("le", "1.0"))] == 1
    assert found[("torchelastic_seconds_count",)] == 4
    assert found[("torchelastic_seconds_sum",)] == 9.5
    assert not any("evil" in name for name, *_ in found)


def test_without_the_library_there_is_a_sentence(monkeypatch):
    assert prometheus.missing() == ""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert prometheus.missing().endswith("pip install prometheus-client")
