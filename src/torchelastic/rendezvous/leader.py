"""The leader: the holder of the `leader` key turns member records into worlds.

Every agent runs a `Leader`; all but one wait for the key to become free. A world is published only
if no other leader has published one since: a leader that was frozen and has been replaced changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import replace
from itertools import chain
from typing import Protocol

from torchelastic.clock import Clock
from torchelastic.errors import LeaseExpired, RendezvousError
from torchelastic.rendezvous import majority, round_state
from torchelastic.rendezvous.choosing import to_allot
from torchelastic.rendezvous.decide import (
    decide,
    slow_nodes,
    waits_for_checkpoint,
    why_to_replace,
)
from torchelastic.rendezvous.job_settings import JobSettings
from torchelastic.rendezvous.membership.suspicion import Ask, Suspicion
from torchelastic.rendezvous.restart_policy import Kind
from torchelastic.rendezvous.round_state import (
    MemberEntry,
    RoundDecision,
    RoundRules,
    RoundState,
    StateUpdate,
    WitnessVotes,
)
from torchelastic.rendezvous.store import Change, Json, Listing, Store
from torchelastic.rendezvous.witness.vote_keys import Witness, WitnessSilent
from torchelastic.rendezvous.world import (
    LEADER_KEY,
    MEMBER_PREFIX,
    PART_PREFIX,
    PLACE_PREFIX,
    WORLD_KEY,
    Member,
    World,
)

#: The electorates of the next world, and the last world known to be confirmed (`majority`).
ROLL_KEY = "roll"
CONFIRMED_KEY = "confirmed"

#: Seconds between two looks at the checkpoint path, and the looks without a change after which it
#: counts as written.
CHECKPOINT_POLL_INTERVAL = 0.5
CHECKPOINT_QUIET_POLLS = 2

#: Seconds before a silent witness is asked again.
WITNESS_RETRY_DELAY = 1.0

#: A decision about thousands of nodes takes milliseconds, and they report one by one. So the leader
#: pauses for this many times the duration of its last decision, to collect more reports; it skips a
#: pause shorter than the minimum.
BATCH_FACTOR = 4.0
BATCH_PAUSE_MIN, BATCH_PAUSE_MAX = 0.001, 0.05

logger = logging.getLogger(__name__)


class LeaderObserver(Protocol):
    """Receives what the leader sees and decides."""

    def became_leader(self) -> None: ...
    def node_joined(self, member: Member) -> None: ...
    def node_lost(self, name: str, reason: str) -> None: ...
    def node_leaving(self, member: Member) -> None: ...
    def decided(self, world: World, kind: Kind | None) -> None: ...
    def without_host(self, sentence: str) -> None:
        """Report that this node has lost the host of the store and has not found the next one."""
        ...

    def say(self, sentence: str) -> None:
        """Show a sentence to the user."""
        ...


class Leader:
    """Campaigns for the leader key, and leads while it holds it."""

    def __init__(
        self,
        store: Store,
        node: str,
        rules: RoundRules,
        clock: Clock,
        observer: LeaderObserver,
        *,
        term: int = 0,
        may_begin_at: float = 0.0,
        dead: frozenset[str] = frozenset(),
        ask: Ask | None = None,
        agreement: JobSettings | None = None,
        witness: Witness | None = None,
        keep: Callable[[World, Mapping[str, Json]], Awaitable[None]] | None = None,
    ) -> None:
        """`term` is the election term of a node that hosts the store itself. It forms no first
        world before `may_begin_at`, and continues without the `dead`. `ask` probes an agent that
        others suspect, if the store would notice its end too slowly. Nodes with another `agreement`
        are left out. `witness` has the votes that break ties. `keep` receives a world, and the keys
        stored with it, before it is published."""
        self._store = store
        self._agreement = agreement
        self._term = term
        self._keep = keep
        self._may_begin_at = may_begin_at
        self._dead = dead
        self._witness = witness
        #: Why the witness did not answer last time, and the task that asks it now.
        self._silent = ""
        self._claiming: asyncio.Task[None] | None = None
        self._suspicion = (
            Suspicion(ask, lambda: self._changes.put_nowait(None)) if ask is not None else None
        )
        self._node = node
        self._rules = rules
        self._clock = clock
        self._observer = observer
        self._state = RoundState()
        self._world_revision = 0
        #: The revisions at which places in replicas were allotted, by node.
        self._place_revisions: dict[str, int] = {}
        #: The revision of our leader key.
        self._elected = 0
        #: Changed member records; None wakes the leader for another reason.
        self._changes: asyncio.Queue[Change | None] = asyncio.Queue()
        #: The generation and its slow nodes, as last reported; and the nodes that users were told
        #: cannot be replaced.
        self._slow: tuple[int, frozenset[str]] | None = None
        self._told_to_stay: frozenset[str] = frozenset()
        #: Seconds to collect further changes before the next decision.
        self._batch_pause = 0.0
        #: Watched only while newcomers wait for a checkpoint.
        self._checkpoint: CheckpointPath | None = None

    async def run(self) -> None:
        """Lead whenever the key is free; return only when the store is lost or the job closed."""
        while True:
            await self._campaign()
            self._observer.became_leader()
            if await self._lead():
                return

    def replace_slow(self, generation: int, nodes: Set[str]) -> None:
        """Note which nodes of a world slow down the others: spare nodes may replace them."""
        self._slow = (generation, frozenset(nodes))
        self._changes.put_nowait(None)

    async def _campaign(self) -> None:
        """Wait for the key to be free, and take it."""
        async with contextlib.aclosing(self._store.follow(LEADER_KEY)) as holders:
            async for holder in holders:
                if holder is not None and holder.value.get("node") == self._node:
                    self._elected = holder.modified
                    return  # still ours, or taken over from a leader that does not respond
                if holder is not None:
                    continue
                terms = self._agreement.to_json() if self._agreement is not None else {}
                won = await self._store.compare_and_set(
                    LEADER_KEY, {"node": self._node, **terms}, expected=0, leased=True
                )
                if won is not None:
                    self._elected = won
                    return

    async def _lead(self) -> bool:
        """Decide until the job is closed (True) or another leader published a world (False)."""
        revision = await self._take_over()
        watching = asyncio.create_task(self._watch_members(revision), name="watch-members")
        try:
            return await self._decide_until_closed(watching)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError, RendezvousError):
                await watching
            if self._suspicion is not None:
                await self._suspicion.close()
            if self._claiming is not None:
                self._claiming.cancel()

    @property
    def has_ended(self) -> bool:
        """Return whether the job is closed, or no other node could continue it."""
        return round_state.has_ended(self._state)

    async def _take_over(self) -> int:
        """Start from what the store holds; return its revision."""
        self._changes = asyncio.Queue()
        listing = await self._store.get("")
        held = listing.items.get(WORLD_KEY)
        self._world_revision = held.modified if held else 0
        self._state = self._state_from(listing)
        self._take_places(listing)
        members = [(k, item) for k, item in listing.items.items() if k.startswith(MEMBER_PREFIX)]
        ordered = sorted(members, key=lambda pair: pair[1].modified)
        self._take_up([Change(key, item, item.modified) for key, item in ordered])
        self._state = round_state.with_missing_lost(self._state)
        return listing.revision

    def _take_places(self, listing: Listing) -> None:
        """Start from the places that the last leader has allotted."""
        found = {
            key.removeprefix(PLACE_PREFIX): item
            for key, item in listing.items.items()
            if key.startswith(PLACE_PREFIX)
        }
        self._place_revisions = {node: item.modified for node, item in found.items()}
        places = {node: int(item.value["place"]) for node, item in found.items()}
        self._state = replace(self._state, places=places)

    def _state_from(self, listing: Listing) -> RoundState:
        """The state of the last world, as the store has it."""
        state = RoundState(may_begin_at=self._may_begin_at)
        world, items = None, listing.items
        if WORLD_KEY in items:
            parts = [item.value for key, item in items.items() if key.startswith(PART_PREFIX)]
            world = World.from_parts(items[WORLD_KEY].value, parts)
            known = round_state.taken_over(world, self._clock.now())
            state = replace(known, may_begin_at=self._may_begin_at)
        if not self._term:
            return state
        stored = items[ROLL_KEY].value if ROLL_KEY in items else None
        confirmed = items[CONFIRMED_KEY].value["generation"] if CONFIRMED_KEY in items else -1
        state = round_state.hosted(
            state, self._node, self._term, stored, confirmed=confirmed, quorum=self._rules.quorum
        )
        return replace(state, dead=self._dead)

    async def _watch_members(self, revision: int) -> None:
        async with contextlib.aclosing(self._store.watch(MEMBER_PREFIX, after=revision)) as changes:
            async for change in changes:
                self._changes.put_nowait(change)

    async def _decide_until_closed(self, watching: asyncio.Task[None]) -> bool:
        while True:
            began = asyncio.get_running_loop().time()
            await self._note_confirmed()
            self._state = round_state.with_holds(self._state, self._clock.now())
            self._note_slow()
            self._note_witness()
            if not await self._allot():
                return False
            self._note_refused()
            decision = decide(self._rules, self._state, self._clock.now())
            self._batch_pause = BATCH_FACTOR * (asyncio.get_running_loop().time() - began)
            if decision.world is not None:
                if not await self._publish(decision.world, decision.kind):
                    return False
                if decision.world.phase == "closed":
                    return True
                continue
            if decision.claims and (self._claiming is None or self._claiming.done()):
                self._claiming = asyncio.create_task(self._claim(decision.claims), name="claim")
            for node in decision.drop:
                await self._drop(node)
            await self._next_change(decision, watching)

    async def _allot(self) -> bool:
        """Tell nodes their places in replicas; return whether this node still leads."""
        places = to_allot(self._rules, self._state)
        for node, place in places.items():
            revision = await self._store.compare_and_set(
                PLACE_PREFIX + node,
                {"place": place},
                expected=self._place_revisions.get(node, 0),
                leased=True,
                provided=(LEADER_KEY, self._elected),
            )
            if revision is None:
                logger.warning("another leader has allotted a place: reading again")
                return False
            self._place_revisions[node] = revision
        if places:
            self._state = round_state.allotted(self._state, places)
        return True

    def _note_witness(self) -> None:
        if self._witness is not None:
            known = WitnessVotes(
                url=self._witness.url,
                held=self._witness.votes(self._term),
                refused=self._witness.refused(self._term),
                silent=self._silent,
            )
            self._state = replace(self._state, witness=known)

    async def _claim(self, votes: Iterable[str]) -> None:
        """Ask the witness for votes, one after the other until it refuses one."""
        assert self._witness is not None, "a witness vote needs a witness"
        try:
            for vote in votes:
                if not await self._witness.claim(vote, self._term):
                    break
            self._silent = ""
        except WitnessSilent as error:
            self._silent = str(error)
            self._changes.put_nowait(None)  # report it
            await asyncio.sleep(WITNESS_RETRY_DELAY)
        self._changes.put_nowait(None)

    async def _publish(self, world: World, kind: Kind | None) -> bool:
        if self._store.lease_lost.is_set():
            raise LeaseExpired("This node is no longer the leader: its lease expired.")
        world = world.in_parts(self._store.most_beside - 1)
        following = round_state.published(self._state, world, self._clock.now())
        beside = None
        before = self._state.world
        if before is None or not world.has_list_of(before):
            beside = world.parts()
            if following.roll is not None:
                beside[ROLL_KEY] = majority.to_json(following.roll)
        if beside is not None and self._keep is not None:
            await self._keep(world, beside)
        revision = await self._store.compare_and_set(
            WORLD_KEY,
            world.summary(),
            expected=self._world_revision,
            beside=beside,
            provided=(LEADER_KEY, self._elected),
        )
        if revision is None:
            logger.warning("another leader has published a world: reading again")
            return False
        self._world_revision = revision
        if self._suspicion is not None and (
            before is None or before.generation != world.generation
        ):
            self._suspicion.contested.clear()
        self._state = following
        if world.phase != "agreeing":
            self._observer.decided(world, kind)
        return True

    async def _drop(self, node: str) -> None:
        """End the lease of a member whose machine refuses connections."""
        await self._store.give_up(
            MEMBER_PREFIX + node,
            created=self._state.members[node].created,
            provided=(LEADER_KEY, self._elected),
        )

    def _note_refused(self) -> None:
        if self._suspicion is not None:
            refused, contested = self._suspicion.refused, self._suspicion.contested
            self._state = replace(
                self._state, refused=frozenset(refused), contested=frozenset(contested)
            )

    def refuses(self, node: str) -> None:
        """Note that a node refuses connections: the last leader, as this one found before."""
        if self._suspicion is not None:
            self._suspicion.refused.add(node)

    async def _note_confirmed(self) -> None:
        """Store, for the next host too, that only the nodes of the last world have a vote from now
        on."""
        before, self._state = self._state, round_state.confirmed(self._state)
        if self._state.roll is not before.roll and self._state.roll is not None:
            await self._store.put(CONFIRMED_KEY, {"generation": self._state.roll.generation})

    def _note_slow(self) -> None:
        """Note which nodes are slow; report once for each that no spare node can replace it."""
        (generation, slow), self._slow = self._slow or (-1, frozenset()), None
        world = self._state.world
        if world is None or world.generation != generation or world.phase != "running":
            return
        self._state = round_state.slow_seen(self._state, slow)
        if slow - self._told_to_stay and not why_to_replace(self._rules, self._state):
            self._told_to_stay |= slow
            names = round_state.names_of(self._state, slow_nodes(self._state))
            self._observer.say(f"no spare node can replace the slow {names}")

    async def _next_change(self, decision: RoundDecision, watching: asyncio.Task[None]) -> None:
        """Wait for a member to change, or for the time the decision named, and process it."""
        timeout = None
        if decision.wake_at is not None:
            timeout = max(0.0, decision.wake_at - self._clock.now())
        if await self._awaits_checkpoint():
            timeout = (
                CHECKPOINT_POLL_INTERVAL
                if timeout is None
                else min(CHECKPOINT_POLL_INTERVAL, timeout)
            )
        getting = asyncio.ensure_future(self._changes.get())
        try:
            await asyncio.wait(
                {getting, watching}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            getting.cancel()  # no effect if it is done
        if getting.done():
            if self._batch_pause > BATCH_PAUSE_MIN:
                await asyncio.sleep(min(self._batch_pause, BATCH_PAUSE_MAX))
            changes = [getting.result()]
            while not self._changes.empty():
                changes.append(self._changes.get_nowait())
            self._take_up([change for change in changes if change is not None])
        elif watching.done():
            watching.result()
        # In a thread: a slow file system must not keep the lease from being renewed.
        if self._checkpoint is not None and await asyncio.to_thread(self._checkpoint.written):
            self._state = replace(self._state, checkpoint=True)

    async def _awaits_checkpoint(self) -> bool:
        """Return whether newcomers wait for a checkpoint; start watching its path if so."""
        if not waits_for_checkpoint(self._rules, self._state):
            self._checkpoint = None
            self._state = replace(self._state, checkpoint=False)
        elif self._checkpoint is None:
            self._checkpoint = await asyncio.to_thread(CheckpointPath, self._rules.grow.path)
        return self._checkpoint is not None

    def _take_up(self, changes: Iterable[Change]) -> None:
        """Process changed and deleted member records."""
        ours = self._agreement.digest if self._agreement is not None else ""
        draft = StateUpdate(self._state)
        now = self._clock.now()
        for change in changes:
            node = change.key.removeprefix(MEMBER_PREFIX)
            before = draft.members.get(node)
            if change.item is None:
                draft.lose(node)
                if self._suspicion is not None:
                    self._suspicion.lost(node)
                if before is not None and not before.member.leaving:
                    self._observer.node_lost(before.member.name, "its connection or lease ended")
            else:
                member = Member.from_json(change.item.value)
                if ours and member.agreement and member.agreement != ours:
                    continue  # it has other settings: it will notice, and exit
                draft.see(member, change.item.created, now)
                self._report_member(member, change.item.created, before)
                if self._suspicion is not None:
                    self._suspicion.heard(member)
        self._state = draft.finish()

    def _report_member(self, member: Member, created: int, before: MemberEntry | None) -> None:
        if before is None or before.created != created:
            self._observer.node_joined(member)
        if member.leaving and (before is None or not before.member.leaving):
            self._observer.node_leaving(member)


class CheckpointPath:
    """Detects new files at a path (a file, a directory or a pattern)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._first = self._look()
        self._last = self._first
        self._quiet = 0

    def written(self) -> bool:
        """Return whether a file newer than the first one has stopped changing.

        The resize that a checkpoint allows must not interrupt a checkpoint that is being written.
        """
        now = self._look()
        self._quiet = self._quiet + 1 if now == self._last else 0
        self._last = now
        return now is not None and now != self._first and self._quiet >= CHECKPOINT_QUIET_POLLS

    def _look(self) -> tuple[int, int] | None:
        """Modification time and size of the newest file; older files may disappear meanwhile."""
        newest = None
        for root in glob.glob(self._path):
            inside = glob.escape(root)
            below = (glob.glob(os.path.join(inside, *stars)) for stars in (["*"], ["*", "*"]))
            for name in (root, *chain.from_iterable(below)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found = os.stat(name)
                    if stat.S_ISREG(found.st_mode):
                        newest = max(newest or (0, 0), (found.st_mtime_ns, found.st_size))
        return newest
