"""A back end that behaves like NCCL, on top of gloo and for tensors of the CPU.

    late_backend.register()
    dist.init_process_group("late", ...)

A launch returns before anything is done: a thread, the device, does what was launched, in order. A
wait never raises. What is stuck stays stuck: only an abort ends it, and leaves garbage in the
tensors; whatever is launched afterwards is refused. Connections are made by the first collective,
in the calling thread, where no abort reaches it. A watchdog sees failures and time-outs late, and
does what TORCH_NCCL_ASYNC_ERROR_HANDLING says: 1 and 3 end the process, 2 aborts the group.

Other than with CUDA, `wait` blocks the host: whoever calls it reads the tensor next. Emulation is
not NCCL: it shows that our side copes with these habits, and nothing about NCCL itself.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchelastic.training.group import gloo, sockets

NAME = "late"
#: Seconds between two looks of a watchdog; how often the device looks for an abort.
WATCHDOG, LOOK = 0.05, 0.0005
#: What an aborted operation leaves behind.
GARBAGE = 77.0
#: What the watchdog does to the process, by the value of the variable.
_TEARS_DOWN, _ABORTS = ("1", "3"), "2"


class Device:
    """One thread that does what was launched, one after the other: a stream of CUDA's."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[LateWork] = queue.SimpleQueue()
        self._under_way = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Cleared, nothing that is launched gets done: a peer that never comes.
        self.moves = threading.Event()
        self.moves.set()

    def launch(self, work: LateWork) -> None:
        with self._changed:
            self._under_way += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="late-device", daemon=True)
                self._thread.start()
        self._orders.put(work)

    def synchronize(self, device: object = None) -> None:
        """Until all is done or aborted. It does not say which."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def query(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def _run(self) -> None:
        while True:
            self._orders.get().perform()
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()


device = Device()


class LateWork(dist.Work):
    """An operation on the device. It ends well or with garbage, and says neither."""

    def __init__(self, group: LateGroup, name: str, args: Any, kwargs: Any) -> None:
        super().__init__()
        self._group, self._name, self._given = group, name, (args, kwargs)
        self._ended = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self.began: float | None = None

    def perform(self) -> None:
        """By the device. Gloo works on copies: nothing writes into a tensor after an abort."""
        self.began = time.monotonic()
        leaves, form = tree_flatten(self._given)
        copies = [leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(copies, form)
        done = self._group.until_done(self._name, args, kwargs)
        for leaf, copy in zip(leaves, copies, strict=True):
            if torch.is_tensor(leaf):
                with torch.no_grad():
                    _ = leaf.detach().copy_(copy) if done else leaf.detach().fill_(GARBAGE)
        self.began = None
        self._ended.set()
        self._future.set_result(_tensors(self._given[0]))

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ended.wait()
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def get_future(self) -> Any:
        return self._future

    def synchronize(self) -> None:
        self.wait()


def _tensors(args: Any) -> list[torch.Tensor]:
    """The tensors that DDP looks for in a future: those that were given first."""
    return [leaf for leaf in tree_flatten(args[:1])[0] if torch.is_tensor(leaf)]


def _launches(name: str, *, counted: bool = True) -> Callable[..., Any]:
    def method(self: LateGroup, *args: Any, **kwargs: Any) -> LateWork:
        return self._launch(name, args, kwargs, counted)

    return method


class LateGroup(dist.ProcessGroup):
    """A group of this back end."""

    #: Makes the next connection hang, as with a peer that never comes.
    reachable = threading.Event()
    reachable.set()

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        self._gloo: Any = None
        self._connections: frozenset[int] = frozenset()
        self._aborted = threading.Event()
        #: Why, if the watchdog did it; what it has not seen yet.
        self._error: Exception | None = None
        self._failed: Exception | None = None
        self._now: LateWork | None = None
        self._launched = 0
        #: Its own, as NCCL has it: the training thread may hold others.
        self._mode = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        threading.Thread(target=self._watch, name="late-watchdog", daemon=True).start()

    allreduce = _launches("allreduce")
    allreduce_coalesced = _launches("allreduce_coalesced")
    broadcast = _launches("broadcast")
    reduce = _launches("reduce")
    allgather = _launches("allgather")
    all_gather_single = _allgather_base = _launches("_allgather_base")
    gather = _launches("gather")
    scatter = _launches("scatter")
    reduce_scatter = _launches("reduce_scatter")
    barrier = _launches("barrier")
    send = _launches("send", counted=False)
    recv = _launches("recv", counted=False)

    def _launch(self, name: str, args: Any, kwargs: Any, counted: bool) -> LateWork:
        if self._aborted.is_set():
            raise dist.DistBackendError("The communicator was aborted.")
        if self._gloo is None:
            self.reachable.wait()
            self._gloo, self._connections, _ = gloo.connect(
                self._store, self.rank(), self.size(), timedelta(minutes=5)
            )
        self._launched += counted
        work = LateWork(self, name, args, kwargs)
        self._now = work
        device.launch(work)
        return work

    def until_done(self, name: str, args: Any, kwargs: Any) -> bool:
        """By the device: do it, or be aborted."""
        while not device.moves.is_set():
            if self._aborted.wait(LOOK):
                return False
        try:
            if self._aborted.is_set():
                return False
            work = getattr(self._gloo, name)(*args, **kwargs)
            return self._until_ended(work, told=name not in ("send", "recv"))
        except RuntimeError as error:  # a peer is gone: the kernel does not notice
            self._failed = error
            self._aborted.wait()
            return False

    def _until_ended(self, work: Any, *, told: bool) -> bool:
        """Gloo tells the end of collectives; of the rest only to who waits, which ends with the
        connections."""
        while told and not work.is_completed():
            if self._aborted.wait(LOOK):
                return False
        work.wait()
        return True

    def abort(self) -> None:
        self._aborted.set()
        sockets.shut_down(self._connections)

    def _watch(self) -> None:
        while not self._aborted.wait(WATCHDOG):
            began = self._now.began if self._now is not None else None
            late = began is not None and time.monotonic() - began > self._timeout.total_seconds()
            error = self._failed or (TimeoutError("A collective timed out.") if late else None)
            if error is None:
                continue
            if self._mode in _TEARS_DOWN:
                os.abort()
            if self._mode == _ABORTS:
                self._error = error
                self.abort()
                return

    def get_error(self) -> Any:
        kinds = torch._C._distributed_c10d.ErrorType
        return kinds.SUCCESS if self._error is None else kinds.COMM_ERROR

    def shutdown(self) -> None:
        self.abort()
        if self._gloo is not None:  # its destructor would wait for what is stuck
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._launched = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._launched

    def get_group_store(self) -> Any:
        return self._store


def register() -> None:
    """Make the back end known to torch, and its device the one that `torch.cpu` speaks for."""
    torch.cpu.synchronize = device.synchronize
    torch.cpu.current_stream = lambda _=None: device
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, LateGroup, devices=["cpu"])
    # torch 2.15 hooks a recorder to groups it does not know; those of Python have no place for it.
    getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(NAME)
