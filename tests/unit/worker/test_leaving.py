"""`torchelastic.leaving()`."""

import time

import torchelastic
from torchelastic.worker import leaving as module


def test_without_an_agent_nobody_leaves(monkeypatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    assert torchelastic.leaving() is None


def test_it_says_why_and_how_long(tmp_path, monkeypatch):
    file = module.LeaveFile(tmp_path)
    monkeypatch.setenv(module.VARIABLE, str(file.path))
    assert torchelastic.leaving() is None
    file.announce("SIGTERM", time.monotonic() + 20)
    file.announce("SIGINT", time.monotonic() + 30)  # the first reason counts
    said = torchelastic.leaving()
    assert said.reason == "SIGTERM"
    assert 10 < said.seconds <= 20
    assert [one.name for one in tmp_path.iterdir()] == ["leaving.json"]


def test_the_earliest_deadline_counts(tmp_path, monkeypatch):
    """As on a spot machine in Kubernetes: a notice of two minutes, then the pod's grace period."""
    file = module.LeaveFile(tmp_path)
    monkeypatch.setenv(module.VARIABLE, str(file.path))
    file.announce("spot reclaim", time.monotonic() + 120)
    file.announce("SIGTERM", time.monotonic() + 30)
    said = torchelastic.leaving()
    assert said.reason == "spot reclaim"
    assert 20 < said.seconds <= 30


def test_the_time_left_is_never_negative(tmp_path, monkeypatch):
    file = module.LeaveFile(tmp_path)
    monkeypatch.setenv(module.VARIABLE, str(file.path))
    file.announce("SIGTERM", time.monotonic() - 20)
    assert torchelastic.leaving().seconds == 0


def test_the_next_agent_of_a_node_starts_without_the_file(tmp_path):
    module.LeaveFile(tmp_path).announce("SIGTERM", 0.0)
    assert not module.LeaveFile(tmp_path).path.exists()
