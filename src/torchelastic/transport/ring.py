"""The ring: every agent of a world keeps a connection to the next one, so that the end of an agent
is noticed at once even if the store would only notice it by a lease. It also expects one from the
agent before it.

An agent *doubts* a neighbour whose connection has ended or fallen silent, and asks it until it
answers. This is only a hint: the leader asks the neighbour itself (`membership.suspicion`). A
neighbour that has not answered for a lease is *silent*: the world ends
(`rendezvous.connectivity`). Only the agents of a world have doubts, and its end clears them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from torchelastic.errors import RendezvousError, WireError
from torchelastic.side_tasks import TaskSet
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint, NoAnswer, connect_once
from torchelastic.transport.frames import Message, by_kind
from torchelastic.transport.link import Link

logger = logging.getLogger(__name__)

#: Beats that a neighbour sends in the time after which its silence counts.
BEATS = 3
#: Seconds between two attempts to reach the next one.
TRY_AGAIN = 0.5
#: Seconds an agent has to answer when it is asked whether it lives.
ANSWERS = 0.5
#: How often to ask an agent that accepts a connection and ends it again, and seconds between.
QUESTIONS = 4
ASK_AGAIN = 0.02


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Names the sender, and says that it is alive."""

    kind = "beat"
    node: str


@dataclass(frozen=True, slots=True)
class Parting(Message):
    """Ends the connection: the sender has another neighbour."""

    kind = "parting"


#: Marks the end of a connection.
_ENDED = Message()

BEAT = by_kind(Beat)
BEATS_AND_PARTINGS = by_kind(Beat, Parting)


def successor(nodes: Sequence[tuple[str, str]], node: str) -> tuple[str, str] | None:
    """The next one after a node among (node, address), the first after the last; None if there is
    none.

    >>> successor([("a", "h:1"), ("b", "h:2")], "b")
    ('a', 'h:1')
    """
    names = [name for name, _ in nodes]
    if node not in names or len(names) < 2:
        return None
    return nodes[(names.index(node) + 1) % len(names)]


def predecessor(nodes: Sequence[tuple[str, str]], node: str) -> tuple[str, str] | None:
    """The node before a node, whose successor it is."""
    return successor(nodes[::-1], node)


#: Receives the doubted nodes, and those of them that are silent.
OnSuspicion = Callable[[Set[str], Set[str]], None]


class Ring:
    """This node's connections to its neighbours. Made in a running loop."""

    def __init__(
        self, node: str, job: Endpoint, *, silence: float, on_suspicion: OnSuspicion
    ) -> None:
        """`job` has the job and its credentials. `on_suspicion` is called with the doubted nodes,
        and those of them that have been silent for `silence` seconds."""
        self._node = node
        self._job = job
        self._silence = silence
        self._on_suspicion = on_suspicion
        self._generation = -1
        #: When its generation began here, on the loop's clock.
        self._began = 0.0
        #: The nodes of the world and their addresses, if this node is in it.
        self._around: dict[str, str] = {}
        self._doubted: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()
        #: When each neighbour was last heard of, on the loop's clock.
        self._heard: dict[str, float] = {}
        #: The tasks that ask the doubted nodes.
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._next: tuple[str, str] | None = None
        self._calling: asyncio.Task[None] | None = None
        #: The node before us while it has not connected, and when it is suspected for that.
        self._expected: tuple[str, str] | None = None
        self._overdue: asyncio.TimerHandle | None = None
        #: Connections that others have made to us, and the tasks of all.
        self._visitors: set[Link] = set()
        self._tasks = TaskSet()
        #: The last one of each.
        self._callers: dict[str, Link] = {}
        self._is_closed = False

    def turn_to(self, generation: int, nodes: Sequence[tuple[str, str]]) -> None:
        """Take the place of this node among the nodes of a world and their addresses, in order.

        A new generation begins without doubts, and so does a node without a place.
        """
        reached = [pair for pair in nodes if pair[1]]
        self._around = dict(reached) if self._node in dict(nodes) else {}
        if generation != self._generation:
            self._generation = generation
            self._began = asyncio.get_running_loop().time()
            self._heard.clear()
            self._note(frozenset(), frozenset())
            self._expect(None)
        self._note(self._doubted & self._around.keys(), self._silent & self._around.keys())
        self._expect(predecessor(reached, self._node))
        following = successor(reached, self._node)
        if following == self._next:
            return
        self._next = following
        if self._calling is not None:
            self._calling.cancel()
            self._calling = None
        if following is not None:
            self._calling = self._tasks.start(self._call(*following), "ring")

    def _expect(self, before: tuple[str, str] | None) -> None:
        """Suspect the predecessor unless it connects before silence counts."""
        if before == self._expected:
            return
        self._expected = before
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        if before is not None and before[0] not in self._callers:
            loop = asyncio.get_running_loop()
            self._overdue = loop.call_later(self._silence, self._doubt, before[0])

    def admit(self, link: Link, hello: frames.Hello) -> None:
        """Serve a connection of a neighbour, or of an agent that asks whether we are alive."""
        if self._is_closed:
            link.abort()
            return
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, 0))
        self._visitors.add(link)
        self._tasks.start(self._receive(link), "ring visitor")
        link.ended.add_done_callback(lambda _: self._visitors.discard(link))

    async def ask(self, address: str) -> bool | None:
        """Ask the agent there whether it is alive (`suspicion.Ask`)."""
        return await lives(Endpoint.at(address, self._job.job, self._job.credentials))

    async def close(self) -> None:
        self._is_closed = True
        self._around = {}  # no more doubts
        self._expect(None)
        self._tasks.cancel()
        for link in list(self._visitors):
            link.abort()
        await self._tasks.close()

    # Both ends

    async def _call(self, node: str, address: str) -> None:
        """Stay connected to the successor as long as it is the successor."""
        place = Endpoint.at(address, self._job.job, self._job.credentials)
        while True:
            try:
                link, _ = await connect_once(place, purpose=frames.RING, timeout=self._silence)
            except (OSError, asyncio.TimeoutError, NoAnswer, RendezvousError) as error:
                logger.debug("the next node does not answer at %s: %r", place, error)
                self._doubt(node)
            else:
                self._trust(node)
                if not await self._converse(link, node):
                    self._doubt(node)
            await asyncio.sleep(TRY_AGAIN)

    async def _receive(self, link: Link) -> None:
        """Read who connects, then continue as at the other end."""
        try:
            frame = await asyncio.wait_for(link.next_frame(), self._silence)
            beat = frames.parse(frame, BEAT)
        except (OSError, EOFError, asyncio.TimeoutError, WireError):
            link.abort()
            return
        self._called(beat.node)
        self._callers[beat.node] = link
        has_parted = await self._converse(link, beat.node)
        if self._callers.get(beat.node) is link:  # else it has called again
            del self._callers[beat.node]
            if not has_parted:
                self._doubt(beat.node)

    def _called(self, node: str) -> None:
        self._trust(node)
        if self._overdue is not None and self._expected is not None and node == self._expected[0]:
            self._overdue.cancel()
            self._overdue = None

    async def _converse(self, link: Link, node: str) -> bool:
        """Exchange beats with the neighbour until that ends; return whether it has parted from
        us."""
        said: asyncio.Queue[Message] = asyncio.Queue()
        link.deliver_to(lambda payload: said.put_nowait(frames.parse(payload, BEATS_AND_PARTINGS)))
        link.ended.add_done_callback(lambda _: said.put_nowait(_ENDED))
        beating = asyncio.create_task(self._beat(link))
        try:
            while True:
                # Not `wait_for`, which before Python 3.12 may lose a cancellation.
                getting = asyncio.ensure_future(said.get())
                done, _ = await asyncio.wait({getting}, timeout=self._silence)
                getting.cancel()
                message = getting.result() if done else _ENDED
                if message is _ENDED or isinstance(message, Parting):
                    return isinstance(message, Parting)
                self._hear(node)
        finally:
            beating.cancel()
            link.send(Parting())
            link.close()

    async def _beat(self, link: Link) -> None:
        while not link.is_closing:
            link.send(Beat(self._node))
            await asyncio.sleep(self._silence / BEATS)

    # Which nodes to suspect

    def _doubt(self, node: str) -> None:
        if node not in self._around or node in self._doubted:  # a client may send any name
            return
        self._note(self._doubted | {node}, self._silent)
        self._asking[node] = self._tasks.start(self._ask_until_it_answers(node), "ring question")

    async def _ask_until_it_answers(self, node: str) -> None:
        """Ask a doubted node again and again; it is silent if it has not answered for a while."""
        while node in self._doubted:
            if await self.ask(self._around[node]):
                self._trust(node)
            elif node in self._doubted and self._is_overdue(node):
                self._note(self._doubted, self._silent | {node})
            await asyncio.sleep(TRY_AGAIN)

    def _is_overdue(self, node: str) -> bool:
        heard = self._heard.get(node, self._began)
        return asyncio.get_running_loop().time() >= heard + self._silence

    def _trust(self, node: str) -> None:
        self._hear(node)
        self._note(self._doubted - {node}, self._silent - {node})

    def _hear(self, node: str) -> None:
        self._heard[node] = asyncio.get_running_loop().time()

    def _note(self, doubted: frozenset[str], silent: frozenset[str]) -> None:
        if (doubted, silent) != (self._doubted, self._silent):
            for node in self._doubted - doubted:
                self._asking.pop(node).cancel()
            self._doubted, self._silent = doubted, silent
            self._on_suspicion(doubted, silent)


def answer_that_we_live(link: Link, hello: frames.Hello) -> None:
    """Answer an agent that asks whether we are alive, if there is no ring."""
    link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, 0))
    link.close()


async def lives(place: Endpoint) -> bool | None:
    """Ask an agent whether it is alive: True, False if nothing listens there, None if unknown."""
    for _ in range(QUESTIONS):
        try:
            link, _ = await connect_once(place, purpose=frames.RING, timeout=ANSWERS)
        except ConnectionRefusedError:
            return False
        except NoAnswer as error:
            if isinstance(error.__cause__, asyncio.TimeoutError):
                return None
            # The port may be the last part of a process that is being killed to close.
            await asyncio.sleep(ASK_AGAIN)
        except (OSError, asyncio.TimeoutError, RendezvousError):
            return None
        else:
            link.abort()
            return True
    return None
