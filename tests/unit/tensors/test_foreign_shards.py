"""Shards in plain tensors are refused: FSDP1 itself, and classes named as DeepSpeed's are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.fake_mesh import mesh_at
from torchelastic import TorchState
from torchelastic.errors import ConfigError
from torchelastic.tensors.foreign_shards import kind_of


@pytest.mark.parametrize("keeps_names", [True, False], ids=["use_orig_params", "flat"])
def test_fsdp1_is_refused(keeps_names):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with mesh_at(0, (2,)):
        options = {"device_id": torch.device("cpu"), "use_orig_params": keeps_names}
        model = FullyShardedDataParallel(nn.Linear(4, 4), **options)
        optimizer = torch.optim.Adam(model.parameters())
        given = [
            {"model": model, "optimizer": optimizer},
            {"model": nn.Sequential(model)},
            {"model": model.module},
            {"optimizer": optimizer},
        ]
        for parts in given:
            with pytest.raises(ConfigError) as refused:
                TorchState(**parts)
            assert str(refused.value).endswith(
                "FSDP1 shards the state over ranks in plain tensors, which look like replicated "
                "ones. Fix: use FSDP2 (fully_shard), or do not keep it, and save checkpoints "
                "with torch.distributed.checkpoint."
            )


def test_sharded_tensors_are_of_fsdp1():
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    with mesh_at(0, (2,)):
        places = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        assert kind_of(sharded_tensor.empty(places, 4, 4)) == "FSDP1"


class Engine(nn.Module):
    __module__ = "deepspeed.runtime.engine"


class ZeroOptimizer:
    __module__ = "deepspeed.runtime.zero.stage_1_and_2"


class CPUAdam(torch.optim.Adam):
    """An optimizer of DeepSpeed that shards nothing."""

    __module__ = "deepspeed.ops.adam.cpu_adam"


def test_deepspeed_is_refused():
    partitioned = nn.Linear(2, 2)
    partitioned.weight.ds_id = 0
    for parts in (
        {"model": Engine()},
        {"model": nn.Linear(2, 2), "optimizer": ZeroOptimizer()},
        {"model": partitioned},
    ):
        with pytest.raises(ConfigError, match=r"DeepSpeed shards .* own save_checkpoint"):
            TorchState(**parts)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_zero_is_refused():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4)
    with mesh_at(0, (2,)):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        with pytest.raises(ConfigError, match=r"Cannot keep ZeroRedundancyOptimizer: .* FSDP2"):
            TorchState(model=model, optimizer=optimizer)


def test_others_are_not():
    model = nn.Linear(2, 2)
    TorchState(model=model, optimizer=CPUAdam(model.parameters()))
