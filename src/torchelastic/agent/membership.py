"""This node's member record: what it says of itself, kept current in the store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchelastic.rendezvous.store import Store
from torchelastic.rendezvous.world import MEMBER_PREFIX, Member

NAME_PREFIX = "name/"
#: Agents of one host that have consecutive numbers.
NEIGHBOURS = 8


class Membership:
    """Puts the record whenever it changes; several changes before a put travel in one."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def member(self) -> Member:
        return self._member

    def update(self, **changes: Any) -> None:
        """Change the record; it is put by `run`."""
        self._member = replace(self._member, **changes)
        self._changed.set()
        self._settled.clear()

    async def run(self, store: Store) -> None:
        """Put the record at every change. Ends by raising when the lease or the store is lost."""
        key = MEMBER_PREFIX + self._member.node
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await store.put(key, self._member.to_json(), leased=True)
                if not self._changed.is_set():
                    self._settled.set()
        finally:
            self._settled.set()  # nobody is to wait for what cannot be said any more

    async def flush(self) -> None:
        """Wait until all that was said has been put, or nothing can be put any more."""
        await self._settled.wait()


async def claim_name(store: Store, host: str, node: str) -> str:
    """A name for people: the host's, with a number where another agent of the job has it."""
    for number in _numbers():
        name = host if number == 1 else f"{host}-{number}"
        won = await store.compare_and_set(
            NAME_PREFIX + name, {"node": node}, expected=0, leased=True
        )
        if won is not None:
            return name
    raise AssertionError("there is always another number")


def _numbers() -> Iterator[int]:
    """Numbers to try for a name: the smallest first, then farther and farther away.

    One after the other, the last of a thousand agents of one host would ask a thousand times.
    """
    yield from range(1, NEIGHBOURS + 1)
    end = NEIGHBOURS
    while True:
        start, end = end + 1, end * NEIGHBOURS
        yield random.randint(start, end)
