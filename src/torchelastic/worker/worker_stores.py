"""The TCPStores of a process that hosts them itself: one for each generation, used by no other."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from torchelastic.rendezvous.world import World

#: How long a read or a write of a client may take, as with torchrun's own rendezvous.
READ_TIMEOUT = timedelta(seconds=60)
#: In the place of a generation: offered for the next one.
_OFFERED = -1


def serve() -> TCPStore:
    """A fresh store on a free port of this machine."""
    return TCPStore(
        host_name="localhost",
        port=0,
        is_master=True,
        wait_for_workers=False,
        timeout=READ_TIMEOUT,
    )


class OwnStores:
    """A store that is offered for the next world, and those of the worlds that took one."""

    def __init__(self) -> None:
        self._stores: dict[int, TCPStore] = {}

    def offer(self) -> int:
        """Have a fresh one ready; its port."""
        store = self._stores[_OFFERED] = serve()
        return store.port

    def begins(self, world: World, offered: str) -> bool:
        """A world runs: the stores before it are done with. Says whether it has taken the one that
        was `offered`, by its address, and another must be."""
        taken = bool(world.store) and world.store == offered and _OFFERED in self._stores
        if taken:
            self._stores[world.generation] = self._stores.pop(_OFFERED)
        # Before a world that follows a step boundary, workers run through a last step of the old.
        oldest = world.generation - (world.after is not None)
        for generation in [number for number in self._stores if _OFFERED < number < oldest]:
            del self._stores[generation]
        return taken

    def close(self) -> None:
        """Let go of all of them."""
        self._stores.clear()
