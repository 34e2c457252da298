"""This node's member record, kept current in the store."""

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
BATCH_DELAY = 0.25
#: Agents of one host that have consecutive numbers.
NEIGHBOURS = 8


async def at_once() -> None:
    """Return at once: nothing has to reach the disk."""


class MemberRecord:
    """Writes the record whenever it changes; several changes before a write are sent as one."""

    def __init__(self, member: Member) -> None:
        self._member = member
        #: The record as the store has it, if it has one.
        self._said: Member | None = None
        #: The revision at which it was put first under the present lease; 0: it was taken along.
        self.since = 0
        self._reminder: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()

    @property
    def member(self) -> Member:
        return self._member

    async def enlist(self, store: Store, host: str, kept: Kept = at_once) -> None:
        """Claim a name under a new lease, and write the record with it.

        The name is for people: the host's name, with a number if another agent of the job has it. A
        node that comes back keeps its name, unless another took it meanwhile.
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
        """Mark the record as unsent: the store may not have it."""
        self._said, self.since = None, 0
        self.update()

    def update(self, **changes: Any) -> None:
        """Change the record; `run` writes it."""
        if changes:
            self._member = replace(self._member, **changes)
        self._changed.set()
        self._written.clear()

    def mention(self, **changes: Any) -> None:
        """Change something in the record that is not urgent: it is written with the next change, or
        after a while. When a world begins, all its nodes have more important requests."""
        self._member = replace(self._member, **changes)
        if self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(BATCH_DELAY, self._remind)

    def _remind(self) -> None:
        self._reminder = None
        self.update()

    async def run(self, store: Store, kept: Kept = at_once) -> None:
        """Write the record at every change, after what it says is `kept`. Raises when the lease or
        the store is lost."""
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
                    self._written.set()
        finally:
            self._written.set()  # nothing more can be written: do not let callers wait for it

    async def flush(self, store: Store) -> None:
        """Wait until all changes have been written, or none can be written any more."""
        await self._written.wait()
        with contextlib.suppress(RendezvousError):
            await store.keep_alive()  # its answer shows that earlier reports were received


def _numbers() -> Iterator[int]:
    """Numbers to try for a name: the smallest first, then farther and farther apart.

    One by one, the last of a thousand agents on one host would ask a thousand times.
    """
    yield from range(1, NEIGHBOURS + 1)
    end = NEIGHBOURS
    while True:
        start, end = end + 1, end * NEIGHBOURS
        yield random.randint(start, end)
