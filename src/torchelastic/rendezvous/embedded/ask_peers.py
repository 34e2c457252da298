"""Ask many agents at once about the host of the store, each with a short timeout."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.embedded.votes import (
    REPLIES,
    Ballot,
    HostAnnouncement,
    Noted,
    VoteRequest,
)
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint, NoAnswer, connect_once
from torchelastic.transport.link import Link

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds an agent has to answer, each time it is spoken to: it is connected to, greeted and asked.
#: Longer, and once for all three, where it must stop its workers before.
PATIENCE, EXCHANGES = 0.5, 3
STOPPING_PATIENCE = 5.0
#: Seconds left for the others once enough have answered.
LAST_CALL = 0.1
#: Agents asked at a time, and seconds after which more are, though these are silent.
AT_ONCE, BRISK = 64, 0.05

#: What may go wrong with one agent, and says nothing of the others.
_TROUBLE = (OSError, EOFError, asyncio.TimeoutError, NoAnswer, RendezvousError)


@dataclass
class Returns:
    """The answers of the peers that were asked, by peer."""

    ballots: dict[str, Ballot] = field(default_factory=dict)
    #: Connections of those who gave their vote: the winner tells them over these.
    links: dict[str, Link] = field(default_factory=dict)
    #: Whose machine answers that nobody listens.
    refused: set[str] = field(default_factory=set)

    @property
    def latest_term(self) -> int:
        """The highest term that any peer knows; 0 if none has answered."""
        return max((ballot.term for ballot in self.ballots.values()), default=0)

    def close(self) -> None:
        for link in self.links.values():
            link.abort()
        self.links.clear()


async def ask_for_votes(
    places: Mapping[str, Endpoint], asked: VoteRequest, *, enough: Callable[[Returns], bool]
) -> Returns:
    """Ask all peers; return when all have answered, or when enough have and the others had a
    moment."""
    returns = Returns()
    questions = _Questions(places, asked, returns)
    try:
        while questions.ask_more():
            if not await questions.wait(LAST_CALL if enough(returns) else None):
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
    takes too long when many are silent. So `AT_ONCE` peers are asked at a time, and as many more
    after `BRISK` seconds of silence; a peer that is silent for `PATIENCE` seconds is dropped. The
    connections of peers that voted stay open, so that the winner can tell them: they will be its
    clients.
    """

    def __init__(
        self, places: Mapping[str, Endpoint], asked: VoteRequest, returns: Returns
    ) -> None:
        self._asked = asked
        self._returns = returns
        self._next = deque(places.items())
        self._under_way: set[asyncio.Task[None]] = set()
        self._time = asyncio.get_running_loop().time
        #: When more are asked though these are silent, and when the last have had their time.
        self._more_at = self._deadline = 0.0

    def ask_more(self) -> bool:
        """Ask as many peers as allowed; False if none is left."""
        now = self._time()
        room = AT_ONCE - (0 if now >= self._more_at else len(self._under_way))
        asked = [self._next.popleft() for _ in range(min(room, len(self._next)))]
        for key, place in asked:
            asking = _ask_one(key, place, self._asked, self._returns)
            self._under_way.add(asyncio.create_task(asking))
        if asked:
            self._more_at = now + BRISK
            self._deadline = now + (
                STOPPING_PATIENCE if self._asked.binding else EXCHANGES * PATIENCE
            )
        return bool(self._under_way)

    async def wait(self, last_call: float | None) -> bool:
        """Wait for an answer, or until more peers should be asked; at most `last_call` seconds once
        there are enough answers. False if this was all."""
        now = self._time()
        more = bool(self._next) and last_call is None
        until = self._more_at if more else self._deadline
        if last_call is not None:
            until = min(until, now + last_call)
        done, self._under_way = await asyncio.wait(
            self._under_way,
            timeout=max(until - now, 0.0),
            return_when=asyncio.FIRST_COMPLETED,
        )
        return bool(done) or more

    async def drop(self) -> None:
        """Cancel all questions."""
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)


def _patience(asked: VoteRequest) -> float:
    return STOPPING_PATIENCE if asked.binding else PATIENCE


async def _ask_one(key: str, place: Endpoint, asked: VoteRequest, returns: Returns) -> None:
    try:
        link, ballot = await _exchange(place, asked, _patience(asked))
    except ConnectionRefusedError:
        returns.refused.add(key)
        return
    except _TROUBLE as error:
        log.debug("%s does not answer at %s: %r", key, place, error)
        return
    assert isinstance(ballot, Ballot)
    returns.ballots[key] = ballot
    if asked.binding and ballot.granted:
        returns.links[key] = link
    else:
        link.abort()


async def unless(news: asyncio.Event, waiting: Coroutine[Any, Any, T]) -> T | None:
    """Wait for answers, or for a while, but stop as soon as there is news of a host: a frozen or
    stopping peer would otherwise keep this node from following it."""
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


async def announce(place: Endpoint, announcement: HostAnnouncement) -> Noted | None:
    """Tell an agent who is host; return what it knows about hosts, None if it does not answer."""
    try:
        link, noted = await _exchange(place, announcement, PATIENCE)
    except _TROUBLE as error:
        log.debug("could not announce the host at %s: %r", place, error)
        return None
    link.abort()
    assert isinstance(noted, Noted)
    return noted


async def _exchange(
    place: Endpoint, question: VoteRequest | HostAnnouncement, patience: float
) -> tuple[Link, frames.Message]:
    link, _ = await connect_once(place, purpose=frames.SUCCESSION, timeout=patience)
    with contextlib.ExitStack() as unless_answered:
        unless_answered.callback(link.abort)
        link.send(question)
        frame = await asyncio.wait_for(link.next_frame(), patience)
        expected = Ballot if isinstance(question, VoteRequest) else Noted
        reply = frames.parse(frame, {expected.kind: REPLIES[expected.kind]})
        unless_answered.pop_all()
    return link, reply
