"""Metrics of scripts, and the answers of a real agent to scrapers and probes."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

from tests.process.jobs import HERE, Node, job
from tests.support import poll_for
from torchelastic.events.analysis.view import JobView, fold
from torchelastic.events.log import read

#: What is sent to the address of metrics, and should not be.
NO_SCRAPES = [
    b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nstop",
    b"PUT /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET /metrics\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 40 + b"\r\n\r\n",
    b"\x00" * 100_000,
    b"",
]


@pytest.mark.needs("prometheus_client")
def test_a_scraper_sees_a_failure_and_the_recovery_from_it(tmp_path):
    """And nothing else that is sent to the address changes anything."""
    flags = "--standalone --no-zygote --metrics-address=0 --event-log-handler=console"
    with job(tmp_path, flags) as it:
        node = it.start()
        it.world(0, 1)
        said = re.compile(r"metrics at (http://127\.0\.0\.1:\d+/metrics)")
        url = poll_for(lambda: said.search(node.stderr), what="where to ask")[1]
        poll_for(lambda: scrape(url).get("torchelastic_world_size") == 1, what="a world")
        for sent in NO_SCRAPES:
            answer = ask(urlsplit(url).port, sent)
            assert not answer.startswith(b"HTTP/1.1 200"), sent
            assert b"torchelastic_" not in answer
        poll_for(lambda: scrape(url).get("torchelastic_generation") == 0, what="the same world")
        assert node.events("worker-failed", "generation-over") == []
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
    """The agent's answer; empty where a busy machine made it take us for a slow scraper."""
    try:
        with urllib.request.urlopen(url, timeout=30) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return {}
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def ask(port: int, sent: bytes) -> bytes:
    """All that is answered; nothing where the connection is ended instead."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 90) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                answer += data
        except ConnectionError:
            return answer  # it has heard enough
    return answer


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


# --- what scripts report --------------------------------------------------------------------------

SCRIPT = HERE / "reporting.py"


def view_of(node: Node) -> JobView:
    paths = list((node.directory / "logs").rglob("events.jsonl"))
    return fold(read(paths[0])) if paths else JobView()


def values(view: JobView, name: str) -> list[float]:
    return [value for _, _, value in view.metrics.get(name, ())]


def test_plain_script_reports_metrics_in_every_generation(tmp_path):
    flags = "--standalone --nproc-per-node=2 --max-restarts=1"
    with job(tmp_path, flags, SCRIPT, way="script") as it:
        node = it.start()
        poll_for(lambda: 10.0 in values(view_of(node), "loss"), what="the loss, live", timeout=100)
        it.give("finish")
        assert node.wait(100) == 0, node.stderr
        view = view_of(node)
        # Rank 1 may have been the only one to say something, before or after the other: of a
        # child, nothing is heard.
        assert set(values(view, "loss")) <= {0.0, 1.0, 10.0, 11.0}
        assert set(values(view, 'acc"ura\ncy')) == {0.5}
        assert {step for _, step, _ in view.metrics["loss"]} == {None}
        assert "only one has it" not in view.metrics, "it is not finite"
        told = [item for event in node.events("progress") for item in event["metrics"].items()]
        assert ("only one has it", None) in told


@pytest.mark.slow
def test_a_resident_worker_reports_with_its_steps(tmp_path):
    keys = {"way": "train", "store": tmp_path / "store"}
    with job(tmp_path, "--standalone --nproc-per-node=2", SCRIPT, **keys) as it:
        node = it.start()
        assert node.wait(100) == 0, node.stderr
        view = view_of(node)
        assert values(view, "step")[-1] == 2.0
        assert view.metrics["step"][-1][1] in (2, 3), "the step it was in, or the one after"
        assert values(view, "loss"), "tensors are numbers"
        assert set(values(view, "progress_rate")) & {7.0, 8.0}
        assert view.samples == 24
        assert view.checkpoint is not None
        assert (view.checkpoint.step, view.checkpoint.size > 0) == (3, True)
