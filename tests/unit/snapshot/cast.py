"""Fakes for tests of run + keep: a holder of snapshots, ranks as threads, and a training."""

from __future__ import annotations

import copy
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from torchelastic.errors import SnapshotError
from torchelastic.snapshot import agent_client
from torchelastic.snapshot.layout import Memory, Sizes, Version, buffers_for, create
from torchelastic.snapshot.messages import InventoryItem, NodeInventory, Sealed, Settled
from torchelastic.tensors import agreement, transfer
from torchelastic.training.torch_state import TorchState
from torchelastic.worker.orders import Begins, Leave


class FakeSnapshotAgent:
    """Memories as an agent has them: they outlive whoever writes to them."""

    def __init__(
        self, name: str = "here", peers: dict[str, FakeSnapshotAgent] | None = None
    ) -> None:
        """`peers` are all nodes that can fetch from each other, by name."""
        self.name, self.peers = name, peers if peers is not None else {}
        #: Sentences of refusals, one for each piece that is asked for.
        self.refusals: list[str] = []
        self.descriptors: dict[str, int] = {}
        self.told: list[Sealed | Settled] = []
        self.steps: list[int] = []
        self.begun: list[Begins] = []
        self.refusal = ""
        #: Whether copies on other nodes arrive as soon as they are wanted.
        self.arrives = True
        #: Those who want to be told to leave.
        self.on_leave: list[Callable[[Leave], None]] = []
        #: Cleared: it does not answer.
        self.answering = threading.Event()
        self.answering.set()

    def inventory(self) -> NodeInventory:
        held = tuple(
            InventoryItem(piece, one.version, len(one.data), one.rank, one.size)
            for piece, memory in self.memories()
            for one in memory.holdings()
        )
        peer = self.name if self.name in self.peers else ""
        return NodeInventory(1, held, peer=peer, node=self.name)

    def memories(self) -> Iterator[tuple[str, Memory]]:
        for piece, descriptor in self.descriptors.items():
            memory = Memory(descriptor)
            yield piece, memory
            memory.close()

    def request_memory(self, piece: str, size: int, skeleton: int) -> Memory:
        assert self.answering.wait(30)
        if self.refusal:
            raise SnapshotError(self.refusal)
        if piece in self.descriptors:
            memory = Memory(self.descriptors[piece])
            if size <= memory.sizes.bytes and skeleton <= memory.sizes.skeleton:
                return memory
            memory.close()
            os.close(self.descriptors.pop(piece))
        self.descriptors[piece] = create(Sizes(size, skeleton, buffers_for(piece)))
        return Memory(self.descriptors[piece])

    def open(self, piece: str, version: Version, peer: str) -> Memory:
        if self.refusals:
            raise SnapshotError(self.refusals.pop(0))
        holder = self.peers[peer] if peer else self
        return Memory(holder.descriptors[piece], writable=False)

    def drop(self, piece: str, version: Version) -> None:
        memory = Memory(self.descriptors[piece])
        memory.drop(version)
        memory.close()

    def tell(self, message: Sealed | Settled) -> None:
        self.told.append(message)
        if self.arrives and isinstance(message, Sealed):
            memory = Memory(self.descriptors[message.piece])
            memory.note_replicated(message.version)
            memory.close()

    def begins(self, begins: Begins) -> None:
        self.begun.append(begins)

    def progress(self, version: Version, rank: int) -> None:
        self.steps.append(version[1])

    def listen(self, on_leave: Callable[[Leave], None], *, together: bool = False) -> None:
        self.on_leave.append(on_leave)

    def saved(self) -> None:
        for tell in self.on_leave:
            tell(Leave(saves=False))

    def versions(self, piece: str) -> list[Version]:
        return [held.version for held in self.inventory().holdings if held.piece == piece]

    def damage(self, piece: str, version: Version) -> None:
        """Change one byte of what is kept."""
        memory = Memory(self.descriptors[piece])
        held = memory.find(version)
        assert held is not None
        at = memory.sizes.buffer_at(held.index) + len(held.data) // 2
        old = os.pread(self.descriptors[piece], 1, at)
        os.pwrite(self.descriptors[piece], bytes([old[0] ^ 1]), at)
        memory.close()

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


class Data:
    """A position that counts only what was committed."""

    def __init__(self) -> None:
        self.position = self.taken = 0

    def next(self) -> torch.Tensor:
        self.taken += 1
        generator = torch.Generator().manual_seed(self.position + self.taken)
        return torch.randn(8, 16, generator=generator)

    def committed(self) -> None:
        self.position += self.taken
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.taken = state["position"], 0


def build(width: int = 256, seed: int = 3) -> TorchState:
    """Build the state as a script does. The seed of a restarted one must not matter."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(
        nn.Linear(16, width),
        nn.BatchNorm1d(width),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.Linear(width, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return TorchState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        sampler=Data(),
        best=torch.zeros(3),
    )


def step(state: TorchState) -> None:
    """One step, as a script has it."""
    loss = state.model(state.sampler.next()).square().mean() * (1 + random.random())
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.scheduler.step()
    state.best = state.best + loss.detach()


def train(state: TorchState, until: int) -> None:
    for _ in range(state.step, until):
        step(state)
        state.commit()


def trained(until: int) -> TorchState:
    """A state that was kept up to this step."""
    state = build()
    state.restore()
    train(state, until)
    return state


def finish(state: TorchState) -> None:
    """The worker ends; until then its last snapshot may not be sealed."""
    assert state._keeper is not None
    if state._keeper._writer is not None:
        state._keeper._writer.close()


def fingerprint(state: TorchState) -> list[object]:
    tensors = [*state.module.state_dict().values(), state.best, torch.get_rng_state()]
    for entries in state.optimizer.state.values():
        tensors.extend(entries.values())
    rest = [state.sampler.state_dict(), state.scheduler.state_dict(), random.random()]
    return [[one.tolist() for one in tensors], rest]


# --- several ranks in this process, a thread each -------------------------------------------------


PATIENCE = 60.0


class Ranks:
    """Ranks whose collectives are here; one that only some of them enter fails. If there is a node
    for each, the nodes outlive them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        nodes: Sequence[FakeSnapshotAgent] = (),
        size: int = 2,
    ) -> None:
        self.size = len(nodes) or size
        self._here = threading.local()
        self._slots: list[Any] = [None] * self.size
        self._barrier = threading.Barrier(self.size)
        if nodes:
            monkeypatch.setattr(agent_client, "connect", lambda: nodes[self.rank])
        monkeypatch.setattr(agreement, "place", lambda: (self.rank, self.size))
        monkeypatch.setattr(agreement, "gather", self._gather)
        monkeypatch.setattr(agreement, "least", lambda one, *_: min(self.all("least", one)))
        monkeypatch.setattr(agreement, "largest", self._largest)
        monkeypatch.setattr(agreement, "of_rank_0", lambda one: self.all("of rank 0", one)[0])
        monkeypatch.setattr(agreement, "extremes", self._extremes)
        monkeypatch.setattr(transfer, "share", self._share)

    @property
    def rank(self) -> int:
        rank: int = self._here.rank
        return rank

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The result on each rank: the value it returns, or the error that it ends with."""
        self._barrier.reset()
        with ThreadPoolExecutor(self.size, "rank") as pool:
            return list(pool.map(self._perform, [work] * self.size, range(self.size)))

    def _perform(self, work: Callable[[int], Any], rank: int) -> Any:
        self._here.rank = rank
        try:
            return work(rank)
        except Exception as error:
            return error

    def all(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks in the same collective."""
        self._slots[self.rank] = name, value
        self._barrier.wait(PATIENCE)
        said = list(self._slots)
        self._barrier.wait(PATIENCE)
        assert {one for one, _ in said} == {name}, f"different collectives: {said}"
        return [value for _, value in said]

    def _gather(self, said: Any) -> list[Any]:
        return self.all("gather", json.loads(json.dumps(said)))

    def _largest(self, *numbers: int) -> list[int]:
        said = self.all("largest", numbers)
        return [max(values) for values in zip(*said, strict=True)]

    def _extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.stack(self.all("extremes", values))
        return found.amin(0), found.amax(0)

    def _share(self, world: Any, tree: Any, *, holders: Sequence[int], into: Any = None) -> Any:
        trees = self.all("share", tree)
        received = None if world.rank in holders else copy.deepcopy(trees[holders[0]])
        self.all("shared", None)  # nobody goes on before all have their copy
        return received
