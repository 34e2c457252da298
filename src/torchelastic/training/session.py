"""The world this worker is in, for code that runs inside a step or in `State.sync`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torchelastic import env
from torchelastic.data import own_rank
from torchelastic.training.state import Version, base_of

if TYPE_CHECKING:
    from torchelastic.snapshot.agent_client import SnapshotRequests
    from torchelastic.torch_private import Store
    from torchelastic.training.group.group import Group
    from torchelastic.training.group.replica import Replica
    from torchelastic.worker.orders import Enter
    from torchelastic.worker.status_page import StatusPage


@dataclass(kw_only=True)
class Session:
    """One world, as one of its workers sees it."""

    rank: int
    size: int
    generation: int
    local_rank: int
    local_size: int
    #: The store of this world.
    store: Store
    group: Group
    #: By rank: the version that each worker reported when the world began.
    versions: tuple[Version, ...]
    #: By rank: the generation of a step of a sharded training that a worker was interrupted in and
    #: can complete, or -1 (`state.base_of`).
    ready: tuple[int, ...]
    #: The version that this worker has now.
    version: Version
    #: By rank: a number that is equal for compatible states (`state.compatibility`).
    forms: tuple[int, ...] = ()
    #: The status page with this worker's progress and private state, if there is one.
    status_page: StatusPage | None = None
    #: Bytes of state received in `sync`; the receiving code adds them up.
    received: int = 0
    #: In a sharded training: this worker's replica.
    replica: Replica | None = None
    #: Whether steps of this world copy before they write (`undo.writes`); None if no worker knows.
    copying: bool | None = None
    #: In a sharded training: the agent, which holds snapshots.
    agent: SnapshotRequests | None = None
    #: Returns the size of the world that follows this one; 0 if none was announced.
    next_size: Callable[[], int] = lambda: 0
    #: Called after each step, before it is committed; set by the state in `sync`.
    before_commit: Callable[[], None] | None = None
    #: State is sent in the default group.
    link = None

    @property
    def freshest(self) -> Version:
        """The version that all workers are brought to."""
        return base_of(self.versions, self.ready, 1 if self.replica is None else self.replica.size)

    @property
    def version_after_sync(self) -> Version:
        """The version of a worker that has the freshest state now, before its first step here.

        A sharded state keeps its version (`state.base_of`).
        """
        freshest = self.freshest
        return (self.generation, freshest[1]) if self.replica is None else freshest


class WorkerFacts(NamedTuple):
    """The facts that workers exchange when they enter a world, by rank."""

    versions: tuple[Version, ...]
    forms: tuple[int, ...]
    ready: tuple[int, ...]
    copying: tuple[int, ...]

    @property
    def copies(self) -> bool | None:
        """Whether any worker knows that steps must copy before they write; None if none knows."""
        return None if max(self.copying) < 0 else bool(max(self.copying))


def exchange(
    group: Group, version: Version, form: int, *, ready: int = -1, copying: bool | None = None
) -> WorkerFacts:
    """Send all workers this one's version, the number of its state's form, the generation whose
    step it is ready to complete, or -1, and whether it copies before it writes; return what all
    have told."""
    told = group.tell_all((*version, form, ready, -1 if copying is None else int(copying)))
    return WorkerFacts(
        tuple((one[0], one[1]) for one in told), *zip(*(one[2:] for one in told), strict=True)
    )


_current: Session | None = None


def current() -> Session:
    """Return the current world; there is one only inside `torchelastic.train`."""
    if _current is None:
        raise RuntimeError(
            "This worker is not in a world: call this only inside train_step or State.sync, from "
            "torchelastic.train."
        )
    return _current


def is_entered() -> bool:
    """Return whether there is a current world."""
    return _current is not None


@contextmanager
def unhurried() -> Iterator[None]:
    """Announce work that may take any time, an evaluation for example: inside this block the worker
    is not taken for hung. If its node leaves and the other nodes need only the next step, the
    worker is killed, so write no files in it."""
    status_page = current().status_page
    if status_page is not None:
        status_page.unhurried()
    try:
        yield
    finally:
        if status_page is not None:
            status_page.hurried()


def enter(session: Session) -> None:
    """Make this the current world."""
    global _current
    _current = session
    if (replica := session.replica) is not None:
        number, count = session.rank // replica.size, session.size // replica.size
        own_rank.set_place(
            number * replica.data_size + replica.data_rank, count * replica.data_size
        )


def leave() -> None:
    """Leave the current world."""
    global _current
    _current = None


def set_environment(world: Enter) -> None:
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
