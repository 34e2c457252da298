"""The world this worker is in, for code that runs inside a step or in `State.sync`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchelastic.training.state.state import Version

if TYPE_CHECKING:
    from torchelastic.torch_private import Store
    from torchelastic.training.group.group import Group
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
    #: The version that this worker has now.
    version: Version
    #: By rank: a number that is equal for compatible states (`state.compatibility`).
    forms: tuple[int, ...] = ()
    #: The status page with this worker's progress and private state, if there is one.
    status_page: StatusPage | None = None
    #: Bytes of state received in `sync`; the receiving code adds them up.
    received: int = 0

    @property
    def freshest(self) -> Version:
        """The version that all workers are brought to."""
        return max(self.versions)


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
    """Suspend the hang watchdog inside this block, for an evaluation for example."""
    status_page = current().status_page
    if status_page is not None:
        status_page.unhurried()
    yield
    if status_page is not None:
        status_page.hurried()


def enter(session: Session) -> None:
    """Make this the current world."""
    global _current
    _current = session


def leave() -> None:
    """Leave the current world."""
    global _current
    _current = None
