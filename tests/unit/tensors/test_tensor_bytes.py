"""Elements of tensors as bytes: as they lie in memory, or in order where there are gaps."""

from __future__ import annotations

import pytest
import torch

from torchelastic.tensors import tensor_bytes

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
def test_what_is_copied_out_is_read_back_with_its_stride_whole_or_in_pieces(name, monkeypatch):
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


def test_where_bytes_lie():
    view = memoryview(bytearray(b"0123"))
    assert tensor_bytes.address_of(memoryview(b"")) == 0
    assert tensor_bytes.address_of(view[1:]) == tensor_bytes.address_of(view) + 1
