"""DistributedDataParallel across worlds: the group is replaced, the bucket layout stays.

DDP reduces gradients bucket by bucket. With more than two ranks, a parameter's bucket decides the
order in which its gradients are added, and so the last bit of the sum. DDP lays out its buckets
when it is built, and again before its second forward, in the order in which the gradients became
ready. So a new DDP in the middle of a run, on all ranks or only on the new ones, gives a different
model than the undisturbed run, or a deadlock. Therefore

- survivors keep their DDP, and with it the layout;
- a script that keeps its state keeps the layout, too (`follow`, `packed`);
- new ranks receive the survivors' layout (`agree`);
- an interrupted survivor goes back to the layout that its step began with, in new memory: a
  collective of the lost world may still write to the old memory.

With `find_unused_parameters`, DDP never changes its layout. With `static_graph` it would, and its
first step, in which it learns the graph, uses different collectives than later steps. So every rank
learns the graph again in every world, and the buckets are laid out once, in the reverse order of
the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchelastic import torch_private
from torchelastic.errors import TransferError
from torchelastic.torch_private import parameters_of_ddp

#: The indices of the parameters by bucket, in the order in which the buckets are reduced.
Layout = tuple[tuple[int, ...], ...]


@dataclass
class _Layouts:
    """The bucket layouts of one DDP."""

    first: Layout
    #: The current layout; None before the gradients have shown their order.
    now: Layout | None = None
    #: `now` when the last step was committed: the layout that the next step begins with.
    base: Layout | None = None
    #: Gives all ranks one layout before the forward after the first backward; then removed.
    before_forward: torch.utils.hooks.RemovableHandle | None = None


_KEPT: WeakKeyDictionary[DistributedDataParallel, _Layouts] = WeakKeyDictionary()


def wrap(module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """Return a DDP on the current default group; `options` are DDP's.

    Sends nothing: ranks that keep their DDP take no part. The caller must give all ranks the same
    parameters, and call `agree` before the first step.
    """
    options["init_sync"] = False
    ddp = DistributedDataParallel(module, **options)
    follow(ddp)
    return ddp


def follow(ddp: DistributedDataParallel) -> None:
    """Know and decide the layout of a DDP from now on. It has its first layout."""
    if _is_fixed(ddp):  # buckets of the configured size, the last parameters first
        limits = torch_private.bucket_limits(ddp)
    else:  # DDP's first layout: one bucket per dtype, since the order is not known
        limits = torch_private.limits_by_hand(ddp) or [torch.iinfo(torch.int64).max]
    _KEPT[ddp] = layouts = _Layouts(first=_assign(ddp, limits))
    if ddp.static_graph:
        _dictate(ddp, layouts.first)
    _watch(ddp)


def follow_all(models: Iterable[Any]) -> list[DistributedDataParallel]:
    """Follow the DDP models of a script, and return those that can be followed."""
    found = [one for one in models if isinstance(one, DistributedDataParallel) and _can_follow(one)]
    for model in found:
        follow(model)
    return found


def _can_follow(ddp: DistributedDataParallel) -> bool:
    """Return whether this DDP of a script can be followed: it spans all ranks, and has its first
    layout."""
    whole = ddp.process_group.size() == dist.get_world_size()
    return whole and not torch_private.has_rebuilt(ddp)


def packed(ddp: DistributedDataParallel) -> torch.Tensor:
    """Return the next step's layout as a tensor that is as long as any other."""
    return _packed(layout(ddp), trained(ddp))


def unpacked(said: torch.Tensor) -> Layout | None:
    """Reverse `packed`."""
    numbers, sizes = said.reshape(2, -1).tolist()
    return None if numbers[:1] == [-1] else _cut(numbers, [size for size in sizes if size > 0])


def _packed(layout: Layout | None, count: int) -> torch.Tensor:
    said = torch.full((2 * count,), -1, dtype=torch.int64)
    if layout is not None:
        numbers, sizes = _said(layout)
        said[:count] = torch.tensor(numbers[:-1])
        said[count : count + len(sizes)] = torch.tensor(sizes)
    return said


def trained(model: torch.nn.Module) -> int:
    """Return the number of parameters whose gradients DDP reduces, or would if it were wrapped now.

    A DDP keeps those that were trained when it was made.
    """
    if isinstance(model, DistributedDataParallel):
        return sum(map(len, _KEPT[model].first))
    return sum(parameter.requires_grad for parameter in model.parameters())


def form_of(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield what must be the same on all workers: all reduce the same gradients, whatever
    a script has frozen since."""
    for number, model in enumerate(models):
        yield f"model {number} in DDP", f"of {trained(model)} trained parameters"


def committed(ddp: DistributedDataParallel) -> bool:
    """Note that a step is done. Call after each step, in every world, until it returns True."""
    layouts = _KEPT[ddp]
    if layouts.base is not None or _is_fixed(ddp):
        return True
    if layouts.now is None:
        # If DDP cannot lay out its buckets (a parameter has no gradient, for example), it raises in
        # the next forward, where the user sees it.
        with contextlib.suppress(RuntimeError):
            layouts.now = _rebuild(ddp, None)
    layouts.base = layouts.now
    return layouts.base is not None


def swap(ddp: DistributedDataParallel, *, interrupted: bool = True) -> None:
    """Switch to the current default group. Sends nothing; `agree` must follow.

    `interrupted` means that a step was begun and will be repeated; otherwise the last step is
    committed, and no collective of the DDP can be running.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("There is no process group to switch to: enter a world first.")
    ddp.process_group = group
    if not _is_fixed(ddp) and interrupted:
        adopt(ddp, layout(ddp))
    elif interrupted or ddp.static_graph:
        torch_private.renew_reducer(ddp)  # with the same layout: this kind never changes it
        if ddp.static_graph:
            _dictate(ddp, _KEPT[ddp].first)
    else:
        torch_private.show_group(ddp, group)


def layout(ddp: DistributedDataParallel) -> Layout | None:
    """Return the next step's layout, or None before the gradients have shown their order."""
    return _KEPT[ddp].base


def adopt(ddp: DistributedDataParallel, layout: Layout | None) -> None:
    """Use this layout, in new memory, whatever state a backward was left in."""
    if _is_fixed(ddp):
        return
    layouts = _KEPT[ddp]
    _dictate(ddp, layouts.first if layout is None else layout)
    layouts.now = layouts.base = layout
    if layout is None:
        torch_private.forget_backward(ddp)  # so that it lays out its buckets again after the step
    _watch(ddp)


def agree(ddp: DistributedDataParallel, source: int) -> None:
    """Collective, once per world: give all ranks the bucket layout of rank `source`."""
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
    """Return whether this DDP never changes its first layout."""
    return bool(ddp.static_graph or ddp.find_unused_parameters)


def _assign(ddp: DistributedDataParallel, limits: Sequence[int]) -> Layout:
    parameters, sparse = parameters_of_ddp(ddp)
    buckets = torch_private.assign_buckets(parameters, limits, sparse)
    return tuple(tuple(bucket) for bucket in reversed(buckets))


class _Dictation(dist.ProcessGroup):
    """A group of one rank, given to a reducer while it lays out its buckets.

    A reducer takes the layout that rank 0 broadcasts: the indices of all parameters followed by
    the number of buckets, then the sizes of the buckets. This group broadcasts the layout of
    rank 0, or records the layout that the reducer found.
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
    """Make the reducer forget its current backward and use this layout from now on."""
    numbers = sorted(number for bucket in layout for number in bucket)
    if numbers != list(range(trained(ddp))):
        raise TransferError("The peers' DDP bucket layout does not match this model's parameters.")
    torch_private.forget_backward(ddp)
    torch_private.count_all_ready(ddp)
    _rebuild(ddp, layout)


def _rebuild(ddp: DistributedDataParallel, wanted: Layout | None) -> Layout | None:
    """Make the reducer lay out its buckets; return None if it has seen no gradients yet."""
    dictation = _Dictation(wanted)
    torch_private.show_group(ddp, dictation)
    try:
        rebuilt = torch_private.rebuild_buckets(ddp)
    finally:
        torch_private.show_group(ddp, ddp.process_group)
    return dictation.taken() if rebuilt else None


def _watch(ddp: DistributedDataParallel) -> None:
    """Lay out the buckets before DDP does: its own broadcast cannot be aborted."""
    layouts = _KEPT[ddp]
    if not _is_fixed(ddp) and layouts.before_forward is None:
        agree: Any = torch.compiler.disable(_agree_on_layout)  # type: ignore[no-untyped-call]
        layouts.before_forward = ddp.register_forward_pre_hook(agree)


def _unwatch(layouts: _Layouts) -> None:
    if layouts.before_forward is not None:
        layouts.before_forward.remove()
        layouts.before_forward = None


def _agree_on_layout(ddp: DistributedDataParallel, inputs: object) -> None:
    """Collective, like the backward before it: give all ranks the layout of rank 0."""
    if not torch.is_grad_enabled():
        return
    layouts = _KEPT[ddp]
    if layouts.now is None:
        layouts.now = _rebuild(ddp, None)
    if layouts.now is None:
        return
    theirs = _broadcast(ddp, layouts.now, source=0) or layouts.now
    if theirs != layouts.now:
        _dictate(ddp, theirs)
    layouts.now = theirs
    if layouts.base is not None:  # else this is the second backward of the first step
        layouts.base = theirs
    _unwatch(layouts)


def _broadcast(ddp: DistributedDataParallel, mine: Layout | None, source: int) -> Layout | None:
    """Collective: return the layout of rank `source`, sent as one tensor of known length."""
    if ddp.process_group.size() == 1:
        return mine
    said = _packed(mine, trained(ddp)).to(ddp.device)
    dist.broadcast(said, src=source, group=ddp.process_group)
    return unpacked(said.cpu())
