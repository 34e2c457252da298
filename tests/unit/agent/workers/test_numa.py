"""Which CPUs a worker gets, on a machine of two sockets, two nodes each, two threads per core."""

from __future__ import annotations

import os

import pytest

from torchelastic.agent.workers.numa import Cpu, choose, gpu_nodes, machine

# 16 logical CPUs: 8 cores; core c = cpus c and c + 8; node = c // 2; socket = c // 4.
MACHINE = [
    Cpu(number=n, core=n % 8 % 4, socket=n % 8 // 4, node=n % 8 // 2, complex=n % 8 // 2 * 2)
    for n in range(16)
]


@pytest.mark.parametrize(
    ("binding", "local_rank", "nproc", "cpus"),
    [
        ("node", 0, 4, {0, 1, 8, 9}),
        ("node", 3, 4, {6, 7, 14, 15}),
        ("node", 1, 2, {4, 5, 12, 13}),
        ("socket", 0, 4, {0, 1, 2, 3, 8, 9, 10, 11}),
        ("exclusive", 0, 8, {0, 8}),
        ("exclusive", 15, 16, {7, 15}),
        ("core-complex", 1, 8, {0, 1, 8, 9}),
    ],
)
def test_choice(binding, local_rank, nproc, cpus):
    assert choose(binding, MACHINE, local_rank, nproc) == cpus


def test_a_gpu_decides_the_node_and_nobody_is_left_without_a_cpu():
    assert choose("node", MACHINE, 0, 2, gpu_nodes=[3, 0]) == {6, 7, 14, 15}
    assert all(choose("exclusive", MACHINE, rank, 40) for rank in range(40))


def test_this_machine_is_read_and_its_gpus_in_bus_order(tmp_path):
    assert {cpu.number for cpu in machine()} == os.sched_getaffinity(0)
    for bus, node in (("0000:81:00.0", 1), ("0000:01:00.0", 0)):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    assert gpu_nodes(tmp_path / "sys", tmp_path / "gpus") == [0, 1]
    assert gpu_nodes(tmp_path / "sys", tmp_path / "none") == []
