"""What launchers that are guests of a job say to each other in the store of a generation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # public all the same
    PrefixStore,
    TCPStore,
)

from torchelastic.worker.worker_stores import READ_TIMEOUT

#: Under this prefix the agents speak; the workers use the store as it is.
_AGENTS = "torchelastic/agents"
_HERE, _ALL_HERE = "here", "all-here"
#: How torchrun's key begins for the barrier at which agents whose workers succeeded wait.
_EXIT_BARRIER = "torchelastic/agent/terminal_state"


class AgentStore(PrefixStore):
    """What torchrun's agents of one world exchange their ranks through, and wait at in the end."""

    def __init__(self, store: TCPStore, on_success: Callable[[], None]) -> None:
        super().__init__(_AGENTS, store)
        self._on_success = on_success

    @classmethod
    def connect(
        cls, host: str, port: int, *, timeout: float, on_success: Callable[[], None]
    ) -> AgentStore:
        """Raises torch's `DistError` if the store does not answer in time."""
        limit = timedelta(seconds=timeout)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        store.set_timeout(READ_TIMEOUT)
        return cls(store, on_success)

    def arrive(self, nodes: int) -> None:
        """Say that this node is here."""
        if super().add(_HERE, 1) == nodes:
            super().set(_ALL_HERE, "1")

    def all_here(self) -> bool:
        """Whether all nodes have said so."""
        return bool(super().check([_ALL_HERE]))

    def add(self, key: str, amount: int) -> int:
        """As the store does it; and the one place where a launcher shows that its workers succeeded
        while those of other nodes still run."""
        if key.startswith(_EXIT_BARRIER):
            self._on_success()
        return int(super().add(key, amount))
