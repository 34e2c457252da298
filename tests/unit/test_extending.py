"""The code on docs/reference/extending.md runs, in the order of the page."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.light import with_light_torch
from torchelastic import checkpoint, metrics
from torchelastic.compat.rendezvous_api import handler_factory
from torchelastic.events.handlers import sink_for
from torchelastic.metrics.streams import NullMetricHandler

PAGE = Path(__file__).parents[2] / "docs/reference/extending.md"
EVENTS, METRICS, CHECKPOINTS, PREFLIGHT, LAUNCHER, RENDEZVOUS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL
)


def run(code: str) -> dict:
    names: dict = {}
    exec(code, names)
    return names


def test_an_event_log_handler(tmp_path, monkeypatch):
    (tmp_path / "my_handlers.py").write_text(EVENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sink = sink_for("my_handlers:save_failures")
    for name in ("joined", "worker-failed"):
        sink(json.dumps({"type": name}))
    sink.close(60)
    assert sink.lost == 0
    assert (tmp_path / "failures.jsonl").read_text() == '{"type": "worker-failed"}\n'


def test_a_metric_handler():
    try:
        assert run(METRICS)["handler"].values == [("loss", 0.31)]
    finally:
        metrics.configure(NullMetricHandler(), group="my_app")


class State:
    def __init__(self, text: bytes = b"") -> None:
        self.text = text

    def save(self, stream: io.BytesIO) -> None:
        stream.write(self.text)

    def load(self, stream: io.BytesIO) -> None:
        self.text = stream.read()


def test_a_checkpoint_manager():
    manager = run(CHECKPOINTS)
    try:
        loaded = State()
        assert checkpoint.load_latest(loaded) is None
        for step in (10, 20):
            checkpoint.save(State(b"step %d" % step), step)
            checkpoint.wait()
        assert (checkpoint.load_latest(loaded), loaded.text) == (20, b"step 20")
        first, second = reversed(checkpoint.get_checkpoint_manager().list_checkpoints())
        assert checkpoint.get_checkpoint_manager().get_checkpoint(1) is second
        first.discard()
        assert manager["MemoryManager"] is type(checkpoint.get_checkpoint_manager())
        assert checkpoint.get_checkpoint_manager().list_checkpoints() == [second]
    finally:
        checkpoint.set_checkpoint_manager(None)


def test_a_preflight_check():
    run(PREFLIGHT)
    with pytest.raises(SystemExit, match="/dev/shm has only"):
        run(PREFLIGHT.replace("1 << 20", "1 << 80"))


@pytest.mark.slow
def test_a_launcher(tmp_path):
    said = subprocess.run(
        [sys.executable, "-c", LAUNCHER],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=with_light_torch(),
        timeout=100,
    )
    assert (said.returncode, said.stdout.count("hello\n")) == (0, 2), said.stderr


def test_a_rendezvous_handler():
    try:
        handler = run(RENDEZVOUS)["handler"]
        _, rank, nodes = handler.next_rendezvous()
        assert (rank, nodes, handler.get_run_id(), handler.is_closed()) == (0, 1, "job-1", False)
    finally:
        handler_factory._creators.pop("one-node", None)
