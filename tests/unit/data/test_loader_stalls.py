"""Waiting for the next batch is counted, also when there is none."""

from array import array

import pytest

from torchelastic import stalls
from torchelastic.data.loader import DataLoader


class Slow:
    """Takes a second for a sample, by the clock it is given."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.clock[0] += 1.0
        return index


def test_a_batch_is_waited_for(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("torchelastic.data.loader.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(stalls, "seconds", array("d", [0.0] * len(stalls.KINDS)))
    batches = iter(DataLoader(Slow(clock), batch_size=1))
    next(batches)
    clock[0] += 100.0  # a step
    assert list(stalls.seconds) == [1.0, 0.0, 0.0, 0.0]
    next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    assert list(stalls.seconds) == [2.0, 0.0, 0.0, 0.0]
