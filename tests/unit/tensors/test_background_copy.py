"""A copy behind the training: every thread that waits for it helps, and nothing is lost."""

import threading

import pytest
import torch

from tests.support import poll_for
from torchelastic.tensors import tensor_bytes
from torchelastic.tensors.tensor_bytes import BackgroundCopy, SmallCopies

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
    threads = [threading.Thread(target=copy.run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
