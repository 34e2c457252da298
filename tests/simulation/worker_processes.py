"""Workers that only take time: they start, train in groups, are asked to stop, fail and die.

The orders and reports between them and agents are the product's (`worker.orders`, the events of
`lifecycle.node_state`). A group makes a step when all its workers are in it,
none is frozen, and all can reach each other.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection
from typing import Any

from tests.simulation.fault_schedule import LEASE
from tests.simulation.virtual_loop import Scheduler
from tests.simulation.virtual_network import ProcessLoop, VirtualNetwork
from torchelastic.agent.lifecycle.node_state import (
    Event,
    WorkerFailed,
    WorkerMessage,
    WorkerProgress,
    WorkerSucceeded,
    WorkersUp,
)
from torchelastic.chaos import laws
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World
from torchelastic.training.gate import Gate, GateDecision
from torchelastic.training.inbox import Inbox
from torchelastic.worker import orders

#: Virtual seconds of a step, of building a group, and between two checks of a group that cannot
#: step.
STEP_TIME, BUILD_TIME, RETRY_INTERVAL = 0.25, 0.05, 0.1
#: Seconds until a worker notices that a peer is gone, and until it is free after the end of its
#: world.
DETECTION_TIME, ABORT_TIME = 0.005, 0.005
#: Seconds without an answer after which an in-process worker gives up a peer behind a cut
#: (`Group.look`): a lease, and the time that the kernel's retransmits take to show it.
SILENCE = LEASE + 1.0
#: Seconds that a worker takes to exit after the training.
EXIT = 0.05
#: Seconds that a worker takes to start and to call `train` (minimum, maximum), and to stop.
START, ENLIST, STOP = (0.1, 0.8), (0.05, 0.3), (0.01, 0.2)


class VirtualTraining:
    """All groups of the job, and their progress."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: VirtualNetwork,
        note: Callable[[laws.Event], None],
        steps: int,
        replica: int = 0,
    ) -> None:
        """`steps`: the number of steps until the data ends; `replica`: of workers in a replica."""
        self.scheduler = scheduler
        self.steps = steps
        self.replica = replica
        self.note = note
        self._network = network
        #: By generation and store: if two worlds had the same number, it must be noticed.
        self._groups: dict[tuple[int, str], VirtualGroup] = {}

    def enter(
        self, worker: VirtualWorker, generation: int, store: str, rank: int, size: int
    ) -> None:
        group = self._groups.setdefault((generation, store), VirtualGroup(self, generation, size))
        worker.generation, worker.group = generation, group
        group.join(rank, worker)
        if self.replica:
            now, node = self.scheduler.now, worker.workers.node
            entered = laws.WorkerEntered(
                now, node, str(worker), worker.coordinate, generation, rank, size
            )
            self.note(entered)

    def are_linked(self, one: VirtualWorker, other: VirtualWorker) -> bool:
        addresses = (one.workers.loop.machine.address, other.workers.loop.machine.address)
        return addresses[0] == addresses[1] or self._network.is_open(*addresses)


class VirtualGroup:
    """The workers of one generation, each at its own point of the same steps."""

    def __init__(self, training: VirtualTraining, generation: int, size: int) -> None:
        self.generation = generation
        self._training = training
        self._size = size
        self._members: dict[int, VirtualWorker] = {}
        self.has_begun = False
        self._broken = False
        #: The time since which some of its workers are cut from each other.
        self._cut_since: float | None = None

    def join(self, rank: int, worker: VirtualWorker) -> None:
        self._members[rank] = worker
        if len(self._members) == self._size and not self._broken:
            self._look_in(BUILD_TIME)

    def leave(self, worker: VirtualWorker, *, clean: bool = False) -> None:
        """Remove a worker; the others see its connections end, unless the training is done."""
        others = [other for other in self._members.values() if other is not worker]
        self._members = {rank: one for rank, one in self._members.items() if one is not worker}
        self._broken = self._broken or self.has_begun
        if clean or not self.has_begun:
            return
        now = self._training.scheduler.now
        for other in others:
            self._notice_end(worker, other, now if self._cut_since is None else self._cut_since)

    def _notice_end(self, gone: VirtualWorker, worker: VirtualWorker, since: float) -> None:
        """Let a worker see that a peer's connections have ended: at once, when the cut between them
        is mended, or by the peer's silence."""
        scheduler, loop = self._training.scheduler, worker.workers.loop
        if self._training.are_linked(gone, worker):
            loop.call_later(DETECTION_TIME, worker.lose_peer, self, context=loop.context)
        elif worker.is_resident and scheduler.now >= since + SILENCE:
            loop.call_soon(worker.lose_peer, self, context=loop.context)
        elif worker.group is self:
            scheduler.at(scheduler.now + RETRY_INTERVAL, self._notice_end, gone, worker, since)

    def _look_in(self, seconds: float) -> None:
        self._training.scheduler.at(self._training.scheduler.now + seconds, self._look)

    def _look(self) -> None:
        if self._broken or len(self._members) < self._size:
            return
        if not self._can_go_on():
            self._look_for_silence()
            self._look_in(RETRY_INTERVAL)
            return
        self._cut_since = None
        if not self.has_begun:
            self._begin()
            self._look_in(STEP_TIME)
        else:
            self._step()
            self._look_in(STEP_TIME)

    def _can_go_on(self) -> bool:
        workers = [*self._members.values()]
        return not any(worker.workers.are_frozen for worker in workers) and all(
            self._training.are_linked(one, other)
            for index, one in enumerate(workers)
            for other in workers[:index]
        )

    def _look_for_silence(self) -> None:
        """Let in-process workers give up peers that have not answered for `SILENCE` seconds."""
        workers, now = self._ordered(), self._training.scheduler.now
        deaf = [
            one
            for one in workers
            if any(not self._training.are_linked(one, other) for other in workers)
        ]
        if not deaf:
            self._cut_since = None
            return
        self._cut_since = now if self._cut_since is None else self._cut_since
        for worker in deaf if now >= self._cut_since + SILENCE else ():
            if worker.is_resident and not worker.workers.are_frozen:
                loop = worker.workers.loop
                loop.call_soon(worker.lose_peer, self, context=loop.context)

    def _begin(self) -> None:
        """Give all workers the newest state."""
        self.has_begun = True
        base = self._newest()[1]
        for worker in self._ordered():
            worker.version, worker.base = (self.generation, base), base
        self._tell(laws.WorkersBegan, base)
        self._let_run_on()

    def _newest(self) -> tuple[int, int]:
        """The newest version of which all shards are there."""
        workers, size = self._ordered(), max(self._training.replica, 1)
        shards = ({worker.version for worker in workers[rank::size]} for rank in range(size))
        return max(set.intersection(*shards), default=(-1, 0))

    def _step(self) -> None:
        workers = self._ordered()
        if not all(worker.is_in_step for worker in workers):
            self._let_run_on()  # one that waited for its lease may have it again
            return
        step = workers[0].version[1]
        for worker in workers:
            worker.version, worker.is_in_step = (self.generation, step + 1), False
        self._tell(laws.StepFinished, step)
        self._let_run_on()

    def _let_run_on(self) -> None:
        for worker in self._ordered():
            worker.workers.loop.context.run(worker.run_on)

    def _tell(self, kind: type[laws.WorkersBegan] | type[laws.StepFinished], step: int) -> None:
        """Note it once for each node."""
        ranks: dict[str, list[int]] = {}
        for worker in self._ordered():
            ranks.setdefault(worker.workers.node, []).append(worker.local_rank)
        now = self._training.scheduler.now
        for node, its in ranks.items():
            self._training.note(kind(now, node, self.generation, step, tuple(its)))

    def _ordered(self) -> list[VirtualWorker]:
        return [self._members[rank] for rank in sorted(self._members)]


class VirtualWorker:
    """One worker process. An in-process one has the product's own `Inbox` and gates; `_run_on` is
    its training thread, from one wait to the next."""

    def __init__(
        self, workers: VirtualWorkers, local_rank: int, coordinate: int, *, resident: bool
    ) -> None:
        self.workers = workers
        self.local_rank = local_rank
        #: Its number in a replica.
        self.coordinate = coordinate
        self.generation = -1
        self.group: VirtualGroup | None = None
        #: The generation that trained last, and the number of steps done.
        self.version = (-1, 0)
        #: Its first step.
        self.base = -1
        self.is_in_step = False
        self.is_gone = False
        self.is_resident = resident
        self._inbox = Inbox()
        self._gate = Gate(-1)
        #: The world in which it lost a peer, and which may not be over for all nodes yet.
        self._broken: int | None = None

    def __str__(self) -> str:
        return f"worker {self.local_rank} of {self.workers.node}"

    def hear(self, order: orders.Order) -> None:
        if self.is_gone:
            return
        answer = self._inbox.take(order)
        if answer is not None:
            self._say(answer)
        self.run_on()

    def run_on(self) -> None:
        """Continue until the next wait."""
        while not self.is_gone and (self._goes_on_in_group() if self.group else self._goes_on()):
            pass

    def _goes_on_in_group(self) -> bool:
        group, step = self.group, self.version[1]
        assert group is not None
        if self.is_resident and self._inbox.is_over(group.generation):
            self._leave_broken()
            return True
        if self.is_in_step or not group.has_begun:
            return False
        if self.is_resident and self.workers.training.scheduler.now >= self.workers.leased_till:
            return False  # the group looks again
        decision = GateDecision.GO
        if self.is_resident and not self._gate.enter(step):
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
        """End of data: a script ends with it, an in-process worker waits for the others."""
        self.leave_group(clean=True)
        self.workers.training.note(laws.TrainingFinished(self.workers.training.scheduler.now))
        if not self.is_resident:
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

    def lose_peer(self, group: VirtualGroup) -> None:
        """A collective fails: a script exits, an in-process worker reports it."""
        if self.is_gone or self.group is not group:
            return
        message = "connection closed by peer"
        if not self.is_resident:
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
        self.workers.loop.call_later(
            ABORT_TIME, self._said, report, context=self.workers.loop.context
        )

    def _said(self, report: orders.Report) -> None:
        if not self.is_gone:
            self.workers.tell_event(WorkerMessage(self.local_rank, report))

    def enlist(self) -> None:
        self._said(orders.Enlisted(self.workers.training.replica))


class VirtualWorkers:
    """Replaces `agent.workers.pool.WorkerPool`: one node's workers."""

    def __init__(
        self,
        loop: ProcessLoop,
        node: str,
        nproc: int,
        training: VirtualTraining,
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
        self._processes: dict[int, VirtualWorker] = {}
        #: By local rank: the generation and the rank it was last ordered to enter.
        self._places: dict[int, tuple[int, int]] = {}
        self.stopping = False
        #: Whether the machine is frozen, not its agent alone.
        self.are_frozen = False
        #: The time until which the node holds its lease; no step is entered after it.
        self.leased_till = math.inf
        self.results: dict[int, str] = {}
        self._trained = -1

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(self._processes)

    def seen(self) -> WorkerProgress:
        """The workers' progress, as `WorkerPool` reads it."""
        processes = self._processes
        stepped = [one.version[0] for one in processes.values() if one.version[1] > one.base]
        self._trained = max([self._trained, *stepped])
        step = max((one.version[1] - 1 for one in processes.values()), default=-1)
        newest = max((one.version[0] for one in processes.values()), default=-1)
        blank = tuple(rank for rank, one in processes.items() if one.version[0] < newest)
        return WorkerProgress(step, self._trained, newest, blank)

    def thaw(self) -> None:
        self.are_frozen = False

    def leased_until(self, until: float) -> None:
        """Note the time until which the node holds its lease, as on the workers' status pages."""
        self.leased_till = until

    def reached_at(self, addr: str) -> None:
        """Nothing: there is no gloo."""

    def look(self) -> None:
        """Do nothing: there are no status pages."""

    def entering_since(self, local_rank: int) -> float | None:
        return None

    def progress(self, local_rank: int) -> tuple[int, int, float] | None:
        """Return the generation and step that a worker is in; its time is of no use here."""
        worker = self._processes.get(local_rank)
        if worker is None or worker.group is None or not worker.is_in_step:
            return None
        return worker.group.generation, worker.version[1], 0.0

    # Starting and stopping

    async def start_all(self, world: World, node: str) -> bool:
        await asyncio.sleep(self._durations.uniform(*START))
        found = world.find(node)
        assert found is not None
        for local_rank in range(self._nproc):
            rank = found.first_rank + local_rank
            worker = self._start(local_rank, world.generation, rank, found.node_rank)
            if not self._is_resident:
                self.training.enter(worker, world.generation, world.store, rank, world.size)
        self.tell_event(WorkersUp(world.generation))
        return True

    async def start_standby(self, local_rank: int, world: World, place: int) -> bool:
        if not self.stopping:
            await asyncio.sleep(self._durations.uniform(*START))
            self._start(local_rank, -1, -1, place)
        return True

    def _start(self, local_rank: int, generation: int, rank: int, place: int) -> VirtualWorker:
        """`place`: of this node in its replica, or its rank in the world."""
        self._places[local_rank] = (generation, rank)
        size = max(self.training.replica, 1)
        coordinate = (place * self._nproc + local_rank) % size
        worker = VirtualWorker(self, local_rank, coordinate, resident=self._is_resident)
        self._processes[local_rank] = worker
        if self._is_resident:
            self.loop.call_later(self._durations.uniform(*ENLIST), worker.enlist)
        return worker

    def begin_to_stop(self) -> None:
        self.stopping = True

    async def stop(
        self, signum: int, generation: int, told: Collection[int], timeout: float
    ) -> None:
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

    def end(self, worker: VirtualWorker) -> None:
        worker.is_gone = True
        worker.leave_group()
        now, ranks = self.training.scheduler.now, (worker.local_rank,)
        self.training.note(laws.StateForgotten(now, self.node, ranks))
        if self._processes.get(worker.local_rank) is worker:
            del self._processes[worker.local_rank]

    def succeed(self, worker: VirtualWorker) -> None:
        if not worker.is_gone:
            self.end(worker)
            generation, _ = self._places[worker.local_rank]
            self.tell_event(WorkerSucceeded(generation, worker.local_rank))

    def kill(self, local_rank: int, why: str = "SIGKILL") -> None:
        """Kill it like SIGKILL, as a fault or by the agent."""
        if (worker := self._processes.get(local_rank)) is not None:
            self.die(worker, -9, why)

    def die(self, worker: VirtualWorker, exitcode: int, message: str) -> None:
        self.end(worker)
        self.loop.call_later(
            DETECTION_TIME,
            self.report_failure,
            worker,
            exitcode,
            message,
            context=self.loop.context,
        )

    def report_failure(
        self, worker: VirtualWorker, exitcode: int, message: str, *, alive: bool = False
    ) -> None:
        if self.stopping and not alive:
            return  # stopped by the agent
        now, (generation, rank) = self.training.scheduler.now, self._places[worker.local_rank]
        if generation >= 0:
            self.training.note(laws.NodeFailed(now, self.node, generation))
        self.tell_event(
            WorkerFailed(
                Failure(
                    generation=generation,
                    node=self.node,
                    rank=rank,
                    local_rank=worker.local_rank,
                    pid=1,
                    exitcode=exitcode,
                    message=message,
                    alive=alive,
                    before=0 <= worker.generation < generation,
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
