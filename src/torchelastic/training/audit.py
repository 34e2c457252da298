"""Audits: another worker repeats a micro-batch of a fixed batch, and must get the same bits.

    an audit     each micro-batch is drawn at the rate of `Guard(audit=...)`; one other worker
                 repeats it
    a canary     in the first step of new workers, all of them repeat one micro-batch of an old one

Both are computed from the seed, the step and who runs what, so all workers know them. A worker that
repeats a micro-batch gets its samples from the one that runs it, whatever the script loads data
with. So wrong samples are not found. The repeated micro-batches run before its own. When the sums
of all workers are added, and before anything is written, the hashes of gradients, loss and buffers
are compared.

If they differ, all workers repeat that micro-batch (`judge`):

    the workers that have trained before agree       the new ones that differ are wrong
    more than half agree                             the others are wrong
    one of two does not repeat its own gradients     it is wrong
    else                                             which of them is wrong is not known

A wrong worker ends with an `OtherBitsError`. The others undo the step, and take it again in the
next world. If it is not known which one is wrong, the training ends.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from torchelastic.data.own_rank import OwnRank
from torchelastic.errors import NonRetryableException, OtherBitsError
from torchelastic.events import words
from torchelastic.tensors import agreement, tensor_tree, transfer
from torchelastic.tensors.tensor_bytes import crc32_of
from torchelastic.training import session
from torchelastic.training.group.abortable_waits import GenerationOver

log = logging.getLogger(__name__)

#: The seed, the step, and the number of the loop in it.
Place = tuple[int, int, int]


# --- decisions: pure ------------------------------------------------------------------------------


class Audit(NamedTuple):
    """A micro-batch that other ranks repeat."""

    number: int
    #: The rank that runs it for the sum.
    owner: int
    others: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.owner, *self.others)


def plan(
    place: Place, runs: Sequence[Sequence[int]], rate: float, new: Iterable[int]
) -> list[Audit]:
    """Return what is repeated in a loop: `runs` has the micro-batches of each rank, and `new` the
    ranks that were never compared."""
    found: dict[int, tuple[int, set[int]]] = {}
    size, new = len(runs), set(new)
    if not rate and not new:
        return []
    for owner, numbers in enumerate(runs):
        for number in numbers:
            part, turn = _draw(place, number)
            if size > 1 and part < rate:
                found[number] = owner, {(owner + 1 + turn % (size - 1)) % size}
    running = sorted((rank in new, rank) for rank, numbers in enumerate(runs) if numbers)
    if size > 1 and new and running:
        is_new, owner = running[0]
        old = [rank for rank in range(size) if rank not in new][:1] if is_new else []
        number = runs[owner][0]
        found[number] = owner, {*found.get(number, (owner, set()))[1], *old, *new} - {owner}
    return [Audit(number, *_sorted(*found[number])) for number in sorted(found)]


def _sorted(owner: int, others: set[int]) -> tuple[int, tuple[int, ...]]:
    return owner, tuple(sorted(others))


def _draw(place: Place, number: int) -> tuple[float, int]:
    """Draw a number from 0 to 1, and one for the choice of a rank."""
    text = " ".join(map(str, ("audit", *place, number))).encode()
    drawn = hashlib.blake2b(text, digest_size=16).digest()
    one, other = int.from_bytes(drawn[:8], "little"), int.from_bytes(drawn[8:], "little")
    return one / 2**64, other


class Judgement(NamedTuple):
    """The ranks that computed wrongly; none if that is not known."""

    wrong: tuple[int, ...] = ()
    #: Whether workers get the same bits when they repeat a micro-batch.
    is_repeatable: bool = True


def judge(before: Mapping[int, int], after: Sequence[int], new: Iterable[int]) -> Judgement:
    """Find out which ranks are wrong: `before` has the hashes that differed, by rank, `after` the
    hash that each rank got when all repeated the micro-batch."""
    ranks = range(len(after))
    unsteady = {rank for rank, digest in before.items() if after[rank] != digest}
    old = set(ranks) - set(new)
    if len(old) < len(after) and old.isdisjoint(unsteady) and len({after[one] for one in old}) == 1:
        right = {*old, *(one for one in ranks if after[one] == after[min(old)])} - unsteady
        return Judgement(tuple(one for one in ranks if one not in right))
    steady = Counter(after[one] for one in ranks if one not in unsteady)
    for digest, count in steady.items():
        if 2 * count > len(after):
            right = {one for one in ranks if after[one] == digest} - unsteady
            return Judgement(tuple(one for one in ranks if one not in right))
    if len(after) == 2 and len(unsteady) == 1:
        return Judgement(tuple(unsteady))
    return Judgement(is_repeatable=len(unsteady) < 2)


def sentence(audit: Audit, step: int, judgement: Judgement, size: int) -> str:
    """Say what was found, without a period."""
    where = f"micro-batch {audit.number} of step {step}"
    if not judgement.is_repeatable:
        return (
            f"the gradients of {where} have other bits each time a worker computes them: the "
            "training is not deterministic (torch.use_deterministic_algorithms may help)"
        )
    if not judgement.wrong:
        return (
            f"workers compute different gradients of {where}, and which of them are wrong is not "
            "known: their processors or libraries differ, or one is broken"
        )
    ranks = words.listed([str(one) for one in judgement.wrong])
    right = words.counted(size - len(judgement.wrong), "other worker")
    named = f"rank {ranks} computes" if len(judgement.wrong) == 1 else f"ranks {ranks} compute"
    return (
        f"{named} other gradients of {where} than the {right}, with the same threads, torch and "
        "instruction set"
    )


# --- in a loop ------------------------------------------------------------------------------------


@dataclass
class LoopAudits:
    """The audits of one loop, on one rank."""

    plan: Sequence[Audit]
    rank: int
    size: int
    step: int
    new: frozenset[int]
    #: The hashes of this rank, by micro-batch.
    found: dict[int, int] = field(default_factory=dict)
    #: Those whose samples cannot be sent, and why: nobody repeats them.
    refused: dict[int, str] = field(default_factory=dict)
    #: Bytes of samples received (`transfer.Receiver`).
    received: int = 0

    @property
    def own(self) -> frozenset[int]:
        """The micro-batches of this rank that others repeat."""
        return frozenset(one.number for one in self.plan if one.owner == self.rank)

    def to_repeat(self, samples: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
        """Return the micro-batches that this rank repeats, and their samples; collective.
        `samples` returns those of the micro-batches that this rank runs."""
        given = [
            (one.number, self._samples(one, samples, one.others))
            for one in self.plan
            if self.rank in one.ranks
        ]
        left_out = self.own | self.refused.keys()
        return ((number, one) for number, one in given if number not in left_out)

    def to_repeat_by_all(self, audit: Audit, samples: Callable[[int], Any]) -> Any:
        """Return the samples of a micro-batch that all ranks repeat; collective."""
        others = [one for one in range(self.size) if one != audit.owner]
        return self._samples(audit, samples, others)

    def _samples(self, audit: Audit, samples: Callable[[int], Any], others: Sequence[int]) -> Any:
        own, refused = None, ""
        if self.rank == audit.owner:
            own = samples(audit.number)
            try:
                tensor_tree.check("A batch", [own])  # not what its state_dict returns
            except TypeError as error:
                refused = str(error)
        tree = {"samples": None if refused else own, "refused": refused}
        received = transfer.share(self, tree, holders=[audit.owner], lacking=others)
        received = tree if received is None else received
        if received["refused"]:
            self.refused[audit.number] = received["refused"]
        return received["samples"]

    @torch.no_grad()
    def note(self, number: int, computed: Any) -> None:
        """Note the gradients, buffers and loss of a micro-batch."""
        if number not in self.refused:
            self.found[number] = crc32_of(computed)

    def differing(self) -> tuple[Audit, dict[int, int]] | None:
        """Return the first audit whose hashes differ, and these by rank; collective."""
        everybody = agreement.gather([self.found.get(one.number, -1) for one in self.plan])
        for place, audit in enumerate(self.plan):
            hashes = {rank: everybody[rank][place] for rank in audit.ranks}
            if len({*hashes.values()}) > 1:
                return audit, hashes
        return None

    def judge(self, audit: Audit, before: Mapping[int, int]) -> Judgement:
        """Judge the hashes of all ranks, which have repeated the micro-batch; collective."""
        after = [one[0] for one in agreement.gather([self.found[audit.number]])]
        return judge(before, after, self.new)


class Audits:
    """The audits of one state with one policy."""

    def __init__(self, seed: int, *, warns: bool) -> None:
        """`warns`: workers with other bits are admitted."""
        self._seed, self._warns = seed, warns
        #: The part of all micro-batches that are repeated.
        self.rate = 0.0
        #: Whether this worker was never compared.
        self.is_new = True
        #: The ranks that were never compared; None: all of them.
        self._new: frozenset[int] | None = None
        self._has_warned = False

    def enter(self, is_new: Sequence[bool]) -> None:
        """Enter a world; by rank, which workers are new."""
        self._new = frozenset(rank for rank, one in enumerate(is_new) if one)

    def begin(
        self, step: int, loop: int, runs: Sequence[Sequence[int]], here: OwnRank
    ) -> LoopAudits | None:
        """Return the audits of a loop, if it has any."""
        if here.size == 1:
            self._passed()
            return None
        new = frozenset(range(here.size)) if self._new is None else self._new
        found = plan((self._seed, step, loop), runs, self.rate, new)
        return LoopAudits(found, *here, step, new) if found else None

    def passed(self, audited: LoopAudits) -> None:
        """Note that no hashes of a loop differ. All new workers were compared in it."""
        self._passed()
        for why in audited.refused.values():
            if self.rate:
                raise NonRetryableException(
                    f"Guard(audit=...) needs batches that it can send. {why}"
                )
            self._warn(f"Whether workers compute the same bits is not checked. {why}")

    def _passed(self) -> None:
        self.is_new, self._new = False, frozenset()

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            log.warning("%s", text)
        self._has_warned = True

    def failed(self, audited: LoopAudits, audit: Audit, judgement: Judgement) -> None:
        """Raise the error of this rank for hashes that differ, or warn."""
        said = sentence(audit, audited.step, judgement, audited.size)
        if self._warns:
            self._passed()
            if audited.rank == audit.owner:
                self._warn(f'Workers differ, and train on (other_bits="warn"): {said}.')
            return
        if not judgement.wrong:
            raise NonRetryableException(
                f"The workers of this job do not compute the same bits: {said}. "
                'BatchPolicy.fixed(other_bits="warn") continues in spite of that.'
            )
        if audited.rank in judgement.wrong:
            raise OtherBitsError(said)
        _wait_for_next_world(said)


def _wait_for_next_world(said: str) -> NoReturn:
    """Leave the step, and wait for the next world."""
    if session.is_entered():
        raise GenerationOver(f"The world ends: {said}.")
    agreement.gather(0)  # fails when the wrong rank ends, and all processes are restarted
    raise GenerationOver(f"The wrong worker has not ended: {said}.")
