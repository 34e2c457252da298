"""The TCPStores that a process hosts itself: one for each generation."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from torchelastic.rendezvous.world import World

#: The time limit for a read or write of a client, as in torchrun's own rendezvous.
READ_TIMEOUT = timedelta(seconds=60)
#: The key of the store that is offered for the next generation.
_OFFERED = -1


def serve() -> TCPStore:
    """Start a new store on a free port of this machine."""
    return TCPStore(
        host_name="localhost", port=0, is_master=True, wait_for_workers=False, timeout=READ_TIMEOUT
    )


class OwnStores:
    """The store offered for the next world, and the stores of worlds that took one."""

    def __init__(self) -> None:
        self._stores: dict[int, TCPStore] = {}

    def offer(self) -> int:
        """Start a store for the next world; return its port."""
        store = self._stores[_OFFERED] = serve()
        return store.port

    def begins(self, world: World, offered: str) -> bool:
        """Close the stores of worlds before this one. Return True if this world has taken the store
        with the address `offered`, so that another must be offered."""
        taken = bool(world.store) and world.store == offered and _OFFERED in self._stores
        if taken:
            self._stores[world.generation] = self._stores.pop(_OFFERED)
        # Before a world that follows a step boundary, workers run through a last step of the old.
        oldest = world.generation - (world.after is not None)
        for generation in [number for number in self._stores if _OFFERED < number < oldest]:
            del self._stores[generation]
        return taken

    def close(self) -> None:
        """Close all stores."""
        self._stores.clear()
