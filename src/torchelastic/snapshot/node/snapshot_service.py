"""The snapshots this node holds: requests of its workers, and copies on other nodes.

A worker asks on its channel; the answer carries a memory descriptor where there is one. Slow work
(the kernel clears memory when it is allocated) runs in threads.

An agent that joins a running job prefetches the shared state as soon as it is in a world, so that
it is here, or on its way, when its first worker asks.

Copies go out in the background: when a worker has sealed a version of its own piece, and when a
generation's base is known, the newest version goes to every node that holds copies. Every
node writes shared state itself, so a node that lacks it fetches it; it is never sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torchelastic.errors import TransferError
from torchelastic.rendezvous.membership.backend import RendezvousBackend
from torchelastic.rendezvous.world import Base, World
from torchelastic.side_tasks import TaskSet, keep_up
from torchelastic.snapshot import messages
from torchelastic.snapshot.layout import SHARED, Version, is_void
from torchelastic.snapshot.node.memory import SnapshotMemory
from torchelastic.snapshot.node.replicator import Replicator
from torchelastic.system.memory_limit import NoRoom
from torchelastic.transport import frames

logger = logging.getLogger(__name__)

#: Seconds before a failed copy is retried, and failures in a row before that is logged: a node that
#: is lost is not in the next world.
RETRY_AFTER, FAILURES_BEFORE_LOG = 1.0, 3
#: The pause between two rounds of copies: a multiple of the last round's time, and a maximum in
#: seconds. Small pieces of short steps must not keep a core busy.
PAUSE_FACTOR, LONGEST_PAUSE = 4.0, 0.02
#: Memories allocated at a time: the kernel clears their pages, on one core each.
ALLOCATORS = 2
#: Neighbours a newcomer asks for the shared state before its workers do.
PREFETCH_PEERS = 2
#: Answers a worker, with descriptors that remain the caller's.
Answerer = Callable[[dict[str, Any], Sequence[int]], None]


class Snapshots:
    """The node's snapshots. Create it in a running loop; it holds memory until closed."""

    def __init__(
        self,
        node: str,
        job: str,
        *,
        replicas: int,
        bandwidth: float,
        say: Callable[[str], None],
        on_base: Callable[[Base], None] = lambda base: None,
    ) -> None:
        """`bandwidth` in bytes per second, 0: any. `say` logs problems, once each.

        `on_base` receives the base of each generation of the workers here, once.
        """
        self._node = node
        self._job = job
        self._replicas = replicas
        self._bandwidth = bandwidth
        self._say = say
        self._on_base = on_base
        #: The newest generation whose base is known.
        self._newest_base = -1
        #: Held while void versions are dropped, so that none is handed out.
        self._dropping = asyncio.Lock()
        self._said: set[str] = set()
        self._snapshot_memory = SnapshotMemory(replicated=replicas > 0)
        # Separate: allocating all pages takes seconds, and the default threads look up addresses.
        self._rooms = ThreadPoolExecutor(ALLOCATORS, "snapshot-alloc")
        self._backend: RendezvousBackend | None = None
        self._replicator: Replicator | None = None
        self._tasks = TaskSet(_log)
        #: Versions that workers have written and `SnapshotMemory` has not recorded yet.
        self._sealed: list[tuple[str, Version]] = []
        #: Two workers that lack the same piece fetch it once.
        self._fetching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: By node and address: the holders of our pieces.
        self._holders: dict[tuple[str, str], _Holder] = {}
        #: Whether this node has been in no world yet.
        self._is_new = True

    def open(self, backend: RendezvousBackend) -> None:
        """Serve other nodes, once this one has joined."""
        self._backend = backend
        self._replicator = Replicator(
            self._snapshot_memory,
            self._node,
            self._job,
            backend.credentials,
            bandwidth=self._bandwidth,
        )
        backend.serve(frames.SNAPSHOT, self._replicator.admit)

    async def close(self) -> None:
        """Release everything: snapshots end with their agent."""
        for holder in self._holders.values():
            holder.stop()
        await self._tasks.close()
        if self._replicator is not None:
            await self._replicator.close()
        await asyncio.to_thread(self._rooms.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._snapshot_memory.close)

    # --- requests of workers ---------------------------------------------------------------------

    def heard(self, message: Mapping[str, Any], answer: Answerer) -> None:
        """Handle a worker's message about snapshots."""
        try:
            said = messages.from_json(message)
        except ValueError as error:
            logger.debug("ignored an invalid message from a worker: %s", error)
            return
        match said:
            case (
                messages.Room()
                | messages.Inventory()
                | messages.Open()
                | messages.Fetch()
                | messages.Drop()
            ):
                self._tasks.start(self._answer(said, answer), "answer worker")
            case messages.Sealed(piece, version):
                self._sealed.append((piece, version))
                if len(self._sealed) == 1:
                    self._tasks.start(self._note_sealed(), "note sealed")
            case messages.Outdated(before):
                freed = asyncio.to_thread(self._snapshot_memory.drop_before, before)
                self._tasks.start(freed, "drop outdated versions")
            case messages.Settled(base, generation) if generation > self._newest_base:
                begun = Base(generation, *base)
                self._on_base(begun)
                self._note_base(begun, outside=False)

    def hear_of(self, world: World) -> None:
        """Take in a world: its base, or that of an earlier one, may be known now."""
        outside = world.place(self._node) is None
        if world.base is not None and (outside or world.base.generation > self._newest_base):
            self._note_base(world.base, outside=outside)

    def _note_base(self, base: Base, *, outside: bool) -> None:
        self._newest_base = max(self._newest_base, base.generation)
        self._tasks.start(self._drop_void(base, outside=outside), "drop void versions")

    async def _answer(self, request: messages.Request, answer: Answerer) -> None:
        try:
            said, descriptor = await self._perform(request)
        except (NoRoom, TransferError, ValueError, OSError) as error:
            if isinstance(error, NoRoom):
                self._say_once(str(error))
            said, descriptor = messages.Refused(request.request, str(error)), None
        try:
            answer(messages.to_json(said), [] if descriptor is None else [descriptor])
        finally:
            if descriptor is not None:
                os.close(descriptor)

    async def _perform(self, request: messages.Request) -> tuple[messages.Answer, int | None]:
        number = request.request
        match request:
            case messages.Room(_, piece, size, skeleton):
                grant = partial(self._snapshot_memory.grant, piece, size, skeleton)
                made = await asyncio.get_running_loop().run_in_executor(self._rooms, grant)
                return messages.Granted(number), made
            case messages.Open(_, piece, version):
                return messages.Opened(number), await self._opened(piece, version)
            case messages.Fetch(_, piece, version, peer):
                await self._fetch(piece, version, peer)
                return messages.Opened(number), await self._opened(piece, version)
            case messages.Drop(_, piece, version):
                await asyncio.to_thread(self._snapshot_memory.drop_damaged, piece, version)
                return messages.Dropped(number), None
            case messages.Inventory():
                async with self._dropping:
                    held = await asyncio.to_thread(self._snapshot_memory.holdings)
                peer = self._backend.peer if self._backend is not None else ""
                return messages.NodeInventory(number, held, peer, self._node), None

    async def _opened(self, piece: str, version: Version) -> int:
        descriptor = await asyncio.to_thread(self._snapshot_memory.open, piece, version)
        if descriptor is None:
            generation, step = version
            raise ValueError(
                f"This node does not hold '{piece}' of generation {generation}, step {step}."
            )
        return descriptor

    async def _fetch(self, piece: str, version: Version, peer: str) -> None:
        async with self._fetching[piece]:
            descriptor = await asyncio.to_thread(self._snapshot_memory.open, piece, version)
            if descriptor is not None:
                os.close(descriptor)
            elif self._replicator is None:
                raise TransferError("This node has not joined the job yet.")
            else:
                await self._replicator.fetch(piece, version, peer)

    async def _fetch_ahead(self, replicator: Replicator, peers: Sequence[str]) -> None:
        """Prefetch the shared state. On failure, the workers ask again and get the error."""
        async with self._fetching[SHARED]:
            for peer in peers:
                try:
                    return await replicator.fetch_freshest(SHARED, peer)
                except (TransferError, NoRoom) as error:
                    logger.debug("could not prefetch the state from %s: %s", peer, error)

    async def _note_sealed(self) -> None:
        """Record all sealed versions at once: steps may be short, and workers many."""
        sealed, self._sealed = self._sealed, []
        await asyncio.to_thread(self._snapshot_memory.sealed, sealed)
        for holder in self._holders.values():
            holder.wake()

    async def _drop_void(self, base: Base, *, outside: bool) -> None:
        version = (base.written, base.step)
        async with self._dropping:
            drop_void = self._snapshot_memory.drop_void
            await asyncio.to_thread(drop_void, version, base.generation, outside=outside)
        for holder in self._holders.values():
            holder.forget_void(version, base.generation)
            holder.wake()

    def _say_once(self, sentence: str) -> None:
        # The numbers in it change; its beginning identifies the problem.
        if (about := sentence.partition(":")[0]) not in self._said:
            self._said.add(about)
            self._say(sentence)

    # --- copies for others -----------------------------------------------------------------------

    def turn_to(self, world: World) -> None:
        """Choose the holders of our pieces in a new world."""
        if self._replicator is None:
            return
        chosen = chosen_holders(world, self._node, self._replicas)
        for key in self._holders.keys() - chosen:
            self._holders.pop(key).stop()
        self._replicator.forget({peer for _, peer in chosen})
        self._snapshot_memory.awaits_replicas = bool(chosen)
        for node, peer in chosen:
            if (node, peer) not in self._holders:
                holder = _Holder(
                    self._replicator, self._snapshot_memory, peer, self._noted, self._say_once
                )
                self._holders[node, peer] = holder
                name = "snapshot-copies"
                self._tasks.start(keep_up(holder.run, name, self._say_once), name)
        if len(world.nodes) == world.count:  # else an unknown node may be in it
            self._tasks.start(self._adopt({item.node for item in world.nodes}), "adopt")
        if self._is_new and world.generation > 0:
            peers = [peer for _, peer in chosen_holders(world, self._node, PREFETCH_PEERS)]
            self._tasks.start(self._fetch_ahead(self._replicator, peers), "fetch ahead")
        self._is_new = False

    async def _adopt(self, alive: set[str]) -> None:
        """Copy the pieces that lost nodes had stored here to others from now on."""
        if await asyncio.to_thread(self._snapshot_memory.adopt, alive):
            for holder in self._holders.values():
                holder.wake()

    async def _noted(self, piece: str) -> None:
        """Tell the worker the newest version that all holders have."""
        versions = [holder.given.get(piece) for holder in self._holders.values()]
        known = [version for version in versions if version is not None]
        if known and len(known) == len(versions):
            await asyncio.to_thread(self._snapshot_memory.note_replicated, piece, min(known))


def chosen_holders(world: World, node: str, replicas: int) -> list[tuple[str, str]]:
    """The nodes that hold this node's pieces, each with its agent's address.

    In a large world an agent knows only the nodes of its part or, if it is alone there, the nodes
    that all know.
    """
    known = {item.node: item.peer for item in world.nodes}
    if world.place(node) is not None and len(known) == 1:
        known.update((other, peer) for other, peer in world.candidates.items() if other != node)
    reachable = [name for name, peer in known.items() if peer]
    return [(name, known[name]) for name in holders(reachable, node, replicas)]


def _log(error: Exception) -> None:
    # The worker's request times out; the job goes on.
    logger.error("Snapshots: %s.", error, exc_info=error)


def holders(nodes: Sequence[str], node: str, replicas: int) -> tuple[str, ...]:
    """Return the nodes that hold this node's pieces: `replicas` of them, or all others.

    They follow the node in the order of the world, as in a ring. So every node holds as much for
    others as others hold for it, none holds its own, and a change of the world moves as little as
    possible: each node that a lost node held replicas for gets one new holder, and the same for a
    node that joins at the end of the order. Nodes need to agree only on the world.

    >>> holders(["a", "b", "c"], "b", 1), holders(["a", "b", "c"], "c", 5), holders(["a"], "a", 1)
    (('c',), ('a', 'b'), ())
    """
    if node not in nodes:
        return ()
    at = list(nodes).index(node)
    others = [*nodes[at + 1 :], *nodes[:at]]
    return tuple(others[: max(replicas, 0)])


class _Holder:
    """Copies the newest version of each of our pieces to one other node."""

    def __init__(
        self,
        replicator: Replicator,
        snapshot_memory: SnapshotMemory,
        peer: str,
        noted: Callable[[str], Coroutine[Any, Any, None]],
        say_once: Callable[[str], None],
    ) -> None:
        self._replicator = replicator
        self._snapshot_memory = snapshot_memory
        self._peer = peer
        self._noted = noted
        self._say_once = say_once
        self._news = asyncio.Event()
        self._over = False
        self._failures = 0
        #: By piece, the version the node has.
        self.given: dict[str, Version] = {}
        #: The base of the newest generation whose base is known, and that generation.
        self._base: tuple[Version, int] = ((-1, -1), -1)

    def wake(self) -> None:
        """Look for something to copy."""
        self._news.set()

    def forget_void(self, base: Version, generation: int) -> None:
        """Forget void versions, so that the base is copied if the node lacks it."""
        self._base = base, generation
        self.given = {
            piece: version
            for piece, version in self.given.items()
            if not is_void(version, base, generation)
        }

    def stop(self) -> None:
        """Copy nothing more after the copy under way."""
        self._over = True
        self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            began = time.monotonic()
            for piece in await asyncio.to_thread(
                self._snapshot_memory.fresher_than, dict(self.given)
            ):
                if self._over:
                    return
                await self._copy(piece)
            if self._over:
                return
            await asyncio.sleep(min(PAUSE_FACTOR * (time.monotonic() - began), LONGEST_PAUSE))

    async def _copy(self, piece: str) -> None:
        try:
            version = await self._replicator.give(piece, self._peer)
        except TransferError as error:
            logger.debug("could not copy %s to %s: %s", piece, self._peer, error)
            self._failures += 1
            if self._failures == FAILURES_BEFORE_LOG:
                self._say_once(f"Cannot copy snapshots to {self._peer}: {error}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), RETRY_AFTER)
            self._news.set()
        else:
            self._failures = 0
            if is_void(version, *self._base):  # became void on the way: copy the base
                self._news.set()
                return
            self.given[piece] = version
            await self._noted(piece)
