"""The copy of a state: what is small at once, the rest by whoever gets to it, and never torn."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.support import poll_for
from torchelastic.checkpoint.background import staging
from torchelastic.checkpoint.background.staging import Copying, Staging, layout, staged
from torchelastic.errors import CheckpointError
from torchelastic.system import memory_limit

LARGE = staging.SMALL // 4 + 1
PATIENCE = 30.0


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
    copying.result()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert found[name].untyped_storage().nbytes() == tensor.nbytes, "torch.save writes that"


def test_the_memory_is_used_again(memory):
    begin(memory, {"a": torch.zeros(2 * LARGE), "b": torch.zeros(3)})[0].result()
    descriptor = memory.descriptor
    for value in (1.0, 2.0):
        tensors = {"a": torch.full((LARGE,), value), "b": torch.full((3,), value)}
        copying, found = begin(memory, tensors)
        copying.result()
        assert memory.descriptor == descriptor
        assert found["a"].eq(value).all()
        assert found["b"].eq(value).all()
    copying, found = begin(memory, {"a": torch.ones(9 * LARGE)})
    copying.result()
    assert found["a"].eq(1).all()


def test_small_ones_find_their_slots_again(memory):
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}
    slots, size = layout(tensors)
    for value in range(3):
        memory.copy({name: one.fill_(value) for name, one in tensors.items()}, slots, size)
        found = staged(memory.descriptor, slots)
        assert all(one.eq(value).all() for one in found.values())


def test_what_is_lasting_is_copied_later_and_nothing_else(memory):
    tensors = {name: torch.ones(LARGE) for name in ("parameter", "buffer")}
    tensors["number"] = torch.ones(1)
    lasting = {tensors["parameter"].data_ptr(): tensors["parameter"]}
    copying, found = begin(memory, tensors, lasting)
    assert [name for name, one in found.items() if one.eq(1).all()] == ["buffer", "number"]
    tensors["buffer"].zero_()
    tensors["number"].zero_()
    copying.result()
    assert all(one.eq(1).all() for one in found.values())


def test_a_write_before_its_time_is_noticed_and_one_after_its_end_is_none(memory):
    tensor = torch.ones(LARGE)
    copying, found = begin(memory, {"w": tensor}, {tensor.data_ptr(): tensor})
    copying.run()
    tensor.add_(1)
    copying.result()
    assert found["w"].eq(1).all()
    copying, _ = begin(memory, {"w": tensor}, {tensor.data_ptr(): tensor})
    tensor.add_(1)
    copying.run()  # who only helps is not told
    with pytest.raises(CheckpointError, match=r"changed before optimizer\.step"):
        copying.result()


def test_who_waits_helps_and_waits_for_the_others():
    begun, go, done = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go.wait(PATIENCE)
        done.append("slow")

    copying = Copying([slow, lambda: done.append("quick")])
    thread = threading.Thread(target=copying.run)
    thread.start()
    assert begun.wait(PATIENCE)
    helper = threading.Thread(target=lambda: (copying.run(), done.append("over")))
    helper.start()
    poll_for(lambda: done == ["quick"], what="the help")
    go.set()
    helper.join()
    thread.join()
    assert done == ["quick", "slow", "over"]


def test_what_goes_wrong_is_told_to_who_asks_for_the_result():
    def fails():
        raise RuntimeError("of the device")

    copied = []
    copying = Copying([fails, lambda: copied.append(1)])
    copying.run()
    assert copied == [1]
    with pytest.raises(CheckpointError, match="of the device"):
        copying.result()


def test_memory_that_is_not_there_is_not_taken(memory, monkeypatch):
    monkeypatch.setattr(
        memory_limit, "limits", lambda: [memory_limit.Limit("its cgroup", 1000, 900)]
    )
    with pytest.raises(memory_limit.NoRoom, match=r"No room for copies to write checkpoints from"):
        begin(memory, {"w": torch.ones(LARGE)})
    assert memory.descriptor == -1
