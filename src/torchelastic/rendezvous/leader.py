"""The one who decides: whoever holds the `leader` key turns member records into worlds.

Every agent runs a `Leader`; all but one of them wait for the key to come free. A world is published
on condition that nobody has published another one since: a leader that was paused, and woke up as
an impostor, changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
import stat
from itertools import chain
from typing import Protocol

from torchelastic.clock import Clock
from torchelastic.errors import LeaseExpired, RendezvousError
from torchelastic.rendezvous import resident, round_state
from torchelastic.rendezvous.restart_policy import Kind
from torchelastic.rendezvous.round import waits_for_checkpoint
from torchelastic.rendezvous.round_state import Decision, RoundRules, RoundState
from torchelastic.rendezvous.store import Change, Store
from torchelastic.rendezvous.world import PART_PREFIX, WORLD_KEY, Member, World

LEADER_KEY = "leader"
MEMBER_PREFIX = "member/"

#: How often the checkpoint path is looked at, and how often in a row nothing must have changed.
CHECKPOINT_POLL = 0.5
QUIET_LOOKS = 2

logger = logging.getLogger(__name__)


class LeaderObserver(Protocol):
    """Who is told what the leader sees and decides."""

    def became_leader(self) -> None: ...
    def node_joined(self, member: Member) -> None: ...
    def node_lost(self, name: str, reason: str) -> None: ...
    def node_leaving(self, member: Member) -> None: ...
    def decided(self, world: World, kind: Kind | None) -> None: ...


class Leader:
    """Campaigns for the leader key, and leads while it has it."""

    def __init__(
        self, store: Store, node: str, rules: RoundRules, clock: Clock, observer: LeaderObserver
    ) -> None:
        self._store = store
        self._node = node
        self._rules = rules
        self._clock = clock
        self._observer = observer
        self._state = RoundState()
        self._world_revision = 0
        #: When the leader key that is ours came into being.
        self._elected = 0
        self._changes: asyncio.Queue[Change] = asyncio.Queue()
        #: Looked at only while newcomers wait for a checkpoint.
        self._checkpoint: CheckpointPath | None = None

    async def run(self) -> None:
        """Lead whenever the key is free; returns only when the store is lost or the job closed."""
        while True:
            await self._campaign()
            self._observer.became_leader()
            if await self._lead():
                return

    async def _campaign(self) -> None:
        """Wait for the key to be free, and take it."""
        while True:
            listing = await self._store.get(LEADER_KEY)
            holder = listing.items.get(LEADER_KEY)
            if holder is not None and holder.value.get("node") == self._node:
                self._elected = holder.created
                return  # ours still: the last publication came too late, not the key
            if holder is None:
                won = await self._store.compare_and_set(
                    LEADER_KEY, {"node": self._node}, expected=0, leased=True
                )
                if won is not None:
                    self._elected = won
                    return
                continue
            async with contextlib.aclosing(
                self._store.watch(LEADER_KEY, after=listing.revision)
            ) as changes:
                async for change in changes:
                    if change.item is None:
                        break

    async def _lead(self) -> bool:
        """Decide until the job is closed (True) or somebody else published a world (False)."""
        revision = await self._take_over()
        watching = asyncio.create_task(self._watch_members(revision), name="watch-members")
        try:
            return await self._decide_until_closed(watching)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError, RendezvousError):
                await watching

    async def _take_over(self) -> int:
        """Start from what the store holds; returns the revision it is as of."""
        self._state = RoundState()
        self._changes = asyncio.Queue()
        now = self._clock.now()
        listing = await self._store.get("")
        held = listing.items.get(WORLD_KEY)
        self._world_revision = held.modified if held else 0
        if held:
            parts = [item.value for k, item in listing.items.items() if k.startswith(PART_PREFIX)]
            self._state = round_state.taken_over(World.from_parts(held.value, parts), now)
        members = [(k, item) for k, item in listing.items.items() if k.startswith(MEMBER_PREFIX)]
        for _, item in sorted(members, key=lambda pair: pair[1].modified):
            self._take(Member.from_json(item.value), item.created)
        for node in self._state.world.nodes if self._state.world else ():
            if node.node not in self._state.members:
                self._state = round_state.vanished(self._state, node.node)
        return listing.revision

    async def _watch_members(self, revision: int) -> None:
        async with contextlib.aclosing(self._store.watch(MEMBER_PREFIX, after=revision)) as changes:
            async for change in changes:
                self._changes.put_nowait(change)

    async def _decide_until_closed(self, watching: asyncio.Task[None]) -> bool:
        while True:
            decision = resident.decide(self._rules, self._state, self._clock.now())
            if decision.world is not None:
                if not await self._publish(decision.world, decision.kind):
                    return False
                if decision.world.phase == "closed":
                    return True
                continue
            await self._next_change(decision, watching)

    async def _publish(self, world: World, kind: Kind | None) -> bool:
        if self._store.lease_lost.is_set():
            raise LeaseExpired("This node is no leader any more: its lease has ended.")
        revision = await self._store.compare_and_set(
            WORLD_KEY,
            world.summary(),
            expected=self._world_revision,
            beside=None if _has_list_of(world, self._state.world) else world.parts(),
            provided=(LEADER_KEY, self._elected),
        )
        if revision is None:
            logger.warning("somebody else has published a world meanwhile: looking again")
            return False
        self._world_revision = revision
        self._state = round_state.published(self._state, world, self._clock.now())
        self._observer.decided(world, kind)
        return True

    async def _next_change(self, decision: Decision, watching: asyncio.Task[None]) -> None:
        """Wait for a member to change or for the time the decision named, and take it up."""
        timeout = None
        if decision.wake_at is not None:
            timeout = max(0.0, decision.wake_at - self._clock.now())
        if await self._awaits_checkpoint():
            timeout = CHECKPOINT_POLL if timeout is None else min(CHECKPOINT_POLL, timeout)
        getting = asyncio.ensure_future(self._changes.get())
        await asyncio.wait(
            {getting, watching}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if getting.done():
            self._apply(getting.result())
            while not self._changes.empty():
                self._apply(self._changes.get_nowait())
        else:
            getting.cancel()
            if watching.done():
                watching.result()
        # In a thread: a slow file system must not keep the lease from being renewed.
        if self._checkpoint is not None and await asyncio.to_thread(self._checkpoint.written):
            self._state = round_state.checkpoint_seen(self._state, True)

    async def _awaits_checkpoint(self) -> bool:
        """Whether newcomers wait for a checkpoint; looks at the path from their arrival on."""
        if not waits_for_checkpoint(self._rules, self._state):
            self._checkpoint = None
            self._state = round_state.checkpoint_seen(self._state, False)
        elif self._checkpoint is None:
            self._checkpoint = await asyncio.to_thread(CheckpointPath, self._rules.grow.path)
        return self._checkpoint is not None

    def _apply(self, change: Change) -> None:
        if change.item is not None:
            self._take(Member.from_json(change.item.value), change.item.created)
            return
        node = change.key.removeprefix(MEMBER_PREFIX)
        present = self._state.members.get(node)
        self._state = round_state.lost(self._state, node)
        if present is not None and not present.member.leaving:
            self._observer.node_lost(present.member.name, "its connection or lease ended")

    def _take(self, member: Member, created: int) -> None:
        before = self._state.members.get(member.node)
        self._state = round_state.seen(self._state, member, created, self._clock.now())
        if before is None or before.created != created:
            self._observer.node_joined(member)
        if member.leaving and (before is None or not before.member.leaving):
            self._observer.node_leaving(member)


def _has_list_of(world: World, before: World | None) -> bool:
    """Whether the nodes' places are as they were published: another phase of the generation."""
    if before is None:
        return False
    return (world.generation, world.digest) == (before.generation, before.digest)


class CheckpointPath:
    """Notices that something new has been written at a path (a file, a directory or a pattern)."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._first = self._look()
        self._last = self._first
        self._quiet = 0

    def written(self) -> bool:
        """Whether there is another newest file than at first, and it has stopped changing.

        A checkpoint that is still being written must not be cut off by the resize it allows.
        """
        now = self._look()
        self._quiet = self._quiet + 1 if now == self._last else 0
        self._last = now
        return now is not None and now != self._first and self._quiet >= QUIET_LOOKS

    def _look(self) -> tuple[int, int] | None:
        """Time of change and size of the newest file; old ones may be deleted meanwhile."""
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
