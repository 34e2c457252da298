"""Waits end at once when the world is over, whatever a worker waits for."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tests import late_backend
from tests.process import forked
from tests.support import SOAK, poll_for
from torchelastic.training.group import abortable_waits, parked
from torchelastic.training.group import group as groups
from torchelastic.training.group.group import GenerationOver, Group, PeerLostError

# --- what the ranks do, each in a process of its own ---------------------------------------------

SIZE = 3
#: The rank that is lost.
LOST = 2

Step = Callable[[], object]


@dataclass(frozen=True)
class Freed:
    """How a rank got out of what it was in."""

    error: type[BaseException]
    #: How long it waited after the abort, in seconds.
    after: float
    #: Whether nothing of the old group could touch memory when it was left.
    quiet: bool
    #: What is launched in the group that was left.
    launched_later: type[BaseException]
    #: What an all-reduce in the next world gave.
    next_sum: float


class Abort:
    """Aborts a group from another thread, as soon as a condition holds or the step has raised.

    A back end's own watchdog may end the step first, in a moment that this thread sleeps through.
    """

    def __init__(self, group: Group, when: Callable[[], object]) -> None:
        self._group, self._when = group, when
        self._raised = threading.Event()
        self._training = threading.get_native_id()
        self._at, self._busy = 0.0, 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poll_for(lambda: self._raised.is_set() or self._when(), what="the moment to abort")
        self._at, self._busy = time.monotonic(), _busy(self._training)
        self._group.abort("a test says so")

    def seconds_until_error(self, step: Step) -> tuple[BaseException, float]:
        """Repeat `step` until it raises; the error, and how long after the abort it still waited.

        Time in which it ran, or was kept from running by others on a busy machine, is no waiting.
        """
        try:
            while True:
                step()
        except Exception as error:
            now, busy = time.monotonic(), _busy(self._training)
            self._raised.set()
            self._thread.join()
            return self._group.explain(error), max(0.0, now - self._at - (busy - self._busy))


def _busy(thread: int) -> float:
    """How long a thread has run or was ready to run, in seconds."""
    running, ready, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    return (int(running) + int(ready)) / 1e9


def lose_a_peer(rank: int, port: int, what: str, cause: str, backend: str = "gloo") -> Freed | None:
    """Be in `what` while a peer is lost by `cause`; be freed, and go on in a smaller world."""
    late_backend.register()
    store = client(port)
    group = build(port, rank, SIZE, backend=backend)
    step = OPERATIONS[what](group)
    dist.barrier()
    group.check_collectives()
    if rank == LOST:
        store.set("lost", str(os.getpid()))
        CAUSES[cause]()
        return None
    pid = int(store.get("lost"))
    abort = Abort(group, lambda: _is_lost(pid) and (group.pending or group.waits.failure))
    error, after = abort.seconds_until_error(step)
    return leave_and_go_on(group, error, after, port)


def lose_a_builder(rank: int, port: int) -> Freed | None:
    """Be building a group while one that belongs to it never comes."""
    if rank == LOST:
        return None
    group = Group(
        store=client(port), rank=rank, size=SIZE, generation=0, timeout=timedelta(seconds=60)
    )
    error, after = Abort(group, lambda: group.pending).seconds_until_error(group.connect)
    return leave_and_go_on(group, error, after, port)


def leave_and_go_on(group: Group, error: BaseException, after: float, port: int) -> Freed:
    groups.QUIET_WITHIN = 10.0  # others may keep gloo's threads from running, here
    quiet = group.leave()
    try:
        group.connect()
    except RuntimeError as later:
        launched_later = type(later)
    build(port, group.rank, SIZE - 1, generation=1, backend=group.backend)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return Freed(type(error), after, quiet, launched_later, ones.item())


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port)


def build(port: int, rank: int, size: int, generation: int = 0, backend: str = "gloo") -> Group:
    return Group.build(
        store=client(port),
        rank=rank,
        size=size,
        generation=generation,
        backend=backend,
        timeout=timedelta(seconds=60),
    )


def _direct(group: Group) -> Step:
    """Several at once, large enough to be half-way when it happens."""
    tensors = [torch.ones(256 * 1024) for _ in range(6)]

    def step() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return step


def _ddp(group: Group) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=6)
    batch = torch.randn(4, 512)
    return lambda: ddp(batch).sum().backward()


def _hooked(group: Group) -> Step:
    """DDP with a hook of the user's own."""
    ddp = DistributedDataParallel(nn.Linear(512, 512))
    ddp.register_comm_hook(None, fp16_compress_hook)
    batch = torch.randn(4, 512)
    return lambda: ddp(batch).sum().backward()


def _static(group: Group) -> Step:
    """DDP that reduces and waits in one callback at the end of its first backward."""
    ddp = DistributedDataParallel(nn.Linear(512, 512), static_graph=True)
    batch = torch.randn(4, 512)
    return lambda: ddp(batch).sum().backward()


def _subgroup(group: Group) -> Step:
    others = dist.new_group([0, 1, LOST])
    return lambda: dist.all_reduce(torch.ones(1), group=others)


def _exchange(group: Group) -> Step:
    """Each sends to the next."""
    outgoing, incoming = torch.ones(1), torch.ones(1)

    def step() -> None:
        sent = dist.isend(outgoing, (group.rank + 1) % group.size)
        dist.recv(incoming, (group.rank - 1) % group.size)
        sent.wait()

    return step


OPERATIONS: dict[str, Callable[[Group], Step]] = {
    "all-reduces": _direct,
    "backward": _ddp,
    "hooked backward": _hooked,
    "first backward of a static graph": _static,
    "subgroup": _subgroup,
    "barrier": lambda group: dist.barrier,
    "exchange": _exchange,
    "objects": lambda group: lambda: dist.all_gather_object([None] * SIZE, "object"),
}


def _freeze() -> None:
    """After the answer was given."""

    def freeze() -> None:
        forked.answered.wait()
        os.kill(os.getpid(), signal.SIGSTOP)

    threading.Thread(target=freeze, daemon=True).start()


CAUSES: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "frozen": _freeze,
}


def _is_lost(pid: int) -> bool:
    """Dead or stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "TZX"


@dataclass
class Strangers:
    """A second thread that opens, uses and closes connections all the time."""

    done: int = 0
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Strangers:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._kept = self._pair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._talk(*self._kept)
        for end in (*self._kept, self._server):
            end.close()

    def _run(self) -> None:
        while not self._stop.wait(0.0005):  # else the interpreter is all theirs
            ends = self._pair()
            self._talk(*ends)
            for end in ends:
                end.close()
            self.done += 1

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        near = socket.create_connection(self._server.getsockname())
        return near, self._server.accept()[0]

    def _talk(self, near: socket.socket, far: socket.socket) -> None:
        try:
            near.sendall(b"word")
            heard = far.recv(4)
            if heard != b"word":
                self.errors.append(f"heard {heard!r}")
        except OSError as error:
            self.errors.append(str(error))


@dataclass
class Tally:
    """Many aborts in one process."""

    #: How long it waited after the abort; 0 when a peer's was noticed before the own one.
    freed_after: list[float] = field(default_factory=list)
    #: How long `leave` took.
    leaving: list[float] = field(default_factory=list)
    building: list[float] = field(default_factory=list)
    #: Worlds left although gloo might still have written.
    not_quiet: int = 0
    #: Worlds with an operation of gloo's that is stuck until its time-out.
    stuck: int = 0
    #: Not GenerationOver, nor PeerLostError.
    strange: list[str] = field(default_factory=list)
    #: Number of connections of each group.
    connections: set[int] = field(default_factory=set)
    #: Threads and descriptors before and after, when what was parked has been reaped.
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    strangers: int = 0
    strangers_disturbed: list[str] = field(default_factory=list)


def abort_in_traffic(
    rank: int, port: int, what: str, size: int, worlds: int, beside_strangers: bool
) -> Tally:
    """World after world, abort at a random moment while all are busy."""
    abortable_waits.IDLE = 0.1
    tally = Tally()
    enter = partial(_one_world, tally, port, rank, size, OPERATIONS[what], random.Random(rank))
    enter(0)  # what stays for ever is made in the first
    tally.before = _held_at_rest()
    strangers = Strangers()
    with strangers if beside_strangers else contextlib.nullcontext():
        for generation in range(1, worlds):
            enter(generation)
    tally.strangers, tally.strangers_disturbed = strangers.done, strangers.errors
    tally.after = _held_at_rest(tally.before)
    return tally


def _one_world(
    tally: Tally,
    port: int,
    rank: int,
    size: int,
    operation: Callable[[Group], Step],
    chance: random.Random,
    generation: int,
) -> None:
    # A client of its own: a build that waits for a key of another rank's keeps the client busy.
    store, timeout = client(port), timedelta(seconds=10)
    group = Group(store=store, rank=rank, size=size, generation=generation, timeout=timeout)

    def work() -> None:
        began = time.monotonic()
        group.connect()
        tally.building.append(time.monotonic() - began)
        tally.connections |= {len(owned.connections) for owned in group._owned}
        for owned in group._owned:
            owned.set_timeout(timedelta(seconds=2))  # of what will be stuck
        step = operation(group)
        while True:
            step()

    # Another rank may abort before, while this one still builds; not every wait notices that.
    enough, latest = chance.randrange(1, 60), time.monotonic() + 0.5
    abort = Abort(group, lambda: group.launched >= enough or time.monotonic() > latest)
    error, after = abort.seconds_until_error(work)
    if not isinstance(error, GenerationOver | PeerLostError):
        tally.strange.append(repr(error))
    tally.freed_after.append(after)
    leaving = time.monotonic()
    tally.not_quiet += not group.leave()
    tally.leaving.append(time.monotonic() - leaving)
    tally.stuck += bool(group.pending)


def _held_at_rest(before: tuple[int, int] | None = None) -> tuple[int, int]:
    """Threads, those of C++ too, and descriptors, when what was parked has been reaped."""
    poll_for(lambda: not parked.parked(), what="all old groups reaped")
    poll_for(lambda: threading.active_count() == 1, what="no other thread of Python's")
    gc.collect()  # what only waits for the collector is no leak
    with contextlib.suppress(AssertionError):  # the kernel may not have ended such a thread yet
        poll_for(lambda: before is None or _held() <= before, what="no more", timeout=10)
    return _held()


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# --- the tests -----------------------------------------------------------------------------------

#: What is meant by that: nearly always within this, on a machine that has nothing else to do.
SOON = 0.1
#: On any machine: before the time-outs of the groups, of two seconds and more, would free it.
IN_TIME = 1.5

pytestmark = pytest.mark.usefixtures("forks")


def survivors(answers):
    return [answers[rank] for rank in range(SIZE) if rank != LOST]


def check_freed(answers):
    for freed in survivors(answers):
        # One may be freed by the end of its connection to the other, which aborted a little before.
        assert freed.error in (GenerationOver, PeerLostError)
        assert freed.after < IN_TIME
        assert freed.quiet
        assert freed.launched_later is GenerationOver
        assert freed.next_sum == SIZE - 1


@pytest.mark.parametrize("what", list(OPERATIONS))
def test_free_when_a_peer_is_frozen(what):
    with forked.ranks(lose_a_peer, [0, 1, 2], what, "frozen") as answers:
        check_freed(answers)


@pytest.mark.parametrize("what", ["all-reduces", "backward", "subgroup"])
def test_free_when_a_peer_is_killed(what):
    with forked.ranks(lose_a_peer, [0, 1, 2], what, "killed") as answers:
        check_freed(answers)


@pytest.mark.parametrize("cause", ["frozen", "killed"])
@pytest.mark.parametrize("what", ["all-reduces", "backward", "exchange"])
def test_free_on_a_back_end_with_the_habits_of_nccl(what, cause):
    """An abort is the only way out of it, and its watchdog would end a process that is alive."""
    args = (what, cause, late_backend.NAME)
    with forked.ranks(lose_a_peer, [0, 1, 2], *args) as answers:
        check_freed(answers)


def test_free_when_a_peer_never_comes_to_build():
    with forked.ranks(lose_a_builder, [0, 1, 2]) as answers:
        check_freed(answers)


def check_tally(tally, size):
    assert tally.strange == []
    assert max(tally.freed_after) < IN_TIME
    # A rank may find fewer: another had aborted before all were found.
    assert max(tally.connections) == size - 1
    assert tally.after <= tally.before
    assert tally.strangers_disturbed == []


@pytest.mark.parametrize("what", ["all-reduces", "backward"])
def test_world_after_world_beside_a_busy_thread(what):
    with forked.ranks(abort_in_traffic, [0, 1], what, 2, 5, True) as answers:
        for tally in answers.values():
            check_tally(tally, 2)
            assert tally.strangers > 0


@pytest.mark.alone
@pytest.mark.slow
def test_aborts_in_live_traffic(capsys):
    """A thousand of them in a soak of ten and more."""
    tallies, worlds = [], 13 * SOAK
    for what in ("all-reduces", "backward"):
        args = (what, 4, worlds, False)
        with forked.ranks(abort_in_traffic, [0, 1, 2, 3], *args) as answers:
            tallies += answers.values()
        with capsys.disabled():
            print(f"\n{what}: {summary(list(answers.values()))}")
    assert sum(len(tally.freed_after) for tally in tallies) >= 100 * SOAK
    for tally in tallies:
        check_tally(tally, 4)
        assert median(tally.freed_after) < SOON
    # The last resort: such a worker is killed and replaced.
    assert sum(tally.not_quiet for tally in tallies) <= 1 + SOAK // 2


def summary(tallies):
    freed = sorted(after for tally in tallies for after in tally.freed_after)
    leaving = sorted(seconds for tally in tallies for seconds in tally.leaving)
    building = sorted(seconds for tally in tallies for seconds in tally.building)
    late = sum(after >= SOON for after in freed)
    stuck, not_quiet = (sum(getattr(t, name) for t in tallies) for name in ("stuck", "not_quiet"))
    times = ", ".join(
        f"{name} {1e3 * seconds[len(seconds) // 2]:.1f} ms, worst {1e3 * seconds[-1]:.1f}"
        for name, seconds in (("freed after", freed), ("left in", leaving), ("built in", building))
    )
    return (
        f"{len(freed)} aborts, {times}; {late} later than {1e3 * SOON:.0f} ms,"
        f" {stuck} with an operation of gloo's left to its time-out, {not_quiet} not quiet"
    )
