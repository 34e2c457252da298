"""The inbox: the agent's orders that the training thread has not acted on yet.

It has no thread and no socket: `control` puts a lock around it and waits.
"""

from __future__ import annotations

from collections import deque

from torchelastic.errors import JobClosed, TorchElasticError
from torchelastic.training.gate import Gate
from torchelastic.worker.orders import (
    Ask,
    Certified,
    Closed,
    Enter,
    Entered,
    Leave,
    Order,
    Over,
    Through,
)


class Inbox:
    """The orders of one worker."""

    def __init__(self) -> None:
        #: Worlds to enter, in order. Only an `Over` skips one: others may be waiting there.
        self._worlds: deque[Enter] = deque()
        #: The gates of announced worlds that are neither over nor left.
        self._gates: dict[int, Gate] = {}
        #: The last `Over`, and whether the training thread has yet to answer it.
        self._over = Over(-1)
        self._unanswered = False
        self._leave: Leave | None = None
        #: The newest version that is certified, and why states are not compared any more.
        self.certified = (-1, -1)
        self.unchecked = ""
        #: The reason that there will be no more orders.
        self.closed: TorchElasticError | None = None

    # --- orders ----------------------------------------------------------------------------------

    def take(self, order: Order) -> Entered | None:
        """Store an order; return the immediate answer, if there is one."""
        match order:
            case Enter():
                self._enter(order)
            case Ask(generation) if generation in self._gates:
                return Entered(generation, self._gates[generation].ask())
            case Through(generation, step) if generation in self._gates:
                self._gates[generation].run_through(step)
            case Over():
                self._end(order)
            case Certified(generation, step, unchecked):
                self.certified = max(self.certified, (generation, step))
                self.unchecked = unchecked
            case Leave():
                self._leave = order
            case Closed(reason):
                self.close(JobClosed(reason))
        return None

    def _enter(self, order: Enter) -> None:
        if order.generation <= max([self._over.generation, *self._gates]):
            return  # said twice, or late
        if self._gates and order.after is not None:
            self._gates[max(self._gates)].run_through(order.after)
        self.unchecked = order.unchecked
        self._gates[order.generation] = Gate(order.generation)
        self._worlds.append(order)

    def _end(self, order: Over) -> None:
        before = self._over
        if (order.generation, order.finished) <= (before.generation, before.finished):
            return  # said twice, or late
        if self._gates and order.generation < min(self._gates):
            return  # we have left that world by agreement
        self._over, self._unanswered = order, True
        live = self._gates[min(self._gates)] if self._gates else None
        if order.through is None or live is None or not live.finish(order.through):
            self._void(order.generation)
        else:  # run to its end, and no world comes after it
            self._worlds = deque(w for w in self._worlds if w.generation <= live.generation)
            self._gates = {live.generation: live}

    def _void(self, generation: int) -> None:
        """End all worlds up to this generation, and drop later ones that were to begin after a
        step of an ended world: that step will not be reached."""
        for gate in self._gates.values():
            if gate.generation <= generation:
                gate.end()
        kept = [world for world in self._worlds if world.generation > generation]
        self._worlds = deque(world for world in kept if world.after is None)
        announced = {world.generation for world in self._worlds}
        self._gates = {number: gate for number, gate in self._gates.items() if number in announced}

    def close(self, why: TorchElasticError) -> None:
        """Note that no more orders will come. The first reason counts."""
        self.closed = self.closed or why
        for gate in self._gates.values():
            gate.end()

    # --- what the training thread asks -----------------------------------------------------------

    def is_over(self, generation: int) -> bool:
        """Return whether to abort whatever still runs in this generation."""
        return self.closed is not None or (
            generation <= self._over.generation and generation not in self._gates
        )

    @property
    def reason(self) -> str:
        """The reason the last world ended."""
        return str(self.closed or self._over.reason or "the agent ended it")

    def next(self, broken: int | None) -> Enter | Over | Leave | None:
        """Return the training thread's next order at a boundary; None if there is none yet.

        A worker whose world broke (`broken`) must hear that it is over before it enters another: it
        must not enter a world that begins where the broken one would have stopped.
        """
        if self._unanswered:
            self._unanswered = False
            return self._over
        if broken is not None and broken in self._gates:
            return None
        if self._worlds:
            return self._worlds.popleft()
        return self._leave

    @property
    def next_size(self) -> int:
        """The size of the next world to enter; 0 if none was announced."""
        return self._worlds[0].size if self._worlds else 0

    def gate(self, generation: int) -> Gate:
        """Return the gate of a world that `next` returned; the gate of an ended world is shut."""
        if generation not in self._gates:
            over = Gate(generation)
            over.end()
            return over
        return self._gates[generation]

    def left(self, generation: int) -> None:
        """Note that the training thread stopped at the world's last boundary."""
        self._gates.pop(generation, None)
