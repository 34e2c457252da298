"""Copies and hashes of this worker's state, taken every few steps to compare replicas.

The hash of a copy goes to the agent, and the leader compares those of all workers
(`rendezvous.state_check`). If all are equal, the copy is the *pinned* one: the worker goes back to
it when a later check finds a difference. So a worker has at most two copies of its state: the
pinned one, and the *candidate* that is being compared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchelastic import torch_private
from torchelastic.errors import OtherBitsError, TorchElasticError
from torchelastic.events import words
from torchelastic.rendezvous.state_check import Checked, compare, sentence
from torchelastic.tensors import agreement, tensor_tree
from torchelastic.tensors.rank_private import Private
from torchelastic.tensors.tensor_bytes import crc32_of
from torchelastic.training.state import Version
from torchelastic.training.undo import copy_all

log = logging.getLogger(__name__)

#: A step, the number of a loop over micro-batches in it, and the number of a micro-batch.
Place = tuple[int, int, int]
#: About how many gradients a trace has: a wrong state changes nearly all.
TRACED = 16
#: The version of a state that no worker has.
NONE: Version = (-1, -1)


class Pin(NamedTuple):
    """A copy of the state, as a tensor tree, and what only this rank has."""

    version: Version
    skeleton: str
    tensors: list[torch.Tensor]
    private: Private

    def digest(self) -> int:
        return digest_of(tensor_tree.restore(self.skeleton, self.tensors))


def digest_of(tree: Mapping[str, Any]) -> int:
    """Hash the parameters and optimizer state in the tree of a state."""
    parameters = [model["parameters"] for model in tree["model"]]
    return crc32_of([parameters, [optimizer["state"] for optimizer in tree["optimizer"]]])


class Traces:
    """Results of this worker's own part of each step, to find the first step with another result
    when steps are taken again: the norms of the gradients of some micro-batches.

    The gradients of a wrong worker soon change the states of all. But when steps are taken again,
    it is the first whose own micro-batches give other gradients than before. If it became wrong
    after its last micro-batch, only the hash of its state differs.
    """

    def __init__(self) -> None:
        self._found: dict[Place, int] = {}
        #: Of steps that are taken again, or will be; and the hash after the last of them.
        self._before: dict[Place, int] = {}
        self._end: tuple[int, int] | None = None
        self._first_odd = -1
        self._has_ended = False

    @property
    def are_compared(self) -> bool:
        """Whether steps are taken again, up to the one after which states differed."""
        return self._end is not None

    def are_wanted(self, place: Place, *, is_first: bool) -> bool:
        """Return whether to note this micro-batch: each worker's first in a step, and the same ones
        when the step is taken again."""
        return not self._has_ended and (is_first or place in self._before)

    def end(self) -> None:
        """Note that states are not compared any more."""
        self._has_ended = True
        self._found, self._before = {}, {}

    @torch.no_grad()
    def note(self, place: Place, gradients: Sequence[torch.Tensor | None]) -> None:
        some = [one for one in gradients[:: 1 + len(gradients) // TRACED] if one is not None]
        self._found[place] = found = crc32_of(torch_private.norms_of(some) if some else [])
        if self._before.get(place, found) != found and self._first_odd < 0:
            self._first_odd = place[0]

    def certified(self, step: int) -> None:
        """Forget the steps before this one."""
        self._found = {place: one for place, one in self._found.items() if place[0] >= step}
        if self._end is not None and self._end[0] <= step:
            self._before, self._end, self._first_odd = {}, None, -1

    def again(self, step: int, digest: int) -> None:
        """Note that steps up to this one are taken again; it had this hash before."""
        self._before, self._found = self._found, {}
        self._end, self._first_odd = (step, digest), -1

    def odd(self, step: int, digest: int) -> int:
        """Return the first step that gave another result than before; -1: none is known."""
        if self._first_odd >= 0 or self._end is None or step != self._end[0]:
            return self._first_odd
        return -1 if digest == self._end[1] else step


class StateChecks:
    """The checks of one worker."""

    def __init__(
        self,
        every: int,
        capture: Callable[[], tuple[Any, Private]],
        load: Callable[[Version, Any, Private], None],
    ) -> None:
        """`capture` returns the tree of the state and the private part; `load` takes both back."""
        self.every = every
        self._capture, self._load = capture, load
        self._pin: Pin | None = None
        self._candidate: Pin | None = None
        self._thread: threading.Thread | None = None
        #: The version of the last check, and its hash.
        self.last: Version = NONE
        self._digests: dict[Version, int] = {}
        self._has_ended = self._is_urgent = False
        self.traces = Traces()

    def at_once(self) -> None:
        """Check after this step; all workers of a world must call it in the same step."""
        self._is_urgent = True

    def is_due(self, version: Version) -> bool:
        return version != self.last and (version[1] % self.every == 0 or self._is_urgent)

    def begin(
        self, version: Version, certified: Version, tell: Callable[[int, Version, int], None]
    ) -> None:
        """Copy the state, and hash the copy in a thread, which passes on the hash and the pinned
        version. `certified` is the newest version known to be equal everywhere."""
        self._settle(certified)
        self._is_urgent = False
        tree, private = self._capture()
        skeleton, live = tensor_tree.flatten(tree)
        rooms = self._candidate.tensors if self._candidate is not None else []
        made = Pin(version, skeleton, copy_all(live, rooms), private)
        self._candidate, self.last = made, version
        pinned = NONE if self._pin is None else self._pin.version

        def hash_copy() -> None:
            digest = made.digest()
            self._digests[version] = digest
            tell(digest, pinned, self.traces.odd(version[1], digest))

        self._thread = threading.Thread(target=hash_copy, name="torchelastic-state-check")
        self._thread.start()

    def _settle(self, certified: Version) -> None:
        """Pin the candidate if it is certified; its memory is free otherwise."""
        self.wait()
        if self._candidate is not None and self._candidate.version == certified:
            self._pin, self._candidate = self._candidate, self._pin
            self.traces.certified(certified[1])
        kept = NONE if self._pin is None else self._pin.version
        self._digests = {kept: self._digests[kept]} if kept in self._digests else {}

    def go_back(self, version: Version) -> bool:
        """Load the copy of this version; return whether there is a sound one."""
        self.wait()
        for pin in (self._pin, self._candidate):
            if pin is not None and pin.version == version:
                break
        else:
            return False
        if pin.digest() != self._digests.get(version):
            log.error("The copy of the state at step %d is damaged: it is not used.", version[1])
            return False
        tree = tensor_tree.restore(pin.skeleton, [one.clone() for one in pin.tensors])
        self._load(version, tree, pin.private)
        if self.last > version and self.last in self._digests:
            self.traces.again(self.last[1], self._digests[self.last])
        self._pin, self._candidate = pin, None
        return True

    def began_at(self, base: Version) -> None:
        """Drop copies of states beyond the one that a world begins with."""
        self._is_urgent = False  # newcomers know nothing of it
        if self._pin is not None and self._pin.version > base:
            self._pin = None
        if self._candidate is not None and self._candidate.version > base:
            self._candidate = None

    # --- in a script -----------------------------------------------------------------------------

    def compare(self, tree: Mapping[str, Any], step: int, rank: int) -> None:
        """Collective: raise `OtherBitsError` on ranks whose state is wrong. The others then wait
        until all processes are restarted."""
        self._is_urgent = False
        if self._has_ended:
            return
        pinned = self.last[1]
        said = [
            Checked(number, step, digest, 0 if pinned >= 0 else -1, pinned)
            for number, digest in enumerate(agreement.gather(digest_of(tree)))
        ]
        found = compare(said)
        if found.is_equal:
            self.last = (0, step)
        elif found.ends:
            self._has_ended = True
            if rank == 0:
                log.warning("%s", sentence(found, (), len(said)))
        elif not found.wrong:
            raise TorchElasticError(
                f"The states of both ranks differ after step {step}, and were equal after step "
                f"{pinned}. Which of them is wrong is not known. Continue from a checkpoint of "
                f"step {pinned} or before to discard the wrong state."
            )
        elif rank in found.wrong:
            others = words.counted(len(said) - len(found.wrong), "other rank")
            raise OtherBitsError(
                f"the state of rank {rank} differs from that of {others} after step {step}, and "
                f"was equal after step {pinned}. Its gradients have changed the others' states "
                "since then: continue from a checkpoint of that step or before to discard that"
            )
        else:
            agreement.gather(0)  # fails when the wrong rank ends

    def wait(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end(self) -> None:
        """Free the memory: states are not compared any more."""
        self.wait()
        self.traces.end()
        self._pin = self._candidate = None
