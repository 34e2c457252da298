"""The replicator: copies snapshots between agents, over connections that the listener admitted.

    client                        server
    GIVE, a header           ->
                             <-   GO; or HAVE, NO: nothing follows
    skeleton, bytes          ->
                             <-   HAVE: the checksum is right and it is sealed; or NO

    WANT or FRESHEST         ->
                             <-   GO, FOUND with the skeleton and the bytes; or NO
    GO: they are here        ->
                             <-   HAVE: they were not overwritten until now; or NO

WAIT may come any number of times before a first reply: other visitors are served first. A client
that wants a version waits; one that gives comes back later.

The receiver of a given version verifies its checksum: nothing waits for that, and no one else might
read the version for hours. A wanted version is urgent, and the worker verifies its checksum anyway:
here we check only that it is the requested version and was not overwritten.

A connection serves any number of exchanges, one after another. Network waits happen in threads,
never in the agent's loop; an idle connection uses no thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, TypeVar

from torchelastic.errors import ConfigError, RendezvousError, TransferError, WireError
from torchelastic.side_tasks import TaskSet
from torchelastic.snapshot.layout import SHARED, Memory, SealedVersion, Version
from torchelastic.snapshot.node import stream
from torchelastic.snapshot.node.memory import MemoryEntry, SnapshotMemory
from torchelastic.snapshot.node.stream import Bucket, Header, SnapshotStream
from torchelastic.system.memory_limit import NoRoom
from torchelastic.transport import frames
from torchelastic.transport.auth import Credentials
from torchelastic.transport.connect import Endpoint, NoAnswer, connect_once
from torchelastic.transport.link import Link

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds another agent has to answer a greeting.
GREETING_TIMEOUT = 5.0
#: Transfers at a time, each way; others wait.
MOST_OUTGOING, MOST_INCOMING = 4, 4
#: Seconds between WAIT messages to a queued visitor: less than the timeout of a connection on which
#: nothing moves.
WAIT_INTERVAL = 5.0
#: The limit of open connections from others. Idle ones make way: their peers connect again.
MOST_VISITORS = 256
_BROKEN = (OSError, EOFError, RendezvousError)


class Replicator:
    """This node's end of all snapshot connections. Create it in a running loop."""

    def __init__(
        self,
        snapshot_memory: SnapshotMemory,
        node: str,
        job: str,
        credentials: Credentials,
        *,
        bandwidth: float = 0.0,
    ) -> None:
        """`bandwidth` limits what is given to others, in bytes per second; 0: no limit."""
        self._snapshot_memory = snapshot_memory
        self._node = node
        self._job = job
        self._credentials = credentials
        self._bucket = Bucket(bandwidth)
        self._bucket_lock = threading.Lock()
        # Separate pools: if all threads of two nodes were giving, none would be left to take.
        self._outgoing = ThreadPoolExecutor(MOST_OUTGOING, "snapshot-out")
        self._incoming = ThreadPoolExecutor(MOST_INCOMING, "snapshot-in")
        self._pipes: set[SnapshotStream] = set()
        self._visitors: set[SnapshotStream] = set()
        #: The idle ones, the longest idle first.
        self._resting: dict[SnapshotStream, None] = {}
        self._turns = asyncio.Semaphore(MOST_INCOMING)
        #: By address, an unused connection.
        self._idle: dict[str, SnapshotStream] = {}
        self._tasks = TaskSet()
        self._closing = False

    async def close(self) -> None:
        """End all transfers and connections."""
        self._closing = True
        loop = asyncio.get_running_loop()
        for visitor in self._resting:
            loop.remove_reader(visitor)
        for each in self._pipes:
            each.hang_up()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in (self._outgoing, self._incoming):
            await asyncio.to_thread(executor.shutdown)
        for each in list(self._pipes):
            self._end(each)

    # --- calling others --------------------------------------------------------------------------

    async def fetch(self, piece: str, version: Version, peer: str) -> None:
        """Copy a version that another node holds into our own snapshot memory.

        `TransferError` if it cannot be fetched, `NoRoom` if there is no memory for it here.
        """
        await self._fetch(Header(kind=stream.WANT, piece=piece, version=version), peer)

    async def fetch_freshest(self, piece: str, peer: str) -> None:
        """Fetch the freshest version, for a node that has none."""
        await self._fetch(Header(kind=stream.FRESHEST, piece=piece, version=(0, 0)), peer)

    async def _fetch(self, wanted: Header, peer: str) -> None:
        called = await self._call(peer)
        await self._use(called, peer, partial(_fetch, called, self._snapshot_memory, wanted))

    async def give(self, piece: str, peer: str) -> Version:
        """Give the freshest version of our piece to another node; return which it was."""
        idle = self._idle.pop(peer, None)
        if idle is not None and not idle.has_ended():
            return await self._give(idle, piece, peer)
        if idle is not None:
            self._end(idle)
        return await self._give(await self._call(peer), piece, peer)

    async def _give(self, called: SnapshotStream, piece: str, peer: str) -> Version:
        wait = called.limited_by(self._bucket, self._bucket_lock)
        return await self._use(
            called, peer, partial(_give, called, self._snapshot_memory, piece, self._node, wait)
        )

    async def _use(self, called: SnapshotStream, peer: str, work: Callable[[], T]) -> T:
        """Use a connection in a thread; hold it for the next use if that succeeds."""
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._outgoing, work)
        except _Refused as refused:
            self._rest(called, peer)
            raise TransferError(str(refused)) from None
        except (*_BROKEN, stream.Closed) as error:
            self._end(called)
            raise TransferError(f"Lost the agent at {peer} ({_words(error)}).") from error
        except asyncio.CancelledError:
            called.hang_up()  # the thread may still be using it
            raise
        except BaseException:
            self._end(called)
            raise
        self._rest(called, peer)
        return done

    def _rest(self, called: SnapshotStream, peer: str) -> None:
        if self._closing or peer in self._idle:
            self._end(called)
        else:
            self._idle[peer] = called

    async def _call(self, peer: str) -> SnapshotStream:
        try:
            place = Endpoint.at(peer, self._job, self._credentials)
            link, answer = await connect_once(
                place, purpose=frames.SNAPSHOT, timeout=GREETING_TIMEOUT
            )
        except (OSError, asyncio.TimeoutError, NoAnswer, RendezvousError, ConfigError) as error:
            words = _words(error)
            raise TransferError(f"The agent at {peer} did not answer ({words}).") from error
        if not isinstance(answer, frames.Welcome):
            link.abort()
            raise TransferError(f"{peer} did not answer as an agent of this job.")
        return self._taken(link)

    def _taken(self, link: Link) -> SnapshotStream:
        made = SnapshotStream(*link.detach())
        self._pipes.add(made)
        return made

    def _end(self, ended: SnapshotStream) -> None:
        self._pipes.discard(ended)
        self._visitors.discard(ended)
        self._resting.pop(ended, None)
        for peer in [peer for peer, idle in self._idle.items() if idle is ended]:
            del self._idle[peer]
        ended.close()

    def forget(self, peers: set[str]) -> None:
        """Close the connections to all but these: the others are not in our world."""
        for peer in self._idle.keys() - peers:
            self._end(self._idle[peer])

    # --- being called ----------------------------------------------------------------------------

    def admit(self, link: Link, hello: frames.Hello) -> None:
        """Take a connection from the listener."""
        if len(self._visitors) >= MOST_VISITORS:  # close one that is at rest, if there is one
            for visitor in list(self._resting)[:1]:
                asyncio.get_running_loop().remove_reader(visitor)
                self._end(visitor)
        if self._closing or len(self._visitors) >= MOST_VISITORS:
            link.send(frames.Refusal("This agent has too many snapshot connections; retry later."))
            link.close()
            return
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, 0))
        try:
            visitor = self._taken(link)
        except WireError as error:
            link.abort(error)
            return
        self._visitors.add(visitor)
        self._listen(visitor)

    def _listen(self, visitor: SnapshotStream) -> None:
        """Wait, without a thread, until the visitor sends something."""
        self._resting[visitor] = None
        asyncio.get_running_loop().add_reader(visitor, self._heard, visitor)

    def _heard(self, visitor: SnapshotStream) -> None:
        asyncio.get_running_loop().remove_reader(visitor)
        del self._resting[visitor]
        self._tasks.start(self._answer(visitor), "snapshot visitor")

    async def _answer(self, visitor: SnapshotStream) -> None:
        try:
            await self._serve(visitor)
        except (*_BROKEN, stream.Closed) as error:
            logger.debug("snapshot connection ended: %s", _words(error))
            self._end(visitor)
        except BaseException:
            self._end(visitor)
            raise
        else:
            if not self._closing:
                self._listen(visitor)

    async def _serve(self, visitor: SnapshotStream) -> None:
        """Serve a visitor when it is its turn; until then send it WAIT."""
        turn = asyncio.ensure_future(self._turns.acquire())
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=WAIT_INTERVAL)
                if not turn.done():
                    visitor.reply(stream.WAIT)
            await asyncio.get_running_loop().run_in_executor(
                self._incoming, _serve, visitor, self._snapshot_memory
            )
        finally:
            turn.add_done_callback(self._end_turn)

    def _end_turn(self, turn: asyncio.Future[Literal[True]]) -> None:
        if not turn.cancelled():
            self._turns.release()


class _Refused(Exception):
    """The other end refused, with a reason; the connection is still usable."""


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


# --- what is done in threads ---------------------------------------------------------------------


def _give(
    called: SnapshotStream,
    snapshot_memory: SnapshotMemory,
    piece: str,
    node: str,
    wait: Callable[[int], None],
) -> Version:
    try:
        reading = snapshot_memory.reading(piece, None)
        with reading as (memory, descriptor, held):
            header = _header(stream.GIVE, piece, node, memory, held)
            called.send(header.pack())
            if _agreed(called, waits=False) == stream.GO:
                _send(called, memory, descriptor, held, wait)
                _agreed(called)
            return held.version
    except KeyError:
        raise _Refused(f"This node holds no version of '{piece}'.") from None


def _header(kind: int, piece: str, origin: str, memory: Memory, held: SealedVersion) -> Header:
    return Header(
        kind=kind,
        piece=piece,
        version=held.version,
        origin=origin,
        rank=held.rank,
        size=held.size,
        room=memory.sizes.bytes,
        skeleton_room=memory.sizes.skeleton,
        used=len(held.data),
        skeleton=len(held.skeleton),
        checksum=held.checksum,
        before=max((one for one in _versions(memory) if one < held.version), default=stream.NONE),
    )


def _versions(memory: Memory) -> list[Version]:
    return [held.version for held in memory.holdings()]


def _agreed(called: SnapshotStream, *, waits: bool = True) -> int:
    kind, sentence = called.receive_reply()
    while kind == stream.WAIT:
        if not waits:
            # Urgent transfers of this node need the thread.
            raise TransferError("The other node is busy; retrying later.")
        kind, sentence = called.receive_reply()
    if kind == stream.NO:
        raise _Refused(sentence)
    return kind


def _send(
    to: SnapshotStream,
    memory: Memory,
    descriptor: int,
    held: SealedVersion,
    wait: Callable[[int], None],
) -> None:
    to.send(held.skeleton)
    to.send_file(descriptor, memory.sizes.buffer_at(held.index), len(held.data), wait)


def _fetch(called: SnapshotStream, snapshot_memory: SnapshotMemory, wanted: Header) -> None:
    called.send(wanted.pack())
    _agreed(called)
    header = called.receive_header()
    is_it = wanted.kind == stream.FRESHEST or header.version == wanted.version
    if header.kind != stream.FOUND or header.piece != wanted.piece or not is_it:
        raise WireError("Received a different snapshot than requested.")
    # Only the pages of this version are needed now, and writing allocates them.
    entry = snapshot_memory.memory_for(header.piece, header.room, header.skeleton_room, take=False)
    with snapshot_memory.bringing(entry) as may:
        if not may:
            raise TransferError(f"Another connection is already bringing '{header.piece}'.")
        if wanted.kind == stream.WANT:
            # The requested version is the base: whatever this memory has beyond it is void.
            entry.memory.drop_void(header.version, header.version[0] + 1)
        _take(called, entry, header, partial(_is_confirmed, called, entry, header))


def _serve(visitor: SnapshotStream, snapshot_memory: SnapshotMemory) -> None:
    """Serve all requests that a visitor has already sent."""
    while True:
        header = visitor.receive_header()
        if header.kind == stream.GIVE:
            _serve_give(visitor, snapshot_memory, header)
        elif header.kind in (stream.WANT, stream.FRESHEST):
            _serve_want(visitor, snapshot_memory, header)
        else:
            raise WireError("A peer sent an unexpected message.")
        if not visitor.has_more:
            return


def _serve_want(visitor: SnapshotStream, snapshot_memory: SnapshotMemory, wanted: Header) -> None:
    version = wanted.version if wanted.kind == stream.WANT else None
    try:
        with snapshot_memory.reading(wanted.piece, version) as (memory, descriptor, held):
            found = _header(stream.FOUND, wanted.piece, "", memory, held)
            visitor.reply(stream.GO)
            visitor.send(found.pack())
            _send(visitor, memory, descriptor, held, lambda size: None)
            # Until they arrive there, they are in this memory, and may still change.
            visitor.receive_reply()
            if memory.still_holds(held):
                visitor.reply(stream.HAVE)
            else:
                visitor.reply(stream.NO, f"That version of '{wanted.piece}' has been overwritten.")
    except KeyError:
        visitor.reply(stream.NO, f"This node does not hold that version of '{wanted.piece}'.")


def _serve_give(visitor: SnapshotStream, snapshot_memory: SnapshotMemory, header: Header) -> None:
    if header.piece == SHARED:
        # A node that uses it as its workers' freshest state must have requested it.
        raise WireError("A peer pushed shared state, which nodes only fetch.")
    try:
        entry = snapshot_memory.memory_for_replica(
            header.piece, header.origin or "?", header.room, header.skeleton_room
        )
    except NoRoom as error:
        visitor.reply(stream.NO, str(error))
        return
    freshest = entry.freshest()
    if entry.find(header.version) is not None:
        visitor.reply(stream.HAVE)
    elif freshest is not None and freshest.version > header.version:
        # Ours is void if the given version is a generation's base: then it is dropped soon.
        visitor.reply(stream.NO, f"This node holds a newer version of '{header.piece}'.")
    else:
        with snapshot_memory.bringing(entry) as may:
            visitor.reply(*_taken_in(visitor, entry, header, may))


def _taken_in(
    visitor: SnapshotStream, entry: MemoryEntry, header: Header, may: bool
) -> tuple[int, str]:
    """Take a given version; return the reply."""
    if not may:
        return stream.NO, "Another connection is already bringing that piece."
    _drop_between(entry.memory, header)
    visitor.reply(stream.GO)
    whole = _take(visitor, entry, header, partial(_is_whole, visitor, entry, header))
    return (stream.HAVE, "") if whole else (stream.NO, "It was overwritten during the transfer.")


def _drop_between(memory: Memory, header: Header) -> None:
    """Drop versions that all ranks have dropped because one could not hold them. Otherwise the
    given version would replace the one before: the last one that all have."""
    if header.before != stream.NONE:
        for version in _versions(memory):
            if header.before < version < header.version:
                memory.drop(version)


def _take(
    by: SnapshotStream, entry: MemoryEntry, header: Header, receive: Callable[[], bool]
) -> bool:
    """Receive a version into a memory; return whether it is undamaged, as `receive` finds while it
    reads the bytes."""
    skeleton = by.receive(header.skeleton)
    try:
        entry.memory.begin(header.version)
        if not receive():
            return False
        entry.memory.seal(
            header.version,
            skeleton,
            header.used,
            header.checksum,
            rank=header.rank,
            size=header.size,
        )
    except ValueError as error:
        # The memory was dropped meanwhile, or holds something fresher.
        raise WireError(f"Cannot store a received snapshot: {error}") from error
    return True


def _is_whole(by: SnapshotStream, entry: MemoryEntry, header: Header) -> bool:
    summed = by.receive_summed(entry.descriptor, entry.memory.begun_at, header.used)
    return summed == header.checksum


def _is_confirmed(called: SnapshotStream, entry: MemoryEntry, header: Header) -> bool:
    """Return whether the other end confirms; raise its refusal."""
    called.receive_into(entry.descriptor, entry.memory.begun_at, header.used)
    called.reply(stream.GO)
    _agreed(called)
    return True
