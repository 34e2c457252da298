"""A worker's replica: the process groups that a sharded model is built on, which outlive worlds.

A sharded training is several replicas of one model, each on S workers. Sharding (FSDP2, tensor
parallel) stays inside a replica. Its groups are made once, before there is a world: a device mesh
and FSDP2 hold the Python objects, and functional collectives find them by name. In each world the
same objects get a new gloo inside. A worker's coordinate, its rank in its replica, never changes;
its partners may.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchelastic import torch_private
from torchelastic.errors import ConfigError
from torchelastic.torch_private import PrefixStore, Store
from torchelastic.training.group import gloo
from torchelastic.training.group.gloo import OwnedGloo

if TYPE_CHECKING:
    from torchelastic.training.group.group import Group


class Replica:
    """The groups of this worker's replica, and its place in it."""

    def __init__(
        self, size: int, coordinate: int, timeout: timedelta, device_backend: str = ""
    ) -> None:
        self.size, self.coordinate, self.device_backend = size, coordinate, device_backend
        #: The rank and the number of the workers of a replica that read different samples, and
        #: whether this worker records them: one of those that read the same does.
        self.data_rank, self.data_size, self.is_recorder = coordinate, size, True
        self._names = _Names()
        #: Groups by the name under which their ranks meet, and the names of those made in a world.
        self._groups: dict[str, OwnedGloo] = {}
        self._late: set[str] = set()
        self._world: tuple[Group, Store] | None = None
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is already initialized: call torchelastic.mesh before anything "
                "that initializes it, and leave init_process_group out."
            )
        gloo.install(self)
        dist.init_process_group(
            "gloo", store=self._names, rank=coordinate, world_size=size, timeout=timeout
        )

    def made(self, group: OwnedGloo, store: Store) -> None:
        """Register a group of the replica. One that is made in a world connects when it is used:
        others have it from an earlier world, and enter a later one before this worker makes it."""
        name = self._names.of(store)
        self._groups[name] = group
        if self._world is not None:
            world, of_world = self._world
            self._late.add(name)
            group.connect_later(world, PrefixStore(name, of_world))

    def enter(self, world: Group, store: Store, number: int) -> None:
        """Connect all groups to the partners in this world, as the replica of this number."""
        gloo.install(self)
        for name, group in self._groups.items():
            group.label = f"replica {number}, {torch_private.name_of_group(group)}"
            connect = group.connect_later if name in self._late else group.connect
            connect(world, PrefixStore(name, store))
        self._world = world, store

    def leave(self) -> None:
        """Note that there is no world: new groups stay unconnected."""
        self._world = None
        gloo.install(self)


class _Names(Store):
    """A store that holds nothing: torch derives the name of a group from it, as a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self._latest = ""

    def of(self, store: Store) -> str:
        """Return the prefix of a store that was derived from this one."""
        store.set("", "")
        return self._latest

    def set(self, key: str, value: Any) -> None:
        self._latest = key
