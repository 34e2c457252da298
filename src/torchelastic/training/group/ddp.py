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

from torchelastic import torch_private
from torchelastic.errors import TransferError
from torchelastic.torch_private import parameters_of_ddp

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
        torch_private.show_group(ddp, group)


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
        torch_private.forget_backward(ddp)  # so that it lays out anew after the step
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


def _all_in_one(ddp: DistributedDataParallel) -> Layout:
    """What DDP begins with: one bucket for each type, since the order is not known."""
    return _assign(ddp, torch_private.limits_by_hand(ddp) or [torch.iinfo(torch.int64).max])


def _by_size(ddp: DistributedDataParallel) -> Layout:
    """Buckets of the size asked for, the last parameters first."""
    return _assign(ddp, torch_private.bucket_limits(ddp))


def _assign(ddp: DistributedDataParallel, limits: Sequence[int]) -> Layout:
    parameters, sparse = parameters_of_ddp(ddp)
    buckets = torch_private.assign_buckets(parameters, limits, sparse)
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
        return torch_private.work_of(done)

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
    if numbers != list(range(len(parameters_of_ddp(ddp)[0]))):
        raise TransferError("The peers' bucket layout is not one of this model's parameters.")
    torch_private.forget_backward(ddp)
    torch_private.count_all_ready(ddp)
    _rebuild(ddp, layout)


def _rebuild(ddp: DistributedDataParallel, wanted: Layout | None) -> Layout | None:
    """Have the reducer lay out its buckets; None if it has seen no gradients to do so by."""
    dictation = _Dictation(wanted)
    torch_private.show_group(ddp, dictation)
    try:
        rebuilt = torch_private.rebuild_buckets(ddp)
    finally:
        torch_private.show_group(ddp, ddp.process_group)
    return dictation.taken() if rebuilt else None


def _renew(ddp: DistributedDataParallel) -> None:
    """A new reducer with the same layout: this kind does not lay out anew."""
    torch_private.renew_reducer(ddp)
    if ddp.static_graph:
        _dictate(ddp, _KEPT[ddp].first)


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
    count = len(parameters_of_ddp(ddp)[0])
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
