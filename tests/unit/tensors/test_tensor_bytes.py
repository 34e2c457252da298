"""Elements of tensors as bytes: as they lie in memory, or in order where there are gaps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support import poll_for
from torchelastic.tensors import tensor_bytes
from torchelastic.tensors.tensor_bytes import BackgroundCopy, SmallCopies

TENSORS = {
    "plain": torch.arange(24.0).reshape(2, 3, 4),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "with gaps": torch.arange(12.0).reshape(3, 4)[:, ::2],
    "transposed, with gaps": torch.arange(48.0).reshape(8, 6)[::2].t(),
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
}


def room_for(tensor):
    memory = torch.zeros(max(tensor.nbytes, 1), dtype=torch.uint8)
    flat = memory[: tensor.nbytes].view(tensor.dtype)
    return memory, flat.as_strided(tensor.shape, tensor_bytes.stride_of(tensor))


@pytest.mark.parametrize("name", TENSORS)
def test_copied_bytes_are_read_back_with_their_stride(name, monkeypatch):
    tensor = TENSORS[name]
    memory, copy = room_for(tensor)
    tensor_bytes.copy_out(tensor, memory.data_ptr())
    assert torch.equal(copy, tensor)
    monkeypatch.setattr(tensor_bytes, "PIECE", 16)
    memory, copy = room_for(tensor)
    for piece in tensor_bytes.in_pieces(tensor, memory.data_ptr()):
        piece()
    assert torch.equal(copy, tensor)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_without_gaps_is_its_own_memory(name):
    tensor = TENSORS[name]
    seen = tensor_bytes.elements_of(tensor)
    assert seen.numel() == tensor.nbytes
    dense = name != "expanded" and "gaps" not in name
    assert tensor_bytes.is_dense(tensor) is dense
    if tensor.numel():
        assert (seen.data_ptr() == tensor.data_ptr()) is dense
    if dense:  # what is copied in is as it lay
        memory, _ = room_for(tensor)
        tensor_bytes.copy_out(tensor, memory.data_ptr())
        taken = torch.zeros_like(tensor)
        tensor_bytes.copy_in(taken, memory.data_ptr())
        assert torch.equal(taken, tensor)


def test_layout_of_bytes():
    view = memoryview(bytearray(b"0123"))
    assert tensor_bytes.address_of(memoryview(b"")) == 0
    assert tensor_bytes.address_of(view[1:]) == tensor_bytes.address_of(view) + 1


# --- copies behind the training -------------------------------------------------------------------


TIMEOUT = 30.0


@pytest.fixture
def pieces(monkeypatch):
    """The work of the next copy, instead of copying."""
    made = []
    monkeypatch.setattr(tensor_bytes, "in_pieces", lambda tensor, address: made)
    return made


def copy_of(pieces):
    return BackgroundCopy([torch.zeros(1)], [0], lambda: 0)


def test_large_tensors_are_copied_to_where_the_first_thread_says(monkeypatch):
    monkeypatch.setattr(tensor_bytes, "PIECE", 100)
    tensors = [torch.arange(100.0), torch.arange(40)]
    memory, begun = torch.zeros(800, dtype=torch.uint8), []

    def begin():
        begun.append(1)
        return memory.data_ptr()

    copy = BackgroundCopy(tensors, [0, 448], begin, watched=tensors)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: copy.run(), range(3)))
    assert (begun, copy.error, copy.is_disturbed) == ([1], None, False)
    assert memory[:400].view(torch.float32).equal(tensors[0])
    assert memory[448:768].view(torch.int64).equal(tensors[1])


def test_a_thread_that_waits_helps_and_waits_for_the_others(pieces):
    begun, go, done = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go.wait(TIMEOUT)
        done.append("slow")

    pieces += [slow, lambda: done.append("quick")]
    copy = copy_of(pieces)
    thread = threading.Thread(target=copy.run)
    thread.start()
    assert begun.wait(TIMEOUT)
    helper = threading.Thread(target=lambda: (copy.run(), done.append("over")))
    helper.start()
    poll_for(lambda: done == ["quick"], what="the help")
    go.set()
    helper.join()
    thread.join()
    assert done == ["quick", "slow", "over"]


def test_an_error_does_not_stop_the_copy_and_is_kept(pieces):
    def fails():
        raise RuntimeError("of the device")

    copied = []
    pieces += [fails, lambda: copied.append(1)]
    copy = copy_of(pieces)
    copy.run()
    assert copied == [1]
    assert str(copy.error) == "of the device"


def test_memory_that_cannot_be_begun_ends_the_copy():
    def begin():
        raise ValueError("no memory")

    copy = BackgroundCopy([torch.zeros(1)], [0], begin)
    copy.run()
    copy.run()
    assert str(copy.error) == "no memory"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_counts_only_until_the_copy_is_done(when):
    tensor, memory = torch.ones(3), torch.zeros(64, dtype=torch.uint8)
    copy = BackgroundCopy([tensor], [0], memory.data_ptr, watched=[tensor])
    if when == "before":
        tensor.add_(1)
    copy.run()
    tensor.add_(1)
    assert copy.is_disturbed == (when == "before")


def test_small_tensors_go_to_their_places_whatever_changes():
    copies, memory = SmallCopies(), torch.zeros(256, dtype=torch.uint8)
    for tensors, offsets in (
        ([torch.ones(2), torch.tensor([True])], [0, 64]),
        ([torch.full((2,), 2.0), torch.tensor([True])], [0, 64]),
        ([torch.full((2,), 3.0), torch.tensor([True])], [64, 0]),
        ([torch.tensor([4, 5])], [128]),
    ):
        copies.copy(tensors, offsets, memory)
        for tensor, at in zip(tensors, offsets, strict=True):
            assert memory[at : at + tensor.nbytes].view(tensor.dtype).equal(tensor)
    other = torch.zeros(256, dtype=torch.uint8)
    copies.copy(tensors, offsets, other)
    assert other[128:144].view(torch.int64).tolist() == [4, 5]
