"""One job on simulated machines, under a schedule of faults, watched by the checker of the laws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from tests.simulation.bus.host_search import ENDPOINT, SimulatedEmbeddedNode
from tests.simulation.bus.message_bus import BusTimer, MessageBus
from tests.simulation.bus.node_loop import SimulatedAgent
from tests.simulation.bus.worker_model import TrainingRun
from tests.simulation.fault_schedule import END, HEALED_AT, LEASE, ROUND, Schedule, ScheduledFault
from torchelastic.agent.lifecycle.node_state import InvalidTransition
from torchelastic.chaos import laws
from torchelastic.chaos.laws import Laws, Violation
from torchelastic.rendezvous.round_state import RoundRules
from torchelastic.rendezvous.world import World


class BusSimulation:
    """A job, from its start to its end or to the time limit."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bus = MessageBus()
        self.random = random.Random(schedule.seed)
        self.lease = LEASE
        self.resident = schedule.resident
        self.steps = schedule.steps
        self.endpoint = schedule.machines[0]
        self.spanned = schedule.spanned
        self.rules = RoundRules(
            min_nodes=schedule.min_nodes,
            max_nodes=schedule.max_nodes,
            max_restarts=100,
            replica_size=schedule.replica if self.spanned > 1 else 0,
        )
        self.laws = Laws(
            laws.Rules(
                min_nodes=schedule.nodes_needed,
                replica=schedule.replica,
                workers=schedule.workers,
                within=LEASE + ROUND,
                endures=100,
                together=LEASE + 1.0,
                founders=[laws.LawElectorate(frozenset({f"{self.endpoint}1"}))],
            )
        )
        #: All agents so far by node, and the current one of each machine.
        self.agents: dict[str, SimulatedAgent] = {}
        self.there: dict[str, SimulatedAgent] = {}
        self._numbers: dict[str, int] = {}
        #: The state files of killed agents, for the next ones on their machines.
        self._files: dict[str, SimulatedEmbeddedNode] = {}
        self._runs: dict[tuple[int, str], TrainingRun] = {}
        #: Agents that have not found the job yet.
        self._seeking: set[str] = set()

    def run(self) -> list[Violation]:
        """Run the simulation; return the violations of a law."""
        for index, machine in enumerate(self.schedule.machines):
            self._at(0.1 * index, self._start, machine)
        for fault in self.schedule.faults:
            self._at(fault.at, self._perform, fault)
        self._at(HEALED_AT, self._heal)
        try:
            self.bus.run(END)
        except InvalidTransition as error:
            self.laws.violations.append(Violation(0, self.bus.now, str(error)))
        self.laws.look(END)
        self._look_who_trains()
        return self.laws.violations

    def _look_who_trains(self) -> None:
        """Check that some time after the last fault all nodes that could train do, if any do."""
        run = max(self._runs.values(), key=lambda run: run.generation, default=None)
        if run is None or self.laws.is_closed or self.laws.last_step_at < END - 2.0:
            return
        world = run.world
        busy = {*run.nodes, *(hold.node for hold in world.held)}
        idle = [agent.node for agent in self.there.values() if agent.node not in busy]
        room = self.rules.max_nodes - len(run.nodes)
        if min(len(idle), room) >= self.spanned:
            sentence = f"{' '.join(idle)} could train, and have no place in the last world"
            self.laws.violations.append(Violation(0, END, sentence))

    def _at(self, when: float, call: Callable[..., object], *args: object) -> None:
        self.bus.at(when, BusTimer(None, call, args))

    # --- what agents ask -------------------------------------------------------------------------

    def reached_at(self, address: str) -> SimulatedAgent | None:
        if address == ENDPOINT:
            return self.there.get(self.endpoint)
        return self.agents.get(address)

    def machine_of(self, address: str) -> str:
        return self.endpoint if address == ENDPOINT else address[0]

    def can_all_talk(self, nodes: Iterable[str]) -> bool:
        agents = [self.agents[node] for node in nodes]
        if not all(agent.runs for agent in agents):
            return False
        if not self.bus.cut:
            return True
        clear = self.bus.is_clear
        return all(clear(one.machine, other.machine) for one in agents for other in agents)

    def run_of(self, world: World) -> TrainingRun:
        key = (world.generation, world.digest)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = TrainingRun(self, world)
        return run

    def has_joined(self, agent: SimulatedAgent) -> None:
        """Count a node that has not found the job as up only when its paths are clear."""
        if agent.node in self._seeking:
            self._seeking.discard(agent.node)
            self.laws.note(laws.NodeUp(self.bus.now, agent.node))

    def ended(self, agent: SimulatedAgent) -> None:
        """Note that an agent has ended; near the end of the run, start another one for it."""
        self._remove(agent)
        if self.bus.now >= HEALED_AT and not self.laws.is_closed:
            self._start(agent.machine)
            self.has_joined(self.there[agent.machine])

    def start_anew(self, agent: SimulatedAgent) -> None:
        """Forget the state of the last agent."""
        self._remove(agent)
        self._start(agent.machine)
        if self.bus.now >= HEALED_AT:
            self.has_joined(self.there[agent.machine])

    # --- faults ----------------------------------------------------------------------------------

    def _perform(self, fault: ScheduledFault) -> None:
        match fault.kind:
            case "kill":
                self._kill(fault.machines)
            case "restart":
                self._kill(fault.machines)
                self._start(fault.machines)
            case "join":
                if fault.machines not in self.there:
                    self._start(fault.machines)
            case "mend":
                self._mend()
            case "cut" | "slow":
                self._come_between(fault)
            case _:
                agent = self.there.get(fault.machines)
                if agent is not None:
                    self._disturb(agent, fault)
        self._look()

    def _disturb(self, agent: SimulatedAgent, fault: ScheduledFault) -> None:
        self.laws.note(laws.JobDisturbed(self.bus.now, fault.kind))
        match fault.kind:
            case "freeze" if agent.runs:
                agent.freeze()
                self.laws.note(laws.NodeFrozen(self.bus.now, agent.node))
            case "thaw":
                self._thaw(agent)
            case "worker" if agent.runs:
                agent.workers.each[int(fault.at * 1000) % self.schedule.workers].kill()
            case "leave" if agent.runs:
                agent.leave()

    def _thaw(self, agent: SimulatedAgent) -> None:
        if agent.frozen_at is not None:
            self.laws.note(laws.NodeThawed(self.bus.now, agent.node))
            agent.thaw()

    def _start(self, machine: str) -> None:
        if machine in self.there:
            return
        last = self._files.pop(machine, None)
        if last is None:
            self._numbers[machine] = self._numbers.get(machine, 0) + 1
        agent = self.there[machine] = SimulatedAgent(self, machine, self._numbers[machine], last)
        self.agents[agent.node] = agent
        self._seeking.add(agent.node)
        for source, target in sorted(self.bus.cut):
            if machine in (source, target):
                self._note_cut(source, target)
        agent.begin()

    def _kill(self, machine: str) -> None:
        agent = self.there.get(machine)
        if agent is None:
            return
        for run in agent.workers.runs:
            self.laws.note(laws.NodeFailed(self.bus.now, agent.node, run.generation))
        # A goodbye removes the file; so does the last vote of a leaving host.
        if self.schedule.remembers and not agent.search.elector.leaving:
            self._files[machine] = agent.search
        self._remove(agent)

    def _remove(self, agent: SimulatedAgent) -> None:
        agent.alive = False
        if self.there.get(agent.machine) is agent:
            del self.there[agent.machine]
        self._seeking.discard(agent.node)
        self.laws.note(laws.NodeDown(self.bus.now, agent.node))
        runs = agent.workers.runs
        for worker in agent.workers.each:
            if worker.run is not None:
                worker.run.leave(worker)
        for run in runs:
            run.lost(agent)
        self._look()

    def _come_between(self, fault: ScheduledFault) -> None:
        ways = [(one, other) for one in fault.machines for other in fault.others]
        if fault.both_ways:
            ways += [(other, one) for one, other in ways]
        for way in ways:
            if fault.kind == "slow":
                self.bus.slow[way] = fault.seconds
            elif way not in self.bus.cut:
                self.bus.sever(*way)
                self._note_cut(*way)
        self.laws.note(laws.JobDisturbed(self.bus.now, fault.kind))

    def _note_cut(self, source: str, target: str) -> None:
        if source in self.there and target in self.there:
            pair = self.there[source].node, self.there[target].node
            self.laws.note(laws.PathCut(self.bus.now, *pair))

    def _mend(self) -> None:
        self.bus.slow.clear()
        for way in sorted(self.bus.cut):
            self.bus.mend(*way)
            for source in self.agents.values():
                for target in self.agents.values():
                    if (source.machine, target.machine) == way:
                        self.laws.note(laws.PathRestored(self.bus.now, source.node, target.node))
        self.laws.note(laws.JobDisturbed(self.bus.now, "mend"))

    def _heal(self) -> None:
        """Bring all machines up, and connect them."""
        self._mend()
        for agent in [*self.there.values()]:
            self._thaw(agent)
        if not self.laws.is_closed:
            for machine in self.schedule.machines:
                self._start(machine)
            for agent in self.there.values():
                self.has_joined(agent)
        self._look()

    def _look(self) -> None:
        """Let connections and groups check their paths."""
        for agent in self.agents.values():
            if agent.session is not None:
                agent.session.look()
        for run in self._runs.values():
            run.poke()


def violations(schedule: Schedule) -> list[Violation]:
    """The violations of a law in a simulated job."""
    return BusSimulation(schedule).run()
