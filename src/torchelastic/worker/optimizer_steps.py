"""Count the steps of a script by the steps of its optimizers.

Nothing is imported for it. If the script imports torch, torch calls a hook after every step of any
optimizer. The first call creates a status page and passes it to the agent; the others write there,
without a lock or a system call. A process that is not a worker counts nothing; nor does a child of
a worker. A script that keeps its state, or is in `train`, reports its own steps: then nothing is
counted here.

A step is:

    one optimizer               each of its steps, however many backwards there were before it
    several that take turns     the steps of the one that stepped first: a GAN, one for each layer
    one steps twice meanwhile   from then on its steps are counted: the first may be done with
    a GradScaler skips a step   none, since the optimizer takes none
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from torchelastic.errors import ChannelLost
from torchelastic.worker import channel

if TYPE_CHECKING:
    from torchelastic.worker.backward_waits import BackwardWaits
    from torchelastic.worker.status_page import StatusPage

#: The type of the message that passes the status page to the agent.
MESSAGE = "steps"
#: Seconds to wait for a busy agent, once.
SEND_TIMEOUT = 1.0
#: The number of steps before the first counted one: unknown; or a mix, because another optimizer
#: than the first is counted by now.
UNKNOWN, MIXED = 0, -1

_MODULE = "torch.optim.optimizer"


class Counter:
    """Counts the steps of one process."""

    def __init__(self) -> None:
        self._status_page: StatusPage | None = None
        self._waits: BackwardWaits | None = None
        #: torch's module of optimizers, and our hooks in it.
        self._torch: Any = None
        self._handles: list[Any] = []
        #: Called with each step; does nothing if there is no agent.
        self._note: Callable[[Any], None] = self._count
        #: The optimizer whose steps are counted, and the others that have stepped since.
        self._counted: int | None = None
        self._others: set[int] = set()
        self._steps = 0

    def hook(self, torch: Any) -> None:
        """Register our hook in torch."""
        self._torch = torch
        self._handles.append(torch.register_optimizer_step_post_hook(self.stepped))

    def stepped(self, optimizer: Any, *_: object) -> None:
        """Note a step of an optimizer. An error here does not stop the training."""
        try:
            self._note(optimizer)
        except Exception:
            self._note = _nothing  # torch iterates over its hooks now: none may be removed

    def _count(self, optimizer: Any) -> None:
        this = id(optimizer)
        if this != self._counted:
            if self._status_page is None:
                self._begin(optimizer)
            elif this not in self._others:
                self._others.add(this)
                return
            else:
                self._status_page.taken_before(MIXED)
            self._counted = this
        if self._others:
            self._others.clear()
        self._steps += 1
        if self._waits is not None:
            self._waits.committed()
        if self._status_page is not None:
            self._status_page.entered(0, self._steps)

    def _begin(self, optimizer: Any) -> None:
        self._status_page = _create_status_page()
        if self._status_page is None:
            self._note = _nothing
            return
        self._note = _hidden(self._count)
        self._steps = before = steps_before(optimizer)
        self._status_page.taken_before(before)
        with contextlib.suppress(Exception):  # parameters of a kind that has no such hook
            self._note_waits(optimizer)

    def _note_waits(self, optimizer: Any) -> None:
        """Measure the time spent waiting for other workers."""
        from torchelastic.worker.backward_waits import BackwardWaits  # when it is needed, as above

        groups = optimizer.param_groups
        waits = BackwardWaits([chain.from_iterable(group["params"] for group in groups)])
        self._handles += waits.handles
        hook = _hidden(self._before_write)
        self._handles.append(self._torch.register_optimizer_step_pre_hook(hook))
        self._waits = waits

    def _before_write(self, *_: object) -> None:
        if self._waits is not None:
            self._waits.before_write()

    def stop(self) -> None:
        """Stop counting. Do not call it while an optimizer steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _nothing(optimizer: Any) -> None:
    """Ignore a step."""


def _hidden(function: Callable[..., None]) -> Callable[..., None]:
    """Hide a function from torch's compiler. Otherwise a compiled optimizer step would be compiled
    again at every step, because the step number changes."""
    if "torch._dynamo" not in sys.modules:  # which the first optimizer has imported
        return function
    hidden: Callable[..., None] = sys.modules["torch"].compiler.disable(function)
    return hidden


def _create_status_page() -> StatusPage | None:
    link = channel.link()
    if link is None:
        return None
    from torchelastic.worker import (
        status_page,  # not before it is needed: a worker starts without it
    )

    descriptor = status_page.create()
    try:
        link.tell({"type": MESSAGE}, [descriptor], timeout=SEND_TIMEOUT)
        return status_page.StatusPage(descriptor)
    except ChannelLost:  # training matters more than the status page
        return None
    finally:
        os.close(descriptor)
        link.close()


def steps_before(optimizer: Any) -> int:
    """Return the number of steps of an optimizer before the current one, from its state: Adam and
    similar optimizers count them, also across checkpoints. `UNKNOWN` if it does not count, or if
    this was its first step: the weights may have been trained before."""
    try:
        step = next((one["step"] for one in optimizer.state.values() if "step" in one), 0)
        if (
            getattr(step, "is_cuda", False)
            and sys.modules["torch"].cuda.is_current_stream_capturing()
        ):
            return UNKNOWN  # to read it would end the recording of a CUDA graph
        return max(UNKNOWN, int(step) - 1)
    except Exception:  # an optimizer with an unusual state
        return UNKNOWN


# --- in a worker ---------------------------------------------------------------------------------

_counter = Counter()
#: True once our hook is registered or not wanted; `_turns`: only one thread registers it.
_is_decided = True
_turns = count()


def attach() -> None:
    """Start counting once torch is imported (`look`). Called before the user's code."""
    global _is_decided
    _is_decided = False
    os.register_at_fork(after_in_child=stop)
    look()


def look() -> None:
    """Check if torch is imported. Called at every import, in any thread. Never raises."""
    global _is_decided
    if _is_decided:
        return
    torch = sys.modules.get(_MODULE)
    if hasattr(torch, "register_optimizer_step_post_hook") and next(_turns) == 0:
        _is_decided = True
        _counter.hook(torch)


def stop() -> None:
    """Stop counting: this process reports its own steps, or is a child of the worker."""
    global _is_decided
    _is_decided = True
    _counter.stop()
