"""The default process group of a world: entered, aborted, left; its waits can be aborted.

    group = Group.build(store=store, rank=0, size=4, generation=7, timeout=timedelta(seconds=60))
    ...                                     # dist.all_reduce, DDP, dist.new_group as ever
    group.abort("node b is lost")           # any thread: every wait in the world ends within ms
    group.leave()                           # the training thread: torch.distributed is free again

To be abortable while it builds, a worker makes a `Group`, passes it to the thread that may abort
it, and then calls `connect`: that is how `enter` follows an agent's order.

The training thread waits for our operations (`abortable_waits`), which gloo's callback or the abort
ends. The abort also shuts down the group's connections (`sockets`), so that gloo's threads and the
other ranks notice. What remains of gloo is parked until it can be dropped (`parked`).

NCCL has its own abort, which frees the device. Torch makes and aborts its groups, and no result of
them counts before it is checked (`native_groups`).
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchelastic import torch_backends, torch_private
from torchelastic.errors import ConfigError
from torchelastic.torch_private import PrefixStore, Store, TCPStore
from torchelastic.training.group import gloo, native_groups, parked, sockets
from torchelastic.training.group.abortable_waits import GenerationOver, PeerLostError, Waits
from torchelastic.training.group.gloo import OwnedGloo
from torchelastic.training.group.replica import Replica
from torchelastic.worker import store_sockets
from torchelastic.worker.collective_log import NO_ROW

if TYPE_CHECKING:
    from torchelastic.training.control import Control
    from torchelastic.worker.orders import Enter

__all__ = ["GenerationOver", "Group", "PeerLostError", "enter"]

#: How long `leave` waits for gloo's threads to stop writing, in seconds. It takes less than a
#: millisecond; but on a busy machine they wait for a CPU first, and a worker that exits instead may
#: have the only copy of the state.
QUIET_WITHIN = 1.0
#: Seconds until a broken connection that gloo has not noticed is silenced.
_UNSEEN = 0.005
#: How long a device may be busy after an abort before it counts as stuck, in seconds: aborts of
#: NCCL have been seen to take that long, and what was computed meanwhile ends, too.
_ABORT_TAKES = 5.0
#: The name of a collective that torch only counts.
_NAMELESS = b"collective"


class Group:
    """All process groups of one world: the default one and those a script makes beside it."""

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        size: int,
        generation: int,
        backend: str = "gloo",
        timeout: timedelta,
        replica: Replica | None = None,
    ) -> None:
        if ":" in backend:
            raise ConfigError(
                f"The backend {backend!r} combines two: use one, and create a group for the other"
                " with dist.new_group(backend=...)."
            )
        self.rank, self.size, self.generation = rank, size, generation
        self.backend, self.timeout = backend, timeout
        self.waits = Waits()
        self._store = PrefixStore(f"generation-{generation}", store)
        self._owned: list[OwnedGloo] = []
        #: In a sharded training: this worker's replica, the group of all workers, and the group of
        #: the workers with the same coordinates in all replicas, if there are several.
        self.replica = replica
        self.joint: OwnedGloo | None = None
        self.between: OwnedGloo | None = None
        self.device_backend = "" if replica is None else replica.device_backend
        #: The native groups of the replica's groups.
        self._natives: list[Any] = []
        #: The operation that was pending at the last `look`.
        self._waited: int | None = None
        self._aborting = threading.Lock()
        self._excepthook: Any = None
        #: The sockets that keep broken connections silent which gloo has not noticed.
        self._silent: list[socket.socket] | None = None
        #: Of groups that torch made: where they are waited for, and what was launched in them when
        #: they were checked last.
        self._streams: list[Any] = []
        self._checked: int | None = None
        self._rows: dict[str, int] = {}
        self._aborted_at = 0.0

    @classmethod
    def build(cls, **world: Any) -> Group:
        """Connect to the other ranks and become the default group of torch.distributed."""
        group = cls(**world)
        group.connect()
        return group

    def connect(self) -> None:
        """Do the blocking part of `build`; another thread may abort it.

        Raises GenerationOver after an abort, PeerLostError when the others cannot be reached.
        """
        self.waits.check()
        self._excepthook = sys.excepthook
        if not torch_backends.is_on_host(self.backend):
            native_groups.spare_process()
        gloo.install(self)
        try:
            if self.replica is None:
                dist.init_process_group(
                    self.backend,
                    store=self._store,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=self.timeout,
                )
            else:
                self._connect(self.replica)
        except BaseException:
            self._unmake()
            raise
        if self.waits.over is not None:  # aborted between the last wait and now
            self.leave()
            self.waits.check()

    def _connect(self, replica: Replica) -> None:
        """Connect the groups of this worker's replica, which outlive worlds, and two of our own."""
        number, coordinate = divmod(self.rank, replica.size)
        count = self.size // replica.size
        self.joint = self._own("joint", self.rank, self.size)
        self.joint.is_quick = True
        if count > 1:
            self.between = self._own(f"between-{coordinate}", number, count)
        replica.enter(self, PrefixStore(f"replica-{number}", self._store), number)

    def _own(self, label: str, rank: int, size: int) -> OwnedGloo:
        group = OwnedGloo(PrefixStore(label, self._store), rank, size, self.timeout)
        group.label = label
        return group

    def make_native(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Make a group of the device's backend; an abort ends the wait for the others."""
        native = self.waits.call(
            lambda: torch_private.native_group(self.device_backend, store, rank, size, timeout)
        )
        self._natives.append(native)
        return native

    def _native(self) -> list[Any]:
        """The groups whose collectives the host does not wait for."""
        return native_groups.groups() if self.replica is None else self._natives

    def made(self, group: OwnedGloo, store: Store) -> None:
        group.connect(self, store)

    def adopt(self, group: OwnedGloo) -> None:
        """Register a group connected in this world: the default one, or a script's."""
        self._owned.append(group)
        if self.waits.over is not None:  # an abort has not seen it
            sockets.shut_down(group.connections)
            self.waits.check()

    @property
    def aborted(self) -> bool:
        return self.waits.over is not None

    @property
    def pending(self) -> int:
        """The number of unfinished collectives; a busy device counts as one."""
        late = time.monotonic() - self._aborted_at > _ABORT_TAKES
        busy = late and any(map(native_groups.is_busy, self._streams))
        return self.waits.pending + busy

    def look(self, silence: float) -> None:
        """Control thread: end waits for a rank that has not answered for `silence` seconds.

        The network may be cut between two nodes while their agents can still talk.
        """
        before, self._waited = self._waited, None
        if self.waits.over is None and self.waits.failure is None and self.waits.pending:
            self._waited = min(self.waits.under_way, default=None)
        if self._waited is None or self._waited != before:
            return
        for group in list(self._owned):
            if fault := group.unanswered(silence):
                self.waits.fail(fault)
                return

    def show(self) -> None:
        """Show the agent the number of collectives launched in NCCL groups. Any thread.

        The training thread does not pass here when it launches them: torch counts them. Neither
        their names nor the group that a device waits in are known; we report the first group.
        """
        shown = self.waits.shown
        if shown is None or self.waits.pending:
            return
        rows: list[tuple[int, int]] = []
        for group in self._native():
            number, name = native_groups.launched([group]), torch_private.name_of_group(group)
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = shown.row_of(name)
            if number and row != NO_ROW:
                rows.append((row, number))
        for order, (row, number) in enumerate(reversed(rows), start=1):
            shown.launched(order, row, number, _NAMELESS)
        if rows and any(map(native_groups.is_busy, self._streams)):
            shown.waits(*rows[0], _NAMELESS)
        elif rows:
            shown.goes_on()

    def first(self, collective: Callable[[], object]) -> None:
        """Launch the first collective of this world; an abort ends the wait for the others.

        NCCL connects then, in the calling thread, where its own abort cannot reach it.
        """
        if torch_backends.is_on_host(self.backend):
            collective()
        else:
            self.waits.call(collective, b"connecting")
        self.check_collectives()

    def tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Tell all workers these numbers; return what all have told, by rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=torch_backends.here())
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        if self.joint is None:
            self.first(lambda: dist.all_gather(everybodys, mine))
        else:
            self.joint.allgather([everybodys], [mine]).wait()
        return [one.tolist() for one in everybodys]

    def check_collectives(self, *, again: bool = True) -> None:
        """Training thread: raise unless every collective launched so far has succeeded.

        This is for NCCL groups: a wait for gloo already checks it. With `again=False` there is
        nothing to wait for if nothing was launched since the last call.
        """
        if self.replica is None:
            none = torch_private.count_groups() == len(self._owned)
        else:
            none = not self._natives
        if none:
            return
        native = self._native()
        launched, before = native_groups.launched(native), self.waits.before
        if launched is None or launched != self._checked:
            again, self._checked = True, launched
            if launched is not None and before is not None:
                before()
        if again:
            self._streams = native_groups.streams(native)
            native_groups.synchronize(native)
            if self._rows and self.waits.shown is not None:
                self.waits.shown.goes_on()
        self.waits.check()
        if failure := native_groups.failure(native):
            raise self.waits.failed(RuntimeError(failure))

    @property
    def launched(self) -> int:
        """The number of collectives launched: a sequence number."""
        return self.waits.launched

    @property
    def before_collective(self) -> Callable[[], None] | None:
        """Set a function to call in the launching thread before each collective of the world."""
        return self.waits.before

    @before_collective.setter
    def before_collective(self, hook: Callable[[], None] | None) -> None:
        self.waits.before = hook

    def abort(self, reason: str) -> None:
        """End the world: every wait in it raises GenerationOver. Any thread."""
        with self._aborting:
            if self.waits.over is not None:
                return
            self._aborted_at = time.monotonic()
            self.waits.end(GenerationOver(f"Generation {self.generation} is over: {reason}."))
            # All groups before leaving any: a script may wait in one for the work of another.
            sockets.shut_down(self._connections())
            native_groups.abort(self._native())

    def leave(self, last: Callable[[], None] = lambda: None) -> bool:
        """Training thread: release torch.distributed and park what remains of gloo.

        `last` is called before that, when nothing writes to tensors any more: it still sees this
        world's rank and size. Return False, without the call, if a gloo thread may still write to
        tensors of an aborted operation: then this process must not train with them any more.
        """
        in_order = not self.aborted and not self.waits.pending
        if in_order:
            self.waits.end(GenerationOver(f"This worker has left generation {self.generation}."))
        else:
            self.abort("this worker left it with collectives still running")
            native_groups.synchronize(self._native())
        quiet = in_order or self._wait_until_quiet()
        if quiet:
            last()
        if self.replica is None and dist.is_initialized():
            dist.destroy_process_group()
        self._unmake()
        return quiet

    def explain(self, error: BaseException) -> BaseException:
        """Return the real cause of an error raised in a step of this world.

        An error that passed through the C++ code of a hook comes back as a plain RuntimeError.
        """
        if isinstance(error, GenerationOver | PeerLostError) or not isinstance(error, Exception):
            return error
        native = self._native()
        if native and self.waits.failure is None:
            failure = native_groups.failure(native)
            if failure or isinstance(error, dist.DistError):
                self.waits.failed(RuntimeError(failure or str(error)))
        # After an NCCL abort, user code may raise because of garbage; that says nothing of it.
        known = self.waits.over or self.waits.failure
        if known is None or not (native or isinstance(error, RuntimeError)):
            return error
        return type(known)(*known.args)

    def _connections(self) -> frozenset[int]:
        return frozenset().union(*(group.connections for group in list(self._owned)))

    def _unmake(self) -> None:
        """Revert what `connect` did to torch and the process, and park gloo."""
        if self.replica is None:
            gloo.uninstall()
            # A build that failed has counted a group; with another count ranks would not meet.
            torch_private.count_groups_anew()
        else:
            self.replica.leave()
            self._natives.clear()
        # Each init_process_group wraps the hook once more.
        if self._excepthook is not None:
            sys.excepthook, self._excepthook = self._excepthook, None
        owned, self._owned = self._owned, []
        aborted = bool(self.waits.pending) or self.aborted
        gloos = [group.take() for group in owned]
        parked.park(gloos, self.waits, silent=self._silent or [], rank=self.rank, aborted=aborted)

    def _wait_until_quiet(self) -> bool:
        """Wait until no gloo thread can write to a tensor of an aborted operation any more.

        The waits ended at once, but a running reduction continues to its next exchange, and gloo
        still reads data that has arrived. In a bucket that the next step uses again, that would be
        a silently wrong gradient. The wait lasts until gloo notices its broken connections. A
        thread that is still stuck then sleeps, and writes nothing when it wakes.
        """
        began = time.monotonic()
        while self.waits.pending and not self._only_stuck():
            waited = time.monotonic() - began
            if waited > QUIET_WITHIN:
                return False
            if waited > _UNSEEN and self._silent is None:
                self._silent = sockets.silence(self._connections())
            time.sleep(0.0002)
        return True

    def _only_stuck(self) -> bool:
        """Return whether the pending operations can never write again."""
        if self._silent is None and sockets.are_open(self._connections()):
            return False
        return not any(map(_is_running, _gloo_threads()))


# --- entering a world ----------------------------------------------------------------------------


def enter(
    control: Control, world: Enter, backend: str, timeout: timedelta, replica: Replica | None
) -> tuple[Store, Group]:
    """Connect to the store of a world and build its process group; `GenerationOver` if the world
    ends meanwhile. The control thread may abort both."""
    host, _, port = world.store.rpartition(":")
    connecting = _Connecting()
    control.guard(world.generation, connecting)
    store = connecting.connect(host.strip("[]"), int(port), timeout)
    _check_mesh(replica, world, backend)
    group = Group(
        store=store,
        rank=world.rank,
        size=world.size,
        generation=world.generation,
        backend=backend,
        timeout=timeout,
        replica=replica,
    )
    if control.status_page is not None:
        group.waits.shown = control.status_page.collectives
        group.waits.shown.enter(world.generation)
    control.guard(world.generation, group)
    group.connect()
    return store, group


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
        address = host, port
        store: Store = self._waits.call(
            lambda: store_sockets.connect(
                TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=timeout
            ),
            b"connecting to the store",
            find_fault=lambda: gloo.no_answer(address) if sockets.is_silent(address) else "",
        )
        return store


def _check_mesh(replica: Replica | None, world: Enter, backend: str) -> None:
    """Raise unless this worker's mesh fits the world's replicas and the backend."""
    if (0 if replica is None else replica.size) != world.replica:
        made = "no mesh" if replica is None else f"a mesh of {replica.size} workers"
        raise ConfigError(
            f"This worker has made {made}, and the world has replicas of {world.replica}: all "
            "workers must call torchelastic.mesh with the same sizes."
        )
    if replica is not None and backend not in ("gloo", replica.device_backend):
        raise ConfigError(
            f"The mesh was made for {replica.device_backend or 'gloo'}, not for {backend!r}: leave "
            "c10d_backend out."
        )


# --- gloo's threads ------------------------------------------------------------------------------


def _gloo_threads() -> list[Path]:
    """Return this process's threads that run gloo operations, of any group."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if "gloo" in (task / "comm").read_text():
                found.append(task)
        except OSError:  # ended since it was listed
            continue
    return found


def _is_running(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False
