"""Asking other agents about the host of the store: all at once, each with little patience."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchelastic.errors import RendezvousError
from torchelastic.rendezvous.embedded import wire
from torchelastic.rendezvous.embedded.ballots import REPLIES, Ballot, Canvass, Noted, Reign
from torchelastic.rendezvous.embedded.dial import Endpoint, NoAnswer, knock
from torchelastic.rendezvous.embedded.link import Link

log = logging.getLogger(__name__)

#: Seconds an agent has to answer; longer where it must stop its workers before.
PATIENCE = 0.5
STOPPING_PATIENCE = 5.0
#: Seconds left for the others once enough have answered.
LAST_CALL = 0.1

#: What may go wrong with one agent, and says nothing of the others.
_TROUBLE = (OSError, EOFError, asyncio.TimeoutError, NoAnswer, RendezvousError)


@dataclass
class Returns:
    """What came back of a canvass, by whom it was asked of."""

    ballots: dict[str, Ballot] = field(default_factory=dict)
    #: Connections of those who gave their vote: the winner tells them over these.
    links: dict[str, Link] = field(default_factory=dict)
    #: Whose machine answers that nobody listens.
    refused: set[str] = field(default_factory=set)

    def close(self) -> None:
        for link in self.links.values():
            link.abort()
        self.links.clear()


async def canvass(
    places: Mapping[str, Endpoint], asked: Canvass, *, enough: Callable[[Returns], bool]
) -> Returns:
    """Ask everybody; returns when all have answered, or enough, and the others had a moment."""
    returns = Returns()
    tasks = {
        asyncio.create_task(_ask_one(key, place, asked, returns)) for key, place in places.items()
    }
    patience = STOPPING_PATIENCE if asked.binding else PATIENCE
    deadline = asyncio.get_running_loop().time() + patience
    try:
        while tasks:
            left = deadline - asyncio.get_running_loop().time()
            limit = LAST_CALL if enough(returns) else left
            done, tasks = await asyncio.wait(
                tasks, timeout=max(min(limit, left), 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
    except BaseException:
        returns.close()
        raise
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    return returns


async def _ask_one(key: str, place: Endpoint, asked: Canvass, returns: Returns) -> None:
    patience = STOPPING_PATIENCE if asked.binding else PATIENCE
    try:
        link, ballot = await _exchange(place, asked, patience)
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


async def proclaim(place: Endpoint, reign: Reign) -> Noted | None:
    """Tell an agent who is host; what it knows of that, None if it does not answer."""
    try:
        link, noted = await _exchange(place, reign, PATIENCE)
    except _TROUBLE as error:
        log.debug("nobody to be told who hosts at %s: %r", place, error)
        return None
    link.abort()
    assert isinstance(noted, Noted)
    return noted


async def _exchange(
    place: Endpoint, question: Canvass | Reign, patience: float
) -> tuple[Link, wire.Message]:
    link, _ = await knock(place, purpose=wire.SUCCESSION, timeout=patience)
    with contextlib.ExitStack() as unless_answered:
        unless_answered.callback(link.abort)
        link.send(question)
        frame = await asyncio.wait_for(link.next_frame(), patience)
        expected = Ballot if isinstance(question, Canvass) else Noted
        reply = wire.parse(frame, {expected.kind: REPLIES[expected.kind]})
        unless_answered.pop_all()
    return link, reply
