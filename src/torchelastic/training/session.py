"""The world this worker is in, for whoever runs inside a step or in `State.sync`."""

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
    #: By rank: what each worker brought along, as told when the world began.
    versions: tuple[Version, ...]
    #: What this worker has now.
    version: Version
    #: By rank: a number that is the same for states of the same form (`fitting`).
    forms: tuple[int, ...] = ()
    #: Where this worker's progress and private state are kept for its replacement, if anywhere.
    status_page: StatusPage | None = None
    #: Bytes of state received in `sync`; whoever receives them adds them.
    received: int = 0

    @property
    def freshest(self) -> Version:
        """The version that all are brought to."""
        return max(self.versions)


_current: Session | None = None


def current() -> Session:
    """The present world; only inside `torchelastic.train` there is one."""
    if _current is None:
        raise RuntimeError(
            "This worker is in no world: call this inside a train_step or State.sync that "
            "torchelastic.train has called."
        )
    return _current


def is_entered() -> bool:
    """Whether there is a present world."""
    return _current is not None


@contextmanager
def unhurried() -> Iterator[None]:
    """What is done inside may take any time, an evaluation for example: no limit of progress."""
    status_page = current().status_page
    if status_page is not None:
        status_page.unhurried()
    yield
    if status_page is not None:
        status_page.hurried()


def enter(session: Session) -> None:
    """This is the world from now on."""
    global _current
    _current = session


def leave() -> None:
    """There is no world until the next one is entered."""
    global _current
    _current = None
