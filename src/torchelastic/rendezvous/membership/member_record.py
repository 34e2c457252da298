"""This node's member record: what it says of itself, kept current in the store."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain
from typing import Any

from torchelastic.errors import RendezvousError
from torchelastic.records import replace
from torchelastic.rendezvous.store import Store
from torchelastic.rendezvous.world import MEMBER_PREFIX, Member

NAME_PREFIX = "name/"
#: Returns when this node would not forget what it is about to say.
Kept = Callable[[], Awaitable[None]]
#: Seconds by which what is not urgent is put.
A_WHILE = 0.25
#: Agents of one host that have consecutive numbers.
NEIGHBOURS = 8


async def at_once() -> None:
    """Of a node that need not remember."""


class MemberRecord:
    """Puts the record whenever it changes; several changes before a put travel in one."""

    def __init__(self, member: Member) -> None:
        self._member = member
        #: The record as the store has it, if it has one.
        self._said: Member | None = None
        #: The revision at which it was put first under the present lease; 0: it was taken along.
        self.since = 0
        self._reminder: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def member(self) -> Member:
        return self._member

    async def enlist(self, store: Store, host: str, kept: Kept = at_once) -> None:
        """Claim a name under a new lease, and put the record with it.

        The name is for people: the host's, with a number where another agent of the job has it. Who
        comes back has the name it had, unless somebody else took it meanwhile.
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

    def unsaid(self) -> None:
        """What the store has of the record is not known: it is to be put again."""
        self._said, self.since = None, 0
        self.update()

    def update(self, **changes: Any) -> None:
        """Change the record; it is put by `run`."""
        if changes:
            self._member = replace(self._member, **changes)
        self._changed.set()
        self._settled.clear()

    def mention(self, **changes: Any) -> None:
        """Change the record in something that is not urgent: it is put with what comes next, or
        after a while. When a world begins, all its nodes have more important things to ask."""
        self._member = replace(self._member, **changes)
        if self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(A_WHILE, self._remind)

    def _remind(self) -> None:
        self._reminder = None
        self.update()

    async def run(self, store: Store, kept: Kept = at_once) -> None:
        """Put the record at every change, when what it says is `kept`. Ends by raising when the
        lease or the store is lost."""
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
                    self._settled.set()
        finally:
            self._settled.set()  # nobody is to wait for what cannot be said any more

    async def flush(self, store: Store) -> None:
        """Wait until all that was said has been heard, or nothing can be said any more."""
        await self._settled.wait()
        with contextlib.suppress(RendezvousError):
            await store.keep_alive()  # its answer tells that what was said before was heard


def _numbers() -> Iterator[int]:
    """Numbers to try for a name: the smallest first, then farther and farther away.

    One after the other, the last of a thousand agents of one host would ask a thousand times.
    """
    yield from range(1, NEIGHBOURS + 1)
    end = NEIGHBOURS
    while True:
        start, end = end + 1, end * NEIGHBOURS
        yield random.randint(start, end)
