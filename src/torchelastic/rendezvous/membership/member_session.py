"""This node's membership in the job: its lease, its member record, its leadership, its worlds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Set
from functools import partial
from itertools import chain
from typing import Any

from torchelastic.clock import Clock
from torchelastic.config import LaunchConfig
from torchelastic.errors import LeaseExpired, RendezvousError, RendezvousLost, RendezvousRefused
from torchelastic.records import replace
from torchelastic.rendezvous.embedded.failover_state import Failover
from torchelastic.rendezvous.embedded.voter_file import VoterFile
from torchelastic.rendezvous.job_settings import JobSettings
from torchelastic.rendezvous.leader import CONFIRMED_KEY, Leader, LeaderObserver
from torchelastic.rendezvous.membership.backend import RendezvousBackend, meet
from torchelastic.rendezvous.membership.suspicion import Prober, RivalProber, replace_leader
from torchelastic.rendezvous.round_state import RoundRules
from torchelastic.rendezvous.store import Item, Json, Store
from torchelastic.rendezvous.witness.vote_keys import WitnessWatch
from torchelastic.rendezvous.world import (
    LEADER_KEY,
    MEMBER_PREFIX,
    PLACE_PREFIX,
    WORLD_KEY,
    Member,
    World,
    part_key,
)
from torchelastic.side_tasks import Work
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.ring import Ring, lives

NAME_PREFIX = "name/"
#: Returns when this node would not forget what it is about to say.
Kept = Callable[[], Awaitable[None]]
#: Seconds by which what is not urgent is put.
BATCH_DELAY = 0.25
#: Agents of one host that have consecutive numbers.
NEIGHBOURS = 8


async def at_once() -> None:
    """Return at once: nothing has to reach the disk."""


class MemberRecord:
    """Writes the record whenever it changes; several changes before a write are sent as one."""

    def __init__(self, member: Member) -> None:
        self._member = member
        #: The record as the store has it, if it has one.
        self._said: Member | None = None
        #: The revision at which it was put first under the present lease; 0: it was taken along.
        self.since = 0
        self._reminder: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()

    @property
    def member(self) -> Member:
        return self._member

    async def enlist(self, store: Store, host: str, kept: Kept = at_once) -> None:
        """Claim a name under a new lease, and write the record with it.

        The name is for people: the host's name, with a number if another agent of the job has it. A
        node that comes back keeps its name, unless another took it meanwhile.
        """
        member = self._member
        await kept()
        names = (host if number == 1 else f"{host}-{number}" for number in _numbers())
        for name in chain(filter(None, [member.name]), names):
            named = replace(member, name=name)
            won = await store.compare_and_set(
                NAME_PREFIX + named.name,
                {"node": named.node},
                expected=0,
                leased=True,
                beside={MEMBER_PREFIX + named.node: named.to_json()},
            )
            if won is not None:
                self._said, self.since = named, won
                self.update(name=named.name)
                return

    async def rewrite(self, store: Store, kept: Kept = at_once) -> None:
        """Write the record under a lease that is held again. Worlds published before that count
        this node as lost, as after `enlist`."""
        member = self._member
        await kept()
        self.since = await store.put(MEMBER_PREFIX + member.node, member.to_json(), leased=True)
        self._said = member

    def unsaid(self) -> None:
        """Mark the record as unsent: the store may not have it."""
        self._said, self.since = None, 0
        self.update()

    def update(self, **changes: Any) -> None:
        """Change the record; `run` writes it."""
        if changes:
            self._member = replace(self._member, **changes)
        self._changed.set()
        self._written.clear()

    def mention(self, **changes: Any) -> None:
        """Change something in the record that is not urgent: it is written with the next change, or
        after a while. When a world begins, all its nodes have more important requests."""
        self._member = replace(self._member, **changes)
        if self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(BATCH_DELAY, self._remind)

    def _remind(self) -> None:
        self._reminder = None
        self.update()

    async def run(self, store: Store, kept: Kept = at_once) -> None:
        """Write the record at every change, after what it says is `kept`. Raises when the lease or
        the store is lost."""
        key = MEMBER_PREFIX + self._member.node
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if (member := self._member) != self._said:
                    await kept()
                    await store.report(key, member.to_json())
                    self._said = member
                if not self._changed.is_set():
                    self._written.set()
        finally:
            self._written.set()  # nothing more can be written: do not let callers wait for it

    async def flush(self, store: Store) -> None:
        """Wait until all changes have been written, or none can be written any more."""
        await self._written.wait()
        with contextlib.suppress(RendezvousError):
            await store.keep_alive()  # its answer shows that earlier reports were received


def _numbers() -> Iterator[int]:
    """Numbers to try for a name: the smallest first, then farther and farther apart.

    One by one, the last of a thousand agents on one host would ask a thousand times.
    """
    yield from range(1, NEIGHBOURS + 1)
    end = NEIGHBOURS
    while True:
        start, end = end + 1, end * NEIGHBOURS
        yield random.randint(start, end)


logger = logging.getLogger(__name__)

#: Worlds of up to this many nodes: all may report at once when the world begins.
SMALL_WORLD = 64
#: Seconds a host that leaves stays for the others to elect the next one.
HANDING_OVER = 10.0
#: Seconds a node that ends has to write the last changes of its member record.
RECORD_TIMEOUT = 2.0
#: Seconds the host stays so that others learn that the job is closed.
HOST_STAYS = 5.0
#: Seconds that a leader has to end a world whose nodes fall silent.
LEADER_TIME = 1.0
#: `SideTasks.start`: runs something beside the loop; what goes wrong there is the owner's to see.
Background = Callable[[Work, str], asyncio.Task[Any]]


class MemberSession:
    """A node's membership in a job; it survives the loss and reopening of its lease."""

    def __init__(
        self,
        config: LaunchConfig,
        node: str,
        clock: Clock,
        *,
        observer: LeaderObserver,
        background: Background,
        on_world: Callable[[World], None],
        on_lease_lost: Callable[[], None],
        on_lease: Callable[[float], None] = lambda until: None,
        on_place: Callable[[int], None] = lambda place: None,
        host: str = "",
        on_child: Callable[[int], None] = lambda pid: None,
        file: VoterFile | None = None,
    ) -> None:
        """`on_lease` receives the time until which the lease is held, again after every renewal.
        `on_place` receives the place in a replica that the leader allots, if replicas span
        nodes. `host` is the displayed name of this node; the default is its host name. `on_child`
        is called with every process that this starts; `file` keeps the node's vote for its next
        agent."""
        self._config = config
        self._node = node
        self._host = host or socket.gethostname()
        self._agreement = JobSettings.from_config(config)
        self._clock = clock
        self._on_child = on_child
        self._file = file
        self._observer = observer
        self._background = background
        self._on_world = on_world
        self._on_lease_lost = on_lease_lost
        self._on_lease = on_lease
        self._on_place = on_place
        self._backend: RendezvousBackend | None = None
        self._membership: MemberRecord | None = None
        #: Updates made before there was a record to put them into.
        self._facts: dict[str, Any] = {}
        #: A phase of the last world that had nodes, with those of our part.
        self._world: World | None = None
        #: The last world that was passed on, as it came.
        self._seen: Json | None = None
        self._failover = Failover(node)
        #: With etcd, where the nodes of the job watch each other.
        self._ring: Ring | None = None
        self._prober: Prober | RivalProber | None = None
        #: Whether the last world that was seen runs.
        self._is_under_way = False
        self._suspecting: asyncio.Task[Any] | None = None
        self._leader: Leader | None = None
        #: The tasks of this node as a member under its present lease.
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def backend(self) -> RendezvousBackend:
        assert self._backend is not None, "read before joining"
        return self._backend

    @property
    def member(self) -> Member:
        assert self._membership is not None, "read before joining"
        return self._membership.member

    async def join(self, **facts: Any) -> None:
        """Join the job; `facts` are more fields of the member record."""
        say = self._observer.without_host
        self._backend = await meet(
            self._config, self._node, self._clock, say, self._on_child, self._file
        )
        if self._file is not None:  # the workers of an agent before this one ended with it
            self._facts.setdefault("gone", self._file.generation)
            self._facts["resumed"] = self._file.resumed is not None
        if self._backend.witness is not None:
            watchdog = WitnessWatch(self._backend.witness, self._observer.say)
            self._facts["witness"] = await watchdog.look()
            self._background(partial(watchdog.run, self._note_witness), "witness")
        member = Member(
            node=self._node,
            name="",
            addr=self._backend.addr,
            peer=self._backend.peer,
            nproc=self._config.nproc_per_node,
            role=self._config.role,
            node_rank=self._config.node_rank,
            agreement=self._agreement.digest,
            **{**facts, **self._facts},
        )
        self._membership = MemberRecord(member)
        self._ring = self._backend.ring(self._node, self._doubt)
        if self._ring is not None:
            self._prober = Prober(self._node, self._ring.ask, self._probed)
        else:
            self._prober = RivalProber(self._node, self._ask, self._unreached)
        await self._enlist()

    def _note_witness(self, token: str) -> None:
        if self._membership is None or self.member.witness != token:
            self.update(witness=token)

    async def rejoin(self, gone: int) -> str:
        """After a lost lease, with no worker left in a world: become a member again, if necessary
        at another host of the store; return the new name.

        If the store still has the lease, it is held again. Giving it back first would delete the
        record for a moment, in which a leader could form a world without the state of this node.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        gone = max(gone, self.member.gone)  # the later generation counts
        self.update(gone=gone, failures=(), resumed=False)
        self.update(probed=-1, unreached=())
        if self._prober is not None:
            self._prober.forget()
        if not await self._resume():
            await self._enlist()
        return self.member.name

    async def _resume(self) -> bool:
        """Hold the lease again, and write the record anew; return False if the lease has ended."""
        assert self._membership is not None
        store = self.backend.store
        store.tell_lease(self._on_lease)
        try:
            if not await store.resume_lease(self._config.lease):
                return False
            await self._membership.rewrite(store, self.backend.kept)
        except (LeaseExpired, RendezvousLost) as error:
            logger.debug("the lease could not be resumed: %s", error)
            return False
        self._be_member()
        return True

    async def _enlist(self) -> None:
        """Open a lease and claim a name under it; again if the store took longer than the lease to
        answer, and at the next host if the host is lost."""
        assert self._membership is not None
        while True:
            store = self.backend.store
            store.tell_lease(self._on_lease)
            try:
                await store.open_lease(self._config.lease)
                await self._membership.enlist(store, self._host, self.backend.kept)
            except LeaseExpired as error:
                logger.debug("the lease expired before it could be used: %s", error)
            except RendezvousLost:
                if await self._regain():
                    break
            else:
                break
        self._be_member()

    def _kept(self) -> dict[str, Json]:
        """This node's rows in the store under its lease."""
        if not self.member.name:
            return {}
        return {
            MEMBER_PREFIX + self._node: self.member.to_json(),
            NAME_PREFIX + self.member.name: {"node": self._node},
        }

    async def _regain(self) -> bool:
        """Connect to a store again; return whether this node's keys are there under a lease."""
        limit, say = self._config.wait_for_nodes or None, self._observer.without_host
        had_rows = bool(self._kept())
        leased = await self.backend.regain(self._kept, timeout=limit, say=say)
        assert self._membership is not None
        self._membership.unsaid()
        self.update(addr=self.backend.addr, peer=self.backend.peer)
        return leased and had_rows

    def update(self, **changes: Any) -> None:
        """Change the member record, or what it will say after joining."""
        if self._membership is not None:
            self._membership.update(**changes)
            if changes.get("leaving"):
                self.backend.say_goodbye()
        else:
            self._facts.update(changes)

    def _be_member(self) -> None:
        """Write the member record, follow the worlds, and lead when it is our turn, until the lease
        ends."""
        assert self._membership is not None
        store = self.backend.store
        store.tell_lease(self._on_lease)
        self.update()
        work = {
            "membership": self._membership.run(store, self.backend.kept),
            "watch-world": self._watch_world(store),
            "watch-leader": self._watch_leader(store),
        }
        if self._prober is not None:
            work["probe"] = self._prober.run(store)
        if self._config.nodes_per_replica > 1:
            work["watch-place"] = self._watch_place(store)
        if self.backend.term:
            work["watch-confirmed"] = self._watch_confirmed(store)
        if self.backend.is_host or not self.backend.term:
            self._leader = self._new_leader(store)
            work["leader"] = self._leader.run()
        self._tasks = [
            self._background(partial(self._while_leased, coroutine), name)
            for name, coroutine in work.items()
        ]
        self._tasks.append(self._background(partial(self._watch_lease, store), "watch-lease"))

    def replace_slow(self, generation: int, nodes: Set[str]) -> None:
        """If this node leads, replace these slow nodes by spare ones."""
        if self._leader is not None:
            self._leader.replace_slow(generation, nodes)

    def _new_leader(self, store: Store) -> Leader:
        rules = RoundRules.from_config(self._config)
        return Leader(
            store,
            self._node,
            rules,
            self._clock,
            self._observer,
            term=self.backend.term,
            may_begin_at=self.backend.may_begin_at,
            dead=self.backend.dead,
            ask=self._ring.ask if self._ring is not None else None,
            agreement=self._agreement,
            witness=self.backend.witness,
            keep=self._keep_formed if self.backend.term else None,
        )

    async def _keep_formed(self, world: World, rows: Mapping[str, Json]) -> None:
        """As host: hold a world before others see it."""
        if not self.backend.is_host:
            raise RendezvousLost("This node no longer hosts the rendezvous.")
        if world.count:
            self.backend.hold(self._failover.formed(world, rows))
            await self.backend.kept()

    async def _while_leased(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that ends quietly with the lease: `_watch_lease` reports that. The same holds
        for the loss of the store's host, if another node can take over."""
        try:
            await work
        except LeaseExpired:
            return
        except RendezvousLost:
            if not self.backend.term:
                raise

    async def _watch_leader(self, store: Store) -> None:
        """End this node if its settings differ from the job's, whoever leads."""
        async with contextlib.aclosing(store.follow(LEADER_KEY)) as leaders:
            async for leader in leaders:
                if leader is not None and (why := self._agreement.objection(leader.value)):
                    raise RendezvousRefused(why)

    async def _watch_place(self, store: Store) -> None:
        """Pass on the place in a replica that the leader allots to this node."""
        async with contextlib.aclosing(store.follow(PLACE_PREFIX + self._node)) as places:
            async for place in places:
                if place is not None:
                    self._on_place(int(place.value["place"]))

    async def _watch_world(self, store: Store) -> None:
        async with contextlib.aclosing(store.follow(WORLD_KEY)) as summaries:
            async for summary in summaries:
                if summary is not None:
                    await self._see_world(store, summary)

    async def _see_world(self, store: Store, item: Item) -> None:
        """Pass on a world, with the part of its nodes that this one may be in."""
        summary = item.value
        if summary == self._seen:
            return  # repeated by a store that was opened again
        world = await self._with_nodes(store, World.from_json(summary))
        if world is None:
            return
        self.backend.hear_of([*world.candidates.values()])
        takes_up = self.backend.takes_up(world.generation)
        if world.count and not takes_up and world.is_under_way:
            return  # of an earlier host, and not ours: a newer one follows
        if world.count and takes_up and self.backend.term:
            self.backend.hold(await self._failover.take(store, world, summary))
            self._accept(world)
        if self._ring is not None:
            self._watch_others(self._ring, world)
        if self._prober is not None:
            self._prober.see(world)
        if store.lease_lost.is_set() and world.phase != "closed":
            return  # the others may continue without this node; repeated when it has joined again
        self._seen = summary
        if world.phase != "agreeing":
            self._on_world(self._unless_given_up(world, item.modified))

    def _unless_given_up(self, world: World, published: int) -> World:
        """The world as this node takes it. A world that gave this node a place before its present
        membership has counted it as lost, or will, and is over for it."""
        assert self._membership is not None
        return world.without(self._node) if published < self._membership.since else world

    async def _with_nodes(self, store: Store, world: World) -> World | None:
        """The world with the nodes of our part, which is read once for all of the world's phases.

        None if there is a newer world whose summary is on its way: only its parts are left.
        """
        if not world.count:
            return world
        if self._world is not None and world.has_list_of(self._world):
            return world.with_list_of(self._world)
        key = part_key(self._node, world.part_count)
        part = await store.latest(key)
        if part is None or not world.owns(part.value):
            return None
        self._world = world.with_parts([part.value])
        return self._world

    def _accept(self, world: World) -> None:
        """Report that this node has a world; at once if the others wait for that, or are so few
        that it costs nothing: until enough have reported it, the nodes of the last world have a
        vote."""
        assert self._membership is not None
        if world.phase == "agreeing" or world.count <= SMALL_WORLD:
            self.update(accepted=world.generation)
        elif self.member.accepted != world.generation:
            self._membership.mention(accepted=world.generation)

    def _watch_others(self, ring: Ring, world: World) -> None:
        """With etcd: watch the neighbours in a world, and report that its end is known."""
        self._is_under_way = world.is_under_way
        ring.turn_to(world.generation, [(node.node, node.peer) for node in world.nodes])
        if world.has_ended_for(self._node) and world.place(self._node) is not None:
            self.update(stopping=world.generation)

    async def _ask(self, address: str) -> bool | None:
        job = self._config.run_id
        return await lives(Endpoint.at(address, job, self.backend.credentials))

    def _unreached(self, rivals: tuple[str, ...]) -> None:
        self.update(unreached=rivals)

    def _probed(self, probe: int, unreached: tuple[str, ...]) -> None:
        self.update(probed=probe, unreached=unreached)

    def _doubt(self, doubted: Set[str], silent: Set[str]) -> None:
        """Tell the leader which nodes the ring suspects; replace the leader if it does nothing."""
        generation = self._world.generation if self._world is not None else -1
        self.update(
            doubts=tuple(sorted(doubted)), silent=tuple(sorted(silent)), silent_in=generation
        )
        if self._suspecting is not None:
            self._suspecting.cancel()
        if doubted:
            minding = partial(self._mind_leader, doubted, bool(silent))
            self._suspecting = self._background(lambda: self._while_leased(minding()), "doubt")

    async def _mind_leader(self, doubted: Set[str], silent: bool) -> None:
        """Lead in place of a leader that is dead, or that does not end a world whose nodes fall
        silent."""
        assert self._ring is not None
        every = min(self._config.lease / 2, LEADER_TIME)
        due = self._clock.now() + every if silent else math.inf

        def is_overdue() -> bool:
            return self._clock.now() >= due and self._is_under_way

        mine = {"node": self._node, **self._agreement.to_json()}
        dead = await replace_leader(
            self.backend.store, mine, doubted, self._ring.ask, is_overdue=is_overdue, every=every
        )
        if dead and self._leader is not None:
            self._leader.refuses(dead)

    async def _watch_confirmed(self, store: Store) -> None:
        """As a possible next host, watch for a world to be confirmed."""
        await self._failover.is_candidate.wait()
        async with contextlib.aclosing(store.watch(CONFIRMED_KEY, after=0)) as changes:
            async for change in changes:
                if change.item is not None:
                    self.backend.hold(self._failover.confirmed(change.item.value["generation"]))
                    await self.backend.kept()

    async def _watch_lease(self, store: Store) -> None:
        await store.lease_lost.wait()
        self._on_lease_lost()

    async def last_words(self) -> None:
        """Wait, within limits, until all changes of the record have been written."""
        if self._membership is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._membership.flush(self.backend.store), RECORD_TIMEOUT)

    async def close(self, *, job_closed: bool) -> None:
        """Close; the host of a closed job waits for the other nodes to go first."""
        if self._backend is None:
            return
        ended = self._backend.is_host and self._leader is not None and self._leader.has_ended
        if self._membership is not None and self.member.leaving:
            await self._backend.hand_over(self._kept, HANDING_OVER)
        await self._backend.close(HOST_STAYS if job_closed else 0.0, ended=ended)
