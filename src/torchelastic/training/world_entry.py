"""Entering a world: from the agent's order to a working process group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchelastic import env, torch_backends
from torchelastic.torch_private import Store, TCPStore
from torchelastic.training.control import Control
from torchelastic.training.group.abortable_waits import Waits
from torchelastic.training.group.gloo import no_answer
from torchelastic.training.group.group import GenerationOver, Group
from torchelastic.training.group.sockets import is_silent
from torchelastic.training.state.state import Version
from torchelastic.worker.orders import Enter


class _Connecting:
    """An abortable attempt to connect to a world's store."""

    aborted = False
    pending = 1

    def __init__(self) -> None:
        self._waits = Waits()

    def abort(self, reason: str) -> None:
        self.aborted = True
        self._waits.end(GenerationOver(f"The world ended before this worker entered it: {reason}."))

    def show(self) -> None:
        """Do nothing: there are no collectives yet."""

    def look(self, silence: float) -> None:
        """Do nothing: the waiting thread finds the fault."""

    def connect(self, host: str, port: int, timeout: timedelta) -> Store:
        store: Store = self._waits.call(
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
            b"connecting to the store",
            find_fault=lambda: no_answer((host, port)) if is_silent((host, port)) else "",
        )
        return store


def connect(control: Control, world: Enter, timeout: timedelta) -> Store:
    """Return a client of the world's store; GenerationOver if the world ends meanwhile."""
    host, _, port = world.store.rpartition(":")
    connecting = _Connecting()
    control.guard(world.generation, connecting)
    return connecting.connect(host.strip("[]"), int(port), timeout)


def build(control: Control, world: Enter, store: Store, backend: str, timeout: timedelta) -> Group:
    """Build the world's process group; the control thread may abort it from now on."""
    group = Group(
        store=store,
        rank=world.rank,
        size=world.size,
        generation=world.generation,
        backend=backend,
        timeout=timeout,
    )
    if control.status_page is not None:
        group.waits.shown = control.status_page.collectives
        group.waits.shown.enter(world.generation)
    control.guard(world.generation, group)
    group.connect()
    return group


def exchange(
    group: Group, version: Version, form: int
) -> tuple[tuple[Version, ...], tuple[int, ...]]:
    """Return every worker's version and the number of its state's form, by rank."""
    mine = torch.tensor((*version, form), dtype=torch.int64, device=torch_backends.here())
    everybodys = [torch.empty_like(mine) for _ in range(group.size)]
    group.first(lambda: dist.all_gather(everybodys, mine))
    told = [one.tolist() for one in everybodys]
    return tuple((one[0], one[1]) for one in told), tuple(one[2] for one in told)


def show(world: Enter) -> None:
    """Set the environment variables as in a worker that was started for this world.

    `LOCAL_RANK` never changes: the worker chose its device by it.
    """
    host, _, port = world.store.rpartition(":")
    values = {
        "RANK": world.rank,
        "ROLE_RANK": world.rank,
        "WORLD_SIZE": world.size,
        "ROLE_WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": world.local_size,
        "NODE_RANK": world.node_rank,
        "GROUP_RANK": world.node_rank,
        "GROUP_WORLD_SIZE": world.nodes,
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": world.generation,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "LOCAL_RANK": env.get("LOCAL_RANK", str(world.local_rank)),
    }
    env.update({name: str(value) for name, value in values.items()})
