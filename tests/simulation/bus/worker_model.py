"""The workers of simulated nodes, which train with those of the other nodes.

A `TrainingRun` is a world in training: it begins when the workers of all its nodes have entered it,
from the newest state among them, and makes a step while all of them live and can reach each other.
The state of a sharded model is there if each of its shards is: a worker has the one of its
coordinate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.bus.message_bus import BusTimer
from torchelastic.agent.lifecycle.in_process import InProcessState, Status
from torchelastic.agent.lifecycle.node_state import (
    WorkerFailed,
    WorkerMessage,
    WorkersGone,
    WorkerSucceeded,
    WorkersUp,
)
from torchelastic.chaos import laws
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World
from torchelastic.worker import orders

if TYPE_CHECKING:
    from tests.simulation.bus.bus_simulation import BusSimulation
    from tests.simulation.bus.node_loop import SimulatedAgent

#: Seconds to start a worker, to stop one, to abort a step, to build a group.
START, STOP, ABORT, GROUP = 0.3, 0.02, 0.005, 0.02
#: Every third start and stop takes up to this many seconds more: slow nodes expose states in which
#: others have already continued.
EXTRA_DELAY, EXTRA_DELAY_EVERY = 0.8, 3
#: Seconds of a step.
STEP_TIME = 1.0
#: Seconds within which a worker notices that a peer is gone.
DETECTION_TIME = 0.03
#: The version of a worker without a state.
NO_VERSION = (-1, -1)
NO_LIMIT = 1 << 30
LOST_PEER = "lost a peer: connection closed by peer"


class TrainingRun:
    """One world in training."""

    def __init__(self, simulation: BusSimulation, world: World) -> None:
        self._simulation = simulation
        self.world = world
        self.generation = world.generation
        #: In a fixed order: nothing may depend on the order of a set.
        self.nodes = tuple(node.node for node in world.nodes)
        #: The workers in the order of their ranks: nodes and local ranks.
        self._ranks = tuple((node.node, rank) for node in world.nodes for rank in node.local_ranks)
        #: The workers that have entered, with the last step that each may make.
        self.limits: dict[tuple[str, int], int] = {}
        self.begun = False
        #: The step in flight.
        self.step = -1
        self._timer: BusTimer | None = None

    def enter(self, worker: SimulatedWorker) -> None:
        self.limits[worker.key] = NO_LIMIT
        if len(self.limits) == len(self._ranks):
            self._expect(GROUP)

    def leave(self, worker: SimulatedWorker) -> None:
        self.limits.pop(worker.key, None)

    def poke(self) -> None:
        """Check again after a change."""
        if self._timer is None and len(self.limits) == len(self._ranks):
            self._expect(STEP_TIME)

    def _expect(self, seconds: float) -> None:
        if self._timer is None:
            bus = self._simulation.bus
            self._timer = bus.at(bus.now + seconds, BusTimer(None, self._go_on, ()))

    def _go_on(self) -> None:
        self._timer = None
        simulation = self._simulation
        if len(self.limits) < len(self._ranks) or not simulation.can_all_talk(self.nodes):
            return
        workers = [simulation.agents[node].workers.each[rank] for node, rank in self._ranks]
        if not self.begun:
            self._begin(workers)
        elif self.step <= min(self.limits.values()):
            self._make_step(workers)
        else:
            return

    def _begin(self, workers: list[SimulatedWorker]) -> None:
        self.begun = True
        base = self._newest(workers)
        self.step = base[1] + 1
        note, now = self._simulation.laws.note, self._simulation.bus.now
        for worker in workers:
            worker.version, worker.holds = base, self.generation
        for node in self.world.nodes:
            ranks = node.local_ranks
            note(laws.WorkersBegan(now, node.node, self.generation, self.step, ranks))
        self._expect(STEP_TIME)

    def _newest(self, workers: list[SimulatedWorker]) -> tuple[int, int]:
        """The newest version of which all shards are there."""
        size = max(self.world.replica, 1)
        shards = ({worker.version for worker in workers[rank::size]} for rank in range(size))
        return max(set.intersection(*shards), default=NO_VERSION)

    def _make_step(self, workers: list[SimulatedWorker]) -> None:
        note, now = self._simulation.laws.note, self._simulation.bus.now
        step, self.step = self.step, self.step + 1
        for worker in workers:
            worker.version = (self.generation, step)
            worker.trained = self.generation
        for node in self.world.nodes:
            note(laws.StepFinished(now, node.node, self.generation, step, node.local_ranks))
            if self._simulation.agents[node.node].state.leaving:
                note(laws.StateForgotten(now, node.node))
        if step + 1 == self._simulation.steps:
            note(laws.TrainingFinished(now))
        for worker in workers:
            worker.finished_step(step, self._simulation.steps)
        self._expect(STEP_TIME)

    def lost(self, gone: SimulatedAgent) -> None:
        """Note that a worker is gone; the others notice it with a delay."""
        simulation = self._simulation
        for node, rank in sorted(self.limits):
            agent = simulation.agents[node]
            if simulation.bus.is_clear(agent.machine, gone.machine):
                agent.after(
                    simulation.random.random() * DETECTION_TIME,
                    agent.workers.each[rank].lose_peer,
                    self,
                )


class SimulatedWorkers:
    """The workers of one node, as its agent sees them."""

    def __init__(self, agent: SimulatedAgent, nproc: int) -> None:
        self._agent = agent
        self.each = [SimulatedWorker(agent, self, rank) for rank in range(nproc)]
        #: When the last start or stop is done: they run one after the other.
        self._busy_until = 0.0
        self.stopping = False

    @property
    def version(self) -> tuple[int, int]:
        """The newest state in this node's memory."""
        return max(worker.version for worker in self.each)

    @property
    def holds(self) -> int:
        """The newest generation that started from it, or made it."""
        return max(worker.holds for worker in self.each)

    @property
    def blank(self) -> tuple[int, ...]:
        """The workers that do not hold it."""
        alive = (worker for worker in self.each if worker.lives)
        return tuple(worker.local_rank for worker in alive if worker.holds < self.holds)

    @property
    def trained(self) -> int:
        """The newest generation in which this node made a step."""
        return max(worker.trained for worker in self.each)

    @property
    def runs(self) -> list[TrainingRun]:
        """The worlds in which its workers are; one after the other, not at the same time."""
        return list(dict.fromkeys(one.run for one in self.each if one.run is not None))

    def act(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Start or stop something, after what is being started or stopped."""
        now, chance = self._agent.bus.now, self._agent.simulation.random
        if chance.random() * EXTRA_DELAY_EVERY < 1:
            seconds += chance.random() * EXTRA_DELAY
        self._busy_until = max(self._busy_until, now) + seconds
        self._agent.after(self._busy_until - now, call, *args)

    def start(self, world: World) -> None:
        """Start the workers of a world, for a script."""
        found = world.find(self._agent.node)
        assert found is not None
        place = found.node_rank % self._agent.simulation.spanned
        starts = [worker.is_started_for(world.generation, place) for worker in self.each]
        self.act(START, self._started, world, starts)

    def _started(self, world: World, starts: list[int]) -> None:
        started = [worker for worker in self.each if worker.number == starts[worker.local_rank]]
        if not started:
            return
        for worker in started:
            worker.lives = True
        self._agent.take(WorkersUp(world.generation))
        for worker in started:
            if self._agent.resident:
                worker.enlist()
            else:
                worker.enter(world)

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.act(STOP, self._gone)

    def _gone(self) -> None:
        self.stopping = False
        runs = self.runs
        for worker in self.each:
            worker.die()
        for run in runs:
            run.lost(self._agent)
        self._agent.take(WorkersGone())


class SimulatedWorker:
    """One worker of a node."""

    def __init__(self, agent: SimulatedAgent, pool: SimulatedWorkers, local_rank: int) -> None:
        self._agent, self._pool = agent, pool
        self.local_rank = local_rank
        #: Its node and local rank.
        self.key = (agent.node, local_rank)
        #: The newest state in its memory: the worker's own, or the agent's snapshot of a script.
        self.version = NO_VERSION
        #: The generation that started from it, or made it.
        self.holds = -1
        #: The newest generation in which it made a step.
        self.trained = -1
        #: Whether the process is alive.
        self.lives = False
        self.run: TrainingRun | None = None
        #: The last world that it was started for or ordered to enter; -1: none.
        self._placed = -1
        #: The place of its node in a replica when it was started.
        self._place = 0
        #: It has lost a peer, and waits for the end of its world.
        self._broken = False
        #: The action after a given step: enter a world, or stop.
        self._then: tuple[int, Callable[[], None]] | None = None
        #: Numbers the starts.
        self.number = 0

    # --- processes -------------------------------------------------------------------------------

    def is_started_for(self, generation: int, place: int) -> int:
        """Note that it is being started; return the number of the start."""
        self.number += 1
        self._placed, self._place = generation, place
        return self.number

    def spawn(self) -> None:
        """Start a spare worker."""
        start = self.is_started_for(-1, self._agent.state.place)
        self._pool.act(START, self._stands, start)

    def _stands(self, start: int) -> None:
        if start == self.number and not self._pool.stopping:
            self.lives = True
            self.enlist()

    def enlist(self) -> None:
        size = self._agent.simulation.schedule.replica
        self._agent.take(WorkerMessage(self.local_rank, orders.Enlisted(size)))

    def die(self) -> None:
        self.number += 1
        self.lives, self._broken, self._then = False, False, None
        if self._agent.resident:
            self._forget()
        self._leave_run()

    def _forget(self) -> None:
        if self.version != NO_VERSION:
            self.version, self.holds = NO_VERSION, -1
            now, ranks = self._agent.bus.now, (self.local_rank,)
            self._agent.note(laws.StateForgotten(now, self._agent.node, ranks))

    def kill(self) -> None:
        """Kill the worker, as a fault or by its agent."""
        if not self.lives:
            return
        run, agent = self.run, self._agent
        if run is not None:
            agent.note(laws.NodeFailed(agent.bus.now, agent.node, self._placed))
        self.die()
        if run is not None:
            run.lost(agent)
        if not self._pool.stopping:  # otherwise the agent stopped it
            agent.take(WorkerFailed(self._failure("killed", exitcode=-9)))

    def _failure(self, message: str, *, exitcode: int = 1, alive: bool = False) -> Failure:
        world = self._agent.state.world
        rank = world.rank(*self.key) if world is not None else None
        return Failure(
            generation=self._placed,
            node=self._agent.node,
            rank=-1 if rank is None else rank,
            local_rank=self.local_rank,
            pid=self.number,
            exitcode=exitcode,
            message=message,
            step=self.version[1],
            alive=alive,
        )

    # --- worlds ----------------------------------------------------------------------------------

    def enter(self, world: World) -> None:
        self._leave_run()
        self.run = self._agent.simulation.run_of(world)
        self.run.enter(self)
        self._note_coordinate(world)

    def _note_coordinate(self, world: World) -> None:
        """Note the coordinate for which it was started, and the one that it has in a world."""
        rank = world.rank(*self.key)
        if self._agent.simulation.schedule.replica and rank is not None:
            process = f"worker {self.local_rank} of {self._agent.node}, start {self.number}"
            began = self._place * len(self._pool.each) + self.local_rank
            now = self._agent.bus.now
            self._agent.note(
                laws.WorkerEntered(
                    now, self._agent.node, process, began, world.generation, rank, world.size
                )
            )

    def _leave_run(self) -> None:
        if self.run is not None:
            run, self.run = self.run, None
            run.leave(self)

    def lose_peer(self, run: TrainingRun) -> None:
        if self.run is not run or self._broken or self._pool.stopping:
            return
        agent = self._agent
        if agent.is_in_process:
            self._broken = True
            run.leave(self)
            failure = self._failure(LOST_PEER, alive=True)
        else:
            self.die()
            run.lost(agent)
            failure = self._failure(LOST_PEER)
        agent.take(WorkerFailed(failure))

    def hear(self, order: orders.Order) -> None:
        """Handle an order of the agent, as an in-process worker."""
        match order:
            case _ if not self.lives:
                return
            case orders.Enter(generation=generation, after=after):
                world = self._agent.state.world
                assert world is not None
                self._placed = generation
                self._when_through(after, lambda: self.enter(world))
            case orders.Ask(generation):
                self._answer(generation)
            case orders.Through(generation, step):
                self._when_through(step, lambda: self._stopped(generation))
            case orders.Over(generation):
                self._then = None
                self._leave_run()
                self._agent.after(ABORT, self._stopped, generation)

    def _answer(self, generation: int) -> None:
        run, entered = self.run, -1
        if run is not None and run.generation == generation and run.begun:
            entered = run.step
            if self.key in run.limits:
                run.limits[self.key] = entered
        self._agent.after(
            0.0,
            self._agent.take,
            WorkerMessage(self.local_rank, orders.Entered(generation, entered)),
        )

    def _when_through(self, step: int | None, then: Callable[[], None]) -> None:
        run = self.run
        if step is None or run is None or not run.begun or run.step > step or self._broken:
            self._broken = False
            self._then = None
            self._agent.after(ABORT, self._go_through, self.number, then)
            return
        self._then = (step, then)
        if self.key in run.limits:
            run.limits[self.key] = step
        run.poke()

    def _go_through(self, start: int, then: Callable[[], None]) -> None:
        if start == self.number and self.lives:
            then()

    def _stopped(self, generation: int) -> None:
        if not self.lives:
            return
        self._broken = False
        self._leave_run()
        step = self.version[1] + 1
        self._agent.take(WorkerMessage(self.local_rank, orders.Stopped(generation, step)))
        state = self._agent.state
        if isinstance(state, InProcessState) and self.local_rank in state.having(Status.FINISHED):
            self._agent.after(STOP, self._exit, self.number)

    def _exit(self, start: int) -> None:
        """End the script after training."""
        if start == self.number and self.lives:
            generation = self._agent.state.generation
            self.lives = False
            self._agent.take(WorkerSucceeded(generation, self.local_rank))

    def finished_step(self, step: int, steps: int) -> None:
        """Perform the action after this step, if there is one."""
        run, agent = self.run, self._agent
        assert run is not None
        if step + 1 == steps:
            if agent.is_in_process:
                run.limits[self.key] = step
                said = orders.Finished(run.generation, steps)
                agent.after(0.0, agent.take, WorkerMessage(self.local_rank, said))
            else:
                run.limits[self.key] = step
                self.lives = False
                agent.after(0.0, agent.take, WorkerSucceeded(run.generation, self.local_rank))
        if self._then is not None and step >= self._then[0]:
            (_, then), self._then = self._then, None
            agent.after(0.0, self._go_through, self.number, then)
