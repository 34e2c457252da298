"""A simulated node's search for a host, and its time as host: the loop of `embedded.node`.

`majority` and `Poll` decide which nodes to ask, what to answer, and what follows from the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.bus.host_loop import SimulatedHost, SimulatedSession
from tests.simulation.bus.message_bus import BusTimer
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import (
    EXCHANGE_TIMEOUT,
    LAST_CALL_TIMEOUT,
    STOPPING_TIMEOUT,
    AnnouncementReply,
    Ballot,
    HostAnnouncement,
    Returns,
)
from torchelastic.rendezvous.embedded.election import Poll, Search
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.node import (
    ANNOUNCEMENTS_PER_LEASE,
    FIRST_TERM,
    HOST_TIMEOUT,
    RETRY_FACTOR,
)
from torchelastic.rendezvous.leader import ROLL_KEY
from torchelastic.rendezvous.majority import Candidacy, Elector
from torchelastic.rendezvous.world import WORLD_KEY

if TYPE_CHECKING:
    from tests.simulation.bus.node_loop import SimulatedAgent

#: The address of the job's endpoint: the agent on that machine.
ENDPOINT = "@"
#: The most redirects to a host that a node follows.
REDIRECTS_LIMIT = 3


class QuestionRound:
    """One question to many nodes, and their answers."""

    def __init__(self, asked: set[str], then: Callable[[Returns], None]) -> None:
        self.returns = Returns()
        self.left = asked
        self.is_last_call = False
        self.then: Callable[[Returns], None] | None = then

    def close(self) -> None:
        if self.then is not None:
            then, self.then = self.then, None
            then(self.returns)


class SimulatedEmbeddedNode:
    """One node at the embedded rendezvous."""

    def __init__(self, agent: SimulatedAgent, last: SimulatedEmbeddedNode | None = None) -> None:
        self._agent = agent
        self.elector = Elector(agent.node)
        self.holding = FailoverState()
        #: Whether it resumed its last agent's state, and has had no host itself.
        self._resumed = last is not None
        if last is not None:
            voter = last.elector
            self.elector = Elector(agent.node, voter.term, voter.chosen, voter.generation)
            self.holding = last.holding
        self.server: SimulatedHost | None = None
        #: Whether it listens at the endpoint of the job.
        self._is_endpoint = agent.machine == agent.simulation.endpoint
        #: Whether it may start the job: only the first agent at the endpoint; later ones have its
        #: file, and know that there is a job.
        self._founds = self._is_endpoint and agent.is_first
        self._yielded_to = 0
        #: Whether no worker of this node is in a world, so that it may vote.
        self._stopped = True
        #: Calls that wait for that.
        self._waiting: list[Callable[[], None]] = []
        self._announced_hosts: list[str] = []
        self._heard_of: list[str] = []
        self._given_up = ""
        self._search = Search(0.0)
        self._next: BusTimer | None = None
        self._votes: QuestionRound | None = None
        self._searching = False
        self._announcing: BusTimer | None = None

    # --- what the agent asks ---------------------------------------------------------------------

    def takes_up(self, generation: int) -> bool:
        has_it = generation == self.elector.generation
        return has_it or majority.may_take_up(self.elector, generation)

    def hold(self, holding: FailoverState) -> None:
        if holding is self.holding:
            return
        if holding.roll.generation > self.holding.roll.generation:
            self._stopped = False
        self.holding = holding.following(self.holding)
        if holding.roll.generation != self.elector.generation:
            self.elector = replace(self.elector, generation=holding.roll.generation)

    def hear_of(self, addresses: list[str]) -> None:
        self._heard_of = addresses

    def say_goodbye(self) -> None:
        self.elector = replace(self.elector, leaving=True)

    def lose_host(self) -> None:
        self.elector = replace(self.elector, has_host=False)

    def follow(self, session: SimulatedSession) -> None:
        self._searching = self._resumed = False
        self._stopped = False
        host = session.host.agent.node
        self.elector = majority.following(self.elector, session.term, host)

    def open(self) -> None:
        """Find a host, or become it."""
        self._look_for_host()

    def regain(self) -> None:
        """After losing the host, with no worker of this node in a world: find the next host, or
        become it."""
        agent = self._agent
        self._leave()
        agent.takes_rows_along = True
        self._stop()
        self._look_for_host()

    def hand_over(self) -> None:
        """As a host that leaves with no worker left: vote for the next host before going."""
        self._leave()
        self._agent.takes_rows_along = True
        self.elector = replace(self.elector, leaving=False, hands_over=True)
        self._stop()

    def _leave(self) -> None:
        agent = self._agent
        if self.server is not None:
            self._yield(self.elector.term)
        session, agent.session = agent.session, None
        agent.is_member = False
        if session is not None:
            self._given_up = session.host.agent.node
            if session.connected:
                session.close()
        self.lose_host()

    def _stop(self) -> None:
        self._stopped = True
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer()

    # --- looking for a host ----------------------------------------------------------------------

    def _look_for_host(self) -> None:
        self._searching = True
        self._search = Search(self._agent.bus.now)
        self._ask_around()

    def _ask_around(self) -> None:
        self._next = None
        if not self._searching:
            return
        if not self.holding.roll.latest.nodes and not self._founds:
            announced, self._announced_hosts = self._announced_hosts, []
            endpoint = [] if self._is_endpoint else [ENDPOINT]
            self._join_one_of([*announced, *endpoint, *self._heard_of], self._wait)
        elif self._may_found():
            self._become_host(FIRST_TERM, Returns())
        else:
            term = majority.next_term(self.elector, self._search.heard)
            self._ask_for_votes(term, binding=False, of=None, then=partial(self._judge, term))

    def _may_found(self) -> bool:
        is_first = self._yielded_to <= FIRST_TERM and self.holding.roll.generation < 0
        return is_first and self._founds

    @property
    def poll(self) -> Poll:
        own = ENDPOINT if self._is_endpoint else ""
        return Poll(self.elector, self.holding, places=(ENDPOINT,), own_place=own)

    def _peers(self, but: set[str]) -> list[str]:
        places = [] if self._is_endpoint else [ENDPOINT]
        known = self.holding.addresses
        return [
            *places,
            *(node for node in known if node not in but and node != self._agent.node),
        ]

    def _judge(self, term: int, returns: Returns) -> None:
        self._search.hear(returns)
        announced, self._announced_hosts = self._announced_hosts, []
        waited = self._agent.bus.now - self._search.begun > self._agent.lease
        hosts = [*announced, *self.poll.hosts(returns, waited=waited)]
        self._join_one_of(hosts, lambda: self._run_or_wait(term, returns))

    def _run_or_wait(self, term: int, returns: Returns) -> None:
        waited = self._agent.bus.now - self._search.begun
        if self._resumed and self.poll.why_outdated(returns, waited=waited > self._agent.lease):
            self._agent.simulation.start_anew(self._agent)
            return
        is_our_turn = self._search.is_our_turn(self.poll, term, self._agent.bus.now)
        if is_our_turn and self.poll.is_won(returns):
            self._run_for_election(returns)
        else:
            self._wait()

    def _wait(self) -> None:
        if self._searching:
            self._next = self._agent.after(self._search.next_pause(), self._ask_around)

    def _hear_news(self) -> None:
        if self._votes is not None and self._votes.then is not None:
            self._votes.then = None  # a frozen peer would keep this node from following the host
            self._next = self._agent.after(0.0, self._ask_around)
        elif self._next is not None:
            self._next.cancel()
            self._next = self._agent.after(0.0, self._ask_around)

    # --- asking others ---------------------------------------------------------------------------

    def _ask_for_votes(
        self,
        term: int,
        *,
        binding: bool,
        of: Sequence[str] | None,
        then: Callable[[Returns], None],
    ) -> QuestionRound:
        agent = self._agent
        generation, is_confirmed = self.elector.generation, self.holding.is_confirmed
        asked = Candidacy(term, agent.node, generation, binding, is_confirmed)
        places = [key for key in self._peers(set()) if of is None or key in of]
        made = QuestionRound(set(places), then)
        for key in places:
            target = agent.simulation.reached_at(key)
            if target is not None and target.alive:
                agent.send(
                    target, target.search.hear_vote_request, agent, key, asked, made, begins=True
                )
            elif agent.bus.is_clear(agent.machine, agent.simulation.machine_of(key)):
                agent.after(0.004, self._refused, key, made)
        agent.after(STOPPING_TIMEOUT if binding else EXCHANGE_TIMEOUT, made.close)
        if not places:
            made.close()
        return made

    def _refused(self, key: str, made: QuestionRound) -> None:
        made.returns.refused.add(key)
        self._answered(key, made)

    def _returned(self, key: str, made: QuestionRound, ballot: Ballot) -> None:
        if made.then is not None:
            made.returns.ballots[key] = ballot
            self._answered(key, made)

    def _answered(self, key: str, made: QuestionRound) -> None:
        made.left.discard(key)
        if not made.left:
            made.close()
        elif not made.is_last_call and self.poll.suffices(made.returns):
            made.is_last_call = True
            self._agent.after(LAST_CALL_TIMEOUT, made.close)

    def hear_vote_request(
        self, sender: SimulatedAgent, key: str, asked: Candidacy, made: QuestionRound
    ) -> None:
        if asked.binding and not self._stopped and not majority.refusal(self.elector, asked):
            self._waiting.append(lambda: self._answer(sender, key, asked, made))
        else:
            self._answer(sender, key, asked, made)

    def _answer(
        self, sender: SimulatedAgent, key: str, asked: Candidacy, made: QuestionRound
    ) -> None:
        why = majority.refusal(self.elector, asked)
        if not why:
            self.elector = majority.voted(self.elector, asked)
            self.holding = self.holding.told(asked)
        ballot = self._ballot(why)
        self._agent.send(sender, sender.search._returned, key, made, ballot, begins=True)
        if self.elector.hands_over and asked.binding and not why:
            self._agent.after(0.1, self._agent.exit)

    def _ballot(self, why: str) -> Ballot:
        agent = self._agent
        brings = not why and agent.takes_rows_along
        return Ballot(
            node=agent.node,
            granted=not why,
            why=why,
            term=self.elector.term,
            generation=self.elector.generation,
            hosts=self._known_hosts(),
            lease=agent.node if brings else "",
            seconds=agent.lease,
            rows=[agent.member] if brings else [],  # type: ignore[list-item]
        )

    def _known_hosts(self) -> list[str]:
        if not self.elector.has_host:
            return []
        session = self._agent.session
        if self.server is not None:
            return [self._agent.node]
        return [session.host.agent.node] if session is not None else []

    # --- becoming a client -----------------------------------------------------------------------

    def _join_one_of(
        self, hosts: Sequence[str], otherwise: Callable[[], None], hops: int = REDIRECTS_LIMIT
    ) -> None:
        """Try the hosts one after the other, and those they redirect to."""
        if not self._searching:
            return
        if not hosts:
            otherwise()
            return
        agent, (address, *others) = self._agent, hosts
        target = agent.simulation.reached_at(address)
        attempt = ConnectAttempt(
            lambda more: self._join_one_of(
                [*more, *others] if hops else others, otherwise, hops - bool(more)
            )
        )
        if target is not None and target.alive:
            term = self.elector.term
            agent.send(target, target.search.hear_hello, agent, term, attempt, begins=True)
        elif agent.bus.is_clear(agent.machine, agent.simulation.machine_of(address)):
            agent.after(0.004, attempt.close, ())
        patience = RETRY_FACTOR * self._search.pause if address == self._given_up else HOST_TIMEOUT
        agent.after(min(patience, HOST_TIMEOUT), attempt.close, ())

    def hear_hello(self, client: SimulatedAgent, term: int, attempt: ConnectAttempt) -> None:
        """Handle the hello of a node that wants to be a client of the store."""
        server = self.server
        if server is None or majority.must_step_down(self.elector.term, term):
            hosts = [node for node in self._known_hosts() if node != self._agent.node]
            self._agent.send(client, attempt.close, hosts, begins=True)
            if server is not None:
                self._yield(term)
            return
        session, resumed = server.admit(client)
        self._agent.send(client, client.search.welcomed, session, resumed, attempt, begins=True)

    def welcomed(self, session: SimulatedSession, resumed: bool, attempt: ConnectAttempt) -> None:
        if attempt.then is None or not self._searching or session.term < self.elector.term:
            return
        attempt.then = None
        self._agent.follow(session, resumed)

    # --- being host ------------------------------------------------------------------------------

    def _run_for_election(self, wished: Returns) -> None:
        """Ask the nodes that would grant their vote for it."""
        term = majority.next_term(self.elector, wished.latest_term)
        ours = Candidacy(term, self._agent.node, self.elector.generation, binding=True)
        if majority.refusal(self.elector, ours):
            self._wait()
            return
        self.elector = majority.voted(self.elector, ours)
        self.holding = self.poll.found(wished)
        willing = [key for key, ballot in wished.ballots.items() if ballot.granted]

        def count(returns: Returns) -> None:
            if not self._searching:
                return
            returns.refused |= wished.refused
            for key, ballot in wished.ballots.items():
                returns.ballots.setdefault(key, replace(ballot, granted=False))
            if self.poll.is_won(returns) and self.elector.term == term:
                self._become_host(term, returns)
            else:
                self._search.lost_election(self._agent.bus.now)
                self._wait()

        self._votes = self._ask_for_votes(term, binding=True, of=willing, then=count)

    def _become_host(self, term: int, returns: Returns) -> None:
        agent = self._agent
        self.elector = replace(self.elector, term=term, chosen=agent.node)
        may_begin_at = agent.bus.now + agent.lease
        dead = self.poll.dead(returns)
        granted = [ballot for ballot in returns.ballots.values() if ballot.granted]
        rows = self.holding.rows
        voters = [row for ballot in (self._ballot(""), *granted) for row in ballot.rows]
        self.server = SimulatedHost(
            agent,
            term,
            world=rows[WORLD_KEY]["world"] if WORLD_KEY in rows else None,
            roll=rows.get(ROLL_KEY),
            confirmed=self.holding.roll.generation if self.holding.is_confirmed else -1,
            voters=voters,  # type: ignore[arg-type]
            may_begin_at=may_begin_at,
            dead=dead,
        )
        session, resumed = self.server.admit(agent)
        for ballot in granted:
            self._announce_to(ballot.node)
        agent.follow(session, resumed)
        self._announcing = agent.after(
            agent.lease / ANNOUNCEMENTS_PER_LEASE, self._tell_the_uninformed
        )

    def _announcement(self) -> HostAnnouncement:
        node = self._agent.node
        return HostAnnouncement(self.elector.term, node, self.elector.generation, [node])

    def _announce_to(self, address: str) -> None:
        target = self._agent.simulation.reached_at(address)
        if target is not None and target.alive:
            said = self._announcement()
            self._agent.send(
                target, target.search.hear_announcement, self._agent, said, begins=True
            )

    def _tell_the_uninformed(self) -> None:
        server = self.server
        if server is None:
            return
        for address in self._peers(set(server.rows)):
            self._announce_to(address)
        self._announcing = self._agent.after(
            self._agent.lease / ANNOUNCEMENTS_PER_LEASE, self._tell_the_uninformed
        )

    def hear_announcement(self, sender: SimulatedAgent, announcement: HostAnnouncement) -> None:
        """Note that another node says it is host."""
        noted = AnnouncementReply(self.elector.term, self._known_hosts())
        self._agent.send(sender, sender.search.hear_noted, noted, begins=True)
        if announcement.node == self._agent.node:
            return
        if not self.elector.has_host:
            if self.poll.may_follow(announcement.term, announcement.generation):
                self._announced_hosts += announcement.addresses
                self._hear_news()
        elif majority.must_step_down(self.elector.term, announcement.term):
            self._announced_hosts += announcement.addresses
            if self.server is not None:
                self._yield(announcement.term)
            elif self._agent.session is not None:
                self._agent.lose_store(self._agent.session)

    def hear_noted(self, noted: AnnouncementReply) -> None:
        if self.server is not None and majority.must_step_down(self.elector.term, noted.term):
            self._announced_hosts += noted.hosts
            self._yield(noted.term)

    def _yield(self, term: int) -> None:
        """Stop being host."""
        self._yielded_to = max(self._yielded_to, term)
        self.lose_host()
        server, self.server = self.server, None
        if self._announcing is not None:
            self._announcing.cancel()
        if server is not None:
            server.close()


class ConnectAttempt:
    """One attempt to become a client; `then` is called with the places to try next."""

    def __init__(self, then: Callable[[Sequence[str]], None]) -> None:
        self.then: Callable[[Sequence[str]], None] | None = then

    def close(self, more: Sequence[str]) -> None:
        if self.then is not None:
            then, self.then = self.then, None
            then(more)
