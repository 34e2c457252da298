"""The workers of simulated nodes: one on each node, which trains with those of the other nodes.

A `Run` is a world in training: it begins when the workers of all its nodes have entered it, from
the newest state among them, and makes a step as long as all of them live and hear each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchelastic.agent.lifecycle import in_process, script
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.world import World
from torchelastic.testing import laws
from torchelastic.testing.bus.message_bus import Timer
from torchelastic.worker import orders

if TYPE_CHECKING:
    from torchelastic.testing.bus.bus_simulation import Simulation
    from torchelastic.testing.bus.node_loop import Agent

#: Seconds it takes to start a worker, to stop one, to let it abort a step, to build a group.
START, STOP, ABORT, GROUP = 0.3, 0.02, 0.005, 0.02
#: Every third start and stop takes up to so many seconds more: who is slow opens the windows in
#: which others have gone on already.
LONGER, EVERY = 0.8, 3
#: Seconds of a step.
STEP = 1.0
#: Seconds within which a worker notices that a peer is gone.
NOTICE = 0.03
#: A worker with nothing in its memory.
NOTHING = (-1, -1)
NO_LIMIT = 1 << 30
LOST_PEER = "lost a peer: connection closed by peer"


class Run:
    """One world in training."""

    def __init__(self, simulation: Simulation, world: World) -> None:
        self._simulation = simulation
        self.world = world
        self.generation = world.generation
        #: In their order: nothing may depend on that of a set.
        self.nodes = tuple(node.node for node in world.nodes)
        #: Those who have entered, with the last step that each may make.
        self.limits: dict[str, int] = {}
        self.begun = False
        #: The step in flight.
        self.step = -1
        self._timer: Timer | None = None

    def enter(self, agent: Agent) -> None:
        self.limits[agent.node] = NO_LIMIT
        if len(self.limits) == len(self.nodes):
            self._expect(GROUP)

    def leave(self, agent: Agent) -> None:
        self.limits.pop(agent.node, None)

    def poke(self) -> None:
        """Check again after a change that may have been in the way."""
        if self._timer is None and len(self.limits) == len(self.nodes):
            self._expect(STEP)

    def _expect(self, seconds: float) -> None:
        if self._timer is None:
            bus = self._simulation.bus
            self._timer = bus.at(bus.now + seconds, Timer(None, self._go_on, ()))

    def _go_on(self) -> None:
        self._timer = None
        simulation = self._simulation
        if len(self.limits) < len(self.nodes) or not simulation.can_all_talk(self.nodes):
            return
        agents = [simulation.agents[node] for node in self.nodes]
        if not self.begun:
            self._begin(agents)
        elif self.step <= min(self.limits.values()):
            self._make_step(agents)
        else:
            return

    def _begin(self, agents: list[Agent]) -> None:
        self.begun = True
        base = max(agent.workers.version for agent in agents)
        self.step = base[1] + 1
        note, now = self._simulation.laws.note, self._simulation.bus.now
        for agent in agents:
            agent.workers.version = base
            agent.workers.holds = self.generation
            note(laws.Began(now, agent.node, self.generation, self.step))
        self._expect(STEP)

    def _make_step(self, agents: list[Agent]) -> None:
        note, now = self._simulation.laws.note, self._simulation.bus.now
        step, self.step = self.step, self.step + 1
        for agent in agents:
            agent.workers.version = (self.generation, step)
            agent.workers.trained = self.generation
            note(laws.Stepped(now, agent.node, self.generation, step))
            if agent.state.leaving:
                note(laws.Forgot(now, agent.node))
        if step + 1 == self._simulation.steps:
            note(laws.Finished(now))
        for agent in agents:
            agent.workers.finished_step(step, self._simulation.steps)
        self._expect(STEP)

    def lost(self, gone: Agent) -> None:
        """Note that a worker is gone: the others notice, sooner or later."""
        simulation = self._simulation
        for node in sorted(self.limits):
            agent = simulation.agents[node]
            if simulation.bus.is_clear(agent.machine, gone.machine):
                agent.after(simulation.random.random() * NOTICE, agent.workers.lose_peer, self)


class Workers:
    """The worker of one node, as its agent sees it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        #: The newest state in memory here: the worker's own, or what the agent keeps of a script.
        self.version = NOTHING
        #: The generation that has begun with it, or made it.
        self.holds = -1
        #: The newest generation in which a step was made here.
        self.trained = -1
        #: Whether the process lives.
        self.lives = False
        self.run: Run | None = None
        #: The last world that it was started for, or told to enter; -1: none.
        self._placed = -1
        #: It has lost a peer, and waits to hear that its world is over.
        self._broken = False
        #: When what was begun last is done: one start or stop after the other.
        self._busy_until = 0.0
        self.stopping = False
        #: What to do after a step: enter a world, or stop.
        self._then: tuple[int, Callable[[], None]] | None = None
        #: Starts are told apart by it.
        self._start = 0

    # --- processes -------------------------------------------------------------------------------

    def _act(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        now, chance = self._agent.bus.now, self._agent.simulation.random
        if chance.random() * EVERY < 1:
            seconds += chance.random() * LONGER
        self._busy_until = max(self._busy_until, now) + seconds
        self._agent.after(self._busy_until - now, call, *args)

    def start(self, world: World) -> None:
        """Start the worker of a world, for a script."""
        self._start += 1
        self._placed = world.generation
        self._act(START, self._started, world, self._start)

    def _started(self, world: World, start: int) -> None:
        if start != self._start:
            return
        self.lives = True
        self._agent.take(script.WorkersUp(world.generation))
        if self._agent.resident:
            self._agent.take(in_process.Said(0, orders.Enlisted()))
        else:
            self._enter(world)

    def spawn(self) -> None:
        """Start a spare worker."""
        self._start += 1
        self._placed = -1
        self._act(START, self._stands, self._start)

    def _stands(self, start: int) -> None:
        if start == self._start and not self.stopping:
            self.lives = True
            self._agent.take(in_process.Said(0, orders.Enlisted()))

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self._act(STOP, self._gone)

    def _gone(self) -> None:
        self.stopping = False
        run = self.run
        self._die()
        if run is not None:
            run.lost(self._agent)
        self._agent.take(script.WorkersGone())

    def _die(self) -> None:
        self._start += 1
        self.lives, self._broken, self._then = False, False, None
        if self._agent.resident:
            self._forget()
        self._leave_run()

    def _forget(self) -> None:
        if self.version != NOTHING:
            self.version, self.holds = NOTHING, -1
            self._agent.note(laws.Forgot(self._agent.bus.now, self._agent.node))

    def kill(self) -> None:
        """Kill the worker, as a fault."""
        if not self.lives:
            return
        run, agent = self.run, self._agent
        if run is not None:
            agent.note(laws.Failed(agent.bus.now, agent.node, self._placed))
        self._die()
        if run is not None:
            run.lost(agent)
        if not self.stopping:  # else its end is the agent's doing
            agent.take(script.WorkerFailed(self._failure("killed", exitcode=-9)))

    def _failure(self, message: str, *, exitcode: int = 1, alive: bool = False) -> Failure:
        world = self._agent.state.world
        rank = world.rank(self._agent.node, 0) if world is not None else None
        return Failure(
            generation=self._placed,
            node=self._agent.node,
            rank=-1 if rank is None else rank,
            local_rank=0,
            pid=self._start,
            exitcode=exitcode,
            message=message,
            step=self.version[1],
            alive=alive,
        )

    # --- worlds ----------------------------------------------------------------------------------

    def _enter(self, world: World) -> None:
        self._leave_run()
        self.run = self._agent.simulation.run_of(world)
        self.run.enter(self._agent)

    def _leave_run(self) -> None:
        if self.run is not None:
            run, self.run = self.run, None
            run.leave(self._agent)

    def lose_peer(self, run: Run) -> None:
        if self.run is not run or self._broken or self.stopping:
            return
        agent = self._agent
        if agent.is_in_process:
            self._broken = True
            run.leave(agent)
            failure = self._failure(LOST_PEER, alive=True)
        else:
            self._die()
            run.lost(agent)
            failure = self._failure(LOST_PEER)
        agent.take(script.WorkerFailed(failure))

    def hear(self, order: orders.Order) -> None:
        """Handle an order of the agent, as a resident worker."""
        match order:
            case _ if not self.lives:
                return
            case orders.Enter(generation=generation, after=after):
                world = self._agent.state.world
                assert world is not None
                self._placed = generation
                self._when_through(after, lambda: self._enter(world))
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
            if self._agent.node in run.limits:
                run.limits[self._agent.node] = entered
        self._agent.after(
            0.0, self._agent.take, in_process.Said(0, orders.Entered(generation, entered))
        )

    def _when_through(self, step: int | None, then: Callable[[], None]) -> None:
        run = self.run
        if step is None or run is None or not run.begun or run.step > step or self._broken:
            self._broken = False
            self._then = None
            self._agent.after(ABORT, self._go_through, self._start, then)
            return
        self._then = (step, then)
        if self._agent.node in run.limits:
            run.limits[self._agent.node] = step
        run.poke()

    def _go_through(self, start: int, then: Callable[[], None]) -> None:
        if start == self._start and self.lives:
            then()

    def _stopped(self, generation: int) -> None:
        if not self.lives:
            return
        self._broken = False
        self._leave_run()
        step = self.version[1] + 1
        self._agent.take(in_process.Said(0, orders.Stopped(generation, step)))
        state = self._agent.state
        if isinstance(state, in_process.InProcessState) and state.having(
            in_process.Status.FINISHED
        ):
            self._agent.after(STOP, self._exit, self._start)

    def _exit(self, start: int) -> None:
        """End the script after training."""
        if start == self._start and self.lives:
            generation = self._agent.state.generation
            self.lives = False
            self._agent.take(script.WorkerSucceeded(generation, 0))

    def finished_step(self, step: int, steps: int) -> None:
        """Continue after a step, if there is something to do other than the next one."""
        run, agent = self.run, self._agent
        assert run is not None
        if step + 1 == steps:
            if agent.is_in_process:
                run.limits[agent.node] = step
                said = orders.Finished(run.generation, steps)
                agent.after(0.0, agent.take, in_process.Said(0, said))
            else:
                run.limits[agent.node] = step
                self.lives = False
                agent.after(0.0, agent.take, script.WorkerSucceeded(run.generation, 0))
        if self._then is not None and step >= self._then[0]:
            (_, then), self._then = self._then, None
            agent.after(0.0, self._go_through, self._start, then)
