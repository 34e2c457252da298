"""The gate between two steps: a world that is to change ends at one step for all its workers.

Nobody asks at every step whether the world changes. When it does, every worker is asked which step
it has entered, and enters no later one until it is told; the largest answer, T, is the step that
all run through. Since each enters its steps in order and none enters one after T, all stop at the
same boundary, and none waits inside a step for somebody who has stopped before it.

Two threads meet at a gate. The training thread announces a step, then looks whether it was asked:

    entered = n            (1)
    if asked: ...          (2)

The control thread, on being asked, does it the other way round, holding the lock:

    asked = True           (3)
    answer = entered       (4)

Python runs one bytecode at a time, in one order that both threads agree on. If (2) sees nothing it
came before (3), so (1) came before (4): the answer counts step n. If (2) sees `asked`, the training
thread takes the lock, hence comes after (4), and compares n with the answer that was given. In
neither case is a step run that the answer does not count. Without the GIL there is no such order,
and every step takes the lock.

The answer, once given, stays: asked again, by a new leader, each worker says the same, and so every
leader finds the same T.
"""

from __future__ import annotations

import enum
import sys


class Verdict(enum.Enum):
    """What the training thread does at a boundary."""

    GO = "enter the step"
    WAIT = "wait: which step is the last is not known yet"
    STOP = "the last step was run: the world ends here"
    OVER = "the world has ended in the middle of a step"


def _runs_in_one_order() -> bool:
    """Whether Python has its lock, which the proof above needs."""
    check = getattr(sys, "_is_gil_enabled", None)
    return check is None or bool(check())


class Gate:
    """The boundary of one generation. What is not `enter` is called under the caller's lock."""

    __slots__ = ("answer", "asked", "entered", "generation", "last", "over")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        #: The last step the training thread has announced; -1 before the first.
        self.entered = -1
        #: Whether the training thread must look, under the lock, before it enters a step.
        self.asked = not _runs_in_one_order()
        #: What was answered to the first question.
        self.answer: int | None = None
        #: The step after which all stop.
        self.last: int | None = None
        self.over = False

    def enter(self, step: int) -> bool:
        """Training thread: announce a step. False: look at the `verdict` before running it."""
        self.entered = step  # before the next line, see above
        return not self.asked

    def verdict(self, step: int) -> Verdict:
        """Whether the announced step may be run."""
        if self.over:
            return Verdict.OVER
        if self.last is not None:
            return Verdict.GO if step <= self.last else Verdict.STOP
        if self.answer is None or step <= self.answer:
            return Verdict.GO
        return Verdict.WAIT

    def ask(self) -> int:
        """The last step entered; from now on no later one is, until `run_through` allows it.

        Asked again, the answer is the same: what is announced by then may be a step that waits.
        """
        if self.answer is None:
            self.asked = True  # before the next line, see above
            self.answer = self.entered
        return self.answer

    def run_through(self, step: int) -> None:
        """The step after which all stop; the first word stands, all leaders come to the same."""
        if self.last is None:
            self.asked = True
            self.last = step

    def finish(self, step: int) -> bool:
        """The data ended after this step, which is the last, whatever was agreed before.

        Whether the step in flight can be run to its end; if not, the generation is over.
        """
        self.asked, self.last = True, step  # before the next line, as in `ask`
        if self.entered > step:
            self.end()
        return not self.over

    def end(self) -> None:
        """The generation is over."""
        self.asked = True
        self.over = True
