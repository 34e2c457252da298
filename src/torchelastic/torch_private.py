"""All use of torch beyond its public interface.

No other module touches a private name of torch (tests/test_architecture.py). Every name here has a
test of what we rely on (tests/unit/test_torch_private.py): run it on a new release of torch first.

Two classes have to use torch's own names, because torch calls them back: `OwnedGloo` in
`training.group.gloo` and `OwnedWork` in `training.group.abortable_waits`. For those and for gloo's
behaviour there is tests/unit/training/test_torch_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from torchelastic import torch_versions
from torchelastic.errors import ConfigError

if _reason := torch_versions.too_old(torch.__version__):
    raise ConfigError(_reason)

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.parallel import DistributedDataParallel

__all__ = ["NormBase", "PrefixStore", "Store", "TCPStore"]  # public, or with a public subclass

_c10d: Any = torch._C._distributed_c10d

# --- tensors and modules --------------------------------------------------------------------------

#: Copy many tensors in one call: destinations, sources.
copy_all: Callable[..., None] = torch._foreach_copy_
#: Add many tensors to others in one call: sums, terms.
add_all: Callable[..., None] = torch._foreach_add_


def norms_of(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor, in one call; of half precision as float32, which it fits."""
    if any(one.dtype in (torch.float16, torch.bfloat16) for one in tensors):
        return torch._foreach_norm(tensors, 2, torch.float32)
    return torch._foreach_norm(tensors)


#: The number of in-place writes to a tensor that autograd has seen.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

#: The buffers of one module by name: the dictionary itself.
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")

#: The parameters of one module, without those of its children, and its children.
own_parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter(
    "_parameters"
)
children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = attrgetter("_modules")

#: This rank's part of a DTensor: the memory itself. (`to_local` is differentiable, and slow.)
local_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")

#: Mesh, placements, shape and dtype of a DTensor; hashable.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


def strided_shard() -> type[Any]:
    """Return the placement of FSDP2 on top of tensor parallelism in the same dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def is_of_fsdp1(value: object) -> bool:
    """Return whether FSDP1 has made this parameter, or flattened it with others."""
    return hasattr(value, "_is_flat_param") or hasattr(value, "_fsdp_flattened")


# --- FSDP2 ----------------------------------------------------------------------------------------


def fsdp_parameters(module: Any) -> list[torch.nn.Parameter]:
    """Return the sharded parameters that this FSDP2 module manages itself."""
    return [one.sharded_param for group in _fsdp_groups(module) for one in group.fsdp_params]


def fsdp_has_run(module: Any) -> bool:
    """Return whether this module has begun a forward: before, there is nothing to reset."""
    return module._get_fsdp_state()._is_root is not None


def fsdp_reduces(module: Any) -> bool:
    """Return whether this module reduces gradients in its next backward."""
    return all(group.reduce_grads for group in _fsdp_groups(module))


def fsdp_forget_gradients(module: Any) -> None:
    """Drop gradients that were accumulated without being reduced; a reset of 2.13 keeps them."""
    for group in _fsdp_groups(module):
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # 2.15 derives it from the next
                parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None


def _fsdp_groups(module: Any) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups)


# --- state dicts ----------------------------------------------------------------------------------


def layer_versions(state_dict: Any) -> Any:
    """Return the layer versions in a module's state_dict; None for other mappings."""
    return getattr(state_dict, "_metadata", None)


def set_layer_versions(state_dict: Any, versions: Any) -> None:
    state_dict._metadata = versions


# --- GradScaler -----------------------------------------------------------------------------------

#: The attributes of a GradScaler that are tensors on its device, or None before its first use.
SCALER_TENSORS = ("_scale", "_growth_tracker")


def scaler_stages(scaler: Any) -> Any:
    """Return a GradScaler's per-optimizer stages; each update creates a new dictionary."""
    return scaler._per_optimizer_states


# --- autograd -------------------------------------------------------------------------------------

_variable: Any = torch.autograd.Variable

#: The engine as torch starts it, and the node of the graph that this thread runs, or None.
Engine: Any = type(_variable._execution_engine)
current_node: Callable[[], Any] = torch._C._current_autograd_node

#: Make the engine call this at the end of the current backward.
at_end_of_backward: Callable[[Callable[[], object]], None] = (
    _variable._execution_engine.queue_callback
)

#: The code of the function that every backward of Python goes through; None if there is none.
RUN_BACKWARD = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)


def use_engine(kind: Any) -> None:
    """Run all backwards in an engine of this class, a subclass of `Engine`."""
    if type(_variable._execution_engine) is not kind:
        _variable._execution_engine = kind()


# --- process groups -------------------------------------------------------------------------------

#: gloo's own class, even while its name in torch is replaced.
Gloo: Any = distributed_c10d.ProcessGroupGloo


def excepthook_below(hook: Any) -> Any:
    """Return the `sys.excepthook` that was replaced by those of `init_process_group`, which add the
    rank to every line."""
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        hook = hook.__closure__[hook.__code__.co_freevars.index("old_hook")].cell_contents
    return hook


def make_gloo_of(group_class: Any) -> None:
    """Make torch create its groups of backend "gloo" by calling this."""
    distributed_c10d.ProcessGroupGloo = group_class  # type: ignore[misc]


def groups() -> list[Any]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_map)


def count_groups() -> int:
    """Return the number of process groups, cheaply."""
    return len(distributed_c10d._world.pg_map)


def name_of_group(group: Any) -> str:
    """Return a group's name, the same on all ranks; empty if torch.distributed lacks it."""
    return str(distributed_c10d._world.pg_names.get(group, ""))


def count_groups_anew() -> None:
    """Restart the numbering of groups: ranks find each other under these names."""
    distributed_c10d._world.group_count = 0


def launched_in(group: Any) -> int:
    """Return the number of collectives launched in a group; RuntimeError if not counted."""
    return int(group._get_sequence_number_for_group())


def backend_of(group: Any, device: str) -> Any:
    """Return a group's backend for tensors on this device."""
    return group._get_backend(torch.device(device))


def group_of_backend(store: Store, backend: Any, rank: int, size: int) -> dist.ProcessGroup:
    """Return a C++ group around an existing gloo backend."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def native_group(
    backend: str, store: Store, rank: int, size: int, timeout: Any
) -> dist.ProcessGroup:
    """Return a C++ group of NCCL, which torch.distributed does not know."""
    if not backend.startswith("nccl"):
        raise ConfigError(f"Sharded training knows NCCL for devices, not {backend!r}.")
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError("NCCL needs a GPU, and this process sees none. Use the gloo backend.")
    options = distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = distributed_c10d.ProcessGroupNCCL(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, made)
    return group


def begin_all_to_all(
    group: Any,
    into: torch.Tensor,
    out: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
) -> Any:
    """Launch an all-to-all of parts of these lengths, by rank; also in a group that
    torch.distributed does not know. Return its work."""
    options = _c10d.AllToAllOptions()
    options.asyncOp = True
    return group.alltoall_base(into, out, list(received), list(sent), options)


def begin_all_gather(group: Any, into: torch.Tensor, part: torch.Tensor) -> Any:
    """The same for an all-gather of one part of each rank."""
    options = _c10d.AllgatherOptions()
    options.asyncOp = True
    return group._allgather_base(into, part, options)


def begin_broadcast(group: Any, tensor: torch.Tensor, source: int) -> Any:
    """The same for a broadcast."""
    options = _c10d.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = source, 0, True
    return group.broadcast([tensor], options)


def device_types_of(group: Any) -> list[str]:
    """Return the kinds of devices that a group has a backend for."""
    return [device.type for device in group._device_types]


def timeout_of(gloo: Any) -> Any:
    return gloo.options._timeout


def source_of(work: Any) -> int:
    """Return the source rank of a receive from any rank."""
    return int(work._source_rank())


def unwrap_by(future: Any, function: Callable[[Any], Any]) -> None:
    """Make Python readers of the future get the result of this function, or its error."""
    future._set_unwrap_func(function)


def work_of(future: Any) -> Any:
    """Return a work that C++ can wait for, done when the future is."""
    return _c10d._create_work_from_future(future)


# --- DistributedDataParallel ----------------------------------------------------------------------


def parameters_of_ddp(ddp: Any) -> tuple[list[torch.Tensor], list[bool]]:
    """Return DDP's parameters in order, and whether each has sparse gradients."""
    parameters, sparse = ddp._build_params_for_reducer()
    return parameters, sparse


def assign_buckets(
    parameters: list[torch.Tensor], limits: Iterable[int], sparse: list[bool]
) -> list[list[int]]:
    """Return the parameters' indices by bucket, as DDP lays them out with these limits."""
    buckets: list[list[int]] = _c10d._compute_bucket_assignment_by_size(
        parameters, list(limits), sparse
    )[0]
    return buckets


def bucket_limits(ddp: DistributedDataParallel) -> list[int]:
    """Return the bucket limits in bytes; the last is for all further buckets."""
    if by_hand := limits_by_hand(ddp):
        return by_hand
    first = [_c10d._DEFAULT_FIRST_BUCKET_BYTES] if ddp.bucket_bytes_cap_default else []
    return [*first, ddp.bucket_bytes_cap]


def limits_by_hand(ddp: DistributedDataParallel) -> list[int]:
    """Return DDP's option bucket_cap_mb_list, which torch before 2.13 does not have."""
    return list(getattr(ddp, "bucket_bytes_cap_list", ()))


def show_group(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Set the group for the next collectives of the reducer."""
    ddp.reducer._update_process_group(group)


def forget_backward(ddp: DistributedDataParallel) -> None:
    """Make the reducer lay out its buckets again by the next backward."""
    ddp.reducer._reset_state()


def count_all_ready(ddp: DistributedDataParallel) -> None:
    """Mark all gradients as ready in the reducer, in the order of their indices."""
    ddp.reducer._push_all_rebuilt_params()


def rebuild_buckets(ddp: Any) -> bool:
    """Make the reducer lay out its buckets; return False if it has seen no gradients."""
    if not ddp.reducer._rebuild_buckets():
        return False
    ddp._has_rebuilt_buckets = True
    return True


def has_rebuilt(ddp: Any) -> bool:
    """Return whether DDP has laid out its buckets in the order of the gradients."""
    return bool(ddp._has_rebuilt_buckets)


def renew_reducer(ddp: Any) -> None:
    """Create a new reducer with the hooks of the old one."""
    static = ddp.static_graph
    ddp.reducer._remove_autograd_hooks()
    parameters, sparse = parameters_of_ddp(ddp)
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, static)
    for hook, state in ddp._comm_hooks:
        _c10d._register_comm_hook(ddp.reducer, state, hook)
    if static:
        ddp.static_graph = False  # or DDP warns that it has been set
        ddp._set_static_graph()
