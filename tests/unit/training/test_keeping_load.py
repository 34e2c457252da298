"""Tensors filled by several threads have all their bytes, and no other memory is touched."""

from __future__ import annotations

import mmap
import os
import threading

import pytest
import torch

from torchelastic.tensor_bytes import PIECE
from torchelastic.training import keeping_load
from torchelastic.training.parts import Spec


@pytest.fixture(params=[1, 2, 5])
def threads(request, monkeypatch):
    monkeypatch.setattr(keeping_load, "threads_of", lambda cores: request.param)
    return request.param


SIZES = [0, 1, 7, PIECE - 8, 3, 2 * PIECE + 5, PIECE, 11]


def test_every_byte_comes_where_it_belongs(threads):
    source = torch.randint(256, (sum(SIZES),), dtype=torch.uint8)
    parts = source.split(SIZES)
    room = torch.full((sum(SIZES) + 64 * len(SIZES),), 99, dtype=torch.uint8)
    rooms = [one[: len(one) - 64] for one in room.split([size + 64 for size in SIZES])]
    keeping_load.load(
        [(one, part.data_ptr()) for one, part in zip(rooms, parts, strict=True)],
    )
    assert all(map(torch.equal, rooms, parts))
    between = [one[len(one) - 64 :] for one in room.split([size + 64 for size in SIZES])]
    assert all((one == 99).all() for one in between)
    assert [one for one in threading.enumerate() if "load" in one.name] == []


def test_shares_are_of_equal_size_and_hold_everything():
    tensors = [torch.empty(size, dtype=torch.uint8) for size in SIZES]
    shares = list(keeping_load.shared_out([(one, 1 << 40) for one in tensors]))
    sizes = [sum(count for _, _, count in share) for share in shares]
    assert sum(sizes) == sum(SIZES)
    assert set(sizes[:-1]) == {PIECE}
    assert list(keeping_load.shared_out([])) == []


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 4, 1), (8, 2, 4), (64, 1, 8), (96, 8, 8)],
)
def test_workers_of_a_node_share_its_cores(cores, workers, threads, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    assert keeping_load.threads_of(set(range(cores))) == threads


@pytest.mark.parametrize("elements", [0, 1, 1000, 3 << 20])
def test_a_new_tensor_is_as_its_spec_says(elements):
    spec = Spec.of("", torch.empty(elements, 2, dtype=torch.bfloat16))
    made = keeping_load.empty(spec)
    assert spec.describes(made)
    made.zero_()


def test_a_new_tensor_asks_for_large_pages():
    made = keeping_load.empty(Spec.of("", torch.empty(8 << 20, dtype=torch.uint8)))
    # Whether there are any is the machine's choice; that they were asked for is a flag, `hg`.
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("this kernel has no large pages")
    inside = made.data_ptr() + (4 << 20)
    assert "hg" in flags_at(inside)
    assert "hg" not in flags_at(torch.empty(64 * mmap.PAGESIZE, dtype=torch.uint8).data_ptr())


def flags_at(address: int) -> list[str]:
    found = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(number, 16) for number in head.split("-"))
                found = begin <= address < end
            elif found and head == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("no such memory")
