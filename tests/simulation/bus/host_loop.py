"""The store and the leader of a simulated node that hosts them.

Leases are renewed continuously while the path is clear, so they need no messages: when the path is
blocked, the last renewal is known, and with it the end of the lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.bus.message_bus import BusTimer
from torchelastic.chaos import laws
from torchelastic.records import replace
from torchelastic.rendezvous import majority, round_state
from torchelastic.rendezvous.choosing import to_allot
from torchelastic.rendezvous.decide import decide
from torchelastic.rendezvous.embedded.client import FAILOVER_RECONNECT_TIMEOUT, RENEWALS_PER_LEASE
from torchelastic.rendezvous.round_state import RoundState, StateUpdate
from torchelastic.rendezvous.world import Member, World

if TYPE_CHECKING:
    from tests.simulation.bus.node_loop import SimulatedAgent

Json = dict[str, Any]


class SimulatedSession:
    """A client's connection to a host, and its lease there."""

    def __init__(self, client: SimulatedAgent, host: SimulatedHost) -> None:
        self.client, self.host = client, host
        self.term = host.term
        self._opened = client.bus.now
        #: Whether the client has not given it up; whether the host counts its lease.
        self.connected = self.leased = False
        self.watches = False
        #: The store's revision when the current lease began.
        self.since = 0
        #: The number of the lease on this connection.
        self.lease = 0
        #: When the lease ends on each side's clock; None: it is being renewed.
        self._ends: float | None = None
        self._ends_there: float | None = None
        self._losing = False

    def look(self) -> None:
        """Check the path; called whenever it, or one of its two ends, has changed."""
        client, host = self.client, self.host.agent
        bus = client.bus
        up = (client.machine, host.machine) not in bus.cut
        down = (host.machine, client.machine) not in bus.cut
        serves = host.alive and not self.host.closed
        if self.connected and up and down and not serves and not self._losing:
            self._losing = True  # the machine refuses connections
            client.after(2 * bus.delay(client.machine, host.machine), self._refused)
        answered = up and down and serves and host.frozen_at is None
        if self.connected and client.alive and client.frozen_at is None and answered:
            self._ends = None
        elif self._ends is None and client.alive:
            self._ends = self._last_renewal() + client.lease
            client.after(self._ends - bus.now, self.check)
        heard = self.connected and up and client.runs
        if heard:
            self._ends_there = None
        elif up and not client.alive and self.leased and host.runs and not self._steps_alone():
            host.after(2 * bus.delay(client.machine, host.machine), self.host.expire, self)
        elif self._ends_there is None:
            self._ends_there = (
                self._last_renewal() + client.lease + bus.delay(client.machine, host.machine)
            )
            host.after(self._ends_there - bus.now, self._expire)

    def _steps_alone(self) -> bool:
        """Return whether the client trains alone, so that a refused connection proves nothing."""
        world = self.host.world
        return world is not None and world.steps_without(self.host.agent.node)

    def _last_renewal(self) -> float:
        every = self.client.lease / RENEWALS_PER_LEASE
        now = self.client.bus.now
        return now - (now - self._opened) % every

    def check(self) -> bool:
        """Return whether the client still holds its lease; ends it if it may be over."""
        now = self.client.bus.now
        if self._ends is None or now < self._ends:
            return True
        host = self.host.agent
        clear = self.client.bus.is_clear(self.client.machine, host.machine)
        if clear and host.runs and not self.host.closed:
            self.client.lose_lease(self, self.lease)
        else:
            self.client.lose_store(self)
        return False

    def _refused(self) -> None:
        self.client.after(FAILOVER_RECONNECT_TIMEOUT, self.client.lose_store, self)

    def _expire(self) -> None:
        if self._ends_there is not None and self.client.bus.now >= self._ends_there:
            self.host.expire(self)

    def renew(self) -> None:
        """Open a new lease over the same connection."""
        self._opened = self.client.bus.now
        self._ends = self._ends_there = None
        self.leased = True
        self.lease += 1

    def close(self) -> None:
        """Close the connection, as the client."""
        self.connected = False
        self._ends = None
        self.look()
        self._ends = None


class MemberRow(NamedTuple):
    """A member's record in the store, and the connection that holds its lease; None: a voter that
    has not connected yet."""

    member: Member
    created: int
    modified: int
    session: SimulatedSession | None


class SimulatedHost:
    """Serves the store, and leads while its own agent is a member."""

    def __init__(
        self,
        agent: SimulatedAgent,
        term: int,
        *,
        world: World | None,
        roll: Json | None,
        confirmed: int,
        voters: list[Member],
        may_begin_at: float,
        dead: frozenset[str],
    ) -> None:
        self.agent = agent
        self.term = term
        self.world = world
        self.roll = roll
        self.parts = world.parts() if world is not None else {}
        #: The last world that the store has as confirmed.
        self.confirmed = confirmed
        #: The revision at which the world was published.
        self._published = 0
        self.rows: dict[str, MemberRow] = {}
        self.sessions: list[SimulatedSession] = []
        self.closed = False
        self.revision = 0
        self._may_begin_at = may_begin_at
        self._dead = dead
        self._state: RoundState | None = None
        #: Changed members; None: gone.
        self._changed: dict[str, MemberRow | None] = {}
        self._wake: BusTimer | None = None
        self._wakes_at = 0.0
        for member in voters:
            self._put(member, None)
        agent.after(agent.lease, self._forget_absent)

    # --- the store -------------------------------------------------------------------------------

    def _put(self, member: Member, session: SimulatedSession | None) -> None:
        self.revision += 1
        before = self.rows.get(member.node)
        created = before.created if before is not None else self.revision
        row = MemberRow(member, created, self.revision, session)
        self.rows[member.node] = row
        self._change(member.node, row)

    def _delete(self, node: str) -> None:
        del self.rows[node]
        self._change(node, None)

    def _change(self, node: str, row: MemberRow | None) -> None:
        if self._state is not None:
            if row is None and node in self._changed:
                self._take_up()  # its last report counts
            self._changed[node] = row
            self._decide_soon()

    def _forget_absent(self) -> None:
        """Forget voters that have not come in time."""
        for node in [node for node, row in self.rows.items() if row.session is None]:
            self._delete(node)

    def admit(self, client: SimulatedAgent) -> tuple[SimulatedSession, bool]:
        """Connect a client; return whether it already had a lease here."""
        session = SimulatedSession(client, self)
        row = self.rows.get(client.node)
        resumed = row is not None and row.session is None and client.takes_rows_along
        if row is not None and resumed:
            self.rows[client.node] = row._replace(session=session)
            session.leased = True
            self.agent.after(client.lease, self._forget_half_open, session)
        self.sessions = [one for one in self.sessions if one.client is not client] + [session]
        return session, resumed

    def _forget_half_open(self, session: SimulatedSession) -> None:
        """Forget a client that never received its welcome."""
        if not session.connected:
            self.expire(session)

    def enlist(self, session: SimulatedSession, member: Member) -> None:
        """Open a lease for a client, with its record."""
        if self.closed or not session.connected:
            return
        session.renew()
        session.since = self.revision
        self._put(member, session)
        self.agent.send(session.client, session.client.enlisted, session)
        session.look()

    def watch(self, session: SimulatedSession) -> None:
        if self.closed or not session.connected:
            return
        session.watches = True
        if session not in self.sessions:  # a hello that was delayed by a freeze
            self.sessions.append(session)
        if self.world is not None:
            self._show(session, self.world)
        place = self._state.places.get(session.client.node) if self._state is not None else None
        if place is not None:
            self.agent.send(session.client, session.client.hear_place, session, place)
        if self.confirmed >= 0:
            self.agent.send(session.client, session.client.hear_confirmed, session, self.confirmed)

    def report(self, session: SimulatedSession, member: Member) -> None:
        row = self.rows.get(member.node)
        if self.closed or not session.connected:
            return
        if row is None or row.session is not session or not session.leased:
            self.agent.send(session.client, session.client.lose_lease, session, session.lease)
            return
        self._put(member, session)

    def expire(self, session: SimulatedSession) -> None:
        """End a lease."""
        if self.closed or not session.leased:
            return
        session.leased = False
        row = self.rows.get(session.client.node)
        if row is not None and row.session is session:
            self._delete(session.client.node)
        if session.connected:
            self.agent.send(session.client, session.client.lose_lease, session, session.lease)

    def goodbye(self, session: SimulatedSession) -> None:
        """End a client's lease and connection."""
        session.connected = False
        self.expire(session)

    def close(self) -> None:
        """Stop being host."""
        self.closed = True
        self.stop_leading()
        for session in self.sessions:
            if session.connected:
                self.agent.send(session.client, session.client.lose_store, session)

    def _show(self, session: SimulatedSession, world: World) -> None:
        self.agent.send(
            session.client,
            session.client.hear_world,
            session,
            world,
            self._published,
            self.parts,
            self.roll,
        )

    @property
    def clients(self) -> int:
        return sum(session.connected for session in self.sessions)

    # --- the leader ------------------------------------------------------------------------------

    def lead(self) -> None:
        """Start to lead, from what the store holds."""
        now = self.agent.bus.now
        state = RoundState(may_begin_at=self._may_begin_at)
        if self.world is not None:
            state = round_state.taken_over(self.world, now)
        rules = self.agent.simulation.rules
        state = round_state.hosted(
            state,
            self.agent.node,
            self.term,
            self.roll,
            confirmed=self.confirmed,
            quorum=rules.quorum,
        )
        self._state = replace(state, dead=self._dead)
        if self.confirmed >= 0:
            self.agent.note(laws.WorldConfirmed(now, self.confirmed))
        rows = sorted(self.rows.items(), key=lambda item: item[1].modified)
        self._changed = dict(rows)
        self._take_up()
        self._state = round_state.with_missing_lost(self._state)
        self._decide_soon()

    def stop_leading(self) -> None:
        self._state = None
        self._changed.clear()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _take_up(self) -> None:
        assert self._state is not None
        draft, now = StateUpdate(self._state), self.agent.bus.now
        for node, row in self._changed.items():
            if row is None:
                draft.lose(node)
            else:
                draft.see(row.member, row.created, now)
        self._changed.clear()
        self._state = draft.finish()

    def _decide_soon(self) -> None:
        """Decide after everything that happens at the same time."""
        if self._wake is not None:
            if self._wakes_at == self.agent.bus.now:
                return
            self._wake.cancel()
        self._wakes_at = self.agent.bus.now
        self._wake = self.agent.after(0.0, self._decide)

    def _decide(self) -> None:
        """Note confirmations, decide and publish until there is nothing more to publish."""
        self._wake = None
        if self._changed:
            self._take_up()
        rules, now = self.agent.simulation.rules, self.agent.bus.now
        for _ in range(PUBLISH_LIMIT):
            assert self._state is not None
            self._note_confirmed()
            self._allot()
            decision = decide(rules, self._state, now)
            if decision.world is None:
                if decision.wake_at is not None:
                    self._wakes_at = max(decision.wake_at, now)
                    self._wake = self.agent.after(self._wakes_at - now, self._decide)
                return
            self._publish(decision.world)
            if decision.world.phase == "closed":
                self.stop_leading()
                return
        raise AssertionError(f"the leader publishes without end: {self.world}")

    def _allot(self) -> None:
        """Tell nodes their places in replicas."""
        assert self._state is not None
        places = to_allot(self.agent.simulation.rules, self._state)
        self._state = round_state.allotted(self._state, places) if places else self._state
        for session in self.sessions:
            node = session.client.node
            if node in places and session.watches and session.connected:
                self.agent.send(session.client, session.client.hear_place, session, places[node])

    def _note_confirmed(self) -> None:
        assert self._state is not None
        before, self._state = self._state, round_state.confirmed(self._state)
        if self._state.roll is not before.roll and self._state.roll is not None:
            self.confirmed = self._state.roll.generation
            self.agent.note(laws.WorldConfirmed(self.agent.bus.now, self.confirmed))
            for session in self.sessions:
                if session.watches and session.connected:
                    self.agent.send(
                        session.client, session.client.hear_confirmed, session, self.confirmed
                    )

    def _publish(self, world: World) -> None:
        assert self._state is not None
        before, now = self._state.world, self.agent.bus.now
        self._state = round_state.published(self._state, world, now)
        if before is None or not world.has_list_of(before):
            self.parts = world.parts()
            roll = self._state.roll
            if roll is not None:
                self.roll = majority.to_json(roll)
            if world.nodes:
                self._note_formed(world)
        self.world = world
        self.revision += 1
        self._published = self.revision
        if world.phase == "closed":
            blamed = world.cause.node if world.cause is not None else ""
            closed = laws.ClosedJob(now, world.generation, world.exitcode, world.reason, blamed)
            self.agent.note(closed)
        for session in self.sessions:
            if session.watches and session.connected:
                self._show(session, world)

    def _note_formed(self, world: World) -> None:
        """Note the electorate as the laws define it: the nodes of each world and its host."""
        roll = self._state.roll if self._state is not None else None
        electorates = [] if roll is None else [*roll.before, roll.latest]
        self.agent.note(
            laws.WorldPublished(
                self.agent.bus.now,
                world.generation,
                world.host,
                world.members,
                tuple(
                    laws.LawElectorate(each.nodes | {each.host}, each.host)
                    for each in electorates
                    if each.nodes
                ),
                frozenset(self.rows),
            )
        )


#: A leader that publishes this often in a row without news would never stop.
PUBLISH_LIMIT = 20
