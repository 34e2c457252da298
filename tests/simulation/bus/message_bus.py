"""Virtual time, processes and the network between machines, for the simulated control plane.

Only events call code: time jumps from one to the next. Processes can be killed and frozen; a frozen
one does everything that was due when it is thawed. Messages on a connection whose path is cut
arrive when the path is restored, as with TCP; messages that open a connection are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

#: The latency of a message in seconds.
DELAY = 0.002


class BusTimer:
    """A call that is due; it can be cancelled."""

    __slots__ = ("args", "call", "process")

    def __init__(
        self, process: SimulatedProcess | None, call: Callable[..., object], args: Any
    ) -> None:
        self.process = process
        self.call: Callable[..., object] | None = call
        self.args = args

    def cancel(self) -> None:
        self.call = None


class SimulatedProcess:
    """A process on a simulated machine."""

    def __init__(self, bus: MessageBus, machine: str) -> None:
        self.bus = bus
        self.machine = machine
        self.alive = True
        self.frozen_at: float | None = None
        #: Calls that were due while it was frozen.
        self.due: list[BusTimer] = []

    @property
    def runs(self) -> bool:
        return self.alive and self.frozen_at is None

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> BusTimer:
        """Call a function in this process later, if it is alive then; after the thaw if it is
        frozen."""
        bus = self.bus
        return bus.at(bus.now + seconds, BusTimer(self, call, args))

    def send(
        self, to: SimulatedProcess, call: Callable[..., None], *args: Any, begins: bool = False
    ) -> None:
        """Send a message to another process; `begins`: the message opens a connection."""
        self.bus.carry(self.machine, to, BusTimer(to, call, args), begins)

    def freeze(self) -> None:
        self.frozen_at = self.bus.now

    def thaw(self) -> None:
        """Continue, with everything that was due meanwhile."""
        self.frozen_at = None
        due, self.due = self.due, []
        for timer in due:
            self.bus.at(self.bus.now, timer)


class MessageBus:
    """The time, and the network paths between machines."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, BusTimer]] = []
        self._count = count()
        self.cut: set[tuple[str, str]] = set()
        #: The latency of slow paths.
        self.slow: dict[tuple[str, str], float] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._held: dict[tuple[str, str], list[BusTimer]] = {}

    def at(self, when: float, timer: BusTimer) -> BusTimer:
        heappush(self._heap, (when, next(self._count), timer))
        return timer

    def run(self, until: float) -> None:
        """Run everything that is due until then."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, timer = heappop(heap)
            call, process = timer.call, timer.process
            if call is None:
                continue
            if process is None or (process.alive and process.frozen_at is None):
                call(*timer.args)
            elif process.alive:
                process.due.append(timer)
        self.now = until

    # --- ways ------------------------------------------------------------------------------------

    def delay(self, source: str, target: str) -> float:
        if source == target:
            return 0.0
        return self.slow.get((source, target), DELAY)

    def is_clear(self, one: str, other: str) -> bool:
        """Return whether both can reach each other."""
        return (one, other) not in self.cut and (other, one) not in self.cut

    def carry(self, source: str, to: SimulatedProcess, timer: BusTimer, begins: bool) -> None:
        target = to.machine
        if source == target:
            self.at(self.now, timer)
            return
        way = (source, target)
        if self.cut and way in self.cut:
            if not begins:
                self._held.setdefault(way, []).append(timer)
            return
        when = self.now + (self.slow.get(way, DELAY) if self.slow else DELAY)
        if self.slow or way in self._last:
            # Messages on a path arrive in order, even if the path was slower for the first.
            when = self._last[way] = max(when, self._last.get(way, 0.0))
        self.at(when, timer)

    def sever(self, source: str, target: str) -> None:
        self.cut.add((source, target))

    def mend(self, source: str, target: str) -> None:
        self.cut.discard((source, target))
        for timer in self._held.pop((source, target), ()):
            assert timer.process is not None
            self.carry(source, timer.process, timer, begins=False)
