"""The inspector: finds out what every rank of the world does, here and on other nodes.

    agent                                   every other agent of the world
    which generation                   ->
                                       <-   what its ranks do in that, one JSON object a line
    who can continue after a generation ->
                                       <-   whether a rank there can: it has the state, and is free

All agents together have two seconds: those that have not answered by then are named. Inspecting
changes nothing, and its errors end nothing. Connections are authenticated like all connections
between agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchelastic.agent.watch.stack_reader import NOTHING, Stacks
from torchelastic.errors import WireError
from torchelastic.events.analysis.hangs import RankActivity
from torchelastic.rendezvous.membership.backend import RendezvousBackend
from torchelastic.rendezvous.world import World, WorldNode
from torchelastic.side_tasks import TaskSet
from torchelastic.transport import frames
from torchelastic.transport.codec import Codec
from torchelastic.transport.connect import Endpoint, connect_once
from torchelastic.transport.frames import Message, by_kind
from torchelastic.transport.link import Link

if TYPE_CHECKING:
    from torchelastic.agent.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that this node's workers have for their stacks, and all other agents for their answers.
STACKS_TIMEOUT, AGENTS_TIMEOUT = 1.5, 2.0
#: Nodes that are asked, and how many of them at a time.
MOST_NODES, AT_A_TIME = 512, 64
#: Bytes of an answer.
ANSWER_BYTES = 1 << 20
#: Agents that are connected at a time, to ask. Each has as long as it waits for an answer.
MOST_PEERS = 64


@dataclass(frozen=True, slots=True)
class Which(Message):
    """Asks what the ranks of a node are doing."""

    kind = "which"
    generation: int


@dataclass(frozen=True, slots=True)
class These(Message):
    """Answers it; the ranks follow in the same frame."""

    kind = "these"
    generation: int


@dataclass(frozen=True, slots=True)
class CanGoOn(Message):
    """Asks for a rank that has the state of a past generation and is free."""

    kind = "can-go-on"
    generation: int


@dataclass(frozen=True, slots=True)
class GoesOn(Message):
    """Answers it."""

    kind = "goes-on"
    yes: bool


ASKED, TOLD = by_kind(Which, CanGoOn), by_kind(These, GoesOn)


@dataclass(frozen=True)
class WorldActivity:
    """The findings about a world's ranks."""

    generation: int = -1
    activities: tuple[RankActivity, ...] = ()
    #: Names of the nodes that did not answer, and the number of unnamed ones.
    unheard: tuple[str, ...] = ()


#: What agents tell each other of ranks, and `torchelastic stacks` of all of them.
ACTIVITY: Codec[Any] = Codec(RankActivity, WorldActivity)


class Inspector:
    """Finds out what ranks do, here and on other nodes; `open` it once the node has joined."""

    def __init__(
        self,
        workers: WorkerPool,
        stacks: Stacks,
        *,
        node: str,
        job: str,
        world: Callable[[], World | None],
        can_go_on: Callable[[int], bool] = lambda generation: False,
    ) -> None:
        """`can_go_on` answers `CanGoOn` for this node."""
        self._workers, self._stacks = workers, stacks
        self._node, self._job, self._world = node, job, world
        self._can_go_on = can_go_on
        self._backend: RendezvousBackend | None = None
        self._peers: set[Link] = set()
        self._answers = TaskSet()

    def open(self, backend: RendezvousBackend) -> None:
        """Answer other agents from now on."""
        self._backend = backend
        backend.serve(frames.ACTIVITIES, self._admit)

    async def close(self) -> None:
        """Stop answering."""
        for link in self._peers:
            link.abort()
        await self._answers.close()

    # --- here ------------------------------------------------------------------------------------

    async def here(self, generation: int) -> list[RankActivity]:
        """Return what this node's ranks are doing."""
        shown = {rank: self._workers.doing(rank, generation) for rank in self._workers.alive}
        known = {local: doing for local, doing in shown.items() if doing is not None}
        reading = {
            local: asyncio.create_task(self._stacks.of(local), name="stack") for local in known
        }
        seen = await _outcomes(reading.values(), STACKS_TIMEOUT)
        stacks = dict(zip(reading, seen, strict=True))
        # Again: one that was asked for its stack shows what torch has counted for it, too.
        shown = {local: self._workers.doing(local, generation) for local in known}
        return [
            replace(shown[local] or doing, stack=stacks[local] or NOTHING)
            for local, doing in known.items()
        ]

    # --- everywhere ------------------------------------------------------------------------------

    async def everywhere(self) -> WorldActivity:
        """Return what all ranks of the current world are doing."""
        world = self._world()
        if world is None:
            return WorldActivity()
        others = [item for item in world.nodes if item.node != self._node][:MOST_NODES]
        turn = asyncio.Semaphore(AT_A_TIME)
        asking = [
            asyncio.create_task(self._there(item, world.generation, turn), name=item.name)
            for item in others
        ]
        own, told = await asyncio.gather(
            self.here(world.generation), _outcomes(asking, AGENTS_TIMEOUT)
        )
        activities = [doing for one in (own, *told) if one is not None for doing in one]
        silent = [item.name for item, one in zip(others, told, strict=True) if one is None]
        left_out = max(0, len(world.nodes) - 1 - MOST_NODES)
        if (unasked := world.count - len(world.nodes) + left_out) > 0:
            silent.append(f"{unasked} more nodes")
        ranks = tuple(sorted(activities, key=lambda doing: doing.rank))
        return WorldActivity(world.generation, ranks, tuple(silent))

    async def others_can_go_on(self, generation: int) -> bool:
        """True if a rank on another node has the state of a generation and is free to continue."""
        world, turn = self._world(), asyncio.Semaphore(AT_A_TIME)
        nodes = world.nodes if world is not None else ()
        pending = {
            asyncio.create_task(self._goes_on(item, generation, turn), name=item.name)
            for item in nodes[:MOST_NODES]
            if item.node != self._node
        }
        deadline = time.monotonic() + AGENTS_TIMEOUT
        try:
            while pending and (left := deadline - time.monotonic()) > 0:
                done, pending = await asyncio.wait(
                    pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if any(map(_outcome, done)):
                    return True
            return False
        finally:
            for task in pending:
                task.cancel()

    async def _goes_on(self, item: WorldNode, generation: int, turn: asyncio.Semaphore) -> bool:
        async with turn:
            answer, _ = await self._ask(item.peer, CanGoOn(generation))
            return isinstance(answer, GoesOn) and answer.yes

    async def _there(
        self, item: WorldNode, generation: int, turn: asyncio.Semaphore
    ) -> list[RankActivity]:
        """Return what the ranks of another node are doing."""
        async with turn:
            _, lines = await self._ask(item.peer, Which(generation))
            return [_parsed(RankActivity, line) for line in lines.splitlines()]

    async def _ask(self, peer: str, question: Message) -> tuple[Message, bytes]:
        """Return the answer, and the bytes that follow it."""
        if self._backend is None or not peer:
            raise ConnectionError("the agent has no known address")
        place = Endpoint.at(peer, self._job, self._backend.credentials)
        link, answer = await connect_once(place, purpose=frames.ACTIVITIES, timeout=AGENTS_TIMEOUT)
        try:
            if not isinstance(answer, frames.Welcome):
                raise ConnectionError("the peer did not answer as a torchelastic agent")
            link.send(question)
            head, _, lines = (await link.next_frame()).partition(b"\n")
            return frames.parse(head, TOLD), lines
        finally:
            link.abort()

    # --- answering -------------------------------------------------------------------------------

    def _admit(self, link: Link, hello: frames.Hello) -> None:
        """Take a connection from the listener."""
        if len(self._peers) >= MOST_PEERS:
            link.send(frames.Refusal("Too many agents are querying this agent at once."))
            link.close()
            return
        self._peers.add(link)
        leave = asyncio.get_running_loop().call_later(AGENTS_TIMEOUT, link.abort)

        def left(_: object) -> None:
            leave.cancel()
            self._peers.discard(link)

        link.ended.add_done_callback(left)
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, 0))
        link.deliver_to(partial(self._hear, link))

    def _hear(self, link: Link, payload: bytes) -> None:
        asked = frames.parse(payload, ASKED)
        if isinstance(asked, CanGoOn):
            link.send(GoesOn(self._can_go_on(asked.generation)))
            link.close()
            return
        assert isinstance(asked, Which)
        task = self._answers.start(self._answer(link, asked.generation), "activities")
        link.ended.add_done_callback(lambda _: task.cancel())
        link.deliver_to(_refuse_more)

    async def _answer(self, link: Link, generation: int) -> None:
        try:
            activities = await self.here(generation)
            link.send(frames.pack_before(These(generation), lines_of(activities)))
        finally:
            link.close()


def lines_of(activities: Iterable[RankActivity]) -> bytes:
    """One JSON line each; without stacks if that would be too long."""
    lines = [json.dumps(ACTIVITY.to_json(doing)).encode() for doing in activities]
    if sum(map(len, lines)) > ANSWER_BYTES:
        short = [replace(doing, stack="omitted: too long") for doing in activities]
        lines = [json.dumps(ACTIVITY.to_json(doing)).encode() for doing in short]
    return b"\n".join(lines)


def _parsed(kind: type[T], line: bytes) -> T:
    """Parse a line of `ACTIVITY`; `ValueError` for anything else."""
    data = json.loads(line)
    found = ACTIVITY.from_json(data) if isinstance(data, dict) else None
    if not isinstance(found, kind):
        raise ValueError(f"The line is no {kind.__name__}.")
    return found


def _refuse_more(payload: bytes) -> None:
    raise WireError("A second query came before the answer to the first.")


async def _outcomes(tasks: Iterable[asyncio.Task[T]], seconds: float) -> list[T | None]:
    """The result of each task; None for one that failed or was not done in time."""
    waited = list(tasks)
    try:
        if waited:
            await asyncio.wait(waited, timeout=seconds)
        return [_outcome(task) if task.done() else None for task in waited]
    finally:
        for task in waited:
            task.cancel()


def _outcome(task: asyncio.Task[T]) -> T | None:
    if task.cancelled():
        return None
    if (error := task.exception()) is not None:
        logger.debug("cannot tell what %s is doing: %r", task.get_name(), error)
        return None
    return task.result()


# --- the query socket ----------------------------------------------------------------------------

# It answers `torchelastic stacks` of the same user on this machine. `agent.sock` lies beside the
# agent's entry in the job registry. Directory and file mode admit only that user, and the peer's
# user id is checked as well. A query is one line, so is the answer, and it changes nothing.

SOCKET_FILE = "agent.sock"
#: The query.
STACKS = b"stacks\n"
#: Seconds an agent may take: it asks the others, which have two seconds.
ANSWER_TIMEOUT = 10.0
#: Bytes of an answer.
MOST_BYTES = 64 << 20
#: Seconds a client has to send its query, and clients at a time.
_QUERY_TIMEOUT, _MOST_CLIENTS = 5.0, 16


class QuerySocket:
    """The agent's end."""

    def __init__(self, directory: Path, inspector: Inspector) -> None:
        self._path = directory / SOCKET_FILE
        self._inspector = inspector
        self._server: asyncio.AbstractServer | None = None
        self._clients = TaskSet()

    async def open(self) -> None:
        """Listen. A failure is logged, and the job runs without the socket."""
        try:
            listening = _bound(self._path)
        except OSError as error:
            logger.warning("`torchelastic stacks` cannot reach this agent (%s).", error)
            return
        self._server = await asyncio.start_unix_server(self._hear, sock=listening, limit=1024)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        await self._clients.close()
        self._path.unlink(missing_ok=True)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) <= _MOST_CLIENTS and _is_ours(writer.get_extra_info("socket")):
                await self._answer(reader, writer)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            logger.debug("a query failed: %r", error)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await asyncio.wait_for(reader.readline(), _QUERY_TIMEOUT)
        if asked == STACKS:
            found = await self._inspector.everywhere()
            writer.write(json.dumps(ACTIVITY.to_json(found)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), _QUERY_TIMEOUT)


def _bound(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.unlink(missing_ok=True)
        with _short(path) as address:
            listening.bind(address)
        path.chmod(0o600)
    except BaseException:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a socket address, which is limited to 107 bytes, for a path of any length."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _is_ours(end: socket.socket) -> bool:
    """True if the other end belongs to this user or root."""
    packed = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", packed)[1] in (os.geteuid(), 0)


def ask(directory: Path) -> WorldActivity:
    """Ask the agent of this directory what all ranks do; `OSError` if it cannot answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(ANSWER_TIMEOUT)
        with _short(directory / SOCKET_FILE) as address:
            end.connect(address)
        end.sendall(STACKS)
        with end.makefile("rb") as answer:
            line = answer.readline(MOST_BYTES)
    try:
        return _parsed(WorldActivity, line)
    except ValueError as error:
        raise OSError(f"cannot parse its answer: {error}") from None
