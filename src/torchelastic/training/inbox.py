"""What the agent has said and the training thread has not acted on yet: orders in, decisions out.

No thread, no socket: `control` puts a lock around it and waits.
"""

from __future__ import annotations

from collections import deque

from torchelastic.errors import JobClosed, TorchElasticError
from torchelastic.training.gate import Gate
from torchelastic.worker.orders import Ask, Closed, Enter, Entered, Leave, Order, Over, Through


class Inbox:
    """The orders of one worker."""

    def __init__(self) -> None:
        #: Worlds to enter, in order. None is skipped but by an `Over`: others may be waiting there.
        self._worlds: deque[Enter] = deque()
        #: The gates of the worlds that were announced and are neither over nor left.
        self._gates: dict[int, Gate] = {}
        #: The last `Over`, and whether the training thread has yet to answer it.
        self._over = Over(-1)
        self._unanswered = False
        self._leave: Leave | None = None
        #: Why there will be no more orders.
        self.closed: TorchElasticError | None = None

    # --- orders ----------------------------------------------------------------------------------

    def take(self, order: Order) -> Entered | None:
        """Note an order; what is to be answered at once, if anything."""
        match order:
            case Enter():
                self._enter(order)
            case Ask(generation) if generation in self._gates:
                return Entered(generation, self._gates[generation].ask())
            case Through(generation, step) if generation in self._gates:
                self._gates[generation].run_through(step)
            case Over():
                self._end(order)
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
        self._gates[order.generation] = Gate(order.generation)
        self._worlds.append(order)

    def _end(self, order: Over) -> None:
        before = self._over
        if (order.generation, order.finished) <= (before.generation, before.finished):
            return  # said twice, or late
        if self._gates and order.generation < min(self._gates):
            return  # we have gone on from there by agreement
        self._over, self._unanswered = order, True
        live = self._gates[min(self._gates)] if self._gates else None
        if order.through is None or live is None or not live.finish(order.through):
            self._void(order.generation)
        else:  # run to its end, and no world comes after it
            self._worlds = deque(w for w in self._worlds if w.generation <= live.generation)
            self._gates = {live.generation: live}

    def _void(self, generation: int) -> None:
        """End the worlds up to this one, and those that were to begin where they would stop."""
        for gate in self._gates.values():
            if gate.generation <= generation:
                gate.end()
        kept = [world for world in self._worlds if world.generation > generation]
        self._worlds = deque(world for world in kept if world.after is None)
        announced = {world.generation for world in self._worlds}
        self._gates = {number: gate for number, gate in self._gates.items() if number in announced}

    def close(self, why: TorchElasticError) -> None:
        """No more orders will come; the first reason is the one that counts."""
        self.closed = self.closed or why
        for gate in self._gates.values():
            gate.end()

    # --- what the training thread asks -----------------------------------------------------------

    def is_over(self, generation: int) -> bool:
        """Whether what goes on in this generation is to be aborted."""
        return self.closed is not None or (
            generation <= self._over.generation and generation not in self._gates
        )

    @property
    def reason(self) -> str:
        """Why the last world ended."""
        return str(self.closed or self._over.reason or "it was ended")

    def next(self, broken: int | None) -> Enter | Over | Leave | None:
        """What the training thread, standing at a boundary, does next; None: nothing yet.

        A worker whose world broke (`broken`) must hear that it is over before it enters another:
        one that begins where the broken world would have stopped is not for it.
        """
        if self._unanswered:
            self._unanswered = False
            return self._over
        if broken is not None and broken in self._gates:
            return None
        if self._worlds:
            return self._worlds.popleft()
        return self._leave

    def gate(self, generation: int) -> Gate:
        """The gate of a world that `next` has returned; one that is over is shut for good."""
        if generation not in self._gates:
            over = Gate(generation)
            over.end()
            return over
        return self._gates[generation]

    def left(self, generation: int) -> None:
        """The training thread has stopped at the world's last boundary."""
        self._gates.pop(generation, None)
