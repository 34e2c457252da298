"""A process group whose operations are done by gloo and waited for by us.

While a world of ours is alive, what `torch.distributed` makes for the backend "gloo" is an
`OwnedGloo`: the default group and every `dist.new_group`. So scripts see the names they know, and
no group can be made that an abort does not reach.

What is relied upon in torch (tests/unit/training/test_torch_contract.py fails, saying which, when a
release changes it):

* `distributed_c10d` makes groups of backend "gloo" by calling its name `ProcessGroupGloo` with
  store, rank, size and timeout, and takes a `ProcessGroup` that it gets for the group.
* Methods of a Python `ProcessGroup` are called from C++, too (DDP), and so are those of its `Work`.
* gloo tells the end of a collective by the future of its work, in a thread of its own; of sends,
  receives and reduce-scatters only to who waits for them.
* DDP's reducer waits at the end of a backward (`backward`).
* The ranks' listening addresses are in the store, under device and rank
  (`sockets.listening_address`).
* DDP pickles what a future of a Python group holds to find the tensors in it (`waits._Failed`).
* The destructor of `ProcessGroupGloo` joins its threads without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchelastic import faults, torch_private
from torchelastic.config import format_endpoint
from torchelastic.events.analysis.hangs import listed
from torchelastic.torch_private import Store
from torchelastic.training.group import backward, sockets
from torchelastic.training.group.waits import Operation, OwnedWork, Waits
from torchelastic.worker.collective_log import NO_ROW, Mark


class Owner(Protocol):
    """The world that groups made now belong to."""

    waits: Waits
    #: Of the world, not of a group in it.
    size: int

    def adopt(self, group: OwnedGloo) -> None: ...


_owner: Owner | None = None


def install(owner: Owner) -> None:
    """From now on torch makes groups of ours, for this owner."""
    global _owner
    _owner = owner
    torch_private.make_gloo_of(OwnedGloo)


def uninstall() -> None:
    """Torch makes gloo's own groups again."""
    global _owner
    _owner = None
    torch_private.make_gloo_of(torch_private.Gloo)


def connect(
    store: Store, rank: int, size: int, timeout: timedelta
) -> tuple[Any, frozenset[int], sockets.Ports]:
    """Meet the other ranks; gloo, its connections by inode, and where all listen. Blocks until all
    are there."""
    faults.at("group.build")
    gloo = torch_private.Gloo(store, rank, size, timeout=timeout)
    cards: list[list[bytes]] = []
    while store.check([f"{len(cards)}/{rank}"]):  # one more device: several network interfaces
        cards.append(store.multi_get([f"{len(cards)}/{peer}" for peer in range(size)]))
    ports = sockets.Ports.told(rank, cards)
    return gloo, sockets.find(ports), ports


def silent_peer(store: Store, rank: int, size: int, world_size: int) -> str:
    """Which rank cannot be connected to, though all have come to build; empty: none.

    gloo itself waits for five times its time-out, and then does not say for whom. A rank of a group
    that is smaller than the world means nothing to others: there only the address is named.
    """
    try:
        cards = store.multi_get([f"0/{peer}" for peer in range(size)])
    except RuntimeError:  # they have not all come, or the store is gone: that is another fault
        return ""
    for peer, card in enumerate(cards):
        host, port = sockets.listening_address(card)
        if peer != rank and sockets.is_silent((host, port)):
            return no_answer((host, port), [peer] if size == world_size else [])
    return ""


def no_answer(address: sockets.Address, ranks: Sequence[int] = ()) -> str:
    """The fault of a connection, as `rendezvous.unconnected` reads it."""
    return f"no answer from {f'{listed(ranks)} at ' if ranks else ''}{format_endpoint(*address)}"


#: What people know gloo's operations by, where that is another name; those that no other rank
#: counts: they are between two.
_KNOWN_AS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv",
}
_BETWEEN_TWO = frozenset({b"send", b"recv"})


def _label(name: str) -> bytes:
    return _KNOWN_AS.get(name, name).encode()[:24]


def _collective(name: str, *, whole: bool = False) -> Callable[..., Any]:
    """A method that launches gloo's operation of this name.

    `whole` are those that gloo offers through a group of C++ only.
    """
    label = _label(name)

    def method(self: OwnedGloo, *args: Any, **kwargs: Any) -> OwnedWork:
        number, work = self._start(name, args, kwargs, whole)
        owned = OwnedWork(self._waits, number, work)
        owned.mark = self._show(number, label)
        self._waits.enter(owned)
        return owned

    method.__name__ = name
    return method


def _blocking(
    name: str, *, whole: bool = False, tells_source: bool = False
) -> Callable[..., OwnedWork]:
    """The same for an operation whose end gloo tells only to who waits for it."""
    label = _label(name)

    def method(self: OwnedGloo, *args: Any, **kwargs: Any) -> OwnedWork:
        number, work = self._start(name, args, kwargs, whole)
        owned = self._waits.follow(number, work, tells_source=tells_source)
        owned.mark = self._show(number, label)
        return owned

    method.__name__ = name
    return method


def _of_gloo(name: str) -> Callable[[OwnedGloo], Any]:
    """A method that asks gloo at once."""
    return lambda self: getattr(self._gloo, name)()


class OwnedGloo(dist.ProcessGroup):
    """Stands where torch expects a group of gloo's."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        **options: Any,  # of later versions, such as enable_reconfigure of 2.14
    ) -> None:
        assert _owner is not None, "made while installed"
        if asked := [name for name, value in options.items() if value]:
            raise NotImplementedError(
                f"torchelastic.train rebuilds its groups itself: make them without {asked[0]}."
            )
        # The form that C++ calls back; it takes no store.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._waits = _owner.waits
        self._store = store
        self._plain: dist.ProcessGroup | None = None
        #: Collectives launched in it, and where the agent sees them.
        self._launched = 0
        self._row: int | None = None
        self._is_world = size == _owner.size
        self._gloo, self.connections, self._ports = self._waits.call(
            lambda: connect(store, rank, size, timeout),
            find_fault=partial(silent_peer, store, rank, size, _owner.size),
        )
        _owner.adopt(self)

    _allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    broadcast = _collective("broadcast")
    reduce = _collective("reduce")
    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    gather = _collective("gather")
    scatter = _collective("scatter")
    reduce_scatter = _blocking("reduce_scatter")
    alltoall = _collective("alltoall")
    barrier = _collective("barrier")
    # The names of torch 2.13, and those before.
    all_gather_single = _allgather_base = _collective("_allgather_base")
    reduce_scatter_single = _reduce_scatter_base = _blocking("_reduce_scatter_base")
    all_to_all_single = alltoall_base = _collective("alltoall_base")
    all_gather_single_coalesced = _collective("allgather_into_tensor_coalesced", whole=True)
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single_coalesced = _blocking("reduce_scatter_tensor_coalesced", whole=True)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """As any collective; to DDP's reducer gloo's own work, waited for before it waits."""
        if not backward.asks():
            return self._allreduce(*args, **kwargs)
        waits = self._waits
        number = waits.announce()
        try:
            work = self._gloo.allreduce(*args, **kwargs)
        except RuntimeError as error:
            waits.refused(error)
            raise
        operation = Operation(waits, number, work)
        operation.mark = self._show(number, b"all_reduce")
        waits.enter(operation)
        backward.at_end(operation.wait)
        return work

    send = _blocking("send")
    recv = _blocking("recv", tells_source=True)
    recv_anysource = _blocking("recv_anysource", tells_source=True)

    def _start(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False
    ) -> tuple[int, Any]:
        """Launch an operation of gloo's; its number, and gloo's work."""
        number = self._waits.announce()
        try:
            # gloo is looked up late: an error raised before would keep it in its frames.
            target = self._plain_group() if whole else self._gloo
            return number, getattr(target, name)(*args, **kwargs)
        except RuntimeError as error:
            # On a connection that is broken already gloo raises here, not in the wait.
            self._waits.refused(error)
            raise

    def _show(self, order: int, label: bytes) -> Mark | None:
        """Let the agent see what was launched; what to show while it is waited for."""
        shown = self._waits.shown
        if shown is None:
            return None
        if label in _BETWEEN_TWO:
            return (NO_ROW, 0, label)
        if self._row is None:
            self._row = shown.row_of(torch_private.name_of_group(self))
        if self._row == NO_ROW:
            return (NO_ROW, 0, label)
        self._launched += 1
        shown.launched(order, self._row, self._launched, label)
        return (self._row, self._launched, label)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        gloo = self._gloo
        limit = torch_private.timeout_of(gloo) if timeout is None else timeout
        barrier = partial(gloo.monitored_barrier, limit, wait_all_ranks)
        self._waits.call(barrier, b"monitored_barrier")

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "A group that torchelastic can abort is not split: make it with dist.new_group(ranks)."
        )

    merge_remote_group = split_group

    def unanswered(self, seconds: float) -> str:
        """Which ranks have not answered at all for some seconds, in words; empty: none."""
        address = sockets.unanswered(self.connections, seconds)
        if address is None:
            return ""
        return no_answer(address, self._ports.ranks_at(address) if self._is_world else [])

    def take(self) -> Any:
        """gloo's own object, which this group then no longer has: who drops it must not hurry."""
        gloo, self._gloo, self._plain = self._gloo, _Left(self._waits), None
        return gloo

    @property
    def options(self) -> Any:
        return self._gloo.options

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def getBackendName(self) -> str:  # C++ asks by this name
        """Not "gloo", for which DDP's logger looks for a gloo inside; dist.get_backend says it."""
        return "torchelastic"

    name = _get_backend_name = getBackendName

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo.set_timeout(timeout)

    _set_default_timeout = set_timeout

    _set_sequence_number_for_group = _of_gloo("_set_sequence_number_for_group")
    _get_sequence_number_for_group = _of_gloo("_get_sequence_number_for_group")

    def get_group_store(self) -> Store:
        return self._store

    def shutdown(self) -> None:
        """Nothing: the owner parks what is left of gloo."""

    def _plain_group(self) -> dist.ProcessGroup:
        """A group of C++ around the same gloo; made when first needed."""
        if self._plain is None:
            self._plain = torch_private.group_of_backend(
                self._store, self._gloo, self.rank(), self.size()
            )
        return self._plain


class _Left:
    """What a group holds instead of gloo once its world has been left."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __getattr__(self, name: str) -> Any:
        self._waits.check()
        raise AttributeError(name)
