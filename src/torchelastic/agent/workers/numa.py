"""`--numa-binding`: which CPUs a worker runs on. Pure, given the contents of /sys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cpu:
    """One logical CPU, its core, node and cache."""

    number: int
    core: int
    socket: int
    node: int
    #: Smallest CPU number among those that share its last-level cache.
    complex: int


def choose(
    binding: str, cpus: Sequence[Cpu], local_rank: int, nproc: int, gpu_nodes: Sequence[int] = ()
) -> frozenset[int]:
    """Choose the CPUs of one worker.

    A worker belongs to the NUMA node of the GPU with its number; without GPUs the workers are
    spread over the nodes in blocks.
    """
    homes = [_home(cpus, rank, nproc, gpu_nodes) for rank in range(nproc)]
    home = homes[local_rank]
    near = [cpu for cpu in cpus if cpu.node == home]
    if binding == "socket":
        sockets = {cpu.socket for cpu in near}
        near = [cpu for cpu in cpus if cpu.socket in sockets]
    elif binding in ("exclusive", "core-complex"):
        mates = [rank for rank in range(nproc) if homes[rank] == home]
        near = _share(binding, near, mates.index(local_rank), len(mates))
    return frozenset(cpu.number for cpu in near)


def _home(cpus: Sequence[Cpu], local_rank: int, nproc: int, gpu_nodes: Sequence[int]) -> int:
    nodes = sorted({cpu.node for cpu in cpus})
    if local_rank < len(gpu_nodes) and gpu_nodes[local_rank] in nodes:
        return gpu_nodes[local_rank]
    return nodes[local_rank * len(nodes) // nproc]


def _share(binding: str, near: Sequence[Cpu], index: int, sharers: int) -> list[Cpu]:
    """The part of a node that one of its workers gets: whole cores, or a whole core complex."""
    if binding == "core-complex":
        groups = sorted({cpu.complex for cpu in near})
        return [cpu for cpu in near if cpu.complex == groups[index % len(groups)]]
    cores = sorted({(cpu.socket, cpu.core) for cpu in near})
    first, last = index * len(cores) // sharers, (index + 1) * len(cores) // sharers
    mine = set(cores[first:last]) or {cores[index % len(cores)]}
    return [cpu for cpu in near if (cpu.socket, cpu.core) in mine]


def machine(sys: Path = Path("/sys")) -> list[Cpu]:
    """The CPUs this process may run on."""
    return [_cpu(sys / f"devices/system/cpu/cpu{number}") for number in os.sched_getaffinity(0)]


def gpu_nodes(sys: Path = Path("/sys"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> list[int]:
    """The NUMA node of each NVIDIA GPU in bus order; empty where there are none."""
    if not gpus.is_dir():
        return []
    return [
        max(0, _number(sys / f"bus/pci/devices/{gpu.name.lower()}/numa_node"))
        for gpu in sorted(gpus.iterdir())
    ]


def _cpu(path: Path) -> Cpu:
    number = int(path.name.removeprefix("cpu"))
    node = next((int(entry.name[4:]) for entry in path.glob("node[0-9]*")), 0)
    shared = [_first(entry / "shared_cpu_list") for entry in sorted(path.glob("cache/index[0-9]*"))]
    return Cpu(
        number=number,
        core=_number(path / "topology/core_id", number),
        socket=_number(path / "topology/physical_package_id"),
        node=node,
        complex=shared[-1] if shared else number,
    )


def _number(path: Path, default: int = 0) -> int:
    return int(path.read_text()) if path.exists() else default


def _first(path: Path) -> int:
    """The first CPU of a list such as `0-3,8-11`."""
    return int(path.read_text().replace(",", "-").split("-")[0])
