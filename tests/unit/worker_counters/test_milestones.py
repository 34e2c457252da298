"""Milestones: whoever achieves something says so, and whoever listens hears it."""

from __future__ import annotations

import os

import pytest

from tests.unit.checkpoint.conftest import state
from torchelastic.checkpoint import CheckpointStore
from torchelastic.data import ElasticSampler
from torchelastic.worker import bootstrap, channel, status_page
from torchelastic.worker_counters import milestones


@pytest.fixture
def heard(monkeypatch):
    found: list[tuple[int, float, int]] = []
    monkeypatch.setattr(milestones, "_listener", lambda *told: found.append(told))
    return found


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(milestones, "samples", -1)


def test_milestones_work_without_listener(monkeypatch):
    monkeypatch.setattr(milestones, "_listener", None)
    milestones.checkpoint_stored(1, 2.0, 3)


def test_a_checkpoint_in_storage_is_reported(heard, tmp_path):
    store = CheckpointStore(str(tmp_path))
    try:
        store.save(state(7), 7)
        store.finish()
    finally:
        store.close()
    [(step, seconds, size)] = heard
    assert step == 7
    assert seconds > 0
    assert size > 0


def test_a_worker_tells_its_agent_of_a_checkpoint(monkeypatch):
    told = []
    monkeypatch.setattr(channel, "send", lambda message, timeout: told.append(message))
    bootstrap._checkpoint_stored(7, 0.5, 1000)
    assert told == [{"type": "stored", "step": 7, "seconds": 0.5, "size": 1000}]


def test_samples_count_when_they_are_committed():
    sampler = ElasticSampler(10, rank=0, size=1)
    sampler.took(4)
    assert milestones.samples == -1
    sampler.committed()
    assert milestones.samples == 4
    sampler.set_epoch(2)
    sampler.took(3)
    sampler.committed()
    assert milestones.samples == 23


def test_samples_go_to_the_status_page_with_a_step():
    descriptor = status_page.create()
    shown = status_page.StatusPage(descriptor)
    try:
        shown.entered(0, 1)
        assert status_page.read(descriptor).samples == -1
        milestones.samples = 640
        shown.entered(0, 2)
        assert status_page.read(descriptor).samples == 640
    finally:
        shown.close()
        os.close(descriptor)
