"""Several ranks in this process, a thread each, whose collectives are a barrier and a list."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.unit.training.keep_support import FakeSnapshotAgent
from torchelastic.snapshot import agent_client
from torchelastic.tensors import agreement, transfer

PATIENCE = 60.0


class Ranks:
    """A world with a node for each rank; the nodes outlive it."""

    def __init__(self, nodes: Sequence[FakeSnapshotAgent], monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes, self.size = nodes, len(nodes)
        self._here = threading.local()
        self._slots: list[Any] = [None] * self.size
        self._barrier = threading.Barrier(self.size)
        monkeypatch.setattr(agent_client, "connect", lambda: nodes[self._here.rank])
        monkeypatch.setattr(agreement, "place", lambda: (self._here.rank, self.size))
        monkeypatch.setattr(agreement, "gather", self._gather)
        monkeypatch.setattr(agreement, "least", lambda number, *_: min(self._all(number)))
        monkeypatch.setattr(agreement, "extremes", self._extremes)
        monkeypatch.setattr(transfer, "share", self._share)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What comes of it on each rank: what it returns, or the error that it ends with."""
        self._barrier.reset()
        with ThreadPoolExecutor(self.size, "rank") as pool:
            return list(pool.map(self._perform, [work] * self.size, range(self.size)))

    def _perform(self, work: Callable[[int], Any], rank: int) -> Any:
        self._here.rank = rank
        try:
            return work(rank)
        except Exception as error:
            return error

    def _all(self, value: Any) -> list[Any]:
        self._slots[self._here.rank] = value
        self._barrier.wait(PATIENCE)
        found = list(self._slots)
        self._barrier.wait(PATIENCE)
        return found

    def _gather(self, said: Any) -> list[Any]:
        return self._all(json.loads(json.dumps(said)))

    def _extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.stack(self._all(values))
        return found.amin(0), found.amax(0)

    def _share(self, world: Any, tree: Any, *, holders: Sequence[int], into: Any = None) -> Any:
        trees = self._all(tree)
        received = None if world.rank in holders else copy.deepcopy(trees[holders[0]])
        self._all(None)  # nobody goes on before all have their copy
        return received
