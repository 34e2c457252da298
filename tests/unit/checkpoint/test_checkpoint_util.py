"""`CheckpointUtil` in a loop of the user's own, and the defects that 0.1's had."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.checkpoint.conftest import Number
from torchelastic import checkpoint
from torchelastic.checkpoint import CheckpointUtil


class Coordinator:
    def __init__(self, save=False):
        self.save = save

    def should_save_checkpoint(self):
        return self.save


class Asked(Number):
    """Wants a checkpoint after every second step."""

    def should_save_checkpoint(self, rank):
        return self.value % 2 == 0


def test_rank_0_saves_when_the_state_wants_it(manager):
    util = CheckpointUtil(Coordinator())
    state = Asked()
    for _ in range(4):
        state.value += 1
        util.save_checkpoint(state, rank=0)
        checkpoint.finish()
    assert len(manager.list_checkpoints()) == 2
    fresh = Asked()
    other = CheckpointUtil(Coordinator())
    assert other.load_checkpoint(fresh, rank=0) is fresh
    assert (fresh.value, other.step) == (4, 4)


@pytest.mark.parametrize(("rank", "saved"), [(0, 1), (1, 0)])
def test_one_rank_saves_when_the_coordinator_wants_it(manager, rank, saved):
    CheckpointUtil(Coordinator(save=True)).save_checkpoint(Asked(1), rank=rank)
    checkpoint.finish()
    assert len(manager.list_checkpoints()) == saved


def test_rank_0_loads_once(manager):
    """0.1 compared a pair with 1 and so overwrote fresher memory at every rendezvous."""
    checkpoint.save(Number(5), 1)
    checkpoint.finish()
    util = CheckpointUtil(Coordinator())
    assert util.load_checkpoint(Asked(1), rank=1).value == 1
    state = util.load_checkpoint(Asked(), rank=0)
    assert state.value == 5
    util.set_checkpoint_loaded()
    state.value = 99
    assert util.load_checkpoint(state, rank=0).value == 99


def test_without_a_manager_nothing_happens():
    util = CheckpointUtil(Coordinator(save=True))
    util.save_checkpoint(Asked(2), rank=0)
    assert util.load_checkpoint(Asked(2), rank=0).value == 2


def test_checkpoints_are_imported_without_torch():
    program = "import sys, torchelastic.checkpoint; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "False\n"
