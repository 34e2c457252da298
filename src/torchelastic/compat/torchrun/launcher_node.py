"""A node of a job whose workers another launcher starts, such as torchrun.

A thread with an event loop is the member of the job. The launcher's own thread calls the methods
below `# For the launcher`, which may block, and raise when the job ends for it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public all the same
    DistError,
    PrefixStore,
    TCPStore,
)

from torchelastic.clock import SystemClock
from torchelastic.compat.torchrun import launcher_node_state
from torchelastic.compat.torchrun.launcher_node_state import Ending, LauncherNodeState
from torchelastic.config import LaunchConfig, parse_endpoint
from torchelastic.errors import NotEnoughNodes
from torchelastic.events.failure import Failure
from torchelastic.rendezvous.membership.node_driver import NodeDriver
from torchelastic.rendezvous.world import World
from torchelastic.worker.worker_stores import READ_TIMEOUT, OwnStores

logger = logging.getLogger("torchelastic")

#: Seconds that a node that leaves waits for its world to be over.
WORLD_ENDS = 2.0
#: Seconds that a finished node waits for the others: a launcher that is asked to stop its workers
#: gives them 30 s.
OTHERS_END = 35.0
#: Extra seconds for the leader to report why there is no world, before this node gives up.
LEADER_FIRST = 5.0
#: Time limit for the store of a generation to answer: its host was alive a moment ago.
STORE_ANSWERS = 10.0
#: Seconds between two checks that all nodes have reached the store, and for all to arrive.
LOOK_AGAIN, ALL_COME = 0.02, 60.0


@dataclass(frozen=True)
class Entered:
    """A world for which the launcher should start workers."""

    node_rank: int
    nodes: int
    #: The store through which the launchers of this world exchange their ranks.
    store: AgentStore
    #: The address of the workers' store; the same TCPStore.
    master_addr: str
    master_port: int
    generation: int


class LauncherNode:
    """One node of a job, for a launcher named `launcher`."""

    def __init__(self, config: LaunchConfig, launcher: str) -> None:
        self._config = config
        self._launcher = launcher
        self._clock = SystemClock()
        self._driver = NodeDriver(
            config,
            OwnStores(),
            on_world=self._world_seen,
            on_lease_lost=self._lease_lost,
            on_error=self._fail,
        )
        self._session = self._driver.session
        self._state = LauncherNodeState(node=self._driver.node)
        #: Guards `_state` and `_error`, and signals their changes.
        self._news = threading.Condition()
        #: The reason why the job is over for this node.
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._rejoining = False

    # For the launcher

    def next_world(self) -> Entered:
        """Wait for a world with this node in it. The launcher has no worker of an earlier one.

        Raises `JobClosed`, `NotEnoughNodes`, or an error of the rendezvous.
        """
        self._join_once()
        while True:
            self._ask()
            world = self._wait_for_world()
            entered = self._enter(world)
            if entered is not None:
                return entered

    def must_stop(self) -> bool:
        """Return True if the launcher must stop its workers and ask for another world."""
        with self._news:
            if self._error is not None:
                raise self._error
            return launcher_node_state.must_stop(self._state)

    @property
    def is_closed(self) -> bool:
        """True if the job has ended."""
        with self._news:
            return self._state.is_closed

    def workers_succeeded(self) -> None:
        """Report that the workers of this node succeeded; other nodes may still be busy."""
        self._post(self._say_end, "done", "")

    def end(self, ending: Ending, why: str) -> bool:
        """Leave the job; return False if there was an error."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return self._error is None
        self._post(self._say_end, ending, why)
        with self._news:
            if ending == "left":
                # A leader that leaves first announces that its world is over.
                self._news.wait_for(lambda: not self._state.in_world or self._error, WORLD_ENDS)
            elif self._state.counts:
                self._news.wait_for(lambda: self._state.is_closed or self._error, OTHERS_END)
        self._post(self._stop.set)
        thread.join()
        atexit.unregister(self._leave)
        return self._error is None

    # Between the two threads

    def _join_once(self) -> None:
        if self._thread is not None:
            return
        # A daemon: the interpreter would wait for any other thread before it runs `atexit`.
        self._thread = threading.Thread(
            target=self._driver.run,
            args=(self._main, self._fail),
            name="torchelastic-rendezvous",
            daemon=True,
        )
        with self._news:
            self._thread.start()
            self._news.wait_for(lambda: self._loop or self._error)
        atexit.register(self._leave)

    def _leave(self) -> None:
        """Leave at exit: a launcher that is ended by a signal does not do it."""
        self.end("left", f"{self._launcher} exits")

    def _post(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run something in the event loop, unless that has ended."""
        with self._news:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work, *arguments)

    def _change(self, **changes: Any) -> None:
        with self._news:
            self._state = replace(self._state, **changes)
            self._news.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._news:
            self._error = self._error or error
            self._news.notify_all()
        self._stop.set()

    # The launcher's thread: into a world

    def _ask(self) -> None:
        with self._news:
            state = self._state
            self._state = replace(state, asking=True)
        self._post(self._asked, state)

    def _wait_for_world(self) -> World:
        """Wait for a world with this node, also while another world runs without it."""
        limit = self._config.wait_for_nodes
        since = self._clock.now()
        with self._news:
            while True:
                if self._error is not None:
                    raise self._error
                world = launcher_node_state.next_world(self._state)
                if world is not None:
                    self._state = replace(self._state, held=world.generation, asking=False)
                    return world
                if self._state.world is not None and self._state.world.phase == "running":
                    since = self._clock.now()
                if limit and self._clock.now() > since + limit + LEADER_FIRST:
                    raise NotEnoughNodes(
                        f"Timed out: the nodes did not agree on a world within {limit:g} s."
                    )
                self._news.wait(1.0)

    def _enter(self, world: World) -> Entered | None:
        """Wait for the other nodes at the store of the world; None if that fails.

        The launcher gets the world only when all have arrived: otherwise it would wait there for a
        missing node, and then exit.
        """
        host, port = parse_endpoint(world.store)
        node_rank = world.place(self._state.node)
        assert node_rank is not None, "no place in the world to enter"
        try:
            store = AgentStore.connect(
                host, port, timeout=STORE_ANSWERS, on_success=self.workers_succeeded
            )
            store.arrive(world.count)
            if not self._wait_for_all(store):
                return None
        except DistError as error:
            logger.info("Could not enter generation %d: %s", world.generation, error)
            return None
        return Entered(node_rank, world.count, store, host, port, world.generation)

    def _wait_for_all(self, store: AgentStore) -> bool:
        deadline = self._clock.now() + ALL_COME
        while not store.all_here():
            with self._news:
                if self._error is not None or launcher_node_state.must_stop(self._state):
                    return False
                self._news.wait(LOOK_AGAIN)
            if self._clock.now() > deadline:
                return False
        return True

    # The event loop

    async def _main(self) -> None:
        async with self._driver.membership(ready=True):
            with self._news:
                self._loop = asyncio.get_running_loop()
                self._news.notify_all()
            try:
                await self._stop.wait()
            finally:
                with self._news:
                    self._loop = None

    def _asked(self, state: LauncherNodeState) -> None:
        """The launcher has no workers any more and wants a world after that of `state`."""
        if state.given_up:
            self._driver.tasks.start(self._rejoin, "rejoin")
        elif state.held >= 0:
            failure = self._failure(state, _ended(state, self._launcher))
            self._session.update(**launcher_node_state.facts_when_asking(state, failure))

    def _say_end(self, ending: Ending, why: str) -> None:
        state = self._state
        failure = self._failure(state, why, fatal=True)
        self._session.update(**launcher_node_state.facts_at_end(state, ending, failure, why))

    def _failure(self, state: LauncherNodeState, message: str, *, fatal: bool = False) -> Failure:
        """Describe the failure of this node's workers.

        The launcher shows little: unless it gives up, they may have failed because of others, and
        are not treated as the cause (`stopped`).
        """
        found = state.world.find(state.node) if state.world is not None else None
        return Failure(
            generation=state.held,
            node=self._launcher if found is None else found.name,
            rank=-1 if found is None else found.node_rank,
            local_rank=0,
            pid=os.getpid(),
            exitcode=1,
            message=message,
            stopped=not fatal,
            fatal=fatal,
        )

    def _lease_lost(self) -> None:
        self._change(given_up=True)
        if self._state.asking:
            self._driver.tasks.start(self._rejoin, "rejoin")

    async def _rejoin(self) -> None:
        """Join again as a new member, since no worker is left here. Runs once at a time."""
        if self._rejoining:
            return
        self._rejoining = True
        try:
            await self._session.rejoin(self._state.held)
        finally:
            self._rejoining = False
        self._change(given_up=False)

    def _world_seen(self, world: World) -> None:
        self._change(world=world)
        if (state := self._state).asking:
            self._session.update(
                gone=max(self._session.member.gone, launcher_node_state.gone(state))
            )


def _ended(state: LauncherNodeState, launcher: str) -> str:
    """Include the generation, so that no two are equal: the launcher counts restarts."""
    return f"the workers of generation {state.held} ended, {launcher} restarts them"


# --- the store of a generation -------------------------------------------------------------------


#: The key prefix of the launchers; the workers use no prefix.
_AGENTS = "torchelastic/agents"
_HERE, _ALL_HERE = "here", "all-here"
#: The prefix of torchrun's key for the exit barrier of agents whose workers succeeded.
_EXIT_BARRIER = "torchelastic/agent/terminal_state"


class AgentStore(PrefixStore):
    """The store in which torchrun's agents exchange ranks and wait at the exit barrier."""

    def __init__(self, store: TCPStore, on_success: Callable[[], None]) -> None:
        super().__init__(_AGENTS, store)
        self._on_success = on_success

    @classmethod
    def connect(
        cls, host: str, port: int, *, timeout: float, on_success: Callable[[], None]
    ) -> AgentStore:
        """Connect; raises torch's `DistError` if the store does not answer in time."""
        limit = timedelta(seconds=timeout)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        store.set_timeout(READ_TIMEOUT)
        return cls(store, on_success)

    def arrive(self, nodes: int) -> None:
        """Announce that this node has arrived."""
        if super().add(_HERE, 1) == nodes:
            super().set(_ALL_HERE, "1")

    def all_here(self) -> bool:
        """Return True if all nodes have arrived."""
        return bool(super().check([_ALL_HERE]))

    def add(self, key: str, amount: int) -> int:
        """Add as the store does. The exit barrier is the only sign that a launcher's workers
        succeeded while those of other nodes still run."""
        if key.startswith(_EXIT_BARRIER):
            self._on_success()
        return int(super().add(key, amount))
