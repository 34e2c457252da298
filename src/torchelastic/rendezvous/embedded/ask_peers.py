"""Ask many agents at once about the host of the store, each with a short timeout.

the asking agent           the agent asked
vote_request               ->
                           <-   ballot
host_announcement          ->
                           <-   announcement_reply
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torchelastic.errors import RendezvousError
from torchelastic.side_tasks import TaskSet
from torchelastic.transport import frames
from torchelastic.transport.codec import Codec
from torchelastic.transport.connect import Endpoint, NoAnswer, connect_once
from torchelastic.transport.frames import Message, Row, by_kind
from torchelastic.transport.link import Link


@dataclass(frozen=True, slots=True)
class VoteRequest(Message):
    """Asks for a vote (`majority.Candidacy`)."""

    kind = "vote_request"
    term: int
    node: str
    generation: int
    binding: bool
    confirmed: bool
    #: Its agent was started again since that world: the state of its workers is lost.
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Ballot(Message):
    """Answers a request for a vote. A vote carries the voter's rows in the store under its
    lease."""

    kind = "ballot"
    node: str
    granted: bool
    #: The reason for a refusal.
    why: str
    #: The newest term, and the newest world, that this node knows.
    term: int
    generation: int
    #: The address of the host that it follows; empty if it has lost it.
    hosts: list[str]
    lease: str
    seconds: float
    rows: list[Row]
    #: Nodes of its machine that saw the end of their run of the job.
    ended: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HostAnnouncement(Message):
    """Announces the host of the store."""

    kind = "host_announcement"
    term: int
    node: str
    #: The newest world it has.
    generation: int
    addresses: list[str]


@dataclass(frozen=True, slots=True)
class AnnouncementReply(Message):
    """Answers an announcement: the newest term this node knows, and the host it knows."""

    kind = "announcement_reply"
    term: int
    hosts: list[str]


QUESTIONS = by_kind(VoteRequest, HostAnnouncement)
BALLOTS, REPLIES = by_kind(Ballot), by_kind(AnnouncementReply)


log = logging.getLogger(__name__)
T = TypeVar("T")
Reply = TypeVar("Reply", Ballot, AnnouncementReply)

#: Seconds for each of the exchanges with an agent: connect, greet, ask. An agent that must first
#: stop its workers has more, for all exchanges together.
EXCHANGE_TIMEOUT, EXCHANGES = 0.5, 3
STOPPING_TIMEOUT = 5.0
#: Seconds for the remaining agents once enough have answered.
LAST_CALL_TIMEOUT = 0.1
#: Agents asked at a time, and seconds of silence after which more are asked.
BATCH_SIZE, BATCH_DELAY = 64, 0.05
#: The most agents that a host announces itself to at a time.
ANNOUNCE_BATCH_SIZE = 16

#: Errors of one agent, which say nothing about the others.
_PEER_ERRORS = (OSError, EOFError, asyncio.TimeoutError, NoAnswer, RendezvousError)


@dataclass
class Returns:
    """The answers of the peers that were asked, by peer."""

    ballots: dict[str, Ballot] = field(default_factory=dict)
    #: Connections of the voters: the winner uses them to announce itself.
    links: dict[str, Link] = field(default_factory=dict)
    #: Peers whose machine refused the connection.
    refused: set[str] = field(default_factory=set)

    @property
    def latest_term(self) -> int:
        """The highest term that any peer knows; 0 if none has answered."""
        return max((ballot.term for ballot in self.ballots.values()), default=0)

    @property
    def ended(self) -> set[str]:
        """Nodes that saw the end of their run of the job, as the peers say."""
        return {node for ballot in self.ballots.values() for node in ballot.ended}

    @property
    def granted(self) -> dict[str, Ballot]:
        """The votes that were given."""
        return {key: ballot for key, ballot in self.ballots.items() if ballot.granted}

    def add_unasked(self, earlier: Returns) -> None:
        """Add earlier answers of peers that were not asked this time, none of them as a vote."""
        self.refused |= earlier.refused
        for key, ballot in earlier.ballots.items():
            self.ballots.setdefault(key, replace(ballot, granted=False))

    def close(self) -> None:
        for link in self.links.values():
            link.abort()
        self.links.clear()


async def ask_for_votes(
    places: Mapping[str, Endpoint], asked: VoteRequest, *, enough: Callable[[Returns], bool]
) -> Returns:
    """Ask all peers; return when all have answered, or shortly after enough have."""
    returns = Returns()
    questions = _Questions(places, asked, returns)
    try:
        while questions.ask_more():
            if not await questions.wait(LAST_CALL_TIMEOUT if enough(returns) else None):
                break
    except BaseException:
        returns.close()
        raise
    finally:
        await questions.drop()
    return returns


class _Questions:
    """The peers being asked and those still to ask, a few at a time.

    A process cannot open thousands of connections at once, and asking thousands of peers in turn
    takes too long when many are silent. So `BATCH_SIZE` peers are asked at a time, and as many more
    after `BATCH_DELAY` seconds of silence; a peer that is silent for `EXCHANGE_TIMEOUT` seconds is
    dropped. The connections of voters stay open, so that the winner can announce itself: they will
    be its clients.
    """

    def __init__(
        self, places: Mapping[str, Endpoint], asked: VoteRequest, returns: Returns
    ) -> None:
        self._asked = asked
        self._returns = returns
        self._next = deque(places.items())
        self._under_way = TaskSet()
        self._time = asyncio.get_running_loop().time
        #: When more peers are asked in spite of silence, and when the last ones time out.
        self._more_at = self._deadline = 0.0

    def ask_more(self) -> bool:
        """Ask as many peers as allowed; False if no question is open."""
        now = self._time()
        room = BATCH_SIZE - (0 if now >= self._more_at else len(self._under_way))
        asked = [self._next.popleft() for _ in range(min(room, len(self._next)))]
        for key, place in asked:
            self._under_way.start(_ask_one(key, place, self._asked, self._returns), "question")
        if asked:
            self._more_at = now + BATCH_DELAY
            self._deadline = now + (
                STOPPING_TIMEOUT if self._asked.binding else EXCHANGES * EXCHANGE_TIMEOUT
            )
        return bool(self._under_way)

    async def wait(self, last_call: float | None) -> bool:
        """Wait for an answer, or until more peers should be asked; at most `last_call` seconds once
        there are enough answers. False if no more will come."""
        now = self._time()
        more = bool(self._next) and last_call is None
        until = self._more_at if more else self._deadline
        if last_call is not None:
            until = min(until, now + last_call)
        done, _ = await asyncio.wait(
            self._under_way,
            timeout=max(until - now, 0.0),
            return_when=asyncio.FIRST_COMPLETED,
        )
        return bool(done) or more

    async def drop(self) -> None:
        """Cancel all questions."""
        await self._under_way.close()


async def _ask_one(key: str, place: Endpoint, asked: VoteRequest, returns: Returns) -> None:
    try:
        timeout = STOPPING_TIMEOUT if asked.binding else EXCHANGE_TIMEOUT
        link, ballot = await _exchange(place, asked, BALLOTS, timeout)
    except ConnectionRefusedError:
        returns.refused.add(key)
        return
    except _PEER_ERRORS as error:
        log.debug("%s does not answer at %s: %r", key, place, error)
        return
    returns.ballots[key] = ballot
    if asked.binding and ballot.granted:
        returns.links[key] = link
    else:
        link.abort()


async def unless(news: asyncio.Event, waiting: Coroutine[Any, Any, T]) -> T | None:
    """Wait for `waiting`, but cancel it as soon as there is news of a host: a frozen or stopping
    peer would otherwise keep this node from following that host."""
    asked = asyncio.ensure_future(waiting)
    heard = asyncio.ensure_future(news.wait())
    try:
        await asyncio.wait({asked, heard}, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        heard.cancel()
        if not asked.done():
            asked.cancel()
            await asyncio.wait({asked})


async def announce(
    places: Sequence[Endpoint], announcement: HostAnnouncement
) -> list[AnnouncementReply]:
    """Announce the host to some of these agents, chosen at random; return their replies."""
    some = random.sample(places, min(ANNOUNCE_BATCH_SIZE, len(places)))
    replies = await asyncio.gather(*(_announce_to(place, announcement) for place in some))
    return [reply for reply in replies if reply is not None]


async def _announce_to(place: Endpoint, announcement: HostAnnouncement) -> AnnouncementReply | None:
    try:
        link, reply = await _exchange(place, announcement, REPLIES, EXCHANGE_TIMEOUT)
    except _PEER_ERRORS as error:
        log.debug("could not announce the host at %s: %r", place, error)
        return None
    link.abort()
    return reply


async def _exchange(
    place: Endpoint,
    question: VoteRequest | HostAnnouncement,
    replies: Codec[Reply],
    timeout: float,
) -> tuple[Link, Reply]:
    link, _ = await connect_once(place, purpose=frames.ELECTION, timeout=timeout)
    with contextlib.ExitStack() as unless_answered:
        unless_answered.callback(link.abort)
        link.send(question)
        frame = await asyncio.wait_for(link.next_frame(), timeout)
        reply = frames.parse(frame, replies)
        unless_answered.pop_all()
    return link, reply
