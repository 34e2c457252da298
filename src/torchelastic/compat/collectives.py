"""Small collectives for `State.sync`, with the names and the order of arguments of 0.1: without a
process group, or in a world of one, each returns its argument.

Also 0.2's exchange of data through a store. torch's functions of these names take other arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchelastic import torch_backends

if TYPE_CHECKING:
    import numpy
    from torch.distributed import Store  # type: ignore[attr-defined]  # public all the same

    Bytes = numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]

__all__ = [
    "all_gather_return_max_long",
    "broadcast_binary",
    "broadcast_bool",
    "broadcast_float_list",
    "broadcast_long",
    "broadcast_model",
    "convert_to_distributed_tensor",
    "convert_to_normal_tensor",
    "get_rank",
    "is_distributed_training_run",
]

#: From this size on, a binary is sent in this number of concurrent pieces.
_LARGE = 8 << 20
_PIECES = 8


def get_rank() -> int:
    """The rank of this worker; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_distributed_training_run() -> bool:
    """Return True if there are other workers."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def convert_to_distributed_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return the tensor on the backend's device, and its original device: `cpu` or `gpu`."""
    origin = "gpu" if tensor.is_cuda else "cpu"
    return (tensor.to(torch_backends.here()) if origin == "cpu" else tensor), origin


def convert_to_normal_tensor(tensor: torch.Tensor, orig_device: str) -> torch.Tensor:
    """Return the tensor on its original device."""
    return tensor.cpu() if tensor.is_cuda and orig_device == "cpu" else tensor


def broadcast_long(value: int, src_rank: int) -> int:
    """The value that `src_rank` has."""
    if not is_distributed_training_run():
        return value
    return int(_broadcast(torch.tensor([value], dtype=torch.int64), src_rank).item())


def broadcast_bool(value: bool, src_rank: int) -> bool:
    """The value that `src_rank` has."""
    return broadcast_long(int(bool(value)), src_rank) == 1


def broadcast_float_list(float_list: Sequence[float], src_rank: int) -> list[float]:
    """Return the numbers of `src_rank`. All ranks pass lists of the same length."""
    if not is_distributed_training_run():
        return list(float_list)
    found: list[float] = _broadcast(
        torch.tensor(float_list, dtype=torch.float64), src_rank
    ).tolist()
    return found


def all_gather_return_max_long(value: int) -> tuple[int, int]:
    """Return the lowest rank with the largest value, and that value."""
    if not is_distributed_training_run():
        return 0, value
    own, origin = convert_to_distributed_tensor(torch.tensor([value], dtype=torch.int64))
    collected = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(collected, own)
    values = [int(convert_to_normal_tensor(item, origin).item()) for item in collected]
    largest = max(values)
    return values.index(largest), largest


def broadcast_model(src_rank: int, model: torch.nn.Module) -> None:
    """Broadcast the parameters and buffers of `src_rank`.

    0.1 left out the buffers, so that the BatchNorm statistics of ranks differed.
    """
    if not is_distributed_training_run():
        return
    tensors = [*model.parameters(), *model.buffers()]
    works = [dist.broadcast(tensor.data, src=src_rank, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def broadcast_binary(data: Bytes | None, src_rank: int) -> Bytes | None:
    """Return the bytes of `src_rank`, an array of uint8. The other ranks may pass None."""
    if not is_distributed_training_run():
        return data
    source = _as_bytes(data) if dist.get_rank() == src_rank else None
    size = broadcast_long(len(source) if source is not None else 0, src_rank)
    tensor = source if source is not None else torch.empty(size, dtype=torch.uint8)
    tensor, origin = convert_to_distributed_tensor(tensor)
    pieces = tensor.chunk(_PIECES) if size >= _LARGE else (tensor,)
    works = [dist.broadcast(piece, src=src_rank, async_op=True) for piece in pieces]
    for work in works:
        work.wait()
    return convert_to_normal_tensor(tensor, origin).numpy()


def _broadcast(tensor: torch.Tensor, src_rank: int) -> torch.Tensor:
    tensor, origin = convert_to_distributed_tensor(tensor)
    dist.broadcast(tensor, src=src_rank)
    return convert_to_normal_tensor(tensor, origin)


def _as_bytes(data: Bytes | None) -> torch.Tensor:
    """Copy into a tensor: the array may be read-only, which torch refuses."""
    if data is None:
        return torch.empty(0, dtype=torch.uint8)
    if data.dtype != "uint8" or data.ndim != 1:
        raise TypeError(
            f"broadcast_binary takes a flat array of uint8, not {data.dtype} of shape {data.shape}:"
            " use numpy.frombuffer(array.tobytes(), numpy.uint8)."
        )
    return torch.from_numpy(data.copy())


def get_all(store: Store, prefix: str, size: int) -> list[bytes]:
    """Wait for the values of `size` ranks and return them by rank."""
    return [store.get(f"{prefix}{rank}") for rank in range(size)]


def synchronize(
    store: Store,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
) -> list[bytes]:
    """Set this rank's value, wait for all others, return all by rank. Use a prefix only once."""
    store.set_timeout(timedelta(seconds=barrier_timeout))
    store.set(f"{key_prefix}{rank}", data)  # type: ignore[arg-type]  # its stub knows only str
    return get_all(store, key_prefix, world_size)


def barrier(
    store: Store, rank: int, world_size: int, key_prefix: str, barrier_timeout: float = 300
) -> None:
    """Wait for all ranks. Use a prefix only once."""
    synchronize(store, str(rank).encode(), rank, world_size, key_prefix, barrier_timeout)
