"""The steps of a script that tells none: torch says when an optimizer has taken one.

Nothing is imported for it. Where the script has torch, a hook of torch's is called after every step
of any optimizer. The first call makes a slate and hands it to the agent; the others write there,
without a lock or a system call. A process that is no worker has nobody to show it to; nor has a
child of a worker. A script that keeps its state, or is in `train`, tells its own steps: none is
counted then.

What counts as a step:

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

#: The type of the message by which a worker hands its slate to its agent.
MESSAGE = "steps"
#: Seconds to wait for an agent that is busy. It is asked once.
PATIENCE = 1.0
#: Of steps before the first that is counted: nobody knows how many; or the count is no optimizer's
#: own, because another than the first is counted by now.
UNKNOWN, MIXED = 0, -1

_MODULE = "torch.optim.optimizer"


class Counter:
    """Counts in one process."""

    def __init__(self) -> None:
        self._status_page: StatusPage | None = None
        self._waits: BackwardWaits | None = None
        #: torch's module of optimizers, and what it calls us by.
        self._torch: Any = None
        self._handles: list[Any] = []
        #: What is called with each step; nothing once there is nobody to tell.
        self._note: Callable[[Any], None] = self._count
        #: Which optimizer's steps are counted, and which others have stepped since the last.
        self._counted: int | None = None
        self._others: set[int] = set()
        self._steps = 0

    def hook(self, torch: Any) -> None:
        """Have torch call us."""
        self._torch = torch
        self._handles.append(torch.register_optimizer_step_post_hook(self.stepped))

    def stepped(self, optimizer: Any, *_: object) -> None:
        """An optimizer has taken a step. Whatever goes wrong here, the training goes on."""
        try:
            self._note(optimizer)
        except Exception:
            self._note = _nothing  # torch goes through its hooks now: none may be removed

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
        self._status_page = _hand_over_a_slate()
        if self._status_page is None:
            self._note = _nothing
            return
        self._note = _hidden(self._count)
        self._steps = before = steps_before(optimizer)
        self._status_page.taken_before(before)
        with contextlib.suppress(Exception):  # parameters of a kind that has no such hook
            self._note_waits(optimizer)

    def _note_waits(self, optimizer: Any) -> None:
        """What is waited for others does not count as this worker's own time."""
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
        """Count no more. Not while an optimizer steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _nothing(optimizer: Any) -> None:
    """What is done with a step when there is nobody to tell."""


def _hidden(function: Callable[..., None]) -> Callable[..., None]:
    """From torch's compiler. It would look into this where a script has it compile its optimizer's
    step: and compile it anew with every step, since each has another number."""
    if "torch._dynamo" not in sys.modules:  # which the first optimizer has imported
        return function
    hidden: Callable[..., None] = sys.modules["torch"].compiler.disable(function)
    return hidden


def _hand_over_a_slate() -> StatusPage | None:
    link = channel.link()
    if link is None:
        return None
    from torchelastic.worker import (
        status_page,  # not before it is needed: a worker starts without it
    )

    descriptor = status_page.create()
    try:
        link.tell({"type": MESSAGE}, [descriptor], patience=PATIENCE)
        return status_page.StatusPage(descriptor)
    except ChannelLost:  # training matters more than telling
        return None
    finally:
        os.close(descriptor)
        link.close()


def steps_before(optimizer: Any) -> int:
    """How many steps an optimizer had taken before the one that it has just taken, by its own
    state: Adam and its kin count theirs, and a checkpoint has the number. `UNKNOWN` where it does
    not tell; and where this was its first: the weights may have been trained before."""
    try:
        step = next((one["step"] for one in optimizer.state.values() if "step" in one), 0)
        if (
            getattr(step, "is_cuda", False)
            and sys.modules["torch"].cuda.is_current_stream_capturing()
        ):
            return UNKNOWN  # to read it would end the recording of a CUDA graph
        return max(UNKNOWN, int(step) - 1)
    except Exception:  # an optimizer with a state of its own making
        return UNKNOWN


# --- in a worker ---------------------------------------------------------------------------------

_counter = Counter()
#: Whether torch calls us, or is not to; and who was the first to see that it can.
_settled = True
_turns = count()


def attach() -> None:
    """Before the user's code: count from now on, once torch is there (`look`)."""
    global _settled
    _settled = False
    os.register_at_fork(after_in_child=stop)
    look()


def look() -> None:
    """Called with every import, in any thread: torch may be there now. Never raises."""
    global _settled
    if _settled:
        return
    torch = sys.modules.get(_MODULE)
    if hasattr(torch, "register_optimizer_step_post_hook") and next(_turns) == 0:
        _settled = True
        _counter.hook(torch)


def stop() -> None:
    """Count no more in this process: it tells its steps itself, or is a child of the worker."""
    global _settled
    _settled = True
    _counter.stop()
