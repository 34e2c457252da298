"""The training of `sharded.py` as torch does it alone, on a fixed mesh: one line per rank and step.

native_hsdp.py LINES [key=value ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.process.sharded_model import Training
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler

KEYS = dict(text.partition("=")[::2] for text in sys.argv[2:])

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


with open(Path(sys.argv[1]) / f"{os.getpid()}.jsonl", "a") as lines:
    for step, batch in enumerate(loader):
        training.step(batch.tolist(), loader.weight, average_the_rest)
        shards = torch.cat([one.reshape(-1) for one in training.shards()]).tolist()
        line = {"step": step, "rank": dist.get_rank(), "hash": training.fingerprint()}
        lines.write(json.dumps(line | {"shards": shards}) + "\n")
dist.destroy_process_group()
