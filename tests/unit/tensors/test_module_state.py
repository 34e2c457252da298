"""Values that were received into a tensor's own memory are not copied."""

import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.fake_mesh import mesh_at
from torchelastic.tensors.dtensors import local_of, shard_like
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
