"""The training of `sharded.py` as torch does it alone, on a fixed mesh: one line per rank and step.

native_hsdp.py LINES ORDERS [key=value ...]
"""

from __future__ import annotations

import torch.distributed as dist
from sharded_model import Training
from torch.distributed.device_mesh import init_device_mesh
from worker_side import KEYS, write

from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler

training = Training(KEYS)
dist.init_process_group("gloo")
replicas = dist.get_world_size() // training.size
names = {"replicate": replicas, **training.mesh}
mesh = init_device_mesh("cpu", tuple(names.values()), mesh_dim_names=tuple(names))
tensor = mesh["tensor"] if "tensor" in names else None
data = mesh["replicate", "shard"] if "shard" in names else None
training.build(tensor, data)
rank, size = mesh["replicate"].get_local_rank(), replicas
if "shard" in names:
    rank = rank * names["shard"] + mesh["shard"].get_local_rank()
    size *= names["shard"]
samples = training.batch * training.steps
loader = DataLoader(
    range(samples),
    sampler=ElasticSampler(samples, rank=rank, size=size),
    policy=BatchPolicy.constant_global(training.batch),
)


def average_the_rest() -> None:
    """Do for parameters outside of FSDP2 what a user of native HSDP has to do."""
    group = mesh["replicate"].get_group()
    apart = [training.model.scale] if "shard" in names else training.trained
    if "plain" in KEYS or "shard" not in names:
        for one in apart:
            grad = one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad
            dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=group)


for step, batch in enumerate(loader):
    training.step(batch.tolist(), loader.weight, average_the_rest)
    write("step", step=step, rank=dist.get_rank(), hash=training.fingerprint())
dist.destroy_process_group()
