"""A training of one worker that is seen in some of its steps and not in others.

Blocks of steps take turns: seen, not seen, seen, seen. What a step does to be seen is replaced by
nothing in the second of them. Each block's processor time of the training thread, for one step, is
appended to RECORD as a line of JSON.
"""

import importlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import workload

import torchelastic
from torchelastic import metrics
from torchelastic.p2p import CoordinatorP2P

#: What is called to be seen. Parts that this version does not have are left out.
SEEN = (
    "torchelastic.worker.status_page:StatusPage.entered",
    "torchelastic.worker_counters.stalls:add",
    "torchelastic.worker.collective_log:Collectives.launched",
    "torchelastic.worker.collective_log:Collectives.waits",
    "torchelastic.worker.collective_log:Collectives.goes_on",
    "torchelastic.worker.backward_waits:BackwardWaits.before_write",
    "torchelastic.worker.backward_waits:BackwardWaits.committed",
    "torchelastic.worker.optimizer_steps:_counter._note",
    "torchelastic.metrics.metric_table:MetricTable.put",
)


def nothing(*anything: object) -> None:
    """In the place of what is not to be done."""


@contextmanager
def unseen() -> Iterator[None]:
    with ExitStack() as replaced:
        for name in SEEN:
            if (found := owner_of(name)) is not None:
                replaced.enter_context(mock.patch.object(*found, nothing))
        yield


def owner_of(name: str) -> tuple[Any, str] | None:
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
    except (ImportError, AttributeError):
        return None
    return (owner, last) if hasattr(owner, last) else None


class Blocks:
    """Counts steps, and changes from block to block."""

    def __init__(self, arguments: Any) -> None:
        arguments.record.mkdir(parents=True, exist_ok=True)
        self._file = (arguments.record / f"blocks-{os.getpid()}.jsonl").open("a", buffering=1)
        self._size, self._left = arguments.block, arguments.steps
        self._done = self._block = 0
        self._blind = ExitStack()
        self._began = time.thread_time()

    def step(self) -> bool:
        """One more is done; False: it was the last."""
        self._done += 1
        if self._done % self._size == 0:
            self._turn()
        return self._done < self._left

    def _turn(self) -> None:
        took = (time.thread_time() - self._began) / self._size
        self._blind.close()
        self._file.write(json.dumps({"event": "block", "seconds": took}) + "\n")
        self._block += 1
        if self._block % 4 == 1:
            self._blind.enter_context(unseen())
        self._began = time.thread_time()


def report() -> None:
    metrics.put_metric("loss", 0.5)
    metrics.put_metric("accuracy", 0.25)


def as_script(arguments: Any, blocks: Blocks) -> None:
    dist.init_process_group("gloo")
    model, optimizer = workload.build(arguments.size)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    kept = torchelastic.TorchState(model=wrapped, optimizer=optimizer)
    kept.restore()
    while True:
        workload.take_step(wrapped, optimizer, arguments)
        report()
        kept.commit()
        if not blocks.step():
            break
    dist.destroy_process_group()


def plain(arguments: Any, blocks: Blocks) -> None:
    dist.init_process_group("gloo")
    model, optimizer = workload.build(arguments.size)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    while True:
        workload.take_step(wrapped, optimizer, arguments)
        if not blocks.step():
            break
    dist.destroy_process_group()


def resident(arguments: Any, blocks: Blocks) -> None:
    model, optimizer = workload.build(arguments.size)

    def train_step(state: torchelastic.TorchState) -> None:
        workload.take_step(state.model, state.optimizer, arguments)
        report()
        if not blocks.step():
            raise StopIteration

    state = torchelastic.TorchState(model=model, optimizer=optimizer)
    torchelastic.train(CoordinatorP2P(), train_step, state)


def main() -> None:
    parser = workload.parser(__doc__)
    parser.add_argument("--block", type=int, default=20, help="steps (default 20)")
    modes = {"plain": plain, "script": as_script, "train": resident}
    parser.add_argument("--mode", choices=modes, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = Blocks(arguments)
    modes[arguments.mode](arguments, blocks)


if __name__ == "__main__":
    main()
