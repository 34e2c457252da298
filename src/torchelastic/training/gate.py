"""The gate between two steps: a world that changes ends after the same step on all its workers.

Workers do not ask at every step whether the world changes. When it does, the leader asks every
worker which step it has entered, and the worker enters no later step until it gets an answer. All
workers run through the largest step reported, T. Each worker enters its steps in order and none
enters a step after T, so all stop at the same boundary, and none waits inside a step for a worker
that stopped before it.

Two threads use a gate. The training thread announces a step, then checks whether it was asked:

    entered = n            (1)
    if asked: ...          (2)

The control thread, when asked, does the reverse while it holds the lock:

    asked = True           (3)
    answer = entered       (4)

Python runs one bytecode at a time, in an order that both threads agree on. If (2) does not see
`asked`, it ran before (3), so (1) ran before (4): the answer includes step n. If (2) sees `asked`,
the training thread takes the lock, so it continues after (4) and compares n with the answer. Either
way, no step runs that the answer does not include. Without the GIL there is no such order, and
every step takes the lock.

The answer never changes: when a new leader asks again, each worker gives the same answer, so every
leader finds the same T.
"""

from __future__ import annotations

import enum
import sys


class GateDecision(enum.Enum):
    """The training thread's next action at a step boundary."""

    GO = "enter the step"
    WAIT = "wait: the last step is not known yet"
    STOP = "the last step is done: the world ends here"
    OVER = "the world ended in the middle of a step"


def _runs_in_one_order() -> bool:
    """Return whether Python has its GIL, which the proof above needs."""
    check = getattr(sys, "_is_gil_enabled", None)
    return check is None or bool(check())


class Gate:
    """The boundary of one generation. Call every method but `enter` under the caller's lock."""

    __slots__ = ("answer", "asked", "entered", "generation", "last", "over")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        #: The last step the training thread announced; -1 before the first.
        self.entered = -1
        #: Whether the training thread must check, under the lock, before it enters a step.
        self.asked = not _runs_in_one_order()
        #: The answer to the first question.
        self.answer: int | None = None
        #: The step after which all workers stop.
        self.last: int | None = None
        self.over = False

    def enter(self, step: int) -> bool:
        """Training thread: announce a step. Return False if it must check `decision` first."""
        self.entered = step  # before the next line, see above
        return not self.asked

    def decision(self, step: int) -> GateDecision:
        """Decide whether the announced step may run."""
        if self.over:
            return GateDecision.OVER
        if self.last is not None:
            return GateDecision.GO if step <= self.last else GateDecision.STOP
        if self.answer is None or step <= self.answer:
            return GateDecision.GO
        return GateDecision.WAIT

    def ask(self) -> int:
        """Return the last step entered; no later one is entered until `run_through` allows it.

        Later calls return the same answer: a step announced since then may be one that waits.
        """
        if self.answer is None:
            self.asked = True  # before the next line, see above
            self.answer = self.entered
        return self.answer

    def run_through(self, step: int) -> None:
        """Set the step after which all stop. The first call counts: all leaders agree on it."""
        if self.last is None:
            self.asked = True
            self.last = step

    def finish(self, step: int) -> bool:
        """Make this the last step because the data ended, overriding any agreement.

        Return whether the step in flight can run to its end; if not, the generation is over.
        """
        self.asked, self.last = True, step  # before the next line, as in `ask`
        if self.entered > step:
            self.end()
        return not self.over

    def end(self) -> None:
        """End the generation."""
        self.asked = True
        self.over = True
