"""FSDP2 in a training whose steps may be aborted."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchelastic.tensors.dtensors import zeros_like
from torchelastic.training.sharded.between import FullyShardedModels


@pytest.mark.parametrize("inner", [pytest.param(2, id="none at the root"), pytest.param(1)])
def test_accumulation_is_noticed_whichever_modules_have_the_parameters(inner):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        for part in [*model[:inner], model]:
            fully_shard(part, mesh=mesh)
        models = FullyShardedModels([model])
        assert models.reduces
        model.set_requires_gradient_sync(False)
        assert not models.reduces
    finally:
        dist.destroy_process_group()


def test_zero_gradients_are_sharded_as_their_parameters():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (1,))).weight
        zeros = zeros_like(weight)
        assert (zeros.placements, zeros.device_mesh) == (weight.placements, weight.device_mesh)
        assert (zeros.shape, zeros.stride()) == (weight.shape, weight.stride())
        assert not zeros.requires_grad
        assert not zeros.to_local().any()
    finally:
        dist.destroy_process_group()
