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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchelastic.errors import TransferError

#: Parameters by their number, bucket by bucket, in the order in which the buckets are reduced.
Layout = tuple[tuple[int, ...], ...]


@dataclass
class _Kept:
    """What is known of a DDP besides itself."""

    first: Layout
    #: What the gradients' order of the first step has led to; None while that step lasts.
    settled: Layout | None = None
    steps: int = 0
    #: Lays out anew before the forward that follows the first backward, then goes.
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


def committed(ddp: DistributedDataParallel) -> None:
    """The step is done; to be called after each."""
    _KEPT[ddp].steps += 1


def swap(ddp: DistributedDataParallel, *, interrupted: bool = True) -> None:
    """Go on with the present default group. Nothing is sent.

    `interrupted` says that a step was begun that is going to be done again; otherwise the last
    step is committed, and no collective of the DDP can be under way.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("There is no process group to swap to: enter a world first.")
    settled = layout(ddp)
    ddp.process_group = group
    if _is_fixed(ddp):
        if interrupted or ddp.static_graph:
            _renew(ddp)
        else:
            ddp.reducer._update_process_group(group)
    elif interrupted:
        adopt(ddp, settled)
    else:
        ddp.reducer._update_process_group(group)


def layout(ddp: DistributedDataParallel) -> Layout | None:
    """The layout for the next step; None for the first, before gradients have shown their order.

    After the first committed step the order is known; a reducer that has not laid out its buckets
    by it does so now, without asking the others.
    """
    kept = _KEPT[ddp]
    if _is_fixed(ddp) or kept.steps == 0:
        return None
    if kept.settled is None:
        kept.settled = _rebuild(ddp, None)
    return kept.settled


def adopt(ddp: DistributedDataParallel, layout: Layout | None) -> None:
    """Lay the buckets out like this, in new memory, whatever state a backward was left in."""
    kept = _KEPT[ddp]
    if _is_fixed(ddp):
        return
    _dictate(ddp, kept.first if layout is None else layout)
    kept.settled = layout
    if layout is None:
        ddp.reducer._reset_state()  # so that it lays out anew after the step
        kept.steps = 0
        _watch(ddp)
    else:
        kept.steps = max(kept.steps, 1)
        _unwatch(kept)


def agree(ddp: DistributedDataParallel, source: int) -> None:
    """Collective, once per world: all lay their buckets out as rank `source` does."""
    if _is_fixed(ddp):
        return
    mine = layout(ddp)
    theirs = _broadcast(ddp, mine, source)
    if theirs != mine:
        adopt(ddp, theirs)


# --- laying out ----------------------------------------------------------------------------------


def _is_fixed(ddp: DistributedDataParallel) -> bool:
    """Whether its buckets stay as they are laid out at first."""
    return bool(ddp.static_graph or ddp.find_unused_parameters)


def _parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """In the order of their numbers."""
    parameters: list[torch.nn.Parameter] = ddp._build_params_for_reducer()[0]
    return parameters


def _all_in_one(ddp: DistributedDataParallel) -> Layout:
    """What DDP begins with: one bucket for each type, since the order is not known."""
    return _assign(ddp, [torch.iinfo(torch.int64).max])


def _by_size(ddp: DistributedDataParallel) -> Layout:
    """Buckets of the size asked for, the last parameters first."""
    small = [dist._DEFAULT_FIRST_BUCKET_BYTES] if ddp.bucket_bytes_cap_default else []
    return _assign(ddp, [*small, ddp.bucket_bytes_cap])


def _assign(ddp: DistributedDataParallel, limits: Sequence[int]) -> Layout:
    parameters, sparse = ddp._build_params_for_reducer()
    buckets = dist._compute_bucket_assignment_by_size(parameters, list(limits), sparse)[0]
    return tuple(tuple(bucket) for bucket in reversed(buckets))


class _Dictation(dist.ProcessGroup):
    """A group of one, shown to a reducer while it lays out its buckets.

    A reducer takes the layout that rank 0 broadcasts: the numbers of all parameters followed by
    the number of buckets, then the sizes of the buckets. This one says what rank 0 wants, or
    leaves what the reducer has found out, and keeps it.
    """

    def __init__(self, wanted: Layout | None) -> None:
        super().__init__(0, 1)
        self._to_say = None if wanted is None else _said(wanted)
        self._heard: list[list[int]] = []

    def broadcast(self, tensors: list[torch.Tensor], options: object = None) -> dist.Work:
        (tensor,) = tensors
        if self._to_say is not None:
            tensor.copy_(torch.tensor(self._to_say[len(self._heard)]))
        self._heard.append(tensor.tolist())
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
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
    if sorted(number for bucket in layout for number in bucket) != list(
        range(len(_parameters(ddp)))
    ):
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


def _renew(ddp: DistributedDataParallel) -> None:
    """A new reducer with the same layout: this kind does not lay out anew."""
    kept, static = _KEPT[ddp], ddp.static_graph
    ddp.reducer._remove_autograd_hooks()
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, static)
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)
    if static:
        ddp.static_graph = False  # or DDP warns that it has been set
        ddp._set_static_graph()
        _dictate(ddp, kept.first)


def _watch(ddp: DistributedDataParallel) -> None:
    """Settle the layout before DDP would, which broadcasts out of reach of an abort."""
    kept = _KEPT[ddp]
    if not _is_fixed(ddp) and kept.before_forward is None:
        kept.before_forward = ddp.register_forward_pre_hook(_settle)


def _unwatch(kept: _Kept) -> None:
    if kept.before_forward is not None:
        kept.before_forward.remove()
        kept.before_forward = None


@torch.compiler.disable(recursive=True)
def _settle(ddp: DistributedDataParallel, inputs: object) -> None:
    if not torch.is_grad_enabled():
        return
    kept = _KEPT[ddp]
    kept.settled = _rebuild(ddp, None)
    if kept.settled is None:
        return
    _unwatch(kept)
    theirs = _broadcast(ddp, kept.settled, source=0)
    if theirs is not None and theirs != kept.settled:
        _dictate(ddp, theirs)
        kept.settled = theirs


def _broadcast(ddp: DistributedDataParallel, mine: Layout | None, source: int) -> Layout | None:
    """The layout of rank `source`, as one tensor of a length known to all."""
    if ddp.process_group.size() == 1:
        return mine
    count = len(_parameters(ddp))
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
