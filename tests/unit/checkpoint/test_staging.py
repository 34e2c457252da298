"""The copy of a state: what is small at once, the rest by whoever gets to it, and never torn."""

from __future__ import annotations

import pytest
import torch

from torchelastic.checkpoint import staging
from torchelastic.checkpoint.staging import Staging, layout, staged
from torchelastic.system import memory_limit

LARGE = staging.SMALL // 4 + 1


@pytest.fixture
def memory():
    made = Staging()
    yield made
    made.close()


def begin(memory, tensors, lasting=None):
    """Begin to copy; what is in the memory, by name, now and later, and the copying."""
    slots, size = layout(tensors)
    copying = memory.copy(tensors, slots, size, lasting)
    return copying, staged(memory.descriptor, slots)


def test_tensors_are_copied_as_they_are(memory):
    tensors = {
        "empty": torch.empty(0, 3),
        "number": torch.tensor(1.5),
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "turned": torch.arange(6).view(2, 3).t(),
        "complex": torch.tensor([1 + 2j]),
        "large": torch.arange(2.0 * LARGE).view(2, LARGE),
        "large, turned": torch.arange(2.0 * LARGE).view(2, LARGE).t(),
        "large, with gaps": torch.arange(4.0 * LARGE).view(LARGE, 4).t()[::2],
    }
    copying, found = begin(memory, tensors)
    copying.run()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert found[name].untyped_storage().nbytes() == tensor.nbytes, "torch.save writes that"


def test_the_memory_is_used_again(memory):
    begin(memory, {"a": torch.zeros(2 * LARGE), "b": torch.zeros(3)})[0].run()
    descriptor = memory.descriptor
    for value in (1.0, 2.0):
        tensors = {"a": torch.full((LARGE,), value), "b": torch.full((3,), value)}
        copying, found = begin(memory, tensors)
        copying.run()
        assert memory.descriptor == descriptor
        assert found["a"].eq(value).all()
        assert found["b"].eq(value).all()
    copying, found = begin(memory, {"a": torch.ones(9 * LARGE)})
    copying.run()
    assert found["a"].eq(1).all()


def test_small_ones_find_their_slots_again(memory):
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}
    slots, size = layout(tensors)
    for value in range(3):
        memory.copy({name: one.fill_(value) for name, one in tensors.items()}, slots, size)
        found = staged(memory.descriptor, slots)
        assert all(one.eq(value).all() for one in found.values())


def test_staging_copies_only_lasting_tensors_later(memory):
    tensors = {name: torch.ones(LARGE) for name in ("parameter", "buffer")}
    tensors["number"] = torch.ones(1)
    lasting = {tensors["parameter"].data_ptr(): tensors["parameter"]}
    copying, found = begin(memory, tensors, lasting)
    assert [name for name, one in found.items() if one.eq(1).all()] == ["buffer", "number"]
    tensors["buffer"].zero_()
    tensors["number"].zero_()
    copying.run()
    assert all(one.eq(1).all() for one in found.values())


def test_a_write_before_its_time_is_noticed_and_one_after_its_end_is_none(memory):
    tensor = torch.ones(LARGE)
    copying, found = begin(memory, {"w": tensor}, {tensor.data_ptr(): tensor})
    copying.run()
    tensor.add_(1)
    assert not copying.is_disturbed
    assert found["w"].eq(1).all()
    copying, _ = begin(memory, {"w": tensor}, {tensor.data_ptr(): tensor})
    tensor.add_(1)
    copying.run()
    assert copying.is_disturbed


def test_memory_that_is_not_there_is_not_taken(memory, monkeypatch):
    monkeypatch.setattr(
        memory_limit, "limits", lambda: [memory_limit.Limit("its cgroup", 1000, 900)]
    )
    with pytest.raises(memory_limit.NoRoom, match=r"No room for copies to write checkpoints from"):
        begin(memory, {"w": torch.ones(LARGE)})
    assert memory.descriptor == -1
