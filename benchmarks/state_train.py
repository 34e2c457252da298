"""A script that keeps its state, and writes down how long its training waits for that.

    --measure blocked   snapshots with nothing to hide behind, beside a copy of the same tensors
    --measure sharded   the same on each of four ranks: FSDP2 over tensor parallelism, 2 x 2
    --measure overhead  steps with a snapshot beside steps without, in turn
    --measure restore   from the memory of its own node, in a worker that was killed and restarted,
                        beside a copy of the same bytes in another such worker
    --measure peer      from the memory of another node, in a worker that has just come

Runs under `torchelastic run`, which holds the memory. Every line it writes is one measurement.
"""

import argparse
import ctypes
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workload
from workload import StepLog

import torchelastic
from torchelastic.snapshot.agent_client import AgentClient
from torchelastic.snapshot.layout import SHARED, Memory
from torchelastic.snapshot.writer import ShardStatus
from torchelastic.tensors.dtensors import is_sharded, local_of
from torchelastic.tensors.tensor_bytes import address_of

#: How many copies of the state a step is to take: beyond the twenty of the promise, for a copy
#: takes longer at one time than at another.
COPIES_PER_STEP = 22
#: Until the thread that writes a snapshot has sealed it, in copies, with room to spare.
SETTLING = 10


class Kept:
    """A state that is kept, and how long its training waits for it."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        *,
        copies_to: StepLog | None = None,
        build: Callable[[Any], tuple[Any, Any]] = workload.build,
    ) -> None:
        """With a log to write that to, a plain copy is made before the state is restored."""
        self.arguments = arguments
        self.model, self.optimizer = build(arguments.size)
        # Hooks run in the order of their registration: ours lie around that of the state.
        self.optimizer.register_step_pre_hook(self._waits)
        self.state = torchelastic.TorchState(model=self.model, optimizer=self.optimizer)
        if dist.is_initialized():
            dist.barrier()
        if copies_to is not None:
            copy_before_restoring(self.model, copies_to)
        began = time.perf_counter()
        self.start = self.state.restore()
        self.restored = time.perf_counter() - began
        self.optimizer.register_step_pre_hook(self._goes_on)
        self._waiting = self._waited = 0.0

    def _waits(self, *_: object) -> None:
        self._waiting = time.perf_counter()

    def _goes_on(self, *_: object) -> None:
        self._waited = time.perf_counter() - self._waiting

    def step(self) -> None:
        workload.take_step(self.model, self.optimizer, self.arguments)

    def commit_before(self, work: Callable[[], object]) -> dict[str, float]:
        """A snapshot, then something that ends with a write to the parameters."""
        began = time.perf_counter()
        self.state.commit()
        commit = time.perf_counter() - began
        work()
        return {"seconds": commit + self._waited, "commit": commit, "wait": self._waited}

    @property
    def memory(self) -> Memory | None:
        """What snapshots are written to; None until the agent has given it."""
        writer = self.state._keeper._writer
        return (writer._shards if self.state._keeper._shards.any else writer._shared)._memory

    def commit(self) -> Memory:
        """A snapshot, sealed when this returns; returns the memory it is in."""
        self.state.commit()
        while (memory := self.memory) is None:  # that commit was too early
            time.sleep(0.1)
            self.state.commit()
        while not self.is_sealed():
            time.sleep(0.005)
        return memory

    def is_sealed(self) -> bool:
        """Whether nothing is left to be done for the last snapshot."""
        held = self.memory.freshest() if self.memory is not None else None
        return held is not None and held.version[1] == self.state.step

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and optimizer state, which are what is copied of it."""
        states = self.optimizer.state.values()
        momenta = [value for each in states for value in each.values() if value is not None]
        found = [*(each.detach() for each in self.model.parameters()), *momenta]
        return [local_of(one) if is_sharded(one) else one for one in found]

    def copy_out(self) -> float:
        """Seconds of a copy by one thread, to where the next snapshot will be written."""
        assert self.memory is not None
        with self.memory.begin((self.state._keeper.generation, self.state.step + 1)) as room:
            return copy(self.tensors(), room, out=True)

    def warm_up(self) -> None:
        """Into both buffers, until the pages of both are this process's."""
        for _ in range(3):
            self.step()
            self.commit()
            self.copy_out()


def copy(tensors: Sequence[torch.Tensor], memory: memoryview, *, out: bool) -> float:
    """Seconds of copying tensors out to memory or in from there, one after the other."""
    address = address_of(memory)
    began = time.perf_counter()
    for tensor in tensors:
        to, of = (address, tensor.data_ptr()) if out else (tensor.data_ptr(), address)
        ctypes.memmove(to, of, tensor.nbytes)
        address += tensor.nbytes
    return time.perf_counter() - began


# --- blocked --------------------------------------------------------------------------------------


def measure_blocked(arguments: argparse.Namespace, log: StepLog) -> None:
    """In turn: a copy; a snapshot right before a write; one behind a forward and backward."""
    kept = Kept(arguments)
    kept.warm_up()
    settle = SETTLING * kept.copy_out()
    behind = replace(arguments.size, batch=64)
    for _ in range(arguments.repetitions):
        log.write("copy", seconds=kept.copy_out())
        log.write("snapshot", **kept.commit_before(kept.optimizer.step))
        time.sleep(settle)
        kept.arguments = argparse.Namespace(**{**vars(arguments), "size": behind})
        log.write("hidden", **kept.commit_before(kept.step))
        time.sleep(settle)
    for number in range(arguments.repetitions):
        blocked = kept.commit_before(kept.optimizer.step)
        if number:  # the first one follows a pause
            log.write("back to back", **blocked)


def measure_sharded(arguments: argparse.Namespace, log: StepLog) -> None:
    """In turn, on all ranks at a time: a copy of a rank's shards; the same behind a bare vote; a
    snapshot before a write."""
    dist.init_process_group("gloo")
    kept = Kept(arguments, build=build_sharded)
    for number in range(-3, arguments.repetitions):  # the first ones to warm up
        kept.step()
        settle_shards(kept)
        if kept.memory is not None:
            seconds = kept.copy_out()
            if number >= 0:
                log.write("copy", seconds=seconds)
                dist.barrier()
                log.write("vote and copy", seconds=timed(lambda: vote_and_copy(kept)))
        dist.barrier()
        blocked = kept.commit_before(kept.optimizer.step)
        settle_shards(kept)
        if number >= 0:
            log.write("snapshot", **blocked, kept=int(kept.is_sealed()))
    dist.destroy_process_group()


def vote_and_copy(kept: Kept) -> None:
    """The least that a snapshot of shards can do: ranks agree to begin, then each copies."""
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MIN)
    kept.copy_out()


def settle_shards(kept: Kept) -> None:
    """Wait until every rank may begin another snapshot."""
    writer = kept.state._keeper._writer
    while writer.shard_status() == ShardStatus.PENDING:
        time.sleep(0.005)
    dist.barrier()


def build_sharded(size: Any) -> tuple[Any, Any]:
    """The same model: pairs of layers split by column and by row, under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, _ = workload.build(size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    kinds = (ColwiseParallel, RowwiseParallel)
    plan = {str(2 * layer): kinds[layer % 2]() for layer in range(size.depth // 2 * 2)}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["shard"])
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


# --- overhead -------------------------------------------------------------------------------------


def measure_overhead(arguments: argparse.Namespace, log: StepLog) -> None:
    """Pairs of equally many steps, with and without a snapshot at their beginning.

    A step takes several times as long as a snapshot: what one costs lies within its pair.
    """
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    kept = Kept(arguments)
    kept.warm_up()
    seconds = statistics.median(kept.copy_out() for _ in range(5))
    kept.arguments = long_enough(kept, COPIES_PER_STEP * seconds)
    step = statistics.median(timed(kept.step) for _ in range(3))
    log.write("settings", copy=seconds, batch=kept.arguments.size.batch, step=step)
    log.write("settings", free=free_cores(lambda: steps(kept, 3)))
    for every, pairs in ((1, arguments.repetitions), (10, arguments.tens)):
        name = "every step" if every == 1 else f"every {every} steps"
        bare: list[float] = []
        for first, second in take_turns(
            lambda every=every: steps(kept, every, log),
            lambda every=every: steps(kept, every),
            pairs,
        ):
            log.write("pair", name=name, first=first, second=second)
            bare.append(second)
        control(kept, name, every, bare, log)


def control(kept: Kept, name: str, every: int, bare: list[float], log: StepLog) -> None:
    """The same without any snapshot: with steps of its own, or if those are many, with these."""
    pairs = zip(bare[::2], bare[1::2], strict=False)
    if every == 1:
        pairs = take_turns(lambda: steps(kept, 1), lambda: steps(kept, 1), len(bare))
    for first, second in pairs:
        log.write("pair", name=f"{name}, A/A", first=first, second=second)


def take_turns(
    one: Callable[[], float], other: Callable[[], float], pairs: int
) -> Iterator[tuple[float, float]]:
    """Every other pair in reverse order."""
    for number in range(pairs):
        if number % 2 == 0:
            yield one(), other()
        else:
            second = other()
            yield one(), second


def steps(kept: Kept, count: int, log: StepLog | None = None) -> float:
    """Seconds of so many steps; with a snapshot before the first if there is a log for it."""

    def run() -> None:
        if log is not None:
            blocked = kept.commit_before(kept.step)
            log.write("in a step", **blocked, sealed=int(kept.is_sealed()))
        for _ in range(count - (log is not None)):
            kept.step()

    return timed(run)


def free_cores(work: Callable[[], object]) -> float:
    """How many cores nobody used meanwhile."""
    began, idle = time.perf_counter(), idle_seconds()
    work()
    return (idle_seconds() - idle) / (time.perf_counter() - began)


def idle_seconds() -> float:
    fields = Path("/proc/stat").read_text().split(None, 6)[:6]  # cpu user nice system idle iowait
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def long_enough(kept: Kept, wanted: float) -> argparse.Namespace:
    """The arguments with as large a batch as makes a step take the time that is wanted."""
    size = kept.arguments.size
    measured = []
    for batch in (32, 96):
        kept.arguments = argparse.Namespace(
            **{**vars(kept.arguments), "size": replace(size, batch=batch)}
        )
        kept.step()
        measured.append(min(timed(kept.step) for _ in range(3)))
    each = max(measured[1] - measured[0], 1e-6) / 64
    batch = max(8, round(96 + (wanted - measured[1]) / each))
    return argparse.Namespace(**{**vars(kept.arguments), "size": replace(size, batch=batch)})


# --- restore --------------------------------------------------------------------------------------


def measure_restore(arguments: argparse.Namespace, log: StepLog) -> None:
    """One generation: what restoring took, or in every other one what a copy takes in its place.
    Then this worker dies."""
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    restores = generation % 2 == 1
    kept = Kept(arguments, copies_to=log if generation and not restores else None)
    if not generation:
        kept.step()
    if restores:
        log.write("own memory", seconds=kept.restored, step=kept.start)
    held = kept.commit().freshest()
    if restores and held is not None:
        for _ in range(2):  # the first one maps its pages
            seconds = copy(kept.tensors(), held.data, out=False)
        log.write("memcpy", seconds=seconds)
    if generation < 2 * arguments.repetitions:
        os.kill(os.getpid(), signal.SIGKILL)


def copy_before_restoring(model: torch.nn.Module, log: StepLog) -> None:
    """Copy the state out of the agent's memory as soon as that is there, in a worker that has
    touched what one that restores has: its parameters, but neither that memory nor its momentum."""
    plain = AgentClient.open

    def open_and_copy(agent: AgentClient, piece: str, *rest: Any) -> Memory:
        memory = plain(agent, piece, *rest)
        if piece == SHARED and (held := memory.freshest()) is not None:
            parameters = [each.detach() for each in model.parameters()]
            began = time.perf_counter()
            copy([*parameters, *map(torch.empty_like, parameters)], held.data, out=False)
            log.write("memcpy by a new worker", seconds=time.perf_counter() - began)
        return memory

    AgentClient.open = open_and_copy


def measure_peer(arguments: argparse.Namespace, log: StepLog) -> None:
    """One generation of a world that nodes join and leave: says what restoring took, and waits."""
    dist.init_process_group("gloo")
    opened = time_what_agents_do()
    kept = Kept(arguments)
    guest = int(os.environ.get("BENCHMARK_GUEST", "0"))
    facts = {"step": kept.start, "guest": guest, "opened": sum(opened)}
    log.write("restored", seconds=kept.restored, **facts)
    if not kept.start:
        kept.step()
    dist.barrier()
    kept.commit()
    dist.barrier()
    log.write("kept", guest=guest)
    time.sleep(arguments.seconds)


def time_what_agents_do() -> list[float]:
    """The seconds until an agent had a piece for us, each time it is asked for one."""
    plain, seconds = AgentClient.open, []

    def open_and_tell(*arguments: Any) -> Memory:
        began = time.perf_counter()
        memory = plain(*arguments)
        seconds.append(time.perf_counter() - began)
        return memory

    AgentClient.open = open_and_tell
    return seconds


MEASURES = {
    "blocked": measure_blocked,
    "sharded": measure_sharded,
    "overhead": measure_overhead,
    "restore": measure_restore,
    "peer": measure_peer,
}


def main() -> None:
    parser = workload.parser(__doc__)
    parser.add_argument("--measure", choices=MEASURES, required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tens", type=int, default=2, help="pairs of ten steps each")
    parser.add_argument("--cores", type=int, default=0, help="use so many (0: all)")
    arguments = parser.parse_args()
    arguments.accelerator = 0
    torch.set_num_threads(1)
    torch.manual_seed(1)
    MEASURES[arguments.measure](arguments, StepLog(arguments.record))


if __name__ == "__main__":
    main()
