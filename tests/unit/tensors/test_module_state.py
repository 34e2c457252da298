"""Values that were received into a tensor's own memory are not copied."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.fake_mesh import mesh_at
from torchelastic import TorchState
from torchelastic.errors import ConfigError
from torchelastic.tensors.dtensors import local_of, shard_like
from torchelastic.tensors.foreign_shards import kind_of
from torchelastic.tensors.module_state import fill


class Copies(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.copy_.default
        return function(*args, **kwargs or {})


def test_a_shard_in_its_own_memory_is_there_already():
    with mesh_at(1, (2,)) as mesh:
        live = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
        same, other = (shard_like(live, part) for part in (local_of(live), torch.ones(4)))
        with Copies() as copies:
            assert fill(live, same) is live
            assert copies.count == 0
            fill(live, other)
        assert copies.count > 0
        assert local_of(live).tolist() == [1.0] * 4


# --- sharded state that looks replicated ----------------------------------------------------------


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
