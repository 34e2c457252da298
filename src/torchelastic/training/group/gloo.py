"""A process group whose operations gloo performs and whose waits we can abort.

In our worlds, `torch.distributed` creates an `OwnedGloo` for the backend "gloo": for the default
group and for every `dist.new_group`. Scripts use the names they know, and an abort reaches every
group.

We rely on this behaviour of torch (tests/unit/training/test_torch_contract.py fails, and names the
item, when a release changes it):

* `distributed_c10d` makes groups of backend "gloo" by calling its name `ProcessGroupGloo` with
  store, rank, size and timeout, and takes a `ProcessGroup` that it gets for the group.
* Methods of a Python `ProcessGroup` are called from C++, too (DDP), and so are those of its `Work`.
* gloo reports the end of a collective through the future of its work, in its own thread; that of
  sends, receives and reduce-scatters only to the thread that waits.
* DDP's reducer waits at the end of a backward (`backward`).
* The ranks' listening addresses are in the store, under device and rank
  (`sockets.listening_address`).
* DDP pickles what a future of a Python group holds to find the tensors in it
  (`abortable_waits._Failed`).
* The destructor of `ProcessGroupGloo` joins its threads without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from torchelastic import faults, torch_backends, torch_private
from torchelastic.config import format_endpoint
from torchelastic.errors import ConfigError
from torchelastic.events.analysis.hangs import listed
from torchelastic.torch_private import PrefixStore, Store
from torchelastic.training.group import backward, sockets
from torchelastic.training.group.abortable_waits import AbortableOperation, OwnedWork, Waits
from torchelastic.worker.collective_log import NO_ROW, Mark

if TYPE_CHECKING:
    from torchelastic.training.group.group import Group


class GroupMaker(Protocol):
    """The owner of the groups that torch makes now: a world, or what outlives worlds."""

    def made(self, group: OwnedGloo, store: Store) -> None:
        """Connect a new group, or leave it unconnected until there is a world."""


_owner: GroupMaker | None = None


def install(owner: GroupMaker) -> None:
    """Make torch create our groups, for this owner, from now on."""
    global _owner
    _owner = owner
    torch_private.make_gloo_of(OwnedGloo)


def uninstall() -> None:
    """Make torch create gloo's own groups again."""
    global _owner
    _owner = None
    torch_private.make_gloo_of(torch_private.Gloo)


def connect(
    store: Store, rank: int, size: int, timeout: timedelta
) -> tuple[Any, frozenset[int], sockets.Ports]:
    """Connect to the other ranks; blocks until all are there. Return the gloo object, the inodes of
    its connections, and the addresses where the ranks listen."""
    faults.at("group.build")
    gloo = torch_private.Gloo(store, rank, size, timeout=timeout)
    cards: list[list[bytes]] = []
    while store.check([f"{len(cards)}/{rank}"]):  # one more device: several network interfaces
        cards.append(store.multi_get([f"{len(cards)}/{peer}" for peer in range(size)]))
    ports = sockets.Ports.told(rank, cards)
    return gloo, sockets.find(ports), ports


def silent_peer(store: Store, rank: int, size: int, world_size: int) -> str:
    """Name the rank that cannot be reached although all ranks are building; empty if none.

    gloo itself waits for five times its timeout, and then does not name the rank. In a group that
    is smaller than the world a rank means nothing to others: there we name only the address.
    """
    try:
        cards = store.multi_get([f"0/{peer}" for peer in range(size)])
    except RuntimeError:  # not all ranks are here yet, or the store is gone: a different fault
        return ""
    for peer, card in enumerate(cards):
        host, port = sockets.listening_address(card)
        if peer != rank and sockets.is_silent((host, port)):
            return no_answer((host, port), [peer] if size == world_size else [])
    return ""


def no_answer(address: sockets.Address, ranks: Sequence[int] = ()) -> str:
    """Describe a connection fault in the words that `rendezvous.suspects` recognises."""
    return f"no answer from {f'{listed(ranks)} at ' if ranks else ''}{format_endpoint(*address)}"


#: torch.distributed's names of gloo's operations, where they differ. Then the operations between
#: two ranks, which other ranks do not count.
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


def _is_awaited(args: tuple[Any, ...]) -> bool:
    """Return whether torch waits for an operation in the call that launches it, unless it gets None
    for it: so say the options, the last argument."""
    return bool(args) and not getattr(args[-1], "asyncOp", True)


def _collective(name: str, *, whole: bool = False) -> Callable[..., Any]:
    """Make a method that launches the gloo operation of this name.

    `whole` marks operations that gloo offers only through a C++ group.
    """
    label = _label(name)

    def method(self: OwnedGloo, *args: Any, **kwargs: Any) -> Any:
        if self._device_backend and (native := self._native_for(args)) is not None:
            return getattr(native, name)(*args, **kwargs)
        number, work = self._start(name, args, kwargs, whole)
        mark = self._show(number, label)
        if _is_awaited(args):
            return self._waits.at_once(number, work, mark, soon=self.is_quick)
        return self._waits.enter(OwnedWork(self._waits, number, work, mark))

    method.__name__ = name
    return method


def _blocking(name: str, *, whole: bool = False, tells_source: bool = False) -> Callable[..., Any]:
    """Make the same for an operation whose end gloo reports only to the waiting thread."""
    label = _label(name)

    def method(self: OwnedGloo, *args: Any, **kwargs: Any) -> Any:
        if self._device_backend and (native := self._native_for(args)) is not None:
            return getattr(native, name)(*args, **kwargs)
        number, work = self._start(name, args, kwargs, whole)
        kind = AbortableOperation if _is_awaited(args) else OwnedWork
        operation = kind(self._waits, number, mark=self._show(number, label))
        return self._waits.follow(operation, work, tells_source=tells_source)

    method.__name__ = name
    return method


def _of_gloo(name: str) -> Callable[[OwnedGloo], Any]:
    """Make a method that calls gloo directly."""
    return lambda self: getattr(self._gloo, name)()


class OwnedGloo(dist.ProcessGroup):
    """The group that torch uses in place of gloo's."""

    #: The name of a group in the list of collectives, if torch's name for it is not unique.
    label = ""
    #: Whether its operations are of a few bytes, on workers that arrive together.
    is_quick = False
    #: The backend for tensors on a device; empty: gloo takes all.
    _device_backend = ""

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
                f"torchelastic.train rebuilds its groups itself: create them without {asked[0]}."
            )
        # The form that C++ calls back; it takes no store.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._waits = Waits()
        self._store, self._timeout = store, timeout
        #: The group for tensors on a device, and the world that makes it.
        self._native: Any = None
        self._world: Group | None = None
        self._plain: dist.ProcessGroup | None = None
        self._gloo: Any = _Unconnected()
        self.connections: frozenset[int] = frozenset()
        _owner.made(self, store)

    def connect(self, world: Group, store: Store) -> None:
        """Connect to the other ranks of the group, in this world."""
        self.connect_later(world, store)
        self._connected()

    def connect_later(self, world: Group, store: Store) -> None:
        """Connect when the group is used: until then, other ranks may not have made it."""
        self._waits, self._store = world.waits, store
        #: The number of collectives launched in this group, and where the agent sees them.
        self._launched = 0
        self._row: int | None = None
        self._is_world = self.size() == world.size
        self._world, self._native, self._plain = world, None, None
        self._device_backend = world.device_backend
        self._gloo, self.connections = _Later(self._connected), frozenset()

    def _connected(self) -> Any:
        """Return gloo's object, after connecting if need be."""
        if not isinstance(self._gloo, _Later):
            return self._gloo
        world, store, rank, size = self._world, self._store, self.rank(), self.size()
        assert world is not None
        self._gloo, self.connections, self._ports = self._waits.call(
            lambda: connect(store, rank, size, self._timeout),
            find_fault=partial(silent_peer, store, rank, size, world.size),
        )
        world.adopt(self)
        return self._gloo

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
        """Launch an allreduce; DDP's reducer gets gloo's own work, awaited before it waits."""
        if self._device_backend or not backward.asks():
            return self._allreduce(*args, **kwargs)
        waits = self._waits
        number = waits.announce()
        try:
            work = self._gloo.allreduce(*args, **kwargs)
        except RuntimeError as error:
            waits.refused(error)
            raise
        mark = self._show(number, b"all_reduce")
        operation = waits.enter(AbortableOperation(waits, number, work, mark))
        backward.at_end(operation.wait)
        return work

    send = _blocking("send")
    recv = _blocking("recv", tells_source=True)
    recv_anysource = _blocking("recv_anysource", tells_source=True)

    def _native_for(self, args: tuple[Any, ...]) -> Any:
        """Return the native group for tensors on a device, made when first needed; None for tensors
        of the host."""
        first = args[0] if args else None
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if not isinstance(first, torch.Tensor) or first.device.type == "cpu":
            return None
        self._waits.announce()
        if self._native is None:
            store = PrefixStore(self._device_backend, self._store)
            assert self._world is not None
            self._native = self._world.make_native(store, self.rank(), self.size(), self._timeout)
        return self._native

    def _start(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False
    ) -> tuple[int, Any]:
        """Launch a gloo operation; return its number and gloo's work."""
        number = self._waits.announce()
        try:
            # Look up gloo late: an error raised earlier would keep it alive in its frames.
            target = self._plain_group() if whole else self._gloo
            return number, getattr(target, name)(*args, **kwargs)
        except RuntimeError as error:
            # If the connection is already broken, gloo raises here, not in the wait.
            self._waits.refused(error)
            raise

    def _show(self, order: int, label: bytes) -> Mark | None:
        """Show the agent the launched operation; return the mark to show during the wait."""
        shown = self._waits.shown
        if shown is None:
            return None
        if label in _BETWEEN_TWO:
            return (NO_ROW, 0, label)
        if self._row is None:
            self._row = shown.row_of(self.label or torch_private.name_of_group(self))
        if self._row == NO_ROW:
            return (NO_ROW, 0, label)
        self._launched += 1
        shown.launched(order, self._row, self._launched, label)
        return (self._row, self._launched, label)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        gloo = self._connected()
        limit = torch_private.timeout_of(gloo) if timeout is None else timeout
        barrier = partial(gloo.monitored_barrier, limit, wait_all_ranks)
        self._waits.call(barrier, b"monitored_barrier")

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "torchelastic.train does not support split_group: use dist.new_group(ranks)."
        )

    merge_remote_group = split_group

    def unanswered(self, seconds: float) -> str:
        """Name the ranks that have not answered for some seconds; empty if none."""
        address = sockets.unanswered(self.connections, seconds)
        if address is None:
            return ""
        return no_answer(address, self._ports.ranks_at(address) if self._is_world else [])

    def take(self) -> Any:
        """Take gloo's object out of this group; dropping it may block."""
        gloo, self._gloo, self._plain = self._gloo, _Left(self._waits), None
        self._native = None
        return gloo

    @property
    def options(self) -> Any:
        return self._gloo.options

    @property
    def _device_types(self) -> list[torch.device]:
        device = torch_backends.device_of(self._device_backend) if self._device_backend else "cpu"
        return [torch.device(one) for one in dict.fromkeys(("cpu", device))]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def getBackendName(self) -> str:  # C++ asks by this name
        """Return not "gloo": DDP's logger would look for one inside. dist.get_backend has it."""
        return "torchelastic"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> Any:
        return torch_private.name_of_group(self)

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo.set_timeout(timeout)

    _set_default_timeout = set_timeout

    _set_sequence_number_for_group = _of_gloo("_set_sequence_number_for_group")
    _get_sequence_number_for_group = _of_gloo("_get_sequence_number_for_group")

    def get_group_store(self) -> Store:
        return self._store

    def shutdown(self) -> None:
        """Do nothing: the owner parks the rest of gloo."""

    def _plain_group(self) -> dist.ProcessGroup:
        """The C++ group around the same gloo, made when first needed."""
        if self._plain is None:
            self._plain = torch_private.group_of_backend(
                self._store, self._connected(), self.rank(), self.size()
            )
        return self._plain


class _Left:
    """The placeholder for gloo in a group whose world was left."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __getattr__(self, name: str) -> Any:
        self._waits.check()
        raise AttributeError(name)


class _Placeholder:
    """The placeholder for gloo in a group that is not connected."""

    def __init__(self) -> None:
        self.options = SimpleNamespace()  # torch sets some

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing."""


class _Later(_Placeholder):
    """In a group that connects when it is used."""

    def __init__(self, connected: Callable[[], Any]) -> None:
        super().__init__()
        self._connected = connected

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connected(), name)


class _Unconnected(_Placeholder):
    """In a group that was made before there is a world."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"There is no connection for {_KNOWN_AS.get(name, name)} before torchelastic.train: a "
            "replacement builds its model while the others train. Build it without communication, "
            "from the same seed on all workers; parallelize_module and distribute_tensor take "
            "src_data_rank=None."
        )
