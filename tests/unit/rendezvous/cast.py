"""A server, clients and a connection that can be made to fail, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import hypothesis

from tests.ports import free_port
from tests.support import SOAK
from torchelastic.events.failure import Failure
from torchelastic.rendezvous import round_state
from torchelastic.rendezvous.decide import decide
from torchelastic.rendezvous.embedded import EmbeddedServer, EmbeddedStore
from torchelastic.rendezvous.round_state import RoundRules, RoundState, StateUpdate
from torchelastic.rendezvous.world import Member, World
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.connect import Endpoint

JOB = "job-1"
#: A failed test ends by this, never by hanging.
LIMIT = 30.0
#: The same few examples whenever the suite runs; others, and more of them, in a soak.
a_few_examples = hypothesis.settings(max_examples=40 * SOAK)


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a story to its end; it must leave no task and no descriptor behind."""
    # The first loop of a process may open descriptors that stay.
    asyncio.run(asyncio.sleep(0))
    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(_bounded(story))
    assert set(os.listdir("/proc/self/fd")) <= before


def story(told: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine: it is run as a story is."""

    @functools.wraps(told)
    def test(*args: Any, **kwargs: Any) -> None:
        run(told(*args, **kwargs))

    return test


async def _bounded(story: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait_for(story, LIMIT)
    # What was cancelled or closed last ends in the next turns of the loop.
    for _ in range(3):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left


async def soon(probe: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + LIMIT
    while not probe():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.002)


async def within(seconds: float, awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, seconds)


@contextlib.asynccontextmanager
async def serving(port: int = 0, **options: Any) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(options.pop("job", JOB), **options)
    sockets = bind_endpoint("127.0.0.1", port)
    assert sockets is not None
    await server.start(sockets)
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[EmbeddedStore]:
    store = await EmbeddedStore.connect([Endpoint("127.0.0.1", port, JOB)], timeout=10, **options)
    try:
        yield store
    finally:
        await store.close()


class Proxy:
    """Passes bytes on between clients and a server, as long as it is told to."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        #: Whether what the server says gets through; what is held is lost when the line is cut.
        self.answers = asyncio.Event()
        self.answers.set()
        self.port = free_port()

    async def open(self) -> None:
        """Take connections, at the same port as before."""
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", self.port)

    async def shut(self) -> None:
        """Take no more connections, and cut those that are."""
        assert self._listener is not None
        self._listener.close()
        await self.cut()

    async def cut(self) -> None:
        """Reset every connection, at both ends."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        self._writers += [writer, far_writer]
        always = asyncio.Event()
        always.set()
        for pump in (
            self._pump(reader, far_writer, always),
            self._pump(far_reader, writer, self.answers),
        ):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await gate.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def proxied(server_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(server_port)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.shut()


# ---  support -------------------------------------------------------------------------------------

# A job whose rounds are decided in virtual time, without a store.


def seen(state: RoundState, member: Member, created: int, now: float) -> RoundState:
    """The state after a member joined or changed its record."""
    draft = StateUpdate(state)
    draft.see(member, created, now)
    return draft.finish()


def lost(state: RoundState, node: str) -> RoundState:
    """The state after a member's key is gone."""
    draft = StateUpdate(state)
    draft.lose(node)
    return draft.finish()


class Job:
    """A leader without a store: members come and go, `now` moves, worlds are taken as published."""

    def __init__(self, nnodes: str = "1:4", **rules) -> None:
        low, high = map(int, nnodes.split(":"))
        self.rules = RoundRules(min_nodes=low, max_nodes=high, **rules)
        self.state = RoundState()
        self.now = 0.0
        self.worlds: list[World] = []
        self.kinds: list[str | None] = []
        self.wake_at: float | None = None
        self.claims: tuple[str, ...] = ()
        self.records: dict[str, tuple[Member, int]] = {}
        self.revision = 0

    def come(self, *names: str, ready: bool = True, **fields) -> None:
        for name in names:
            self.revision += 1
            member = Member(
                node=name,
                name=name,
                addr=name,
                **{"nproc": 2, "store": f"{name}:{self.revision}", **fields},
                ready=ready,
            )
            self.records[name] = (member, self.revision)
            self._tell(name)

    def say(self, name: str, **changes) -> None:
        member, created = self.records[name]
        self.records[name] = (replace(member, **changes), created)
        self._tell(name)

    def _tell(self, name: str) -> None:
        member, created = self.records[name]
        self.state = seen(self.state, member, created, self.now)
        self.settle()

    def die(self, *names: str) -> None:
        for name in names:
            del self.records[name]
            self.state = lost(self.state, name)
        self.settle()

    def settle(self) -> None:
        for _ in range(10):
            decision = decide(self.rules, self.state, self.now)
            self.wake_at, self.claims = decision.wake_at, decision.claims
            if decision.world is None:
                return
            self.worlds.append(decision.world)
            self.kinds.append(decision.kind)
            self.state = round_state.published(self.state, decision.world, self.now)
        raise AssertionError(f"no rest: {self.worlds[-3:]}")

    def wait(self, seconds: float) -> None:
        """Let time pass, waking whenever the round asked for it."""
        end = self.now + seconds
        while self.wake_at is not None and self.wake_at <= end:
            self.now = max(self.now, self.wake_at)
            self.settle()
        self.now = end

    def all_gone(self) -> None:
        """Every member that stays stops its workers and offers a fresh store."""
        for name, (member, _) in list(self.records.items()):
            if self.world.phase == "over" and not member.leaving:
                self.revision += 1
                self.say(name, gone=self.world.generation, store=f"{name}:{self.revision}")

    def fail(self, *names: str, **fields) -> None:
        """Workers of these nodes fail, in this order, and all nodes stop theirs."""
        for name in names:
            self.say(name, failures=(failure(name, self.world.generation, **fields),))
        self.all_gone()

    @property
    def world(self) -> World:
        return self.worlds[-1]

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.world.nodes]


def failure(node: str, generation: int = 0, message: str = "ValueError: no", **fields) -> Failure:
    made = {
        "rank": 0,
        "local_rank": 0,
        "pid": 1,
        "exitcode": 1,
        "traceback": f'  File "train.py", line 3\n{message}',
        **fields,
    }
    return Failure(generation=generation, node=node, message=message, **made)


def running(nnodes: str = "1:4", nodes: str = "ab", **rules) -> Job:
    """A job whose first world runs on `nodes`."""
    job = Job(nnodes, **rules)
    job.come(*nodes)
    job.wait(job.rules.settle)
    assert (job.world.phase, job.world.generation, job.names) == ("running", 0, list(nodes))
    return job
