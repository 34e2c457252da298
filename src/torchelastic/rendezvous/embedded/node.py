"""This node at the embedded rendezvous: a client of the node that hosts the store, or the host.

Every node has a listener, where other agents reach it. When the host is lost, the nodes look for
another one, and elect one of themselves if there is none (the rules are in `majority`):

    no host known   ask every known peer: one has a host -> become its client
                                          a majority has none, and it is our turn -> ask for
                                          votes -> become host
    host            serve; announce itself to missing nodes and to the endpoints;
                    hear of a later term -> stop being host
    client          the connection is lost -> no host known
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from torchelastic.clock import Clock
from torchelastic.config import format_endpoint
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Returns, announce, ask_for_votes, unless
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.election import DEAD, Poll, Search
from torchelastic.rendezvous.embedded.failover_state import Holding, LeasedRows, table_of
from torchelastic.rendezvous.embedded.host_timeouts import grace_of, others_stay, trains_alone
from torchelastic.rendezvous.embedded.server import EmbeddedServer
from torchelastic.rendezvous.embedded.tie_breaker import TieBreaker
from torchelastic.rendezvous.embedded.voter_file import Voter, VoterFile
from torchelastic.rendezvous.embedded.votes import (
    QUESTIONS,
    Ballot,
    HostAnnouncement,
    Noted,
    VoteRequest,
)
from torchelastic.rendezvous.majority import Candidacy, Elector
from torchelastic.rendezvous.store import Json
from torchelastic.rendezvous.witness.vote_keys import Witness
from torchelastic.rendezvous.world import MEMBER_PREFIX, PART_PREFIX, WORLD_KEY
from torchelastic.transport import frames
from torchelastic.transport.auth import Credentials
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.frames import Row
from torchelastic.transport.link import Link
from torchelastic.transport.listener import Handler, Listener
from torchelastic.transport.own_endpoint import OwnEndpoint
from torchelastic.transport.ring import answer_that_we_live

logger = logging.getLogger(__name__)

#: Seconds a host that was named has to answer. One that this node has just given up itself has so
#: many times the pause at first: others may name it who are about to give it up, too.
HOST_ANSWERS, SECOND_CHANCE = 1.0, 5.0
#: How often a host tells others that it is host, in a lease.
ANNOUNCEMENTS = 3
#: How many missing nodes it tells at a time.
ANNOUNCED_AT_ONCE = 16
LOOPBACK = "127.0.0.1"
#: Of whoever begins a job at the only endpoint.
FIRST_TERM = 1
SUCCEEDED = "Another node hosts the rendezvous now."
#: How often a node without a host says what it waits for.
SAY_EVERY = 60.0


class _EndpointIsOurs(Exception):
    """The name of the endpoint now resolves to this machine."""


class EmbeddedNode:
    """One node at the embedded rendezvous of one job; call `open` first. Made in a running loop."""

    def __init__(
        self,
        places: Sequence[Endpoint],
        node: str,
        *,
        clock: Clock,
        lease: float,
        local_addr: str | None = None,
        is_host: bool | None = None,
        two_node_takeover: bool = False,
        may_be_remembered: bool = True,
        passes_workers_on: bool = False,
        witness: Witness | None = None,
        file: VoterFile | None = None,
    ) -> None:
        """`passes_workers_on`: workers reach their store through this node's port, as with
        torchrun's static rendezvous. `file`: where this node keeps its vote."""
        self._node = node
        self._clock = clock
        self._lease = lease
        self._local_addr = local_addr
        self._two_node_takeover = two_node_takeover
        #: Others may know a job of this id at our endpoint, from an agent that was here before us.
        self._may_be_remembered = may_be_remembered and places[0].port != 0
        shown = places[0].credentials
        self._listener = Listener(places[0].job, secret=shown.secret, tls=shown.server_tls)
        if passes_workers_on:
            self._listener.pass_workers_on(self._store_of_workers)
        self._endpoints = OwnEndpoint(places, self._listener, clock=clock, is_host=is_host)
        self._file = file
        last = (file.resumed if file is not None else None) or Voter()
        self.witness = witness
        self._tie_breaker = TieBreaker(witness, node, last.token)
        self._elector = Elector(node, last.term, last.chosen, last.generation)
        self._holding = last.holding
        self._leased_rows = LeasedRows(lease)
        #: The latest term for which this node, as host, has stepped down.
        self._yielded_to = 0
        #: Set while no worker of this node is in a world, so that it may vote.
        self._stopped = asyncio.Event()
        self._stopped.set()
        #: Set when it has voted for another node.
        self._voted = asyncio.Event()
        #: This node's address, as found out when it was somebody's client, and the port it had.
        self._addr, self._known_port = last.address_of(node)
        #: Set when there is news of a host.
        self._news = asyncio.Event()
        self._rumours: list[str] = []
        self._heard_of: Sequence[str] = ()
        self._announcing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._store: EmbeddedStore | None = None
        self.server: EmbeddedServer | None = None
        #: Nodes of the last world that are known to be no more, though they never said goodbye.
        self.dead: frozenset[str] = frozenset()
        #: When this node, as the host of a store that has no world yet, may form the first one.
        self.may_begin_at = 0.0

    # What the owner asks

    @property
    def job(self) -> str:
        return self._endpoints.places[0].job

    @property
    def store(self) -> EmbeddedStore:
        assert self._store is not None, "read before the node opened"
        return self._store

    @property
    def term(self) -> int:
        return self._elector.term

    @property
    def is_host(self) -> bool:
        return self.server is not None

    @property
    def loss(self) -> str:
        """The reason why the store is lost; empty while it is not."""
        return self.store.loss

    @property
    def addr(self) -> str:
        """The address where peers reach this node."""
        return self._local_addr or self._addr

    @property
    def peer(self) -> str:
        """The address where peers reach its listener."""
        return format_endpoint(self.addr, self._listener.port)

    @property
    def endpoint(self) -> str:
        """The best endpoint for a new node to find the job."""
        return self.peer if self.is_host else str(self.store.place)

    def ring(self, node: str, on_suspicion: Callable[[set[str]], None]) -> None:
        """None: the host of the store has a connection to every node."""

    @property
    def credentials(self) -> Credentials:
        return self._endpoints.places[0].credentials

    def serve(self, purpose: str, handler: Handler) -> None:
        """Pass connections that other agents make for this purpose to a handler."""
        self._listener.serve(purpose, handler)

    def takes_up(self, generation: int) -> bool:
        """Return whether this node may act on a world that its host shows."""
        has_it = generation == self._elector.generation
        return has_it or majority.may_take_up(self._elector, generation)

    def hold(self, holding: Holding) -> None:
        """Remember a world that this node has taken up, or more details of it."""
        if holding is self._holding:
            return  # another phase of the same world
        if holding.roll.generation > self._holding.roll.generation:
            self._stopped.clear()
        self._holding = holding.following(self._holding)
        self._elector = replace(self._elector, generation=holding.roll.generation)

    async def kept(self) -> None:
        """Return when this node's vote is on disk: others may hear of it only then."""
        if self._file is not None:
            await self._file.keep(self._elector, self._holding, self._tie_breaker.token)

    def hear_of(self, addresses: Sequence[str]) -> None:
        """Remember agents that may know where the store is if it is lost."""
        self._heard_of = addresses

    def say_goodbye(self) -> None:
        """Note that this node leaves and has said so."""
        self._elector = replace(self._elector, leaving=True)

    # Joining

    async def open(self, timeout: float | None, say: Callable[[str], None] = logger.info) -> None:
        """Listen, and become host or client of the job; wait up to `timeout` seconds for a host,
        and say now and then what it waits for."""
        self._listener.serve(frames.STORE, self._say_where)
        self._listener.serve(frames.SUCCESSION, self._converse)
        self._listener.serve(frames.RING, answer_that_we_live)
        await self._endpoints.listen(self._known_port)
        if self._endpoints.ours is None and not self._holding.roll.latest.nodes:
            await self._wait_for_host(timeout, say)
        else:
            await self._find_host(timeout, say)

    async def regain(
        self, rows: Mapping[str, Json], *, timeout: float | None, say: Callable[[str], None]
    ) -> bool:
        """After losing the host, with no worker of this node in a world: find the next host, or
        become it.

        `rows` are this node's rows in the store under its lease; returns whether they are there
        under a lease again. Raises `RendezvousLost` when the time is up.
        """
        if self.term == 0:
            raise RendezvousLost(self.store.loss)  # of a store that nobody takes over
        await self._leave()
        self._leased_rows = LeasedRows(self._lease, rows)
        self._stopped.set()
        if not self._holding.roll.latest.nodes and self._endpoints.ours is None:
            await self._wait_for_host(timeout, say)
        else:
            await self._find_host(timeout, say)
        return self.store.has_lease

    async def hand_over(self, rows: Mapping[str, Json], seconds: float) -> None:
        """As a host that leaves with no worker left: vote for the next host before going.

        `rows` as in `regain`. Waits up to `seconds` to be asked.
        """
        server = self.server
        if server is None or not others_stay(server.rows(MEMBER_PREFIX), self._node):
            return
        await self._leave("The host is leaving the job.")
        self._leased_rows = LeasedRows(self._lease, rows)
        # Nobody else counts on its consent: it was its own host.
        self._elector = replace(self._elector, leaving=False, hands_over=True)
        self._stopped.set()
        voted = asyncio.ensure_future(self._voted.wait())
        await asyncio.wait({voted}, timeout=seconds)
        voted.cancel()

    async def close(self, others: float = 0.0, *, ended: bool = False) -> None:
        """Close; a host waits up to `others` seconds for the other nodes to go first, and removes
        the witness's keys of a job that has `ended`."""
        self._elector = replace(self._elector, has_host=False)
        for task in self._tasks:
            task.cancel()
        if self._store is not None:
            await self._store.close()
        if self.server is not None:
            if others:
                await self.server.wait_alone(others)
            await self.server.close()
        await self._listener.close()
        await self._tie_breaker.close(ended=ended)

    async def _wait_for_host(self, timeout: float | None, say: Callable[[str], None]) -> None:
        """Wait for a host, as a node without a vote."""

        async def look() -> None:
            await self._endpoints.look()
            if self._endpoints.ours is not None:
                raise _EndpointIsOurs

        try:
            store = await EmbeddedStore.connect(
                [*self._endpoints.places, *map(self._at, filter(None, self._heard_of))],
                term=self._elector.term,
                timeout=timeout,
                clock=self._clock,
                meanwhile=look,
                say=say,
            )
        except _EndpointIsOurs:
            await self._find_host(timeout, say)
            return
        self._follow(store)

    async def _find_host(self, timeout: float | None, say: Callable[[str], None]) -> None:
        """Ask peers until this node has a host, or is host."""
        search = Search(self._clock.now())
        deadline = search.begun + (math.inf if timeout is None else timeout)
        say_at = search.begun + 2 * self._lease
        while True:
            if self._may_found() and await self._tie_breaker.begins_job():
                await self._become_host(FIRST_TERM, Returns())
                return
            term = self._tie_breaker.next_term(self._elector, search.heard)
            returns = await self._ask(term, binding=False)
            search.hear(returns)
            rumours, self._rumours = self._rumours, []
            self._news.clear()
            now = self._clock.now()
            waited = now - search.begun > self._lease
            hosts = [*rumours, *self._poll.hosts(returns, waited=waited)]
            if await self._join_one_of(hosts, search.pause):
                return
            if self._file is not None and self._store is None:
                self._file.check(self._poll, returns, waited=waited)
            if search.is_our_turn(self._poll, term, now):
                before = self._elector
                if await self._run_for_election(returns, waited):
                    return
                if self._elector is not before:
                    search.lost_election(self._clock.now())
            now = self._clock.now()
            if now >= deadline:
                raise RendezvousLost(f"{self._poll.predicament(returns)}: giving up.")
            if now >= say_at:
                say(self._poll.predicament(returns))
                say_at = now + SAY_EVERY
            await unless(self._news, asyncio.sleep(search.next_pause()))

    def _may_found(self) -> bool:
        """Return whether no other node can know of the job: no world here, ours is the only
        endpoint, and no peer has mentioned a host."""
        is_first = self._yielded_to <= FIRST_TERM and self._holding.roll.generation < 0
        return is_first and self._endpoints.places == [self._endpoints.ours]

    # Asking others

    @property
    def _poll(self) -> Poll:
        ours = self._endpoints.ours
        return Poll(
            self._elector,
            self._holding,
            places=tuple(map(str, self._endpoints.places)),
            own_place="" if ours is None else str(ours),
            two_node_takeover=self._two_node_takeover,
            witness=self._tie_breaker.view(self._tie_breaker.next_term(self._elector)),
        )

    def _whereabouts(self, but: Set[str] = frozenset()) -> dict[str, Endpoint]:
        """The peers to ask: all that this node knows, endpoints included, except `but`."""
        but = but | {self._node, str(self._endpoints.ours)}
        places = {str(place): place for place in self._endpoints.places if str(place) not in but}
        known = self._holding.addresses.items()
        return {**places, **{node: self._at(at) for node, at in known if node not in but}}

    async def _ask(self, term: int, *, binding: bool, of: Sequence[str] | None = None) -> Returns:
        generation, is_settled = self._elector.generation, self._holding.is_settled
        asked = VoteRequest(term, self._node, generation, binding, is_settled)
        places = {key: at for key, at in self._whereabouts().items() if of is None or key in of}
        return await ask_for_votes(places, asked, enough=self._poll.suffices)

    # Becoming a client

    async def _join_one_of(self, hosts: Sequence[str], pause: float) -> bool:
        given_up = str(self._store.place) if self._store is not None else ""
        for address in hosts:
            patience = SECOND_CHANCE * pause if address == given_up else HOST_ANSWERS
            try:
                store = await EmbeddedStore.connect(
                    [self._at(address)],
                    term=self._elector.term,
                    timeout=min(patience, HOST_ANSWERS),
                    lease=(self._leased_rows.lease, self._leased_rows.seconds),
                    clock=self._clock,
                )
            except (RendezvousLost, RendezvousRefused) as error:
                logger.debug("no host at %s: %s", address, error)
                continue
            self._follow(store)
            return True
        return False

    def _follow(self, store: EmbeddedStore) -> None:
        self._store = store
        self._stopped.clear()
        store.on_lost = self._host_lost
        if not self.is_host or self._endpoints.ours is not None:
            self._addr = store.local_addr
        self._elector = majority.following(self._elector, store.term, str(store.place))

    def _host_lost(self) -> None:
        self._elector = replace(self._elector, has_host=False)

    def _at(self, address: str) -> Endpoint:
        return Endpoint.at(address, self.job, self._endpoints.places[0].credentials)

    # Becoming host

    async def _run_for_election(self, wished: Returns, a_lease_later: bool) -> bool:
        """Run for election if this node would win: ask for votes, and return whether it is host
        now."""
        if not await self._tie_breaker.may_win(self._poll, wished, a_lease_later):
            return False
        term = self._tie_breaker.next_term(self._elector, wished.latest_term)
        ours = Candidacy(term, self._node, self._elector.generation, binding=True)
        if majority.refusal(self._elector, ours):
            return False
        self._elector = majority.voted(self._elector, ours)
        self._holding = self._poll.found(wished)
        await self.kept()
        willing = [key for key, ballot in wished.ballots.items() if ballot.granted]
        asking = self._ask(term, binding=True, of=willing)
        if (returns := await unless(self._news, asking)) is None:
            return False
        returns.refused |= wished.refused
        for key, ballot in wished.ballots.items():
            returns.ballots.setdefault(key, replace(ballot, granted=False))
        is_won = await self._tie_breaker.wins(self._poll, returns, term)
        # Meanwhile it may have voted for somebody of a later term.
        if not is_won or self._elector.term != term:
            returns.close()
            return False
        await self._become_host(term, returns)
        return True

    async def _become_host(self, term: int, returns: Returns) -> None:
        """Become host: serve the store from now on, and tell the voters."""
        self._elector = replace(self._elector, term=term, chosen=self._node)
        self._tie_breaker.became_host()
        await self.kept()
        if self._holding.roll.generation >= 0 or self._may_be_remembered:
            # A store that knows nothing waits a lease: another host may be about to call. So does
            # one whose last world may still make steps.
            self.may_begin_at = self._clock.now() + self._lease
        self.dead = frozenset(
            node for node, last in self._poll.votes(returns).items() if last == DEAD
        )
        granted = [ballot for ballot in returns.ballots.values() if ballot.granted]
        ballots = [self._ballot("", granted=True), *granted]
        table = table_of(self._holding, ballots, self._clock.now())
        self.server = EmbeddedServer(
            self.job, clock=self._clock, table=table, term=term, grace_of=self._grace_of
        )
        self.server.resume()
        self._listener.serve(frames.STORE, self._admit)
        await self._endpoints.look(again=True)  # one may have come free with the last host
        store = await EmbeddedStore.connect(
            [self._endpoints.ours or self._at(format_endpoint(LOOPBACK, self._listener.port))],
            term=term,
            timeout=self._lease,
            lease=(self._leased_rows.lease, self._leased_rows.seconds),
            clock=self._clock,
        )
        self._follow(store)
        for link in returns.links.values():
            link.send(self._announcement())
            link.close()
        self._announcing = self._start(self._announce())

    def _announcement(self) -> HostAnnouncement:
        return HostAnnouncement(
            self._elector.term, self._node, self._elector.generation, [self.peer]
        )

    async def _announce(self) -> None:
        """As host, announce it to nodes that may not know: missing nodes and the endpoints."""
        while self.server is not None:
            members = self.server.rows(MEMBER_PREFIX)
            said = (announce(place, self._announcement()) for place in self._uninformed(members))
            for noted in filter(None, await asyncio.gather(*said)):
                if majority.must_yield(self._elector.term, noted.term):
                    self._rumours += noted.hosts
                    self._start(self._yield(noted.term))
                    return
            await asyncio.sleep(self._lease / ANNOUNCEMENTS)

    def _uninformed(self, members: Sequence[Row]) -> list[Endpoint]:
        there = {row.key.removeprefix(MEMBER_PREFIX) for row in members}
        missing = list(self._whereabouts(but=there).values())
        return random.sample(missing, min(ANNOUNCED_AT_ONCE, len(missing)))

    async def _yield(self, term: int, told: str = SUCCEEDED) -> None:
        """Stop being host, and tell the clients why."""
        logger.info("this node no longer hosts the rendezvous (term %d)", term)
        self._yielded_to = max(self._yielded_to, term)
        self._host_lost()
        server, self.server = self.server, None
        self._listener.serve(frames.STORE, self._say_where)
        if server is not None:
            await server.close(told)

    async def _leave(self, told: str = SUCCEEDED) -> None:
        """Drop the connection to the last host, or the server if this node was host."""
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None
        if self.is_host:
            await self._yield(self.term, told)
        await self.store.close()
        self._host_lost()

    # What others ask

    def _admit(self, link: Link, hello: frames.Hello) -> None:
        """As host, serve a client, unless it has voted in a later term and cannot follow this host:
        then a new election is needed."""
        if self.server is None or majority.must_yield(self._elector.term, hello.term):
            self._say_where(link, hello)
            self._start(self._yield(hello.term))
        else:
            self.server.admit(link, hello)

    async def _grace_of(self, rows: Sequence[Row]) -> float | None:
        """As host: how long to wait for the agent with these rows after its connection ended."""
        parts = self.server.rows(PART_PREFIX) if self.server is not None else []
        alone = trains_alone(self._summary(), parts, self._node)
        return await grace_of(rows, at=self._at, alone=alone)

    def _say_where(self, link: Link, hello: frames.Hello) -> None:
        """Tell a client of the store where the host is."""
        link.send(frames.Elsewhere(self._known_hosts(), self._elector.term))
        link.close()

    def _store_of_workers(self) -> str:
        """The worker store of the newest world; empty if there is none."""
        return str(self._summary().get("store", ""))

    def _summary(self) -> Json:
        """The summary of the newest world; a host has it before any node does."""
        if self.server is None:
            return self._holding.rows.get(WORLD_KEY, {})
        texts = {row.key: row.text for row in self.server.rows(WORLD_KEY)}
        return frames.decode_value(texts.get(WORLD_KEY) or "{}")

    def _known_hosts(self) -> list[str]:
        if not self._elector.has_host:
            return []
        return [self.peer] if self.is_host else [str(self.store.place)]

    def _converse(self, link: Link, hello: frames.Hello) -> None:
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, self._elector.term))
        link.deliver_to(partial(self._hear, link))

    def _hear(self, link: Link, payload: bytes) -> None:
        match frames.parse(payload, QUESTIONS):
            case VoteRequest(term, node, generation, binding, settled):
                self._start(self._vote(link, Candidacy(term, node, generation, binding, settled)))
            case HostAnnouncement() as announcement:
                self._hear_of_host(link, announcement)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="embedded node")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            logger.error("Internal error in the rendezvous.", exc_info=bug)

    async def _vote(self, link: Link, asked: Candidacy) -> None:
        """Answer when the workers have stopped, and the disk has what the candidate counts on."""
        if asked.binding and not majority.refusal(self._elector, asked):
            await self._stopped.wait()
        ballot = self._answer(asked)
        if ballot.granted:
            await self.kept()
        link.send(ballot)

    def _answer(self, asked: Candidacy) -> Ballot:
        why = majority.refusal(self._elector, asked)
        if not why:
            self._elector = majority.voted(self._elector, asked)
            self._holding = self._holding.told(asked)
            if asked.binding:
                self._voted.set()
        return self._ballot(why, granted=not why)

    def _ballot(self, why: str, *, granted: bool) -> Ballot:
        return self._leased_rows.ballot(
            self._elector, self._known_hosts(), why=why, granted=granted
        )

    def _hear_of_host(self, link: Link, announcement: HostAnnouncement) -> None:
        """Note that another node says it is host."""
        link.send(Noted(self._elector.term, self._known_hosts()))
        if announcement.node == self._node:
            return
        if not self._elector.has_host:
            if self._poll.may_follow(announcement.term, announcement.generation):
                self._rumours += announcement.addresses
                self._news.set()
        elif majority.must_yield(self._elector.term, announcement.term):
            self._rumours += announcement.addresses
            if self.is_host:
                self._start(self._yield(announcement.term))
            else:
                self.store.lose(SUCCEEDED)
