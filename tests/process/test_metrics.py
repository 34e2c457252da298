"""`--metrics-address` and `--health-port` of a real agent: what scrapers and probes see."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import pytest

from tests.process.jobs import job
from tests.support import poll_for


@pytest.mark.needs("prometheus_client")
def test_a_scraper_sees_a_failure_and_the_recovery_from_it(tmp_path):
    flags = "--standalone --no-zygote --metrics-address=0 --event-log-handler=console"
    with job(tmp_path, flags) as it:
        node = it.start()
        it.world(0, 1)
        said = re.compile(r"metrics at (http://127\.0\.0\.1:\d+/metrics)")
        url = poll_for(lambda: said.search(node.stderr), what="where to ask")[1]
        poll_for(lambda: scrape(url).get("torchelastic_world_size") == 1, what="a world")
        it.order("exit 3", generation=0)
        it.world(1, 1)
        values = poll_for(lambda: recovered(scrape(url)), what="a recovery")
        assert values["torchelastic_generation"] == 1
        assert values['torchelastic_generations_over_total{cause="failure"}'] == 1
        assert values["torchelastic_worker_failures_total"] == 1
        assert values["torchelastic_recovery_seconds_sum"] > 0
        it.order("finish")
        assert node.wait() == 0, node.stderr
        assert '"type":"job-ended"' in node.stderr, "and the events go where they were wanted"


def recovered(values: dict[str, float]) -> dict[str, float]:
    return values if values.get("torchelastic_recovery_seconds_count") else {}


def scrape(url: str) -> dict[str, float]:
    """What the agent tells; nothing where a busy machine made it take us for a slow scraper."""
    try:
        with urllib.request.urlopen(url, timeout=30) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return {}
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_bad_metrics_settings_are_refused_before_anything_starts(tmp_path):
    with job(tmp_path, "--standalone --no-zygote --metrics-address=0.0.0.0:0") as it:
        node = it.start()
        assert node.wait() == 64
        assert "give --metrics-token-file" in node.stderr
        assert it.lines() == []


def test_a_probe_sees_whether_the_node_is_in_the_world(tmp_path):
    with job(tmp_path, "--nnodes=1:2 --settle=60 --no-zygote --health-port=0") as it:
        node = it.start()
        said = re.compile(r"health probes at port (\d+)")
        url = f"http://127.0.0.1:{poll_for(lambda: said.search(node.stderr), what='where')[1]}"
        assert probe(f"{url}/livez") == 200
        assert probe(f"{url}/readyz") == 503, "it waits for the second node"
        it.start()
        it.world(0, 2)
        poll_for(lambda: probe(f"{url}/readyz") == 200, what="ready")
        it.order("finish")
        assert node.wait() == 0, node.stderr


def probe(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as page:
            return int(page.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
