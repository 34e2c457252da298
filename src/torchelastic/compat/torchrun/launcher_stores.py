"""The messages between launchers of a job, in the store of a generation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # public all the same
    PrefixStore,
    TCPStore,
)

from torchelastic.worker.worker_stores import READ_TIMEOUT

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
