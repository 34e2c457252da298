"""Ranks that take unequal shares of a batch, in micro-batches, with DDP in worlds of many sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.process.forked import PATIENCE, build
from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.training.group import ddp as kept


class Case(NamedTuple):
    """A batch, how much of it is there, and the most samples of a micro-batch."""

    batch: int
    total: int
    micro: int | None


#: Evenly shared and not, cut and not, fewer samples than ranks, fewer than micro-batches.
CASES = (Case(12, 12, None), Case(12, 12, 2), Case(13, 13, 2), Case(12, 7, 1), Case(12, 2, 1))
STEPS = 3

Gradients = list[list[float]]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


def samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return drawn[:, :3], drawn[:, 3:]


def alone(case: Case) -> Gradients:
    """The result of one process that takes the whole batch at once."""
    network = model()
    inputs, targets = samples(STEPS - 1, case.total)
    nn.functional.mse_loss(network(inputs), targets).backward()
    return gradients(network)


def in_every_world(number: int, port: int, largest: int) -> dict[tuple[int, Case], Gradients]:
    """The gradients of the last step, for every size that this rank takes part in."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=number, world_size=largest, timeout=PATIENCE)
    found = {}
    for size in range(1, largest + 1):
        group = dist.new_group(range(size))
        for case in CASES if number < size else ():
            network = DistributedDataParallel(model(), process_group=group)
            for step in range(STEPS):
                take(network, case, step, number, size)
            found[size, case] = gradients(network)
    return found


def in_a_resident_world(number: int, port: int, size: int) -> dict[tuple[int, Case], Gradients]:
    """The same, with the group and the DDP of `torchelastic.train`."""
    group = build(port, number, size)
    found = {}
    for case in CASES:
        network = kept.wrap(model())
        kept.agree(network, source=0)
        for step in range(STEPS):
            take(network, case, step, number, size)
            kept.committed(network)
        found[size, case] = gradients(network)
    group.leave()
    return found


def in_a_sharded_world(number: int, port: int, size: int) -> dict[tuple[int, Case], Gradients]:
    """The same, with parameters that are sharded by `fully_shard`."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=PATIENCE)
    found = {}
    for case in CASES:
        network = fully_shard(model(), mesh=init_device_mesh("cpu", (size,)))
        for step in range(STEPS):
            take(network, case, step, number, size)
        whole = [parameter.grad.full_tensor() for parameter in network.parameters()]
        found[size, case] = [gradient.flatten().tolist() for gradient in whole]
    return found


def take(network: nn.Module, case: Case, step: int, rank: int, size: int) -> None:
    """A step, up to the optimizer's."""
    policy = BatchPolicy.constant_global(case.batch, micro=case.micro)
    shares = policy.shares(size, case.total)
    start = sum(shares[:rank])
    mine = slice(start, start + shares[rank]) if shares[rank] else slice(0, 1)
    batch = tuple(part[mine] for part in samples(step, case.total))
    network.zero_grad()
    for micro in policy.accumulate(batch, network, total=case.total, rank=rank, size=size):
        inputs, targets = micro.data
        micro.backward(nn.functional.mse_loss(network(inputs), targets))


def gradients(network: nn.Module) -> Gradients:
    return [parameter.grad.flatten().tolist() for parameter in network.parameters()]
