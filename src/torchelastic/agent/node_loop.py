"""The loop of a node: take the next event, let the machine decide, perform the commands.

    events ──▶ Machine ──▶ commands ──▶ the workers, the member record

What holds the workers differs. An agent has child processes (`agent.agent`; the simulation puts
virtual workers in their place); a process that is its own node has itself (`training.standalone`).
The plug-in for torchrun (`compat.torchrun`) has no such loop: torch starts and stops there.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial

from torchelastic.agent.lifecycle.machine import Machine, State
from torchelastic.agent.lifecycle.node_state import (
    Command,
    Event,
    Kill,
    Named,
    Rejoin,
    ReportMember,
    Spawn,
    StartWorkers,
    Stop,
    Tell,
    WorkerProgress,
)
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.world import World
from torchelastic.side_tasks import SideTasks
from torchelastic.worker import orders


class NodeLoop(ABC):
    """One node. A kind of node adds what holds its workers; what happens to them are events."""

    #: Its member record at the leader, and the tasks beside the loop.
    session: MemberSession
    tasks: SideTasks

    def __init__(self, state: State) -> None:
        self.node = state.node
        self.machine = Machine(state)
        #: What happens on this node.
        self.queue: asyncio.Queue[Event | Exception] = asyncio.Queue()

    @property
    def state(self) -> State:
        return self.machine.state

    async def supervise(self) -> None:
        """Decide and perform until the node has ended."""
        while not self.state.is_terminal:
            event = await self.queue.get()
            if isinstance(event, Exception):
                raise event
            for command in self.machine.take(event, self.seen()):
                self._perform(command)

    def _perform(self, command: Command) -> None:
        """Perform a command: the only place with side effects."""
        match command:
            case ReportMember(changes):
                self.session.update(**changes)
            case Rejoin(gone):
                self.tasks.start(partial(self.rejoin, gone), "rejoin")
            case Tell(local_rank, order):
                self.tell(local_rank, order)
            case StartWorkers(world):
                self.start(world)
            case Spawn(local_rank):
                self.start_standby(local_rank)
            case Stop(signum, told):
                self.stop(signum, told)
            case Kill(local_rank, why):
                self.kill(local_rank, why)

    async def rejoin(self, gone: int) -> None:
        """Become a member again, with no worker of generation `gone` or an older one."""
        self.queue.put_nowait(Named(await self.session.rejoin(gone)))

    # --- what holds the workers ------------------------------------------------------------------

    @abstractmethod
    def seen(self) -> WorkerProgress:
        """Return the progress that the workers show."""

    @abstractmethod
    def start(self, world: World) -> None:
        """Start the workers of a world; answer `WorkersUp` or `WorkerFailed`."""

    @abstractmethod
    def start_standby(self, local_rank: int) -> None:
        """Start a worker for a later world."""

    @abstractmethod
    def tell(self, local_rank: int, order: orders.Order) -> None:
        """Send an order to a worker."""

    @abstractmethod
    def stop(self, signum: int, told: frozenset[int]) -> None:
        """Stop all workers, after those that were told to leave; answer `WorkersGone`."""

    @abstractmethod
    def kill(self, local_rank: int, why: str) -> None:
        """Kill one worker; answer `WorkerFailed` with this reason."""
