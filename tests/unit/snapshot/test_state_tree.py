"""Tensors filled by several threads have all their bytes, and no other memory is touched."""

from __future__ import annotations

import threading

import pytest
import torch

from torchelastic.snapshot import state_tree
from torchelastic.tensors.tensor_bytes import PIECE


@pytest.fixture(params=[1, 2, 5])
def threads(request, monkeypatch):
    monkeypatch.setattr(state_tree, "threads_of", lambda cores: request.param)
    return request.param


SIZES = [0, 1, 7, PIECE - 8, 3, 2 * PIECE + 5, PIECE, 11]


def test_every_byte_comes_where_it_belongs(threads):
    source = torch.randint(256, (sum(SIZES),), dtype=torch.uint8)
    parts = source.split(SIZES)
    room = torch.full((sum(SIZES) + 64 * len(SIZES),), 99, dtype=torch.uint8)
    rooms = [one[: len(one) - 64] for one in room.split([size + 64 for size in SIZES])]
    state_tree.fill(
        [(one, part.data_ptr()) for one, part in zip(rooms, parts, strict=True)],
    )
    assert all(map(torch.equal, rooms, parts))
    between = [one[len(one) - 64 :] for one in room.split([size + 64 for size in SIZES])]
    assert all((one == 99).all() for one in between)
    assert [one for one in threading.enumerate() if "load" in one.name] == []


def test_shares_are_of_equal_size_and_hold_everything():
    tensors = [torch.empty(size, dtype=torch.uint8) for size in SIZES]
    shares = list(state_tree.shared_out([(one, 1 << 40) for one in tensors]))
    sizes = [sum(count for _, _, count in share) for share in shares]
    assert sum(sizes) == sum(SIZES)
    assert set(sizes[:-1]) == {PIECE}
    assert list(state_tree.shared_out([])) == []


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 4, 1), (8, 2, 4), (64, 1, 8), (96, 8, 8)],
)
def test_workers_of_a_node_share_its_cores(cores, workers, threads, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    assert state_tree.threads_of(set(range(cores))) == threads
