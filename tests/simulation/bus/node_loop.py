"""A simulated node: the agent's loop around the product's own state machines.

The product decides: `lifecycle.machine` what the node does, `majority`
and `Poll` which node hosts, `Failover` what it remembers of a world. This module only performs it,
on the bus.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.bus.host_loop import Json, SimulatedSession
from tests.simulation.bus.host_search import SimulatedEmbeddedNode
from tests.simulation.bus.message_bus import SimulatedProcess
from tests.simulation.bus.worker_model import SimulatedWorkers
from torchelastic.agent.lifecycle import machine
from torchelastic.agent.lifecycle.in_process import InProcessState
from torchelastic.agent.lifecycle.node_state import (
    Command,
    Event,
    Kill,
    LeaseLost,
    LeaveOverdue,
    LeaveRequested,
    PlaceAllotted,
    Rejoin,
    ReportMember,
    Spawn,
    StartWorkers,
    Stop,
    Tell,
    WorkerProgress,
    WorldSeen,
)
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.chaos import laws
from torchelastic.records import replace
from torchelastic.rendezvous.embedded.failover_state import Failover
from torchelastic.rendezvous.world import Member, World

if TYPE_CHECKING:
    from tests.simulation.bus.bus_simulation import BusSimulation

#: Seconds until a node can start workers, and until it offers the next worker store.
WARM_UP_TIME, NEXT_STORE_DELAY = 0.5, 0.01
#: Seconds that a host stays after the job is closed, and that a leaving host waits for an election.
HOST_CLOSE_TIMEOUT, HAND_OVER_TIMEOUT = 5.0, 10.0
SHUTDOWN_TIMEOUT = 30.0


class SimulatedAgent(SimulatedProcess):
    """One agent, from its start to its end."""

    def __init__(
        self,
        simulation: BusSimulation,
        machine: str,
        number: int,
        last: SimulatedEmbeddedNode | None = None,
    ) -> None:
        """`last` is the state file of the last agent on this machine."""
        super().__init__(simulation.bus, machine)
        self.simulation = simulation
        self.node = f"{machine}{number}"
        self.is_first = number == 1 and last is None
        self.lease = simulation.lease
        #: The job's workers call `torchelastic.train`.
        self.resident = simulation.resident
        nproc = simulation.schedule.workers
        self.state: ScriptState | InProcessState = ScriptState(
            node=self.node, name=self.node, nproc=nproc, place=-1 if simulation.spanned > 1 else 0
        )
        self.workers = SimulatedWorkers(self, nproc)
        self.search = SimulatedEmbeddedNode(self, last)
        self.failover = Failover(self.node)
        self.member = Member(
            node=self.node,
            name=self.node,
            addr=machine,
            nproc=nproc,
            peer=self.node,
            gone=self.search.elector.generation,
            resumed=last is not None,
        )
        self._said: Member | None = None
        self._flushing = False
        #: Whether it carries its member record to the next host.
        self.takes_rows_along = False
        self.session: SimulatedSession | None = None
        #: Whether it has a lease and follows the worlds.
        self.is_member = False
        #: Whether its lease is lost and its workers are still stopping.
        self._awaits_rejoin = False
        #: The last world passed to the state machine.
        self._seen: World | None = None
        self._stores = 0
        self.ending = False

    @property
    def is_in_process(self) -> bool:
        return isinstance(self.state, InProcessState)

    def note(self, event: laws.Event) -> None:
        self.simulation.laws.note(event)

    def begin(self) -> None:
        self.after(WARM_UP_TIME, self._offer_store, True)
        self.search.open()

    # --- the loop --------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Let the active state machine decide, and perform its commands."""
        if self.state.is_terminal:
            return
        workers = self.workers
        seen = WorkerProgress(workers.version[1], workers.trained, workers.holds, workers.blank)
        self.state, commands = machine.handle(self.state, event, seen)
        for command in commands:
            self._perform(command)
        if self.state.is_terminal and not self.ending:
            self.ending = True
            self.after(0.0, self._end)

    def _perform(self, command: Command) -> None:
        match command:
            case StartWorkers(world):
                self.workers.start(world)
            case Stop():
                self.workers.stop()
            case ReportMember(changes):
                self.update(**changes)
            case Rejoin(gone):
                self.after(0.0, self._rejoin, gone)
            case Tell(local_rank, order):
                self.workers.each[local_rank].hear(order)
            case Spawn(local_rank):
                self.workers.each[local_rank].spawn()
            case Kill(local_rank):
                self.workers.act(0.0, self.workers.each[local_rank].kill)

    def leave(self, signum: int = 15) -> None:
        """Ask the agent to leave."""
        if not self.state.leaving and not self.state.is_terminal:
            # A state that only a leaving node has does not count as a copy.
            self.note(laws.StateForgotten(self.bus.now, self.node))
            self.take(LeaveRequested(signum, self.bus.now + SHUTDOWN_TIMEOUT))
            if not self.state.is_terminal:
                self.after(SHUTDOWN_TIMEOUT, self.take, LeaveOverdue())

    # --- the member record -----------------------------------------------------------------------

    def update(self, **changes: Any) -> None:
        if changes and all(getattr(self.member, name) == changes[name] for name in changes):
            return
        self.member = replace(self.member, **changes)
        if changes.get("leaving"):
            self.search.say_goodbye()
        if not self._flushing:
            self._flushing = True
            self.after(0.0, self._flush)

    def _flush(self) -> None:
        self._flushing = False
        session = self.session
        if session is None or not self.is_member or self.member is self._said:
            return
        if session.connected:
            self._said = self.member
            self.send(session.host.agent, session.host.report, session, self.member)

    def _offer_store(self, ready: bool = False) -> None:
        self._stores += 1
        self.update(store=f"{self.node}:{self._stores}", **({"ready": True} if ready else {}))

    # --- at the store ----------------------------------------------------------------------------

    def follow(self, session: SimulatedSession, resumed: bool) -> None:
        """Follow a host that has admitted this node."""
        self.session = session
        session.connected = True
        self.search.follow(session)
        session.look()
        self._said = None
        if resumed:
            session.renew()
            self.enlisted(session)
        else:
            self._enlist()

    def _enlist(self) -> None:
        assert self.session is not None
        host = self.session.host
        self.send(host.agent, host.enlist, self.session, self.member)

    def enlisted(self, session: SimulatedSession) -> None:
        """Note that the host has this node's record under a lease."""
        if session is not self.session or not session.connected:
            return
        self.is_member = True
        self.update()
        self.send(session.host.agent, session.host.watch, session)
        server = self.search.server
        if server is not None and server is session.host:
            server.lead()

    def lose_lease(self, session: SimulatedSession, lease: int) -> None:
        """Note that the lease has ended, according to the host or to this node's clock."""
        if session is self.session and self.is_member and lease == session.lease:
            self._give_up_membership()

    def lose_store(self, session: SimulatedSession) -> None:
        """Note that the host is unreachable, or no longer host."""
        if session is not self.session or not session.connected:
            return
        session.close()
        self.search.lose_host()
        if self.is_member:
            self._give_up_membership()
        elif not self._awaits_rejoin:
            self.search.regain()

    def _give_up_membership(self) -> None:
        self.is_member = False
        self._awaits_rejoin = True
        if self.search.server is not None:
            self.search.server.stop_leading()
        self.take(LeaseLost())

    def _rejoin(self, gone: int) -> None:
        self._awaits_rejoin = False
        self.update(gone=max(gone, self.member.gone), failures=(), resumed=False)
        if self.session is not None and self.session.connected:
            self._enlist()
        else:
            self.search.regain()

    def thaw(self) -> None:
        """Check the lease first: after a freeze, what was received is old."""
        frozen_at = self.frozen_at
        super().thaw()
        if self.session is not None and frozen_at is not None:
            stood_still = self.bus.now - frozen_at >= self.lease
            if self.session.check() and stood_still:
                self.lose_lease(self.session, self.session.lease)

    # --- worlds ----------------------------------------------------------------------------------

    def hear_world(
        self,
        session: SimulatedSession,
        world: World,
        published: int,
        parts: Json,
        roll: Json | None,
    ) -> None:
        if session is not self.session or not session.connected or world is self._seen:
            return
        self.search.hear_of(list(world.candidates.values()))
        if not self.is_member and world.phase != "closed":
            return
        if world.count:
            self.simulation.has_joined(self)
        takes_up = self.search.takes_up(world.generation)
        if world.count and not takes_up and world.is_under_way:
            return
        if world.count and takes_up:
            if world.generation != self.search.elector.generation:
                self.note(laws.WorldTakenUp(self.bus.now, self.node, world.generation))
            self.search.hold(self.failover.noted(world, {"world": world}, parts, roll))
            self.update(accepted=world.generation)
        self._seen = world
        if world.phase == "agreeing":
            return
        is_older = published < session.since
        self.take(WorldSeen(world.without(self.node) if is_older else world))
        if world.phase == "running" and world.store and world.store == self.member.store:
            self.update(store="")
            self.after(NEXT_STORE_DELAY, self._offer_store)

    def hear_place(self, session: SimulatedSession, place: int) -> None:
        if session is self.session and session.connected and self.is_member:
            self.take(PlaceAllotted(place))

    def hear_confirmed(self, session: SimulatedSession, generation: int) -> None:
        if session is self.session and session.connected and self.failover.is_candidate.is_set():
            self.search.hold(self.failover.confirmed(generation))

    # --- the end ---------------------------------------------------------------------------------

    def _end(self) -> None:
        """Clean up after the state machine has ended."""
        world = self.state.world
        closed = world is not None and world.phase == "closed"
        asked = closed or bool(self.state.leaving)
        self.note(laws.AgentEnded(self.bus.now, self.node, self.state.reason, asked))
        self._flush()
        server = self.search.server
        if server is not None and server.clients > 1 and not server.closed:
            if closed:
                self.after(HOST_CLOSE_TIMEOUT, self.exit)
                return
            if self.member.leaving:
                self.search.hand_over()
                self.after(HAND_OVER_TIMEOUT, self.exit)
                return
        session = self.session
        if session is not None and session.connected:
            self.send(session.host.agent, session.host.goodbye, session)
        self.after(2 * self.bus.delay(self.machine, "") + 0.01, self.exit)

    def exit(self) -> None:
        if self.alive:
            self.simulation.ended(self)

    def call_back(self, to: SimulatedAgent, call: Callable[..., None], *args: Any) -> None:
        """Answer over a connection that the other end opened."""
        self.send(to, call, *args, begins=True)
