"""An agent on a virtual loop: real membership, workers of `worker_processes`, no telemetry."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulation.virtual_loop import Scheduler
from tests.simulation.virtual_network import ProcessLoop
from tests.simulation.worker_processes import Nothing, VirtualTraining, VirtualWorkers
from torchelastic.agent.agent import Agent
from torchelastic.chaos import laws
from torchelastic.config import Entry, LaunchConfig
from torchelastic.rendezvous.embedded.voter_file import Voter, VoterFile
from torchelastic.rendezvous.leader import Leader
from torchelastic.rendezvous.membership.member_session import MemberSession
from torchelastic.rendezvous.restart_policy import Kind
from torchelastic.rendezvous.round_state import RoundState
from torchelastic.rendezvous.store import Store
from torchelastic.rendezvous.world import World
from torchelastic.side_tasks import SideTasks

ENTRY = Entry("script", "train.py")
#: Virtual seconds until a node can start workers: minimum and maximum.
WARM_UP_TIME = (0.05, 0.5)


class VirtualClock:
    """The scheduler's time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now(self) -> float:
        return self._scheduler.now


class Disk(VoterFile):
    """The voter files on a machine's disk."""

    def __init__(self, kept: dict[str, Voter], node: str) -> None:
        """`kept` is its content, by node."""
        super().__init__(Path(node), node, {"job": "simulated"})
        self._kept = kept
        self.resumed = self._written = kept.get(node)

    def _put(self, voter: Voter | None) -> None:
        if voter is None:
            self._remove()
        else:
            self._kept[self.node] = voter

    def _remove(self) -> None:
        self._is_off = True
        self._kept.pop(self.node, None)

    def close(self) -> None:
        self._is_off = True


class VirtualAgent(Agent):
    """An agent without processes, on a virtual disk. Telemetry does nothing."""

    workers: VirtualWorkers  # type: ignore[assignment]

    def __init__(
        self,
        config: LaunchConfig,
        disk: Disk,
        loop: ProcessLoop,
        training: VirtualTraining,
        *,
        resident: bool,
        seed: str,
        note: Callable[[laws.Event], None],
        joined: Callable[[], None],
    ) -> None:
        """`joined` is called when the agent has found the job."""
        super().__init__(config, ENTRY, clock=VirtualClock(training.scheduler), file=disk)
        self._durations = random.Random(seed)
        self._note, self._joined = note, joined
        self.workers = VirtualWorkers(
            loop,
            disk.node,
            config.nproc_per_node,
            training,
            self.queue.put_nowait,
            resident=resident,
            durations=self._durations,
        )

    def open(self) -> None:
        self.tasks = SideTasks(self._task_failed)
        self.reporter = _SimulatedReporter(self.node, self._joined)  # type: ignore[assignment]
        self.factory = _SimulatedFactory(self._durations)  # type: ignore[assignment]
        self._open_session(SimulatedSession, host=self.node, note=self._note)

    def __getattr__(self, name: str) -> Any:
        return Nothing()


class _SimulatedReporter(Nothing):
    """Reports nothing except that the node has joined."""

    def __init__(self, name: str, joined: Callable[[], None]) -> None:
        self.name = name
        self._joined = joined

    def joined(self, *_: Any) -> None:
        self._joined()


class _SimulatedFactory:
    """Replaces the zygote and the store host."""

    warnings = ()

    def __init__(self, durations: random.Random) -> None:
        self._durations = durations
        self.stores = _Stores()

    async def zygote_killed(self) -> str:
        return ""

    async def warm_up(self) -> float:
        seconds = self._durations.uniform(*WARM_UP_TIME)
        await asyncio.sleep(seconds)
        return seconds

    async def close(self) -> None:
        """Nothing is open."""


class _Stores:
    """Worker stores, identified by a number."""

    pid = 1

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.lost: set[int] = set()
        self._port = 50000

    async def open(self) -> int:
        self._port += 1
        return self._port

    def used(self, generation: int, port: int) -> None:
        """Nothing."""

    def holds(self, generation: int) -> bool:
        return False

    async def retire(self, before: int) -> None:
        """Nothing."""


class SimulatedSession(MemberSession):
    """Records every world that is formed, and the electorates of the next one."""

    def __init__(self, *args: Any, note: Callable[[laws.Event], None], **given: Any) -> None:
        super().__init__(*args, **given)
        self.note = note

    def _new_leader(self, store: Store) -> Leader:
        leader = super()._new_leader(store)
        published, note_confirmed = leader._publish, leader._note_confirmed
        noted = -1

        async def publish(world: World, kind: Kind | None) -> bool:
            done = await published(world, kind)
            if done:
                self.note_world(world, leader._state)
            return done

        async def confirmed() -> None:
            nonlocal noted
            await note_confirmed()
            roll = leader._state.roll
            if roll is not None and not roll.before and roll.generation > noted:
                noted = roll.generation
                self.note(laws.WorldConfirmed(self._clock.now(), roll.generation))

        leader._publish, leader._note_confirmed = publish, confirmed  # type: ignore[method-assign]
        return leader

    def note_world(self, world: World, state: RoundState) -> None:
        now, roll = self._clock.now(), state.roll
        if world.nodes and world.phase in ("agreeing", "running"):
            electorates = tuple(
                laws.LawElectorate(each.nodes | {each.host} if each.host else each.nodes, each.host)
                for each in (roll.electorates if roll is not None else ())
            )
            nodes = frozenset(node.node for node in world.nodes)
            there = frozenset(state.members)
            self.note(
                laws.WorldPublished(now, world.generation, world.host, nodes, electorates, there)
            )
        if world.phase == "closed":
            blamed = world.cause.node if world.cause is not None else ""
            self.note(laws.ClosedJob(now, world.generation, world.exitcode, world.reason, blamed))
