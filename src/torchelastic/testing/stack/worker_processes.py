"""Workers that only take time: they start, train in groups, are asked to stop, fail and die.

The orders and reports between them and agents are the product's (`worker.orders`, the events of
`lifecycle.script` and `lifecycle.in_process`). A group makes a step when all its workers are in it,
none is frozen, and all can reach each other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torchelastic.agent.lifecycle import in_process, script
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World
from torchelastic.testing import laws
from torchelastic.testing.stack.virtual_loop import Scheduler
from torchelastic.testing.stack.virtual_network import Network, ProcessLoop
from torchelastic.training.gate import Gate, GateDecision
from torchelastic.training.inbox import Inbox
from torchelastic.worker import orders

if TYPE_CHECKING:
    from torchelastic.agent.lifecycle.in_process import Event

#: Virtual seconds of a step, of building a group, and between two looks at one that cannot step.
STEP, BUILD, AGAIN = 0.25, 0.05, 0.1
#: Seconds until the end of a peer is seen, and until a worker is free when its world is over.
NOTICE, FREE = 0.005, 0.005
#: Seconds a worker takes to end after the training.
EXIT = 0.05
#: Seconds a worker takes to start and to call `train`, at least and at most; and to stop.
START, ENLIST, STOP = (0.1, 0.8), (0.05, 0.3), (0.01, 0.2)


class Training:
    """All groups of the job, and their progress."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        note: Callable[[laws.Event], None],
        steps: int,
    ) -> None:
        """`steps`: the number of steps until the data ends."""
        self.scheduler = scheduler
        self.steps = steps
        self.note = note
        self._network = network
        #: By generation and store: two worlds may have the same number, and that is to be seen.
        self._groups: dict[tuple[int, str], Group] = {}

    def enter(self, worker: Worker, generation: int, store: str, rank: int, size: int) -> None:
        group = self._groups.setdefault((generation, store), Group(self, generation, size))
        worker.generation, worker.group = generation, group
        group.join(rank, worker)

    def are_linked(self, one: Worker, other: Worker) -> bool:
        addresses = (one.workers.loop.machine.address, other.workers.loop.machine.address)
        return addresses[0] == addresses[1] or self._network.is_open(*addresses)


class Group:
    """The workers of one generation, each at its own point of the same steps."""

    def __init__(self, training: Training, generation: int, size: int) -> None:
        self.generation = generation
        self._training = training
        self._size = size
        self._members: dict[int, Worker] = {}
        self.has_begun = False
        self._broken = False

    def join(self, rank: int, worker: Worker) -> None:
        self._members[rank] = worker
        if len(self._members) == self._size and not self._broken:
            self._look_in(BUILD)

    def leave(self, worker: Worker, *, clean: bool = False) -> None:
        """Remove a worker; the others see its connections end, unless it is done."""
        others = [other for other in self._members.values() if other is not worker]
        self._members = {rank: one for rank, one in self._members.items() if one is not worker}
        self._broken = self._broken or self.has_begun
        if clean or not self.has_begun:
            return
        for other in others:
            if self._training.are_linked(worker, other):
                other.workers.loop.call_later(
                    NOTICE, other.lose_peer, self, context=other.workers.loop.context
                )

    def _look_in(self, seconds: float) -> None:
        self._training.scheduler.at(self._training.scheduler.now + seconds, self._look)

    def _look(self) -> None:
        if self._broken or len(self._members) < self._size:
            return
        if not self._can_go_on():
            self._look_in(AGAIN)
        elif not self.has_begun:
            self._begin()
            self._look_in(STEP)
        else:
            self._step()
            self._look_in(STEP)

    def _can_go_on(self) -> bool:
        workers = [*self._members.values()]
        return all(worker.workers.loop.held is None for worker in workers) and all(
            self._training.are_linked(one, other)
            for index, one in enumerate(workers)
            for other in workers[:index]
        )

    def _begin(self) -> None:
        """Give all workers the newest state."""
        self.has_begun = True
        base = max(worker.version for worker in self._members.values())[1]
        for worker in self._ordered():
            worker.version, worker.base = (self.generation, base), base
            self._tell(laws.Began, worker, base)
        self._let_run_on()

    def _step(self) -> None:
        workers = self._ordered()
        if not all(worker.is_in_step for worker in workers):
            return
        step = workers[0].version[1]
        for worker in workers:
            worker.version, worker.is_in_step = (self.generation, step + 1), False
            self._tell(laws.Stepped, worker, step)
        self._let_run_on()

    def _let_run_on(self) -> None:
        for worker in self._ordered():
            worker.workers.loop.context.run(worker.run_on)

    def _tell(self, kind: type[laws.Began] | type[laws.Stepped], worker: Worker, step: int) -> None:
        node = worker.workers.node
        self._training.note(kind(self._training.scheduler.now, node, self.generation, step))

    def _ordered(self) -> list[Worker]:
        return [self._members[rank] for rank in sorted(self._members)]


class Worker:
    """One process as others see it. A resident one has the product's own `Inbox` and gates;
    `_run_on` is its training thread, from one wait to the next."""

    def __init__(self, workers: VirtualWorkers, local_rank: int, *, resident: bool) -> None:
        self.workers = workers
        self.local_rank = local_rank
        self.generation = -1
        self.group: Group | None = None
        #: The generation that trained last, and how many steps are done.
        self.version = (-1, 0)
        #: The step that it began with.
        self.base = -1
        self.is_in_step = False
        self.is_gone = False
        self._is_resident = resident
        self._inbox = Inbox()
        self._gate = Gate(-1)
        #: The world that broke, and may not be over for all yet.
        self._broken: int | None = None

    def hear(self, order: orders.Order) -> None:
        if self.is_gone:
            return
        answer = self._inbox.take(order)
        if answer is not None:
            self._say(answer)
        self.run_on()

    def run_on(self) -> None:
        """Continue until there is something to wait for."""
        while not self.is_gone and (self._goes_on_in_group() if self.group else self._goes_on()):
            pass

    def _goes_on_in_group(self) -> bool:
        group, step = self.group, self.version[1]
        assert group is not None
        if self._is_resident and self._inbox.is_over(group.generation):
            self._leave_broken()
            return True
        if self.is_in_step or not group.has_begun:
            return False
        decision = GateDecision.GO
        if self._is_resident and not self._gate.enter(step):
            decision = self._gate.decision(step)
        if decision is GateDecision.GO and step >= self.workers.training.steps:
            return self._finish(group.generation, step)
        if decision is GateDecision.GO:
            self.is_in_step = True
        elif decision is GateDecision.STOP:
            self.leave_group(clean=True)
            self._inbox.left(group.generation)
            self._say(orders.Stopped(group.generation, step))
            return True
        return False

    def _finish(self, generation: int, step: int) -> bool:
        """End of data: a script ends with it, a resident worker waits for the others."""
        self.leave_group(clean=True)
        self.workers.training.note(laws.Finished(self.workers.training.scheduler.now))
        if not self._is_resident:
            self.workers.succeed(self)
            return False
        self._broken = generation
        self._say(orders.Finished(generation, step))
        return True

    def _goes_on(self) -> bool:
        match self._inbox.next(self._broken):
            case orders.Over(generation, finished=finished):
                self._say(orders.Stopped(generation, self.version[1]))
                if finished:
                    self.workers.loop.call_later(EXIT, self.workers.succeed, self)
                    return False
            case orders.Enter(generation=generation, rank=rank) as world:
                self._broken, self._gate = None, self._inbox.gate(generation)
                self.workers.training.enter(self, generation, world.store, rank, world.size)
            case orders.Leave():
                self.workers.end(self)
            case None:
                return False
        return True

    def lose_peer(self, group: Group) -> None:
        """A collective fails: a script ends by it, a resident worker reports it."""
        if self.is_gone or self.group is not group:
            return
        message = "connection closed by peer"
        if not self._is_resident:
            self.workers.die(self, 1, f"RuntimeError: {message}")
            return
        self._leave_broken()
        self.workers.report_failure(self, 1, f"lost a peer: {message}", alive=True)
        self.run_on()

    def _leave_broken(self) -> None:
        self._broken = self.generation
        self.leave_group()

    def leave_group(self, *, clean: bool = False) -> None:
        group, self.group, self.is_in_step = self.group, None, False
        if group is not None:
            group.leave(self, clean=clean)

    def _say(self, report: orders.Report) -> None:
        self.workers.loop.call_later(FREE, self._said, report, context=self.workers.loop.context)

    def _said(self, report: orders.Report) -> None:
        if not self.is_gone:
            self.workers.tell_event(in_process.Said(self.local_rank, report))

    def enlist(self) -> None:
        self._said(orders.Enlisted())


class VirtualWorkers:
    """Replaces `agent.workers.pool.WorkerPool`: one node's workers."""

    def __init__(
        self,
        loop: ProcessLoop,
        node: str,
        nproc: int,
        training: Training,
        tell_event: Callable[[Event], None],
        *,
        resident: bool,
        durations: random.Random,
    ) -> None:
        self.loop = loop
        self.node = node
        self.training = training
        self.tell_event = tell_event
        self._nproc = nproc
        self._is_resident = resident
        self._durations = durations
        self._processes: dict[int, Worker] = {}
        #: By local rank: the generation and the rank each was last told to enter.
        self._places: dict[int, tuple[int, int]] = {}
        self.stopping = False
        self.results: dict[int, str] = {}
        self.inherited: dict[int, tuple[int, int, float]] = {}
        self.timers = Nothing()
        self.counted = self

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(self._processes)

    @property
    def best_step(self) -> int:
        return max((one.version[1] - 1 for one in self._processes.values()), default=-1)

    def progress(self, local_rank: int) -> tuple[int, int, float] | None:
        """The generation and step that a worker has entered last."""
        worker = self._processes.get(local_rank)
        return (*worker.version, 0.0) if worker is not None and worker.version[0] >= 0 else None

    def first_step(self, local_rank: int) -> int:
        worker = self._processes.get(local_rank)
        return worker.base if worker is not None else -1

    @property
    def newest(self) -> int:
        """The newest generation in which a worker here has taken a step; `progress` is enough for
        that."""
        return -1

    def reached_at(self, addr: str) -> None:
        """Nothing: there is no gloo."""

    def look(self) -> None:
        """Do nothing: there are no status pages."""

    def entering_since(self, local_rank: int) -> float | None:
        return None

    # Starting and stopping

    async def start_all(self, world: World, node: str) -> None:
        await asyncio.sleep(self._durations.uniform(*START))
        found = world.find(node)
        assert found is not None
        for local_rank in range(self._nproc):
            rank = found.first_rank + local_rank
            worker = self._start(local_rank, world.generation, rank)
            if not self._is_resident:
                self.training.enter(worker, world.generation, world.store, rank, world.size)
        self.tell_event(script.WorkersUp(world.generation))

    async def start_standby(self, local_rank: int, world: World) -> None:
        if not self.stopping:
            await asyncio.sleep(self._durations.uniform(*START))
            self._start(local_rank, -1, -1)

    def _start(self, local_rank: int, generation: int, rank: int) -> Worker:
        self._places[local_rank] = (generation, rank)
        worker = Worker(self, local_rank, resident=self._is_resident)
        self._processes[local_rank] = worker
        if self._is_resident:
            self.loop.call_later(self._durations.uniform(*ENLIST), worker.enlist)
        return worker

    def begin_to_stop(self) -> None:
        self.stopping = True

    async def stop(self, signum: int, generation: int, told: Collection[int]) -> None:
        await asyncio.sleep(self._durations.uniform(*STOP))
        for worker in [*self._processes.values()]:
            self.end(worker)
        self.stopping = False

    def signal(self, signum: int) -> None:
        """Nothing: they end in time."""

    async def close(self) -> None:
        self.kill_everything()

    def kill_everything(self) -> list[int]:
        """Kill all workers with their agent; return the generations they were in."""
        ended = [*self._processes.values()]
        for worker in ended:
            self.end(worker)
        places = [self._places[worker.local_rank] for worker in ended]
        return [generation for generation, _ in places if generation >= 0]

    # Speaking and ending

    def tell(self, local_rank: int, order: orders.Order) -> None:
        worker = self._processes.get(local_rank)
        if isinstance(order, orders.Enter):
            self._places[local_rank] = (order.generation, order.rank)
        if worker is not None:
            self.loop.call_soon(worker.hear, order)

    def end(self, worker: Worker) -> None:
        worker.is_gone = True
        worker.leave_group()
        self.training.note(laws.Forgot(self.training.scheduler.now, self.node))
        if self._processes.get(worker.local_rank) is worker:
            del self._processes[worker.local_rank]

    def succeed(self, worker: Worker) -> None:
        if not worker.is_gone:
            self.end(worker)
            generation, _ = self._places[worker.local_rank]
            self.tell_event(script.WorkerSucceeded(generation, worker.local_rank))

    def kill(self, local_rank: int) -> None:
        """Kill it like SIGKILL, as a fault."""
        if (worker := self._processes.get(local_rank)) is not None:
            self.die(worker, -9, "SIGKILL")

    def die(self, worker: Worker, exitcode: int, message: str) -> None:
        self.end(worker)
        self.loop.call_later(
            NOTICE,
            self.report_failure,
            worker,
            exitcode,
            message,
            context=self.loop.context,
        )

    def report_failure(
        self, worker: Worker, exitcode: int, message: str, *, alive: bool = False
    ) -> None:
        if self.stopping and not alive:
            return  # our own doing
        now, (generation, rank) = self.training.scheduler.now, self._places[worker.local_rank]
        if generation >= 0:
            self.training.note(laws.Failed(now, self.node, generation))
        self.tell_event(
            script.WorkerFailed(
                Failure(
                    generation=generation,
                    node=self.node,
                    rank=rank,
                    local_rank=worker.local_rank,
                    pid=1,
                    exitcode=exitcode,
                    message=message,
                    alive=alive,
                )
            )
        )

    def fail(self, local_rank: int, message: str, *, alive: bool = False) -> None:
        if (worker := self._processes.get(local_rank)) is not None:
            self.report_failure(worker, 1, message, alive=alive)


class Nothing:
    """Replaces parts that only observe: every call does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __await__(self) -> Any:
        return iter(())
