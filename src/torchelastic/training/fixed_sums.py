"""Add the gradients of micro-batches along one tree: in this worker, and over all workers.

A worker adds two sums as soon as it holds both siblings (`add`), so it holds about log2 of its
micro-batches at a time. An `Exchange` adds those of all workers. Parameters are laid out in
buckets; of each bucket a worker owns one part:

    subtrees of a bucket  --all-to-all-->  my part of all workers' subtrees, added in tree order
    my part of the sum    --all-gather-->  the sum, which becomes `.grad`

All subtrees but a worker's last are complete before its last micro-batch, and are sent then. A
bucket of the last one is sent during the last backward, when its gradients are ready. All workers
launch the same collectives in the same order.

Of a sharded model, this worker's parts of gradients are added, and the workers are those with its
coordinates in the other replicas, in a group of ours between them.

A parameter that a micro-batch did not use has no gradient there. It is sent as -0.0, which changes
no other number when it is added; how many micro-batches used it is summed as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from torchelastic import torch_private
from torchelastic.data.fixed_batch import Subtree, SumTree
from torchelastic.errors import ConfigError
from torchelastic.tensors.dtensors import is_sharded, local_of, local_or_whole

#: The gradients of all parameters, None where there is none.
Gradients = list[torch.Tensor | None]

#: Bytes of a bucket at most. A single piece of 100 MB took 2.6 to 3.3 times as long as an
#: all-reduce, four pieces of 25 MB 1.06 to 1.7 times.
BUCKET_BYTES = 25 << 20

#: The place of the first gradient among what is summed: the loss and the counts come before.
_FIRST = 2


class StepSum(NamedTuple):
    """The sum of some micro-batches."""

    gradients: Gradients
    #: The sum of their weighted losses.
    loss: torch.Tensor
    #: How many of them used each parameter.
    used: torch.Tensor


Held = dict[Subtree, StepSum]


class Adders(NamedTuple):
    """The workers whose sums are added: this one's rank among them, and their group."""

    rank: int
    size: int
    #: None if there is only this one.
    group: dist.ProcessGroup | None


@torch.no_grad()
def add(tree: SumTree, held: Held, subtree: Subtree, value: StepSum) -> None:
    """Put in the sum of a subtree. `value` may be changed, and so may those held."""
    while subtree in tree.up and (found := tree.up[subtree])[0] in held:
        one, other = held.pop(found[0]), value
        gradients = added(one.gradients, other.gradients)
        value = StepSum(gradients, one.loss + other.loss, one.used + other.used)
        subtree = found[1]
    held[subtree] = value


def own_gradient(parameter: Any) -> torch.Tensor | None:
    """Return this worker's part of a gradient, sharded as the parameter is: tensor parallelism may
    give one that is not yet added over its workers."""
    gradient = parameter.grad
    if gradient is None or not is_sharded(gradient):
        return cast("torch.Tensor | None", gradient)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)


def added(ours: Gradients, theirs: Gradients) -> Gradients:
    """Add in place. Their order does not matter: a + b and b + a have the same bits."""
    both = [
        (one, other)
        for one, other in zip(ours, theirs, strict=True)
        if one is not None and other is not None
    ]
    if both:
        torch_private.add_all([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(ours, theirs, strict=True)]


class _Bucket:
    """Some parameters of one type."""

    def __init__(self, numbers: Sequence[int], like: Sequence[torch.Tensor]) -> None:
        self.numbers = list(numbers)
        self._like = list(like)
        self.length = sum(one.numel() for one in like)
        self.kind = like[0].dtype, like[0].device
        #: First receives the parts of other workers, and then the sum.
        self.whole = torch.empty(0)

    def part(self, workers: int) -> int:
        """The number of elements that each worker owns. (A worker may have nothing of a sharded
        parameter.)"""
        return max(-(-self.length // workers), 1)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        pieces = torch.split(flat[: self.length], [one.numel() for one in self._like])
        for piece, like in zip(pieces, self._like, strict=True):
            yield piece.view(like.shape)

    def fill(self, flat: torch.Tensor, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Copy values into one run of memory; return their views there."""
        views = list(self.views(flat))
        flat[self.length :] = 0
        present = [(view, one) for view, one in zip(views, values, strict=True) if one is not None]
        if present:
            torch_private.copy_all([view for view, _ in present], [one for _, one in present])
        for view, one in zip(views, values, strict=True):
            if one is None:
                view.fill_(-0.0)
        return views


class Exchange:
    """Adds the sums that the workers hold of some parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        loss, used = torch.zeros((), device=device), torch.zeros(len(parameters), device=device)
        #: What is summed: these two, which are known last, and the gradients.
        self._like = [loss, used, *map(local_or_whole, parameters)]
        self._buckets = [
            _Bucket(numbers, [self._like[number] for number in numbers])
            for numbers in _buckets(self._like)
        ]
        #: Memory for what is sent and received.
        self._rooms: dict[tuple[object, ...], torch.Tensor] = {}
        self._round: Round | None = None
        self._has_begun = False
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(number)
            )

    def _hook(self, number: int) -> Any:
        def ready(_: torch.Tensor) -> None:
            if self._round is not None:
                self._round.ready(number)

        return ready

    def begin(
        self, tree: SumTree, held: Held, plan: Sequence[Sequence[Subtree]], adders: Adders
    ) -> Round:
        """Begin to add the sums of all workers: when only this worker's last micro-batch is
        missing, or none. `plan` has the subtrees of each worker. Collective."""
        self._has_begun = len(plan) > 1
        return Round(self, tree, held, plan, adders)

    def room(self, key: object, like: _Bucket, count: int) -> torch.Tensor:
        found = self._rooms.get((key, like.kind))
        if found is None or found.numel() < count:
            found = torch.empty(count, dtype=like.kind[0], device=like.kind[1])
            self._rooms[key, like.kind] = found
        return found[:count]

    @property
    def buckets(self) -> list[_Bucket]:
        return self._buckets

    def ended(self) -> None:
        """Note that all collectives of a round have ended."""
        self._has_begun = False

    def abandon(self) -> None:
        """Forget a round that an error has interrupted, as in the last backward."""
        if self._has_begun:
            self.forget()
        self._has_begun = False

    def watch(self, ending: Round | None) -> None:
        """Tell a round which gradients become ready in the backward that begins; None: it ends."""
        self._round = ending

    def forget(self) -> None:
        """Use other memory from now on: an aborted collective may still write to this."""
        self._rooms, self._round = {}, None
        for bucket in self._buckets:
            bucket.whole = torch.empty(0)


class Round:
    """The addition over all workers, in one step."""

    def __init__(
        self,
        exchange: Exchange,
        tree: SumTree,
        held: Held,
        plan: Sequence[Sequence[Subtree]],
        adders: Adders,
    ) -> None:
        self._exchange, self._tree, self._held, self._plan = exchange, tree, held, plan
        self._rank, self._size, self._group = adders
        self._own = list(plan[self._rank])
        #: All-to-alls for each bucket. Who sends less often begins later.
        self._turns = max(map(len, plan))
        self._works: list[list[tuple[Any, torch.Tensor, list[Subtree]]]] = [
            [] for _ in exchange.buckets
        ]
        #: In the last backward: the parameters that are ready; per bucket, how many are missing;
        #: the sums of the last micro-batch's siblings; and how many buckets were sent.
        self._ready: set[int] = set()
        self._missing = [len(bucket.numbers) for bucket in exchange.buckets]
        self._place = {
            number: place
            for place, bucket in enumerate(exchange.buckets)
            for number in bucket.numbers
        }
        self._chain: list[Subtree] = []
        self._sent = 0
        self._failure: Exception | None = None
        #: Whether buckets of the last micro-batch were added to siblings, and others not yet: if
        #: the backward fails now, none of them can be used.
        self.is_adding = False
        self._parameters: Sequence[torch.Tensor] = ()
        self._last: Gradients = []
        if self._size > 1:
            self._guarded(self._send_early)

    @torch.no_grad()
    def _guarded(self, do: Any) -> Any:
        try:
            return do()
        except BaseException:
            self._exchange.forget()
            raise

    def _send_early(self) -> None:
        for turn in range(self._turns - 1):
            for place in range(len(self._exchange.buckets)):
                self._send(place, turn)

    # --- the last backward -----------------------------------------------------------------------

    def follow(self, micro_batch: int, parameters: Sequence[torch.Tensor]) -> None:
        """Send buckets of the last subtree while its last micro-batch runs backward."""
        if self._size == 1:
            return
        subtree = micro_batch, micro_batch + 1
        while subtree != self._own[-1]:
            sibling, subtree = self._tree.up[subtree]
            self._chain.append(sibling)
        self._parameters = parameters
        self._last = [None] * len(parameters)
        self._exchange.watch(self)

    def ready(self, number: int) -> None:
        """Note that a gradient of the last micro-batch is complete; in a thread of autograd."""
        if number in self._ready:
            raise ConfigError(
                "A parameter got its gradient twice in one backward, which BatchPolicy.fixed does "
                "not support: use checkpoint(..., use_reentrant=False)."
            )
        self._ready.add(number)
        self._missing[self._place[number + _FIRST]] -= 1
        # In one order on all workers. The last bucket has what is known at the end.
        with torch.no_grad():
            while self._sent < len(self._missing) - 1 and self._missing[self._sent] == 0:
                self._send_ready()

    def _send_ready(self) -> None:
        """Add the next bucket to its siblings, and send it.

        If the world is over, the backward goes on, so that the micro-batch and its siblings are not
        lost: `end` raises.
        """
        bucket = self._exchange.buckets[self._sent]
        numbers = [number - _FIRST for number in bucket.numbers]
        self.is_adding = True
        value = self._chained(numbers, [own_gradient(self._parameters[one]) for one in numbers])
        out = self._exchange.room(
            ("out", self._sent, self._turns - 1), bucket, bucket.part(self._size) * self._size
        )
        for number, view in zip(numbers, bucket.fill(out, value), strict=True):
            self._last[number], self._parameters[number].grad = view, None
        if self._failure is None:
            try:
                self._launch(self._sent, self._turns - 1, out)
            except Exception as error:
                self._exchange.forget()
                self._exchange.watch(self)
                self._failure = error
        self._sent += 1

    def _chained(self, numbers: Sequence[int], value: Gradients) -> Gradients:
        """Add to some gradients of the last micro-batch those of its siblings, upwards."""
        for sibling in self._chain:
            held = self._held[sibling].gradients
            value = added([held[number] for number in numbers], value)
            for number in numbers:
                held[number] = None
        return value

    @torch.no_grad()
    def add_last(self, micro_batch: int, value: StepSum) -> None:
        """Put in the last micro-batch, of which some buckets may be sent already."""
        self._exchange.watch(None)
        if not self._sent:
            add(self._tree, self._held, (micro_batch, micro_batch + 1), value)
            return
        buckets = self._exchange.buckets[: self._sent]
        sent = {number - _FIRST for bucket in buckets for number in bucket.numbers}
        left = [number for number in range(len(self._last)) if number not in sent]
        for number, one in zip(
            left, self._chained(left, [value.gradients[number] for number in left]), strict=True
        ):
            self._last[number] = one
        loss, used = value.loss, value.used
        used[list(sent)] = 1.0  # a bucket is sent when all its gradients are there
        for sibling in self._chain:
            siblings = self._held.pop(sibling)
            loss, used = siblings.loss + loss, siblings.used + used
        self._held[self._own[-1]] = StepSum(self._last, loss, used)
        self.is_adding = False

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> StepSum:
        """Return the sum of all micro-batches. It is valid until the next step."""
        if self._size == 1:
            (whole,) = self._held.values()
            return whole
        result: StepSum = self._guarded(self._end)
        self._exchange.ended()
        return result

    def _end(self) -> StepSum:
        if self._failure is not None:
            raise self._failure
        gathered = []
        for place in range(self._sent, len(self._exchange.buckets)):
            self._send(place, self._turns - 1)
        for place in range(len(self._exchange.buckets)):
            gathered.append(self._gather(place))
        found: list[torch.Tensor] = [torch.empty(0)] * len(self._place)
        for bucket, work in zip(self._exchange.buckets, gathered, strict=True):
            work.wait()
            for number, view in zip(bucket.numbers, bucket.views(bucket.whole), strict=True):
                found[number] = view
        loss, used, *gradients = found
        kept = zip(gradients, (used == 0).tolist(), strict=True)
        return StepSum([None if unused else one for one, unused in kept], loss, used)

    def _send(self, place: int, turn: int) -> None:
        """Send each owner its part of a complete subtree, if this worker sends one in this turn."""
        number = turn - (self._turns - len(self._own))
        bucket = self._exchange.buckets[place]
        size = bucket.part(self._size) * self._size if number >= 0 else 0
        out = self._exchange.room(("out", place, turn), bucket, size)
        if number >= 0:
            held = self._held[self._own[number]]
            every = (held.loss, held.used, *held.gradients)
            bucket.fill(out, [every[one] for one in bucket.numbers])
        self._launch(place, turn, out)

    def _launch(self, place: int, turn: int, out: torch.Tensor) -> None:
        bucket, size = self._exchange.buckets[place], self._size
        part = bucket.part(size)
        firsts = [self._turns - len(subtrees) for subtrees in self._plan]
        sizes = [part * (turn >= first) for first in firsts]
        if turn < self._turns - 1:
            into = self._exchange.room(("in", place, turn), bucket, sum(sizes))
        else:
            if bucket.whole.numel() != part * size:
                bucket.whole = torch.empty(part * size, dtype=out.dtype, device=out.device)
            into = bucket.whole[: sum(sizes)]
        own = [sizes[self._rank]] * size
        work = torch_private.begin_all_to_all(self._group, into, out, sizes, own)
        subtrees = [
            own[turn - first]
            for own, first in zip(self._plan, firsts, strict=True)
            if turn >= first
        ]
        self._works[place].append((work, into, subtrees))

    def _gather(self, place: int) -> Any:
        """Add this worker's part along the tree, and send it to all."""
        bucket = self._exchange.buckets[place]
        part = bucket.part(self._size)
        own: dict[Subtree, torch.Tensor] = {}
        for work, into, subtrees in self._works[place]:
            work.wait()
            for subtree, piece in zip(subtrees, into.view(-1, part), strict=True):
                _put(self._tree, own, subtree, piece)
        (root,) = own.values()
        root = self._exchange.room(("root", place), bucket, part).copy_(root)
        return torch_private.begin_all_gather(self._group, bucket.whole, root)


def _put(
    tree: SumTree, own: dict[Subtree, torch.Tensor], subtree: Subtree, piece: torch.Tensor
) -> None:
    while subtree in tree.up and (found := tree.up[subtree])[0] in own:
        piece = own.pop(found[0]).add_(piece)
        subtree = found[1]
    own[subtree] = piece


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Lay out tensors in buckets of one type each, the last first: backward ends with the first."""
    filled: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    order: list[list[int]] = []
    for number in reversed(range(len(tensors))):
        one = tensors[number]
        kind = one.dtype, one.device
        numbers, size = filled.get(kind, ([], 0))
        if not numbers or size + one.nbytes > BUCKET_BYTES:
            numbers, size = [], 0
            order.append(numbers)
        numbers.append(number)
        filled[kind] = numbers, size + one.nbytes
    # The one with the first tensor is sent last: it is complete last.
    return sorted(order, key=lambda numbers: 0 in numbers)
