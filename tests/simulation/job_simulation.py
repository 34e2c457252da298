"""The whole control plane in one process: real agents, leader, embedded store and elections (or the
etcd store and the ring), on virtual loops and a network in memory, under a schedule of faults.

    JobSimulation(schedule).run()   the violations of a law; `history` is all that happened
    simulation.digest()             equal for two runs of one schedule, in any process

A schedule has the faults. The rest is drawn from its seed: the number of endpoints, and whether a
cut drops packets or resets connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from tests.simulation.agent_process import Disk, VirtualAgent
from tests.simulation.fault_schedule import (
    END,
    HEALED_AT,
    LEASE,
    NEWCOMERS,
    ROUND,
    Schedule,
    ScheduledFault,
)
from tests.simulation.virtual_etcd import VirtualEtcd, VirtualPool
from tests.simulation.virtual_loop import Scheduler
from tests.simulation.virtual_network import ProcessLoop, VirtualMachine, VirtualNetwork
from tests.simulation.worker_processes import VirtualTraining
from torchelastic.chaos import laws
from torchelastic.config import LaunchConfig
from torchelastic.errors import TorchElasticError, VoteOutdated
from torchelastic.rendezvous.embedded.voter_file import Voter
from torchelastic.rendezvous.etcd import etcd_store
from torchelastic.rendezvous.etcd.connection_pool import Address

PORT = 29400
#: The address of etcd, and seconds of an outage of it that leases survive: they last as long.
ETCD, ETCD_OUTAGE = "10.0.1.1", 5.0
SIGTERM = 15
#: Seconds of virtual time between two checks whether the job should train.
CHECK_INTERVAL = 1.0
#: The number of sequential messages in a round.
MESSAGES_PER_ROUND = 40
#: Seconds after which a thawed script takes its next step.
SCRIPT_THAW_TIME = 0.5
#: The share of cuts that reset connections, and of jobs with a list of endpoints.
RESET_SHARE, ENDPOINT_LIST_SHARE = 0.3, 0.5


class VirtualHost:
    """A machine and its current agent, if any."""

    def __init__(self, job: JobSimulation, name: str, address: str) -> None:
        self._job = job
        self._name = name
        self.machine = VirtualMachine(job.network, address)
        #: The nodes that have run here; a restarted agent resumes its node.
        self.nodes: list[str] = []
        self._disk: dict[str, Voter] = {}
        self.loop: ProcessLoop | None = None
        self._agent: VirtualAgent | None = None
        self._is_known = False
        #: Whether the agent has been asked to leave.
        self.leaves = False

    @property
    def node(self) -> str:
        """The node of the last agent."""
        return self.nodes[-1] if self.nodes else self._name

    @property
    def remembered(self) -> frozenset[str]:
        """The nodes that are here, or would be after a restart."""
        return frozenset([*self._disk, *([self.node] if self.loop is not None else [])])

    @property
    def is_frozen(self) -> bool:
        return self.loop is not None and self.loop.held is not None

    def start(self) -> None:
        if self.loop is not None or self._job.laws.is_closed or self._would_found:
            return
        if self.node not in self._disk:
            self.nodes.append(f"{self._name}{len(self.nodes) + 1}" if self.nodes else self._name)
        self._is_known = self.leaves = False
        loop = ProcessLoop(self._job.scheduler, self.machine)  # type: ignore[abstract]
        self.loop = loop
        self._job.loops.append(loop)
        self._job.note_cuts(self)
        loop.call_soon(self._begin, context=loop.context)

    @property
    def _would_found(self) -> bool:
        """Return whether an agent here would not know the running job, and would start another one
        if it were cut off: its machine is an endpoint, has left, and comes back."""
        is_new = bool(self.nodes) and self.node not in self._disk
        return is_new and self._name in self._job.endpoints and self._job.has_begun

    def _begin(self) -> None:
        job, loop = self._job, self.loop
        assert loop is not None
        self._agent = VirtualAgent(
            job.config(),
            Disk(self._disk, self.node),
            loop,
            job.training,
            resident=job.schedule.resident,
            seed=f"{job.schedule.seed} {self.node}",
            note=job.note,
            joined=self.joined,
        )
        loop.create_task(self._serve(self._agent, loop), name="agent")

    def joined(self) -> None:
        """Count a node that has not found the job as up only when its paths are clear."""
        if not self._is_known and self.loop is not None:
            self._is_known = True
            self._job.note(laws.NodeUp(self._job.now, self.node))

    async def _serve(self, agent: VirtualAgent, loop: ProcessLoop) -> None:
        is_closed = False
        try:
            outcome = await agent.run()
            reason = outcome.reason
            is_closed = outcome.world is not None and outcome.world.phase == "closed"
        except VoteOutdated:
            self.kill()
            self.start()
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not isinstance(error, TorchElasticError):
                loop.errors.append(f"the agent of {self.node} has raised {reason}")
        asked = bool(agent.state.leaving)
        self._job.note(laws.AgentEnded(self._job.now, self.node, reason, is_closed or asked))
        loop.kill()
        self.loop = self._agent = None

    def kill(self) -> None:
        """Kill the agent, and its workers with it."""
        if self.loop is None:
            return
        self.loop.kill()
        if self._agent is not None:
            for generation in self._agent.workers.kill_everything():
                self._job.note(laws.NodeFailed(self._job.now, self.node, generation))
        self._job.note(laws.NodeDown(self._job.now, self.node))
        self.loop = self._agent = None
        if not self._job.schedule.remembers:
            self._disk.clear()

    def freeze(self, *, workers: bool = True) -> None:
        """Freeze the agent, and its workers if asked."""
        if self.loop is not None and not self.is_frozen:
            self.loop.freeze()
            if self._agent is not None:
                self._agent.workers.are_frozen = workers
            self._job.note(laws.NodeFrozen(self._job.now, self.node))
            self._job.note_seemingly_dead()

    def thaw(self) -> None:
        if self.loop is not None and self.is_frozen:
            self.loop.thaw()
            if self._agent is not None:
                # Nothing keeps a script from its next step, which it may finish before its agent
                # stops it.
                wait = 0.0 if self._job.schedule.resident else SCRIPT_THAW_TIME
                later = self._job.now + wait
                self._job.scheduler.at(later, self._agent.workers.thaw)
            self._job.note(laws.NodeThawed(self._job.now, self.node))

    def leave(self) -> None:
        if self.loop is not None and SIGTERM in self.loop.signal_handlers:
            self.leaves = True
            self._job.note(laws.NodeLeaves(self._job.now, self.node))
            self.loop.call_soon(self.loop.signal_handlers[SIGTERM], context=self.loop.context)

    def kill_worker(self) -> None:
        if self._agent is not None and not self.is_frozen:
            rank = int(self._job.now * 1000) % self._job.schedule.workers
            self._agent.workers.kill(rank)


class JobSimulation:
    """One run of a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.scheduler = Scheduler()
        self.network = VirtualNetwork(self.scheduler)
        self.history: list[laws.Event] = []
        self.loops: list[ProcessLoop] = []
        self._is_over = False
        self._last: laws.WorldPublished | None = None
        drawn = self._drawn("endpoints")
        listed = drawn.random() < ENDPOINT_LIST_SHARE
        #: The machines that may start the job; with etcd, any.
        endpoints = schedule.machines[: drawn.randint(1, 3) if listed else 1]
        self.endpoints = schedule.endpoints or endpoints
        self._etcd: VirtualEtcd | None = None
        if schedule.etcd:
            self.endpoints = ""
            self._etcd = VirtualEtcd(self.scheduler, self.note)
            VirtualMachine(self.network, ETCD)
        self.hosts = {
            name: VirtualHost(self, name, f"10.0.0.{number}")
            for number, name in enumerate(schedule.machines + NEWCOMERS, start=1)
        }
        slowest = max((fault.seconds for fault in schedule.faults), default=0.0)
        self.laws = laws.Laws(
            laws.Rules(
                min_nodes=schedule.nodes_needed,
                replica=schedule.replica,
                workers=schedule.workers,
                within=(ETCD_OUTAGE if schedule.etcd else LEASE)
                + ROUND
                + MESSAGES_PER_ROUND * slowest,
                redone=0 if schedule.resident else 1 << 30,
                arbiter=schedule.etcd,
                endures=100,
                together=LEASE + 1.0,
                founders=[laws.LawElectorate(frozenset(self.endpoints))] if self.endpoints else (),
            )
        )
        self.training = VirtualTraining(
            self.scheduler, self.network, self.note, schedule.steps, schedule.replica
        )

    def _drawn(self, what: str) -> random.Random:
        """Draw from the seed alone, so that a shortened schedule draws the same."""
        return random.Random(f"{self.schedule.seed} {what}")

    def config(self) -> LaunchConfig:
        places = [f"{self.hosts[name].machine.address}:{PORT}" for name in self.endpoints]
        conf = {"etcd_outage": f"{ETCD_OUTAGE:g}"} if self.schedule.etcd else {}
        return LaunchConfig(
            self.schedule.min_nodes,
            self.schedule.max_nodes,
            self.schedule.workers,
            replica_size=self.schedule.replica if self.schedule.spanned > 1 else 0,
            run_id="simulated",
            rdzv_backend="etcd" if self.schedule.etcd else "c10d",
            rdzv_endpoint=ETCD if self.schedule.etcd else ",".join(places),
            rdzv_configs=conf,
            lease=LEASE,
            shutdown_timeout=LEASE,
        )

    @property
    def has_begun(self) -> bool:
        """Return whether there has been a world."""
        return self._last is not None

    @property
    def now(self) -> float:
        return self.scheduler.now

    def note(self, event: laws.Event) -> None:
        self._is_over = self._is_over or self._begins_anew(event)
        if not self._is_over:
            self.history.append(event)
            self.laws.note(event)

    def _begins_anew(self, event: laws.Event) -> bool:
        """Return whether this is the first world of another start of the job, whose generations
        start again: too many nodes of the last one have left, or forgotten it."""
        if not isinstance(event, laws.WorldPublished):
            return False
        before, self._last = self._last, event
        if before is None or event.generation > before.generation or event.nodes == before.nodes:
            return False
        there = frozenset().union(*(host.remembered for host in self.hosts.values()))
        return not all(electorate.agrees(there) for electorate in before.electorates)

    def digest(self) -> str:
        """A digest of the history."""
        lines = "\n".join(repr(_plain(event)) for event in self.history)
        return hashlib.sha256(lines.encode()).hexdigest()

    def run(self, until: float = END) -> list[laws.Violation]:
        """Run the simulation; return violations of a law, and uncaught exceptions."""
        pools = mock.patch.object(etcd_store, "ConnectionPool", self._connect_to_etcd)
        with _repeatable(self.schedule.seed), pools:
            for number, name in enumerate(self.schedule.machines):
                self.scheduler.at(0.1 * number, self.hosts[name].start)
            for fault in self.schedule.faults:
                self.scheduler.at(fault.at, self.perform, fault)
            self.scheduler.at(HEALED_AT, self._heal)
            while self.now < until:
                self.scheduler.run_until(min(self.now + CHECK_INTERVAL, until))
                if not self._is_over:
                    self.laws.look(self.now)
            left_out = self._left_out() if until == END else []
            self._is_over = True
            errors = [
                each for loop in (*self.loops, self.scheduler.outside) for each in loop.errors
            ]
            self.scheduler.close(self.loops)
        uncaught = [laws.Violation(0, END, error) for error in errors]
        return [*self.laws.violations, *left_out, *uncaught]

    def _left_out(self) -> list[laws.Violation]:
        """With etcd, all nodes train in the end: no hold for lack of reach outlives the contact.
        Once the training is done, the job may wait for a node that has left."""
        is_done = any(isinstance(event, laws.TrainingFinished) for event in self.history)
        is_over = self._is_over or self.laws.is_closed or is_done
        if is_over or self._etcd is None or self._last is None:
            return []
        there = frozenset(host.node for host in self.hosts.values() if host.loop is not None)
        nodes, out = self._last.nodes, sorted(there - self._last.nodes)
        if len(nodes & there) >= min(len(there), self.schedule.max_nodes):
            return []
        sentence = f"{' '.join(out)} does not train, {END - HEALED_AT:g} s after the last fault"
        return [laws.Violation(8, END, sentence)]

    def _connect_to_etcd(self, addresses: Sequence[Address], **given: Any) -> VirtualPool:
        """Replace the connections of the running process to etcd."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        assert self._etcd is not None
        (node,) = (host.node for host in self.hosts.values() if host.loop is loop)
        return VirtualPool(addresses, clock=given["clock"], etcd=self._etcd, loop=loop, node=node)

    # --- faults ----------------------------------------------------------------------------------

    def perform(self, fault: ScheduledFault) -> None:
        self.note(laws.JobDisturbed(self.now, fault.kind))
        if fault.kind in ("cut", "slow"):
            self._come_between(fault)
        elif fault.kind == "mend":
            self._mend()
        else:
            host = self.hosts[fault.machines]
            match fault.kind:
                case "kill":
                    host.kill()
                case "restart":
                    host.kill()
                    host.start()
                case "join":
                    host.start()
                case "freeze":
                    host.freeze()
                case "stall":  # nothing keeps a script from its next step
                    host.freeze(workers=not self.schedule.resident)
                case "thaw":
                    host.thaw()
                case "leave":
                    host.leave()
                case "worker":
                    host.kill_worker()

    def _come_between(self, fault: ScheduledFault) -> None:
        resets = self._drawn(f"cut at {fault.at}").random() < RESET_SHARE
        ways = [(one, other) for one in fault.machines for other in fault.others]
        if fault.both_ways:
            ways += [(other, one) for one, other in ways]
        for source, target in ways:
            addresses = self.hosts[source].machine.address, self.hosts[target].machine.address
            if fault.kind == "slow":
                self.network.slow(*addresses, fault.seconds)
                continue
            self.network.cut(*addresses, reset=resets)
            self.note(laws.PathCut(self.now, self.hosts[source].node, self.hosts[target].node))
        self.note_seemingly_dead()

    def note_seemingly_dead(self) -> None:
        """With etcd, expect nothing of the copy of a frozen agent in whose name a firewall refuses
        connections: that is what a dead one looks like, and it cannot say that it lives."""
        for host in self.hosts.values() if self.schedule.etcd else ():
            address = host.machine.address
            if host.is_frozen and any(
                self.network.rejects(other.machine.address, address)
                for other in self.hosts.values()
            ):
                self.note(laws.LeaseOver(self.now, host.node))

    def note_cuts(self, host: VirtualHost) -> None:
        """Note the cuts around a node that starts."""
        for other in self.hosts.values():
            for source, target in ((host, other), (other, host)):
                if self.network.is_cut(source.machine.address, target.machine.address):
                    self.note(laws.PathCut(self.now, source.node, target.node))

    def _mend(self) -> None:
        for source in self.hosts.values():
            for target in self.hosts.values():
                if not self.network.mend(source.machine.address, target.machine.address):
                    continue
                for one in source.nodes:
                    for other in target.nodes:
                        self.note(laws.PathRestored(self.now, one, other))

    def _heal(self) -> None:
        """Bring all machines up, and connect them."""
        self._mend()
        for host in self.hosts.values():
            host.thaw()
        for name in self.schedule.machines:
            self.hosts[name].start()
        # A newcomer asks the endpoints; whoever leaves may be gone before.
        found = [self.hosts[name] for name in self.endpoints]
        if any(host.loop is not None and not host.leaves for host in found):
            for host in self.hosts.values():
                host.joined()


def violations(schedule: Schedule) -> list[laws.Violation]:
    """The violations of a law in a simulated job."""
    return JobSimulation(schedule).run()


def _plain(item: object) -> object:
    """An event without parts that have no defined order."""
    if isinstance(item, frozenset):
        return sorted(item)
    if isinstance(item, tuple):
        return (type(item).__name__, *map(_plain, item))
    return item


@contextlib.contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Make everything random the same in every run."""
    known, collecting, silenced = random.getstate(), gc.isenabled(), logging.root.manager.disable
    tokens = random.Random(f"tokens of {seed}")
    random.seed(seed)
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.object(
            secrets, "token_hex", lambda size=32: f"{tokens.getrandbits(8 * size):0{2 * size}x}"
        ):
            yield
    finally:
        logging.disable(silenced)
        random.setstate(known)
        if collecting:
            gc.enable()
