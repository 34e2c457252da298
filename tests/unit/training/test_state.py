"""State: the seed's defaults, and what release 0.1 called things."""

import io

import pytest
import torch

from torchelastic.training.state import State, call_sync


class Plain(State):
    def __init__(self):
        self.weights = torch.zeros(2)
        self.calls = []

    def sync(self):
        self.calls.append("sync")


class Rolling(Plain):
    def snapshot(self):
        return {"weights": self.weights.clone()}

    def apply(self, snapshot):
        self.weights = snapshot["weights"]


class Old(State):
    """As written for 0.1."""

    def __init__(self):
        self.number = 0
        self.calls = []

    def sync(self, world_size, rank):
        self.calls.append((world_size, rank))

    def capture_snapshot(self):
        return self.number

    def apply_snapshot(self, snapshot):
        self.number = snapshot


class Older(Old):
    def capture_snapshot(self):
        return super().capture_snapshot() + 100


def test_sync_must_be_written():
    with pytest.raises(TypeError, match="sync"):
        State()


def test_rolling_back_is_not_supported_unless_written():
    state = Plain()
    assert state.snapshot() is None
    state.apply(None)
    assert state.should_save_checkpoint(0) is False


def saved_and_loaded(state):
    stream = io.BytesIO()
    state.save(stream)
    stream.seek(0)
    other = type(state)()
    other.load(stream)
    return other


def test_saving_is_saving_the_snapshot():
    state = Rolling()
    state.weights += 1
    assert saved_and_loaded(state).weights.tolist() == [1, 1]


def test_the_names_of_release_01():
    state = Old()
    state.number = 7
    snapshot = state.snapshot()
    assert snapshot == 7
    state.number = 8
    state.apply(snapshot)
    assert state.number == saved_and_loaded(state).number == 7
    assert Older().snapshot() == 100, "subclasses of old states are heard"


def test_both_forms_of_sync():
    state, old = Plain(), Old()
    call_sync(state, rank=1, size=3)
    call_sync(old, rank=1, size=3)
    assert state.calls == ["sync"]
    assert old.calls == [(3, 1)]


def test_a_sync_with_options_of_its_own_is_todays():
    class Options(Plain):
        def sync(self, group=None, *more):
            super().sync()

    state = Options()
    call_sync(state, rank=0, size=1)
    assert state.calls == ["sync"]
