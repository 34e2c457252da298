"""The loop over this worker's micro-batches: what `policy.accumulate` does with a fixed batch.

    begin(step)      torch's, numpy's and Python's generators are seeded by (seed, step)
    accumulate
      an audit           repeats micro-batches of other workers, now and then (`audit`)
      each micro-batch   generators seeded by (seed, step, loop, micro-batch), the step's buffers
                         the user's forward and backward
                         its gradients are taken out of `.grad` and added (`sums.add`)
      the end            the sums of all workers are added (`sums.Exchange`) and put into `.grad`;
                         the buffers of micro-batch 0 are sent to all; generators as before the loop

So a micro-batch is a function of the parameters, the step and its number, whoever runs it. A worker
without micro-batches joins only the end.

If a model is sharded, a replica takes the place of a worker (`sharded`). Its workers run each of
its micro-batches together, and FSDP2 reduces the gradients among them as ever; then each adds its
parts to those of its peers in the other replicas. Random numbers also depend on which samples of
the micro-batch a worker reads. Bits depend on the shape of a replica, not on how many there are.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchelastic import faults, torch_backends, torch_private
from torchelastic.data.accumulation import Cutter, Micro, check_length, cut_tree
from torchelastic.data.fixed_batch import (
    Assignment,
    FixedBatch,
    Subtree,
    SumTree,
    ranges,
    resume,
    tree_of,
)
from torchelastic.data.own_rank import OwnRank, own_rank
from torchelastic.errors import ConfigError
from torchelastic.tensors import rng
from torchelastic.tensors.dtensors import is_sharded, local_or_whole, shard_like
from torchelastic.training.audit import Audits, LoopAudits
from torchelastic.training.fixed_sums import (
    Adders,
    Exchange,
    Held,
    Round,
    StepSum,
    add,
    own_gradient,
)
from torchelastic.training.group.replica import Replica
from torchelastic.training.state_checks import Traces
from torchelastic.worker_counters import milestones

if TYPE_CHECKING:
    from torchelastic.training.group.group import Group

#: Steps between two comparisons of the workers' speeds.
MEASURE_EVERY = 16
#: New shares must shorten a step at least to this part of its time.
PAYS = 0.95
#: How many of its latest micro-batches a worker measures its speed by.
_TIMES = 16


class InReplica(NamedTuple):
    """The work of a step that is different if models are sharded over a replica."""

    replica: Replica
    #: Whether FSDP2 reduces gradients.
    reduces: Callable[[], bool]
    #: Shards the parameters again that an evaluation may have left whole.
    reshard: Callable[[], None]


class FixedSteps:
    """The steps of one state with one policy.

    When a worker is lost, the others keep the sums of the micro-batches that they have run, and the
    next world runs only those that nobody holds (`enter`). A step with several loops is taken again
    from its beginning: its batch has to be there for all of them. So is a step of a sharded model.
    """

    def __init__(self, policy: FixedBatch, step: Callable[[], int]) -> None:
        self._policy, self._step = policy, step
        #: The loops begun in this step.
        self._loops = 0
        #: By loop and number: the weighted losses of the micro-batches that ran here in this step,
        #: and their weights.
        self._losses: dict[tuple[int, int], tuple[torch.Tensor, float]] = {}
        self._exchanges: dict[tuple[int, ...], tuple[list[nn.Parameter], Exchange]] = {}
        #: Of the first loop of this step: the sums, and the buffers after micro-batch 0.
        self._held: Held = {}
        self._after: list[torch.Tensor] = []
        self._ending: Round | None = None
        #: Whether steps have several loops, as far as this worker has seen.
        self._several = False
        #: By rank: the micro-batches held when this world began, if any are.
        self._known: list[list[int]] | None = None
        #: Seconds of this worker's latest micro-batches; and by rank, how fast workers are.
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._speeds: tuple[float, ...] = ()
        #: The speeds from the next step on, if they change; this one may have another loop.
        self._next_speeds: tuple[float, ...] | None = None
        #: Whether all workers of this world have entered it to take steps again.
        self._keeps_shares = False
        #: Counts changes of the shares, which the size of the world does not show.
        self.turn = 0
        #: The loss of the last loop.
        self.loss: float | None = None
        #: Called when the gradients of a loop are there, before anything can change them.
        self.measure: Callable[[], None] | None = None
        #: Takes what each step gave, for the comparison of states.
        self.traces: Traces | None = None
        self.audits = Audits(policy.seed, warns=policy.other_bits == "warn")
        self._audited: LoopAudits | None = None
        #: Of sharded models: the replica, the workers in it that read different samples, and the
        #: group of this world between the workers with the same part.
        self.sharded: InReplica | None = None
        self._between: dist.ProcessGroup | None = None
        self.tell_all: Callable[[list[int]], list[list[int]]] = _tell_group

    @property
    def readers(self) -> int:
        """The number of workers that divide the samples of a micro-batch among them."""
        return 1 if self.sharded is None else self.sharded.replica.data_size

    @property
    def loss_of_step(self) -> float | None:
        """The loss of the last loop of the step in flight; None before its first."""
        return self.loss if self._loops else None

    def form(self) -> list[tuple[str, str]]:
        """Return the settings that must be the same on all workers, or their bits differ."""
        policy = self._policy
        shape = f"fixed(micro={policy.micro}, count={policy.count}, seed={policy.seed})"
        same = [
            ("the batch policy", shape),
            ("other bits", policy.other_bits),
            ("the rate of audits", str(self.audits.rate)),
        ]
        if policy.other_bits == "warn":
            return same
        return [
            *same,
            ("the number of threads", str(torch.get_num_threads())),
            ("the version of torch", str(torch.__version__)),
            ("the instruction set", torch.backends.cpu.get_cpu_capability()),
        ]

    def same_beginning(self, models: Sequence[nn.Module]) -> None:
        """Give all workers the first worker's parameters and buffers, as DDP does; collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        tensors = [*dict.fromkeys(t for m in models for t in (*m.parameters(), *m.buffers()))]
        everyone = Adders(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        values = sent(tensors, tensors if everyone.rank == 0 else None, 0, everyone)
        with torch.no_grad():
            for one, value in zip(tensors, values, strict=True):
                one.copy_(value)

    def begin(self) -> None:
        """Begin a step, or begin it again."""
        self._loops = 0
        if self._next_speeds is not None:
            self._speeds, self._next_speeds = self._next_speeds, None
            self.turn += 1
        self._losses = {}
        rng.seed(self._policy.seed, self._step(), *self._reader)

    def committed(self) -> None:
        """End the step."""
        self._held, self._after, self._known, self._ending = {}, [], None, None

    def bad_micro_batches(self, is_bad: Callable[[int, float], bool]) -> tuple[int, ...]:
        """Return the numbers of the micro-batches that ran here in this step and whose loss is bad;
        `is_bad` gets the number of the loop, and the loss."""
        found = {
            number
            for (loop, number), (loss, scale) in self._losses.items()
            if is_bad(loop, float(loss) / scale)
        }
        return tuple(sorted(found))

    def forget(self) -> None:
        """Forget the sums: the parameters that they were computed with are replaced."""
        self._held, self._after, self._ending = {}, [], None

    @property
    def _reader(self) -> tuple[int, ...]:
        """Which samples of a micro-batch this worker reads; nothing if all."""
        return () if self.sharded is None else (self.sharded.replica.data_rank,)

    def enter(self, world: Group) -> None:
        """Enter a world: all workers tell each other which micro-batches of the step they hold."""
        self.tell_all, self._between = world.tell_all, world.between
        if self.sharded is not None or (self._ending is not None and self._ending.is_adding):
            self.forget()
        before = self._speeds, self._known
        own = [number for start, stop in self._held for number in range(start, stop)]
        took = round(1e6 * self._took())
        again = zlib.crc32(repr(self._speeds).encode()) if self._takes_again else -1
        said = self.tell_all(
            [took, self._several, self.audits.is_new, again, *_packed(own, self._policy.count)]
        )
        # With the same shares, each worker repeats its own micro-batches: that shows a wrong one.
        self._keeps_shares = again >= 0 and all(one[3] == again for one in said)
        self._next_speeds = None
        if not self._keeps_shares:
            self._speeds = _speeds(self._by_replica([one[0] for one in said]))
        self._several = any(one[1] for one in said)
        self.audits.enter([bool(one[2]) for one in said])
        known = [_unpacked(one[4:]) for one in said]
        self._known = known if any(known) and not self._several else None
        if self._known is None:
            self.forget()
        if (self._speeds, self._known) != before:
            self.turn += 1  # a batch that was loaded ahead is for other shares

    @property
    def _takes_again(self) -> bool:
        """Whether steps are taken again because the states of workers differed."""
        return self.traces is not None and self.traces.are_compared

    def speeds(self, size: int) -> tuple[float, ...]:
        """How fast the workers are, relative to each other."""
        if self._policy.by_speed and len(self._speeds) == size:
            return self._speeds
        return (1.0,) * size

    def _took(self) -> float:
        """The seconds of a micro-batch of this worker; 0.0 if not known yet."""
        return median(self._times) if self._times else 0.0

    def _by_replica(self, took: Sequence[int]) -> list[int]:
        """The longest time of each replica, from those of all workers."""
        size = 1 if self.sharded is None else self.sharded.replica.size
        return [max(took[first : first + size]) for first in range(0, len(took), size)]

    def _measure(self, size: int) -> None:
        """Share out the next steps by the workers' speeds, if that pays; collective. All loading
        processes begin anew then, so this is rare."""
        took = [one[0] for one in self.tell_all([round(1e6 * self._took())])]
        found, count = _speeds(self._by_replica(took)), self._policy.count
        before = ranges(count, self.speeds(size))
        if _slowest(ranges(count, found), found) < PAYS * _slowest(before, found):
            self._next_speeds = found

    def resumed(self, size: int, total: int) -> Assignment | None:
        """Return who holds and who runs what, if this step was interrupted."""
        if self._known is None or self._loops:
            return None
        return resume(-(-total // self._policy.micro), self._known)

    def accumulate(
        self,
        batch: Any,
        models: Sequence[nn.Module],
        total: int | None,
        here: OwnRank,
        cut: Cutter | None,
    ) -> Iterator[Micro]:
        """Run this worker's micro-batches. See `BatchPolicy.accumulate`."""
        if here != own_rank():
            raise ConfigError("BatchPolicy.fixed takes rank and size from the process group.")
        if self._loops:
            self._several = True
            if self._known is not None:
                # The first step of a job: nobody knew. All workers are here, and all raise.
                raise RuntimeError(
                    "This interrupted step has a second loop over micro-batches: it is taken again "
                    "from its beginning."
                )
        policy = self._policy
        samples = policy.batch(here.size) if total is None else total
        adders = self._adders(here)
        assigned = self.resumed(here.size, samples)
        if assigned is None:
            if self._loops == 0:
                self._held, self._after = {}, []
            shares = policy.micro_batches_of(here.size, samples)[:: self.readers]
            assigned = Assignment([frozenset()] * adders.size, shares)
        slices = policy.slices(assigned.again[adders.rank], samples, *self._reader)
        if cut is None:
            check_length(batch, expected=max(slices[-1].stop if slices else 0, 1))
        if self.sharded is not None:
            self.sharded.reshard()
        parameters, exchange = self._exchange_of(models)
        exchange.abandon()
        loop, self._loops = self._loops, self._loops + 1
        tree = tree_of(-(-samples // policy.micro))
        held, after = (self._held, self._after) if loop == 0 else ({}, [])
        kept = assigned.kept[adders.rank]
        for subtree in [one for one in held if kept.isdisjoint(range(*one))]:
            del held[subtree]
        key = policy.seed, self._step(), loop
        around = _Loop(key, self._reader, models, parameters, after)
        data = partial(cut or cut_tree, batch)
        self._audited = None
        if self.sharded is None:
            self._audited = self.audits.begin(self._step(), loop, assigned.again, here)
        return self._run(around, tree, assigned, samples, data, adders, exchange, held, parameters)

    def _adders(self, here: OwnRank) -> Adders:
        """The workers, or those with this one's part of a sharded model."""
        if self.sharded is None:
            return Adders(*here, dist.group.WORLD if here.size > 1 else None)
        return Adders(here.rank // self.readers, here.size // self.readers, self._between)

    def _run(
        self,
        loop: _Loop,
        tree: SumTree,
        assigned: Assignment,
        total: int,
        data: Callable[[int, int], Any],
        adders: Adders,
        exchange: Exchange,
        held: Held,
        parameters: Sequence[nn.Parameter],
    ) -> Iterator[Micro]:
        own = assigned.again[adders.rank]
        whose = [{*kept, *again} for kept, again in zip(*assigned, strict=True)]
        plan = [
            _in_order(tree.subtrees(one), again)
            for one, again in zip(whose, assigned.again, strict=True)
        ]
        cuts = self._policy.slices(own, total, *self._reader)
        slices = dict(zip(own, cuts, strict=True))

        def samples(number: int) -> Any:
            return data(slices[number].start, slices[number].stop)

        audited = self._audited
        to_repeat = () if audited is None else audited.to_repeat(samples)
        for number, given in to_repeat:
            yield from self._repeat(loop, number, given, total)
        ending = exchange.begin(tree, held, plan, adders) if not own else None
        for number, (start, stop, scale) in slices.items():
            if number == own[-1]:
                ending = self._ending = exchange.begin(tree, held, plan, adders)
            began = time.monotonic()
            loop.begin(number)
            length = stop - start if scale else 0
            micro = _FixedMicro(samples(number), length, scale, ending is not None)
            # Of two workers that differ, only traces show which one was wrong.
            is_traced = number == own[0] and adders.size == 2
            if ending is None:
                launched = _launched()
                yield micro
                # A replica runs its micro-batches together, with its own collectives.
                if self.sharded is None and launched != _launched():
                    raise ConfigError(
                        "The loop over micro-batches called a collective, such as all_reduce: "
                        "workers run different numbers of micro-batches. Take policy.loss, or call "
                        "it after the loop."
                    )
                add(
                    tree,
                    held,
                    (number, number + 1),
                    self._taken(loop, micro, number, is_traced=is_traced),
                )
                self._times.append(time.monotonic() - began)
            else:
                if audited is None or number not in audited.own:
                    object.__setattr__(micro, "before", partial(ending.follow, number, parameters))
                yield micro
                ending.add_last(number, self._taken(loop, micro, number, is_traced=is_traced))
                self._times.append(time.monotonic() - began)
        assert ending is not None
        whole = ending.end()
        if audited is not None:
            yield from self._compare(loop, audited, samples, total)
        source = next(rank for rank, one in enumerate(whose) if 0 in one)
        loop.end(whole, adders, source=source)
        if adders.size == 1:
            held.clear()  # the user may change its tensors, the gradients
        self.loss = self._loss_of(whole)
        if self.measure is not None:
            self.measure()
        milestones.micro_batches = len(own)
        # By the number of the step, which all workers know, also new ones.
        is_time = self._loops == 1 and self._step() % MEASURE_EVERY == MEASURE_EVERY - 1
        is_time &= not (self._keeps_shares and self._takes_again)
        if is_time and self._policy.by_speed and adders.size > 1:
            self._measure(adders.size)

    def _loss_of(self, whole: StepSum) -> float:
        loss = whole.loss
        if self.sharded is not None and self.sharded.replica.size > 1:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= self.sharded.replica.size
        return float(loss)

    def _repeat(self, loop: _Loop, number: int, data: Any, total: int) -> Iterator[Micro]:
        """Run a micro-batch for its hash alone."""
        loop.begin(number)
        ((start, stop),) = self._policy.spans([number], total)
        micro = _FixedMicro(data, stop - start, (stop - start) / total, False)
        yield micro
        assert self._audited is not None
        self._audited.note(number, loop.results(loop.take(micro)))

    def _compare(
        self, loop: _Loop, audited: LoopAudits, samples: Callable[[int], Any], total: int
    ) -> Iterator[Micro]:
        """Compare what workers got for the same micro-batches; if it differs, all repeat one."""
        found = audited.differing()
        if found is None:
            self.audits.passed(audited)
            return
        audit, before = found
        data = audited.to_repeat_by_all(audit, samples)
        yield from self._repeat(loop, audit.number, data, total)
        judgement = audited.judge(audit, before)
        self.forget()  # sums of a wrong worker, or of others that were not compared
        self.audits.failed(audited, audit, judgement)

    def _taken(self, loop: _Loop, micro: _FixedMicro, number: int, *, is_traced: bool) -> StepSum:
        if self.sharded is not None and not self.sharded.reduces():
            raise ConfigError(
                "set_requires_gradient_sync(False) is not for BatchPolicy.fixed: each micro-batch "
                "is reduced within its replica, so that the sum of all has the same bits."
            )
        taken, place = loop.take(micro), (self._step(), self._loops - 1, number)
        if micro.loss is not None and micro.scale and not is_sharded(micro.loss):
            self._losses[place[1:]] = micro.loss, micro.scale
        if self.traces is not None and self.traces.are_wanted(place, is_first=is_traced):
            self.traces.note(place, taken.gradients)
        if self._audited is not None and number in self._audited.own:
            self._audited.note(number, loop.results(taken))
        return taken

    def _exchange_of(self, models: Sequence[nn.Module]) -> tuple[list[nn.Parameter], Exchange]:
        if not models:
            raise ConfigError(
                "Pass the models that the loop computes gradients of: "
                "policy.accumulate(batch, model)."
            )
        if any(isinstance(model, DistributedDataParallel) for model in models):
            raise ConfigError("BatchPolicy.fixed adds gradients itself: do not wrap models in DDP.")
        every = (module for model in models for module in model.modules())
        if any(isinstance(module, nn.SyncBatchNorm) for module in every):
            raise ConfigError(
                "SyncBatchNorm computes its statistics over all workers, whose number must not "
                "matter with BatchPolicy.fixed: use BatchNorm."
            )
        key = tuple(map(id, models))
        parameters = trained(models)
        found = self._exchanges.get(key)
        if found is None or [*map(id, found[0])] != [*map(id, parameters)]:
            found = self._exchanges[key] = parameters, Exchange(parameters)
        return found


def trained(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that need gradients, each once."""
    every = (one for model in models for one in model.parameters() if one.requires_grad)
    return list(dict.fromkeys(every))


def _launched() -> int:
    """Return how many collectives this worker has launched."""
    return torch_private.launched_in(dist.group.WORLD) if dist.is_initialized() else 0


def _in_order(subtrees: list[Subtree], again: Sequence[int]) -> list[Subtree]:
    """Put the subtree that a worker completes last at the end."""
    if not again:
        return subtrees
    return sorted(subtrees, key=lambda one: (one[0] <= again[-1] < one[1], one))


class _FixedMicro(Micro):
    """A micro-batch that remembers its weighted loss."""

    loss: torch.Tensor | None = None
    #: Called before the backward of the last micro-batch.
    before: Callable[[], None] | None = None

    def backward(self, loss: torch.Tensor, scaler: Any = None) -> None:
        if self.loss is not None:
            raise ConfigError(
                "backward was called twice for one micro-batch: add the losses, and call it once."
            )
        if self.before is not None:
            self.before()
        # That of a placeholder may be anything: a mean over nothing, for example.
        seen = (loss * self.scale).detach()
        object.__setattr__(self, "loss", seen if self.scale else torch.zeros_like(seen))
        super().backward(loss, scaler)


class _Loop:
    """The surroundings of one loop's micro-batches: generators, buffers, `.grad`."""

    def __init__(
        self,
        key: tuple[int, int, int],
        reader: tuple[int, ...],
        models: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        after: list[torch.Tensor],
    ) -> None:
        """`after` takes, or has already, the buffers after micro-batch 0, if this worker ran it."""
        self._key, self._reader = key, reader
        self._parameters, self._after = parameters, after
        buffers = dict.fromkeys(one for model in models for one in model.buffers())
        self._buffers = [local_or_whole(one) for one in buffers]
        self._number = -1
        if any(parameter.grad is not None for parameter in parameters):
            raise ConfigError(
                "A parameter has a gradient already: call optimizer.zero_grad() before the loop "
                "over micro-batches. With BatchPolicy.fixed, gradients are not added to old ones."
            )
        self._generators = rng.capture()
        #: The buffers at the beginning of the loop.
        self._before = [one.detach().clone() for one in self._buffers]

    @torch.no_grad()
    def begin(self, number: int) -> None:
        """Prepare for a micro-batch."""
        if faults.planned:
            faults.at("micro_batch.begin")
        if self._number >= 0:
            self._restore_buffers()
        self._number = number
        rng.seed(*self._key, number, *self._reader)

    @torch.no_grad()
    def take(self, micro: _FixedMicro) -> StepSum:
        """Take the gradients of the micro-batch that just ran."""
        if micro.loss is None:
            raise ConfigError(
                "Call micro.backward(loss) once for each micro-batch, not loss.backward(); with a "
                "GradScaler micro.backward(loss, scaler)."
            )
        if self._number == 0:
            self._after[:] = [one.detach().clone() for one in self._buffers]
        gradients = [own_gradient(parameter) for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        first = self._parameters[0]
        value: Any = micro.loss
        value = value.full_tensor() if is_sharded(value) else value
        loss = torch.zeros((), device=first.device) + value.to(first.device)
        used = torch.tensor([float(one is not None) for one in gradients], device=first.device)
        return StepSum(gradients, loss, used)

    def results(self, taken: StepSum) -> list[Any]:
        """Return all that the micro-batch that just ran has computed."""
        return [taken.gradients, taken.loss, self._buffers]

    @torch.no_grad()
    def end(self, whole: StepSum, adders: Adders, *, source: int) -> None:
        """Give all workers the gradients, and the buffers of micro-batch 0.

        A loop that fails does not get here: undoing its step restores what it changed. Doing that
        when its generator is closed would be too late, as a traceback may keep it alive.
        """
        rng.restore(self._generators)
        for parameter, gradient in zip(self._parameters, whole.gradients, strict=True):
            if gradient is not None and is_sharded(parameter):
                gradient = shard_like(parameter, gradient)
            parameter.grad = gradient
        if not self._buffers:
            return
        values = self._after
        if adders.size > 1:
            values = sent(self._buffers, values if adders.rank == source else None, source, adders)
        for one, value in zip(self._buffers, values, strict=True):
            one.copy_(value)

    def _restore_buffers(self) -> None:
        for one, value in zip(self._buffers, self._before, strict=True):
            one.copy_(value)


@torch.no_grad()
def sent(
    like: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor] | None,
    source: int,
    adders: Adders,
) -> list[torch.Tensor]:
    """Send tensors like these to all workers; collective. `values` are those of the source."""
    if values is None:
        flat = torch.empty(sum(one.nbytes for one in like), dtype=torch.uint8).to(like[0].device)
    else:
        flat = torch.cat([one.contiguous().flatten().view(torch.uint8) for one in values])
    torch_private.begin_broadcast(adders.group, flat, source).wait()
    pieces = torch.split(flat, [one.nbytes for one in like])
    # A copy is aligned to any type.
    return [
        piece.clone().view(one.dtype).view(one.shape)
        for piece, one in zip(pieces, like, strict=True)
    ]


def _tell_group(numbers: list[int]) -> list[list[int]]:
    """Tell all workers of the default group these numbers; return what all have told, by rank."""
    own = torch.tensor(numbers, device=torch_backends.here())
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [one.tolist() for one in every]


def _speeds(took: Sequence[float]) -> tuple[float, ...]:
    """Return relative speeds; a worker whose speed is not known yet is as fast as the median."""
    known = [one for one in took if one > 0]
    if not known:
        return (1.0,) * len(took)
    usual = median(known)
    # In steps of 5 %, so that noise changes nothing.
    return tuple(round(20 * usual / (one or usual)) / 20 or 0.05 for one in took)


def _slowest(shares: Sequence[range], speeds: Sequence[float]) -> float:
    return max(len(own) / speed for own, speed in zip(shares, speeds, strict=True))


#: Bits of a number that workers tell each other: it is signed, and never negative.
_BITS = 62


def _packed(numbers: Iterable[int], count: int) -> list[int]:
    """Return a set of numbers below `count` as bits."""
    words = [0] * -(-count // _BITS)
    for number in numbers:
        words[number // _BITS] |= 1 << number % _BITS
    return words


def _unpacked(words: Sequence[int]) -> list[int]:
    return [
        place * _BITS + bit
        for place, word in enumerate(words)
        for bit in range(_BITS)
        if word >> bit & 1
    ]
