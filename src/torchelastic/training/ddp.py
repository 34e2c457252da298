"""DistributedDataParallel kept from world to world: its group is swapped, its buckets are not.

DDP adds up gradients bucket by bucket, and in which bucket a parameter is decides, with more than
two ranks, in which order its gradients are added: the last bit of the sum depends on it. DDP lays
the buckets out when it is built and once more, in the order in which the gradients became ready,
before its second forward. So a new DDP in the middle of a run, on all ranks or on the newcomers'
alone, gives another model than the undisturbed run, or a deadlock. Here

- survivors keep their DDP, and with it the layout;
- newcomers are told the survivors' layout (`agree`);
- a survivor that was interrupted goes back to the layout that its step began with, in new memory:
  a collective of the lost world may still write into the old.

With `find_unused_parameters` DDP never lays out anew. With `static_graph` it would, and learns the
graph in its first step, with other collectives than in later ones; so every rank learns it anew in
every world, and the buckets are laid out once, in the reverse order of the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchelastic.errors import TransferError

#: Of DDP's inside, which torch does not declare: tests/process/test_ddp_kept.py holds it to it.
_c10d: Any = torch._C._distributed_c10d

#: Parameters by their number, bucket by bucket, in the order in which the buckets are reduced.
Layout = tuple[tuple[int, ...], ...]


@dataclass
class _Kept:
    """What is known of a DDP besides itself."""

    first: Layout
    #: What the order of the gradients has led to; None before there were any.
    now: Layout | None = None
    #: What `now` was when the last step was committed: what the next one begins with.
    base: Layout | None = None
    #: Makes all ranks lay out alike before the forward after the first backward; then it goes.
    before_forward: torch.utils.hooks.RemovableHandle | None = None


_KEPT: WeakKeyDictionary[DistributedDataParallel, _Kept] = WeakKeyDictionary()


def wrap(module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """A DDP on the present default group; `options` are those of DDP.

    Nothing is sent: ranks that keep theirs take no part in this. That all ranks have the same
    parameters is the caller's affair, and so is `agree` before the first step.
    """
    options["init_sync"] = False
    ddp = DistributedDataParallel(module, **options)
    if ddp.static_graph:
        _dictate(ddp, _by_size(ddp))
    _KEPT[ddp] = _Kept(first=_by_size(ddp) if _is_fixed(ddp) else _all_in_one(ddp))
    _watch(ddp)
    return ddp


def committed(ddp: DistributedDataParallel) -> bool:
    """The step is done; to be called after each until it is True, in every world."""
    kept = _KEPT[ddp]
    if kept.base is not None or _is_fixed(ddp):
        return True
    if kept.now is None:
        # What keeps DDP from laying out (a parameter without a gradient, for one) it says in the
        # next forward, where the user reads it.
        with contextlib.suppress(RuntimeError):
            kept.now = _rebuild(ddp, None)
    kept.base = kept.now
    return kept.base is not None


def swap(ddp: DistributedDataParallel, *, interrupted: bool = True) -> None:
    """Go on with the present default group. Nothing is sent; `agree` must follow.

    `interrupted` says that a step was begun that is going to be done again; otherwise the last
    step is committed, and no collective of the DDP can be under way.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("There is no process group to swap to: enter a world first.")
    ddp.process_group = group
    if not _is_fixed(ddp) and interrupted:
        adopt(ddp, layout(ddp))
    elif interrupted or ddp.static_graph:
        _renew(ddp)
    else:
        ddp.reducer._update_process_group(group)


def layout(ddp: DistributedDataParallel) -> Layout | None:
    """What the next step begins with; None before the gradients have shown their order."""
    return _KEPT[ddp].base


def adopt(ddp: DistributedDataParallel, layout: Layout | None) -> None:
    """Lay the buckets out like this, in new memory, whatever state a backward was left in."""
    if _is_fixed(ddp):
        return
    kept = _KEPT[ddp]
    _dictate(ddp, kept.first if layout is None else layout)
    kept.now = kept.base = layout
    if layout is None:
        ddp.reducer._reset_state()  # so that it lays out anew after the step
    _watch(ddp)


def agree(ddp: DistributedDataParallel, source: int) -> None:
    """Collective, once per world: all lay their buckets out as rank `source` does."""
    if _is_fixed(ddp):
        return
    mine = layout(ddp)
    theirs = _broadcast(ddp, mine, source)
    if theirs != mine:
        adopt(ddp, theirs)
    if theirs is not None:
        _unwatch(_KEPT[ddp])


# --- laying out ----------------------------------------------------------------------------------


def _is_fixed(ddp: DistributedDataParallel) -> bool:
    """Whether its buckets stay as they are laid out at first."""
    return bool(ddp.static_graph or ddp.find_unused_parameters)


def _parameters(ddp: Any) -> tuple[list[torch.Tensor], list[bool]]:
    """In the order of their numbers; and whether each has sparse gradients."""
    parameters, sparse = ddp._build_params_for_reducer()
    return parameters, sparse


def _all_in_one(ddp: DistributedDataParallel) -> Layout:
    """What DDP begins with: one bucket for each type, since the order is not known."""
    return _assign(ddp, _sizes_by_hand(ddp) or [torch.iinfo(torch.int64).max])


def _by_size(ddp: DistributedDataParallel) -> Layout:
    """Buckets of the size asked for, the last parameters first."""
    small = [_c10d._DEFAULT_FIRST_BUCKET_BYTES] if ddp.bucket_bytes_cap_default else []
    return _assign(ddp, _sizes_by_hand(ddp) or [*small, ddp.bucket_bytes_cap])


def _sizes_by_hand(ddp: DistributedDataParallel) -> list[int]:
    """DDP's option bucket_cap_mb_list, which torch before 2.13 does not have."""
    return list(getattr(ddp, "bucket_bytes_cap_list", ()))


def _assign(ddp: DistributedDataParallel, limits: Sequence[int]) -> Layout:
    parameters, sparse = _parameters(ddp)
    buckets = _c10d._compute_bucket_assignment_by_size(parameters, list(limits), sparse)[0]
    return tuple(tuple(bucket) for bucket in reversed(buckets))


class _Dictation(dist.ProcessGroup):
    """A group of one, shown to a reducer while it lays out its buckets.

    A reducer takes the layout that rank 0 broadcasts: the numbers of all parameters followed by
    the number of buckets, then the sizes of the buckets. This one says what rank 0 wants, or
    leaves what the reducer has found out, and keeps it.
    """

    def __init__(self, wanted: Layout | None) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # the form that C++ calls back
        self._to_say = None if wanted is None else _said(wanted)
        self._heard: list[list[int]] = []

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        (tensor,) = tensors
        if self._to_say is not None:
            tensor.copy_(torch.tensor(self._to_say[len(self._heard)]))
        self._heard.append(tensor.tolist())
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return _c10d._create_work_from_future(done)

    def getBackendName(self) -> str:  # C++ asks by this name
        return "dictation"

    def taken(self) -> Layout:
        numbers, sizes = self._heard
        return _cut(numbers[:-1], sizes)


def _said(layout: Layout) -> tuple[list[int], list[int]]:
    numbers = [number for bucket in layout for number in bucket]
    return [*numbers, len(layout)], [len(bucket) for bucket in layout]


def _cut(numbers: Sequence[int], sizes: Sequence[int]) -> Layout:
    layout, begin = [], 0
    for size in sizes:
        layout.append(tuple(numbers[begin : begin + size]))
        begin += size
    return tuple(layout)


def _dictate(ddp: DistributedDataParallel, layout: Layout) -> None:
    """Make the reducer forget the backward it was in, and use this layout from now on."""
    numbers = sorted(number for bucket in layout for number in bucket)
    if numbers != list(range(len(_parameters(ddp)[0]))):
        raise TransferError("The peers' bucket layout is not one of this model's parameters.")
    ddp.reducer._reset_state()
    ddp.reducer._push_all_rebuilt_params()
    _rebuild(ddp, layout)


def _rebuild(ddp: DistributedDataParallel, wanted: Layout | None) -> Layout | None:
    """Have the reducer lay out its buckets; None if it has seen no gradients to do so by."""
    dictation = _Dictation(wanted)
    ddp.reducer._update_process_group(dictation)
    try:
        rebuilt = ddp.reducer._rebuild_buckets()
    finally:
        ddp.reducer._update_process_group(ddp.process_group)
    if not rebuilt:
        return None
    ddp._has_rebuilt_buckets = True
    return dictation.taken()


def _renew(ddp: Any) -> None:
    """A new reducer with the same layout: this kind does not lay out anew."""
    kept, static = _KEPT[ddp], ddp.static_graph
    ddp.reducer._remove_autograd_hooks()
    parameters, sparse = _parameters(ddp)
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, static)
    for hook, state in ddp._comm_hooks:
        _c10d._register_comm_hook(ddp.reducer, state, hook)
    if static:
        ddp.static_graph = False  # or DDP warns that it has been set
        ddp._set_static_graph()
        _dictate(ddp, kept.first)


def _watch(ddp: DistributedDataParallel) -> None:
    """Lay out before DDP does, which would broadcast where an abort cannot reach it."""
    kept = _KEPT[ddp]
    if not _is_fixed(ddp) and kept.before_forward is None:
        settle: Any = torch.compiler.disable(_settle)  # type: ignore[no-untyped-call]
        kept.before_forward = ddp.register_forward_pre_hook(settle)


def _unwatch(kept: _Kept) -> None:
    if kept.before_forward is not None:
        kept.before_forward.remove()
        kept.before_forward = None


def _settle(ddp: DistributedDataParallel, inputs: object) -> None:
    """Rank 0's layout for all; collective, as is the backward that comes before it."""
    if not torch.is_grad_enabled():
        return
    kept = _KEPT[ddp]
    if kept.now is None:
        kept.now = _rebuild(ddp, None)
    if kept.now is None:
        return
    theirs = _broadcast(ddp, kept.now, source=0) or kept.now
    if theirs != kept.now:
        _dictate(ddp, theirs)
    kept.now = theirs
    if kept.base is not None:  # else this is the second backward of the first step
        kept.base = theirs
    _unwatch(kept)


def _broadcast(ddp: DistributedDataParallel, mine: Layout | None, source: int) -> Layout | None:
    """The layout of rank `source`, as one tensor of a length known to all."""
    if ddp.process_group.size() == 1:
        return mine
    count = len(_parameters(ddp)[0])
    said = torch.full((2 * count,), -1, dtype=torch.int64)
    if mine is not None:
        numbers, sizes = _said(mine)
        said[:count] = torch.tensor(numbers[:-1])
        said[count : count + len(sizes)] = torch.tensor(sizes)
    said = said.to(ddp.device)
    dist.broadcast(said, src=source, group=ddp.process_group)
    numbers, sizes = said[:count].tolist(), said[count:].tolist()
    if numbers[:1] == [-1]:
        return None
    return _cut(numbers, [size for size in sizes if size > 0])
