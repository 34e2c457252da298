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
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from torchelastic.clock import Clock
from torchelastic.config import format_endpoint
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import (
    QUESTIONS,
    AnnouncementReply,
    Ballot,
    HostAnnouncement,
    Returns,
    VoteRequest,
    announce,
    ask_for_votes,
    unless,
)
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.election import LONGEST_PAUSE, OTHERS_CONTINUE, Poll, Search
from torchelastic.rendezvous.embedded.failover_state import FailoverState, LeasedRows, table_of
from torchelastic.rendezvous.embedded.own_endpoint import OwnEndpoint
from torchelastic.rendezvous.embedded.server import RECONNECT_GRACE, EmbeddedServer
from torchelastic.rendezvous.embedded.tie_breaker import TieBreaker
from torchelastic.rendezvous.embedded.voter_file import Voter, VoterFile
from torchelastic.rendezvous.majority import Candidacy, Elector
from torchelastic.rendezvous.store import Json
from torchelastic.rendezvous.witness.vote_keys import Witness
from torchelastic.rendezvous.world import MEMBER_PREFIX, PART_PREFIX, WORLD_KEY, World
from torchelastic.side_tasks import TaskSet
from torchelastic.transport import frames
from torchelastic.transport.auth import Credentials
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.frames import Row
from torchelastic.transport.link import Link
from torchelastic.transport.listener import Handler, Listener
from torchelastic.transport.ring import OnSuspicion, answer_that_we_live, lives

logger = logging.getLogger(__name__)

#: How many times per lease a host announces itself.
ANNOUNCEMENTS_PER_LEASE = 3
LOOPBACK = "127.0.0.1"
#: The term of the node that starts a job at the only endpoint.
FIRST_TERM = 1
HOST_REPLACED = "Another node hosts the rendezvous now."
#: Seconds after which a node without a host repeats what it waits for.
REPEAT_INTERVAL = 60.0
#: Seconds for a host that others named to answer. For the host that this node has just given up:
#: this many times the search pause, because peers may name it shortly before they give it up too.
HOST_TIMEOUT, RETRY_FACTOR = 1.0, 5.0


class _EndpointIsOurs(Exception):
    """The name of the endpoint now resolves to this machine."""


class EmbeddedNode:
    """One node at the embedded rendezvous of one job; call `open` first. Must be created in a
    running loop."""

    def __init__(
        self,
        places: Sequence[Endpoint],
        node: str,
        *,
        clock: Clock,
        lease: float,
        local_addr: str | None = None,
        is_host: bool | None = None,
        own: tuple[str, int] | None = None,
        two_node_takeover: bool = False,
        may_be_remembered: bool = True,
        joins_closed: bool = False,
        passes_workers_on: bool = False,
        witness: Witness | None = None,
        file: VoterFile | None = None,
    ) -> None:
        """`own`: the endpoint that is this node's. `joins_closed`: as a new node, join a job that
        has ended instead of waiting for its host to exit. `passes_workers_on`: workers reach their
        store through this node's port (torchrun's static rendezvous). `file` keeps its vote."""
        self._node = node
        self._clock = clock
        self._lease = lease
        self._local_addr = local_addr
        self._two_node_takeover = two_node_takeover
        #: Others may know this job at our endpoint, from an earlier agent.
        self._may_be_known = may_be_remembered and places[0].port != 0
        self._founding = Founding(places[0].job, clock, lease, joins_closed=joins_closed)
        shown = places[0].credentials
        self._listener = Listener(places[0].job, secret=shown.secret, tls=shown.server_tls)
        if passes_workers_on:
            self._listener.pass_workers_on(self._store_of_workers)
        self._endpoints = OwnEndpoint(places, self._listener, clock=clock, is_host=is_host, own=own)
        self._file = file
        last = (file.resumed if file is not None else None) or Voter()
        self.witness = witness
        self._tie_breaker = TieBreaker(witness, node, last.token)
        self._elector = Elector(node, last.term, last.chosen, last.generation)
        self._holding = last.holding
        self._leased_rows = LeasedRows(lease)
        #: The latest term for which this node, as host, has stepped down.
        self._stepped_down_for = 0
        #: Set while no worker of this node is in a world, so that it may vote.
        self._stopped = asyncio.Event()
        self._stopped.set()
        #: Set when it has voted for another node.
        self._voted = asyncio.Event()
        #: This node's address, as learned while it was a client, and its last port.
        self._addr, self._known_port = last.address_of(node)
        #: Set when there is news of a host.
        self._news = asyncio.Event()
        self._announced_hosts: list[str] = []
        self._known_agents: Sequence[str] = ()
        self._announcing: asyncio.Task[None] | None = None
        self._tasks = TaskSet(
            lambda error: logger.error("Internal error in the rendezvous.", exc_info=error)
        )
        self._store: EmbeddedStore | None = None
        self.server: EmbeddedServer | None = None
        #: Nodes of the last world that are known to be dead, without having announced a leave.
        self.dead: frozenset[str] = frozenset()
        #: When this node may form the first world, if it hosts a store without one.
        self.may_begin_at = 0.0

    # Used by the agent

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

    def ring(self, node: str, on_suspicion: OnSuspicion) -> None:
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

    def hold(self, holding: FailoverState) -> None:
        """Remember a world that this node has taken up, or more details of it."""
        if holding is self._holding:
            return  # the same world in another phase
        if holding.roll.generation > self._holding.roll.generation:
            self._stopped.clear()
        self._holding = holding.following(self._holding)
        self._elector = replace(self._elector, generation=holding.roll.generation)

    async def kept(self) -> None:
        """Wait until this node's vote is on disk: others may learn of it only then."""
        if self._file is not None:
            await self._file.keep(self._elector, self._holding, self._tie_breaker.token)

    def hear_of(self, addresses: Sequence[str]) -> None:
        """Remember agents that may know where the store is if it is lost."""
        self._known_agents = addresses

    def say_goodbye(self) -> None:
        """Note that this node has announced that it leaves."""
        self._elector = replace(self._elector, leaving=True)

    # Joining

    async def open(self, timeout: float | None, say: Callable[[str], None] = logger.info) -> None:
        """Listen, and become host or client of the job; wait up to `timeout` seconds for a host,
        and report from time to time what it waits for."""
        self._listener.serve(frames.STORE, self._redirect)
        self._listener.serve(frames.ELECTION, self._serve_election)
        self._listener.serve(frames.RING, answer_that_we_live)
        await self._endpoints.listen(self._known_port)
        await self._find_host(timeout, say)

    async def regain(
        self,
        rows: Callable[[], Mapping[str, Json]],
        *,
        timeout: float | None,
        say: Callable[[str], None],
    ) -> bool:
        """After losing the host, with no worker of this node in a world: find the next host, or
        become it.

        `rows` returns this node's rows in the store under its lease. Returns whether they are under
        a lease again. Raises `RendezvousLost` after `timeout` seconds.
        """
        if self.term == 0:
            raise RendezvousLost(self.store.loss)  # its store has no failover
        await self._leave()
        self._leased_rows = LeasedRows(self._lease, rows)
        self._stopped.set()
        await self._find_host(timeout, say)
        return self.store.has_lease

    async def hand_over(self, rows: Callable[[], Mapping[str, Json]], seconds: float) -> None:
        """As a host that leaves with no worker left: vote for the next host before going.

        `rows` as in `regain`. Waits up to `seconds` to be asked.
        """
        if self.server is None:
            return
        members = [frames.decode_value(row.text or "{}") for row in self.server.rows(MEMBER_PREFIX)]
        if all(one.get("node") == self._node or one.get("leaving") for one in members):
            return
        await self._leave("The host is leaving the job.")
        self._leased_rows = LeasedRows(self._lease, rows)
        # No other host relies on its consent: it was its own host.
        self._elector = replace(self._elector, leaving=False, hands_over=True)
        self._stopped.set()
        voted = asyncio.ensure_future(self._voted.wait())
        await asyncio.wait({voted}, timeout=seconds)
        voted.cancel()

    async def close(self, others: float = 0.0, *, ended: bool = False) -> None:
        """Close; a host waits up to `others` seconds for the other nodes to go first, and removes
        the witness's keys of a job that has `ended`."""
        self._elector = replace(self._elector, has_host=False)
        self._tasks.cancel()
        if self._store is not None:
            await self._store.close()
        if self.server is not None:
            if others:
                await self.server.wait_alone(others)
            await self.server.close()
        await self._listener.close()
        await self._tie_breaker.close(ended=ended)

    async def _find_host(self, timeout: float | None, say: Callable[[str], None]) -> None:
        """Find a host, or become it. A node without a vote can only wait for one."""
        if self._endpoints.ours is None and not self._holding.roll.latest.nodes:
            try:
                self._follow(await self._wait_for_host(timeout, say))
                return
            except _EndpointIsOurs:
                pass
        await self._search_host(timeout, say)

    async def _wait_for_host(
        self, timeout: float | None, say: Callable[[str], None]
    ) -> EmbeddedStore:
        """Wait for a host at the endpoints, or at agents that may know it. Raises `_EndpointIsOurs`
        if an endpoint turns out to be this machine's."""

        async def look() -> None:
            await self._endpoints.look()
            if self._endpoints.ours is not None:
                raise _EndpointIsOurs

        others = [self._endpoint_at(at) for at in self._known_agents if at]
        while True:
            store = await EmbeddedStore.connect(
                [*self._endpoints.places, *others],
                term=self._elector.term,
                timeout=timeout,
                clock=self._clock,
                meanwhile=look,
                say=say,
            )
            if not await self._is_over(store):
                return store
            await asyncio.sleep(LONGEST_PAUSE)
            await look()

    async def _is_over(self, store: EmbeddedStore) -> bool:
        """Return whether this is the store of a run that has ended, and not for a new node."""
        is_new = self._store is None and not self._poll.has_world
        return is_new and await self._founding.is_over(store)

    async def _search_host(self, timeout: float | None, say: Callable[[str], None]) -> None:
        """Ask peers until this node has a host, or is host."""
        search = Search(self._clock.now())
        deadline = search.begun + (math.inf if timeout is None else timeout)
        say_at = search.begun + 2 * self._lease
        while True:
            if self._may_start_job() and await self._tie_breaker.begins_job():
                await self._become_host(FIRST_TERM, Returns())
                return
            term = self._tie_breaker.next_term(self._elector, search.heard)
            returns = await self._ask(term, binding=False)
            search.hear(returns)
            self._founding.ended |= returns.ended
            announced, self._announced_hosts = self._announced_hosts, []
            self._news.clear()
            now = self._clock.now()
            waited = now - search.begun > self._lease
            hosts = [*announced, *self._poll.hosts(returns, waited=waited)]
            if await self._join_one_of(hosts, search.pause):
                return
            if self._file is not None and self._store is None:
                self._file.check(self._poll, returns, waited=waited)
            if self._poll.has_ended:
                raise RendezvousLost(f"Job '{self.job}' ended while this node was cut off from it.")
            if search.is_our_turn(self._poll, term, now):
                before = self._elector
                if await self._run_for_election(returns, waited):
                    return
                if self._elector is not before:
                    search.lost_election(self._clock.now())
            now = self._clock.now()
            if now >= deadline:
                raise RendezvousLost(f"{self._poll.waiting_reason(returns)}: giving up.")
            if now >= say_at:
                say(self._poll.waiting_reason(returns))
                say_at = now + REPEAT_INTERVAL
            await unless(self._news, asyncio.sleep(search.next_pause()))

    def _may_start_job(self) -> bool:
        """Return whether no other node can know of the job: no world here, ours is the only
        endpoint, and no peer has mentioned a host."""
        is_first = max(self._stepped_down_for, self._elector.term) <= FIRST_TERM
        is_alone = self._endpoints.places == [self._endpoints.ours] and not self._poll.has_world
        return is_first and is_alone and self._founding.is_allowed

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
            ended=self._founding.ended,
            gives_way=not self._founding.is_allowed,
        )

    def _peers(self, but: Set[str] = frozenset()) -> dict[str, Endpoint]:
        """The peers to ask: all that this node knows, endpoints included, except `but`."""
        but = but | {self._node, str(self._endpoints.ours)}
        places = {str(place): place for place in self._endpoints.places if str(place) not in but}
        known = self._holding.addresses.items()
        return {**places, **{node: self._endpoint_at(at) for node, at in known if node not in but}}

    async def _ask(self, term: int, *, binding: bool, of: Collection[str] | None = None) -> Returns:
        generation, is_confirmed = self._elector.generation, self._holding.is_confirmed
        is_resumed = self._poll.has_world and self._store is None
        asked = VoteRequest(term, self._node, generation, binding, is_confirmed, is_resumed)
        places = {key: at for key, at in self._peers().items() if of is None or key in of}
        return await ask_for_votes(places, asked, enough=self._poll.suffices)

    # Becoming a client

    async def _join_one_of(self, hosts: Sequence[str], pause: float) -> bool:
        """Follow the first of these that is a host; False if none is. `pause`: seconds between two
        searches."""
        given_up = self._store.names if self._store is not None else ()
        retry = min(RETRY_FACTOR * pause, HOST_TIMEOUT)
        for place in map(self._endpoint_at, hosts):
            try:
                store = await EmbeddedStore.connect(
                    [place],
                    term=self._elector.term,
                    timeout=retry if str(place) in given_up else HOST_TIMEOUT,
                    lease=(self._leased_rows.lease, self._leased_rows.seconds),
                    clock=self._clock,
                )
            except (RendezvousLost, RendezvousRefused) as error:
                logger.debug("no host at %s: %s", place, error)
                continue
            if not await self._is_over(store):
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

    def _endpoint_at(self, address: str) -> Endpoint:
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
        asking = self._ask(term, binding=True, of=wished.granted)
        if (returns := await unless(self._news, asking)) is None:
            return False
        returns.add_unasked(wished)
        is_won = await self._tie_breaker.wins(self._poll, returns, term)
        # Meanwhile it may have voted for a node with a later term.
        if not is_won or self._elector.term != term:
            returns.close()
            return False
        await self._become_host(term, returns)
        return True

    async def _become_host(self, term: int, returns: Returns) -> None:
        """Become host: serve the store, and tell the voters."""
        self._elector = replace(self._elector, term=term, chosen=self._node)
        self._tie_breaker.became_host()
        await self.kept()
        if self._holding.roll.generation >= 0 or self._may_be_known:
            # A store without a world waits for a lease's time: another host may be about to
            # connect. So does one whose last world may still make steps.
            self.may_begin_at = self._clock.now() + self._lease
        self.dead = self._poll.dead(returns)
        ballots = [self._ballot(), *returns.granted.values()]
        table = table_of(self._holding, ballots, self._clock.now())
        self.server = EmbeddedServer(
            self.job, clock=self._clock, table=table, term=term, grace_of=self._grace_of
        )
        self.server.resume()
        self._listener.serve(frames.STORE, self._admit)
        await self._endpoints.look(again=True)  # the last host may have freed one
        local = self._endpoint_at(format_endpoint(LOOPBACK, self._listener.port))
        store = await EmbeddedStore.connect(
            [self._endpoints.ours or local],
            term=term,
            timeout=self._lease,
            lease=(self._leased_rows.lease, self._leased_rows.seconds),
            clock=self._clock,
        )
        self._follow(store)
        for link in returns.links.values():
            link.send(self._announcement())
            link.close()
        self._announcing = self._tasks.start(self._announce(), "announce host")

    def _announcement(self) -> HostAnnouncement:
        return HostAnnouncement(
            self._elector.term, self._node, self._elector.generation, [self.peer]
        )

    async def _announce(self) -> None:
        """As host, announce that to nodes that may not know it: missing nodes and the endpoints."""
        while self.server is not None:
            if self._tie_breaker.is_abandoned:
                self._tasks.start(self._step_down(self.term), "step down")
                return
            members = self.server.rows(MEMBER_PREFIX)
            connected = {row.key.removeprefix(MEMBER_PREFIX) for row in members}
            missing = list(self._peers(but=connected).values())
            for reply in await announce(missing, self._announcement()):
                if majority.must_step_down(self._elector.term, reply.term):
                    self._announced_hosts += reply.hosts
                    self._tasks.start(self._step_down(reply.term), "step down")
                    return
            await asyncio.sleep(self._lease / ANNOUNCEMENTS_PER_LEASE)

    async def _step_down(self, term: int, told: str = HOST_REPLACED) -> None:
        """Stop being host, and tell the clients why."""
        logger.info("this node no longer hosts the rendezvous (term %d)", term)
        self._stepped_down_for = max(self._stepped_down_for, term)
        if (server := self._resign()) is not None:
            await server.close(told)

    def _resign(self) -> EmbeddedServer | None:
        """Stop being host at once; return the server, to be closed."""
        self._host_lost()
        server, self.server = self.server, None
        self._listener.serve(frames.STORE, self._redirect)
        return server

    def _give_way(self, request: VoteRequest, address: str) -> None:
        """As a node that would start the job: let nodes that have a world elect their host."""
        is_founder = self._endpoints.ours is not None and self.is_host == self._elector.has_host
        if not is_founder or self._elector.generation >= 0:
            return
        if self._founding.asked_by(request, address) and (server := self._resign()) is not None:
            self._tasks.start(server.close(HOST_REPLACED), "step down")

    async def _leave(self, told: str = HOST_REPLACED) -> None:
        """Drop the connection to the last host, or the server if this node was host."""
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None
        if self.is_host:
            await self._step_down(self.term, told)
        await self.store.close()
        self._host_lost()

    # Requests of other nodes

    def _admit(self, link: Link, hello: frames.Hello) -> None:
        """As host, serve a client; yield instead if it has voted in a later term, because it cannot
        follow this host."""
        if self.server is None or majority.must_step_down(self._elector.term, hello.term):
            self._redirect(link, hello)
            self._tasks.start(self._step_down(hello.term), "step down")
        else:
            self.server.admit(link, hello)

    async def _grace_of(self, rows: Sequence[Row]) -> float | None:
        """As host: seconds to wait for the agent of these rows after its connection ended; None:
        its whole lease.

        0 if its machine refuses connections to its port. If it lives, if that is unknown, or if a
        node trains alone without this host, the lease decides.
        """
        records = [row.text for row in rows if row.key.startswith(MEMBER_PREFIX)]
        if not records:
            return RECONNECT_GRACE
        if self._trains_alone_elsewhere():
            return None
        address = frames.decode_value(records[0] or "{}").get("peer")
        if not address:
            return RECONNECT_GRACE
        return 0.0 if await lives(self._endpoint_at(address)) is False else None

    def _trains_alone_elsewhere(self) -> bool:
        """Return whether the last world is a single node other than this host."""
        summary = self._newest_summary()
        if summary.get("count") != 1:
            return False
        parts = self.server.rows(PART_PREFIX) if self.server is not None else []
        found = [frames.decode_value(row.text or "{}") for row in parts]
        return World.from_parts(summary, found).steps_without(self._node)

    def _newest_summary(self) -> Json:
        """The summary of the newest world; a host has it first."""
        if self.server is None:
            return self._holding.rows.get(WORLD_KEY, {})
        texts = {row.key: row.text for row in self.server.rows(WORLD_KEY)}
        return frames.decode_value(texts.get(WORLD_KEY) or "{}")

    def _redirect(self, link: Link, hello: frames.Hello) -> None:
        """Tell a client of the store where the host is."""
        self._founding.ended |= {*hello.ended}
        link.send(frames.Elsewhere(self._known_hosts(), self._elector.term))
        link.close()

    def _store_of_workers(self) -> str:
        """The worker store of the newest world; empty if there is none."""
        return str(self._newest_summary().get("store", ""))

    def _known_hosts(self) -> list[str]:
        if not self._elector.has_host:
            return []
        return [self.peer] if self.is_host else self.store.names

    def _serve_election(self, link: Link, hello: frames.Hello) -> None:
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, self._elector.term))
        link.deliver_to(partial(self._on_message, link))

    def _on_message(self, link: Link, payload: bytes) -> None:
        match frames.parse(payload, QUESTIONS):
            case VoteRequest(term, node, generation, binding, confirmed) as request:
                self._give_way(request, link.remote_addr)
                asked = Candidacy(term, node, generation, binding, confirmed)
                self._tasks.start(self._vote(link, asked), "vote")
            case HostAnnouncement() as announcement:
                self._on_announcement(link, announcement)

    async def _vote(self, link: Link, asked: Candidacy) -> None:
        """Answer once the workers have stopped, and what the candidate relies on is on disk."""
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
        return self._ballot(why)

    def _ballot(self, refusal: str = "") -> Ballot:
        ended = self._endpoints.places[0].ended
        return self._leased_rows.ballot(self._elector, self._known_hosts(), ended, refusal)

    def _on_announcement(self, link: Link, announcement: HostAnnouncement) -> None:
        """Note that another node says it is host."""
        link.send(AnnouncementReply(self._elector.term, self._known_hosts()))
        if announcement.node == self._node:
            return
        if not self._elector.has_host:
            if self._poll.may_follow(announcement.term, announcement.generation):
                self._announced_hosts += announcement.addresses
                self._news.set()
        elif majority.must_step_down(self._elector.term, announcement.term):
            self._announced_hosts += announcement.addresses
            if self.is_host:
                self._tasks.start(self._step_down(announcement.term), "step down")
            else:
                self.store.lose(HOST_REPLACED)


class Founding:
    """Other runs of this job, and nodes that can continue one, as far as this node has heard."""

    def __init__(self, job: str, clock: Clock, lease: float, *, joins_closed: bool) -> None:
        """`joins_closed`: a new node joins a job that has ended, and ends, too."""
        self._job = job
        self._clock = clock
        self._lease = lease
        self._joins_closed = joins_closed
        self._told_of_end = False
        #: When a node with a world of this job, which has lost its host, last asked for a vote.
        self._asked_at = -math.inf
        #: Nodes that saw the end of their run of the job, as other agents say.
        self.ended: Set[str] = frozenset()

    @property
    def is_allowed(self) -> bool:
        """Return whether no node with a world of this job has asked for a vote for a lease's time.
        Its workers may have the only copy of the newest state."""
        return self._clock.now() - self._asked_at >= self._lease

    def asked_by(self, candidate: VoteRequest, address: str) -> bool:
        """Note a request for a vote; return whether the candidate can continue the job: its agent
        has been in a world since it started."""
        if candidate.resumed or candidate.generation < 0:
            return False
        if self.is_allowed:
            logger.warning(
                "the node at %s has generation %d of job '%s' and has lost its host: %s",
                address,
                candidate.generation,
                self._job,
                OTHERS_CONTINUE,
            )
        self._asked_at = self._clock.now()
        return True

    async def is_over(self, store: EmbeddedStore) -> bool:
        """Return whether a host that a new node has found belongs to a run that has ended; then
        disconnect, because that host waits for its clients to exit."""
        if self._joins_closed:
            return False
        try:
            world = (await store.get(WORLD_KEY)).items.get(WORLD_KEY)
        except RendezvousLost:
            world = None
        else:
            if world is None or world.value.get("phase") != "closed":
                return False
        if world is not None and not self._told_of_end:
            self._told_of_end = True
            logger.info(
                "the last run of job '%s' has ended; waiting for its host at %s to exit",
                self._job,
                store.place,
            )
        await store.close()
        return True
