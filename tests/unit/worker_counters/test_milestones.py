"""Counters of a worker: milestones, which a listener hears, and stalls, by kind."""

import json
import math
import os
import time
from dataclasses import asdict, replace
from unittest.mock import create_autospec

import pytest
import torch
from torch import nn

from tests.unit.checkpoint.conftest import state
from torchelastic import TorchState
from torchelastic.checkpoint import CheckpointStore, manager, saving
from torchelastic.data import BatchPolicy, ElasticSampler
from torchelastic.data.progress import Handed
from torchelastic.training.step_guard import BadStep
from torchelastic.worker import orders, status_page
from torchelastic.worker_counters import milestones, stalls


@pytest.fixture
def heard(monkeypatch):
    found: list[dict] = []
    monkeypatch.setattr(milestones, "_listener", found.append)
    return found


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(milestones, "samples", -1)


def test_milestones_work_without_listener(monkeypatch):
    monkeypatch.setattr(milestones, "_listener", None)
    milestones.checkpoint_stored(1, 2.0, 3)
    milestones.weights_hashed(1, "3f2a")
    milestones.ended()


def test_a_checkpoint_in_storage_is_reported(heard, tmp_path):
    store = CheckpointStore(str(tmp_path))
    try:
        store.save(state(7), 7)
        store.finish()
    finally:
        store.close()
    [told] = heard
    assert told["seconds"] > 0
    assert told["size"] > 0
    assert orders.from_json(told) == orders.Stored(7, told["seconds"], told["size"])


def test_hash_in_a_checkpoint_is_that_of_the_state(heard, tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    made = TorchState(model=[model], policy=BatchPolicy.fixed(micro=1, count=2))
    store = CheckpointStore(str(tmp_path))
    monkeypatch.setattr(manager, "_manager", store)
    try:
        saving.save(made, 7)
        store.finish()
    finally:
        store.close()
    hashed = orders.Hashed(7, made.digest())
    assert [orders.from_json(one) for one in heard if one["type"] == "hashed"] == [hashed]


def test_hash_of_a_state_without_fixed_batches_is_not_computed(heard, tmp_path, monkeypatch):
    store = CheckpointStore(str(tmp_path))
    monkeypatch.setattr(manager, "_manager", store)
    try:
        saving.save(TorchState(model=nn.Linear(2, 2)), 7)
        store.finish()
    finally:
        store.close()
    assert [one["type"] for one in heard] == ["stored"]


def test_hash_of_a_custom_managers_checkpoint_is_that_of_the_state(heard, monkeypatch):
    made = TorchState(model=nn.Linear(2, 2), policy=BatchPolicy.fixed(micro=1, count=2))
    custom = create_autospec(manager.CheckpointManager, instance=True)
    monkeypatch.setattr(manager, "_manager", custom)
    saving.save(made, 3)
    saving.wait()
    assert orders.from_json(heard[0]) == orders.Hashed(3, made.digest())


def test_end_of_a_kept_training_is_its_programs(heard, monkeypatch):
    monkeypatch.setattr(milestones, "_at_end", None)
    made = TorchState(model=nn.Linear(2, 2), policy=BatchPolicy.fixed(micro=1, count=2))
    assert made.restore() == 0
    milestones.ended()
    assert orders.from_json(heard[-1]) == orders.Hashed(0, made.digest(), final=True)


def test_bad_step_is_reported_in_portions(heard, monkeypatch):
    monkeypatch.setattr(milestones, "SAMPLES_LIMIT", 4)
    handed = [
        Handed(epoch=0, rank=1, size=2, span=(8, 18), ids=tuple(torch.arange(5))),
        Handed(epoch=1, rank=1, size=2, span=(0, 2), ids=((3, 1),)),
    ]
    bad = BadStep(
        step=7,
        rank=1,
        reason="the gradient is not finite",
        norm=math.nan,
        loss=None,
        deviation=0.0,
        is_origin=True,
        samples=tuple(handed),
    )
    milestones.step_was_bad(**asdict(bad), action="skip")
    told = [orders.from_json(json.loads(json.dumps(one))) for one in heard]
    used = [orders.UsedSamples(0, 2, (8, 18), [0, 1, 2, 3]), orders.UsedSamples(0, 2, (8, 18), [4])]
    used.append(orders.UsedSamples(1, 2, (0, 2), [(3, 1)]))
    assert [one.samples for one in told] == [[one] for one in used]
    assert replace(told[0], samples=[]) == orders.BadStep(
        7,
        1,
        bad.reason,
        "nan",
        None,
        0.0,
        is_origin=True,
        action="skip",
        samples=[],
        micro_batches=[],
    )


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


def test_numbers_go_to_the_status_page_with_a_step(monkeypatch):
    descriptor = status_page.create()
    shown = status_page.StatusPage(descriptor)
    try:
        shown.entered(0, 1)
        assert status_page.read(descriptor).samples == -1
        milestones.samples = 640
        monkeypatch.setattr(milestones, "micro_batches", 6)
        shown.entered(0, 2)
        assert status_page.read(descriptor).samples == 640
        assert status_page.read(descriptor).share == 6
    finally:
        shown.close()
        os.close(descriptor)


# --- stalls ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def counted_afresh():
    before = list(stalls.seconds)
    yield
    stalls.seconds[:] = type(stalls.seconds)("d", before)


def counted() -> dict[str, float]:
    return dict(zip(stalls.COUNTED, stalls.seconds, strict=True))


def test_seconds_are_added_to_their_kind_and_no_other():
    before = counted()
    stalls.add("data", 1.5)
    stalls.add("data", 0.25)
    stalls.add("restore", 3.0)
    after = {kind: seconds - before[kind] for kind, seconds in counted().items()}
    assert {kind: more for kind, more in after.items() if more} == {"data": 1.75, "restore": 3.0}
    with pytest.raises(KeyError):
        stalls.add("coffee", 1.0)


def test_stall_is_counted_if_block_fails(monkeypatch):
    times = iter([10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    before = counted()["checkpoint"]
    with stalls.Counted("checkpoint"):
        pass
    with pytest.raises(KeyError), stalls.Counted("checkpoint"):
        raise KeyError
    assert counted()["checkpoint"] - before == 3.0


def test_all_but_data_is_apart_from_what_a_worker_does_itself():
    each = [float(2**place) for place in range(len(stalls.COUNTED))]
    assert stalls.apart(each) == sum(each) - each[stalls.COUNTED.index("data")]
