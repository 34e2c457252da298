"""A script that brings its state to storage and back in every way there is, and takes the time.

What counts as blocked is the time in which the training can do nothing else until it may write to
its parameters again: in the call that begins a checkpoint, and before the optimizer's write until
all is copied. Between the two is a forward and a backward, or nothing to hide behind. Each way has
what it wrote on the disk, by fsync, before the next one begins.
"""

import argparse
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workload
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from workload import StepLog

import torchelastic
from torchelastic import checkpoint


def nothing() -> None:
    """Nobody has to wait."""


@dataclass(frozen=True)
class Begun:
    """A checkpoint on its way."""

    #: Waits until the parameters may be written to, and until all is in storage.
    copied: Callable[[], object] = nothing
    stored: Callable[[], object] = nothing


class Storage:
    """One state and its ways to the storage."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.directory: Path = arguments.checkpoint.parent / "storage"
        self.directory.mkdir()
        self._size = arguments.size
        self.model, self.optimizer = workload.build(arguments.size)
        workload.take_step(self.model, self.optimizer, arguments)
        self.state = torchelastic.TorchState(model=self.model, optimizer=self.optimizer)
        self.store = checkpoint.CheckpointStore(self.directory / "ours", keep_last=1)
        checkpoint.set_checkpoint_manager(self.store)
        # Kept for as long as the script runs: a new one would have new memory every time.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._shared_stager = DefaultStager(StagingOptions(False, True, False, False))
        self._later_stager = DefaultStager(StagingOptions(False, True, True, False))
        self._count = 0

    def forward_and_backward(self) -> None:
        self.optimizer.zero_grad()
        output = self.model(torch.randn(self._size.batch, self._size.width))
        nn.functional.mse_loss(output, torch.zeros_like(output)).backward()

    def ours(self) -> Begun:
        self._count += 1
        checkpoint.save(self.state, self._count)
        return Begun(checkpoint.before_write, checkpoint.finish)

    def torch_save(self) -> Begun:
        with (self.directory / "torch.pt").open("wb") as stream:
            torch.save(self._tree(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        return Begun()

    def dcp_as_it_is(self) -> Begun:
        """With all settings as they are: a thread, and new memory each time."""
        saving = dcp.async_save(self._tree(), checkpoint_id=self.directory / "dcp")
        return Begun(stored=saving.result)

    def dcp_thread(self) -> Begun:
        """With memory that is used again."""
        saving = dcp.async_save(
            self._tree(), checkpoint_id=self.directory / "dcp-thread", async_stager=self._stager
        )
        return Begun(stored=saving.result)

    def dcp_process(self) -> Begun:
        """With a process, and memory that it shares and that is used again."""
        saving = dcp.async_save(
            self._tree(),
            checkpoint_id=self.directory / "dcp-process",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._shared_stager,
        )
        return Begun(stored=saving.result)

    def dcp_process_later(self) -> Begun:
        """And with a thread that copies behind the training, as only its examples for GPUs do."""
        saving = dcp.async_save(
            self._tree(),
            checkpoint_id=self.directory / "dcp-later",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._later_stager,
        )
        return Begun(saving.staging_completion.result, saving.upload_completion.result)

    def clear(self, name: str) -> None:
        """Remove what was written there last: that is not to be timed. (Ours does so by itself.)"""
        path = self.directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _tree(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    # --- and back --------------------------------------------------------------------------------

    def load_ours(self) -> None:
        checkpoint.load_latest(self.state)

    def load_torch(self) -> None:
        self._take(torch.load(self.directory / "torch.pt"))

    def load_torch_mapped(self) -> None:
        self._take(torch.load(self.directory / "torch.pt", mmap=True))

    def load_dcp(self) -> None:
        tree = self._tree()
        dcp.load(tree, checkpoint_id=self.directory / "dcp")
        self._take(tree)

    def _take(self, tree: dict[str, object]) -> None:
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])


def measure(storage: Storage, repetitions: int, log: StepLog) -> None:
    saves = {
        "torchelastic": (storage.ours, ""),
        "torch.save": (storage.torch_save, "torch.pt"),
        "DCP async": (storage.dcp_as_it_is, "dcp"),
        "DCP async, own stager": (storage.dcp_thread, "dcp-thread"),
        "DCP async, own stager, process": (storage.dcp_process, "dcp-process"),
        "DCP async, copied by a thread, process": (storage.dcp_process_later, "dcp-later"),
    }
    for number in range(repetitions + 1):
        for name, (save, written) in saves.items():
            for between in (storage.forward_and_backward, nothing):
                if written:
                    storage.clear(written)
                facts = take_times(save, between)
                hidden = between is not nothing
                if number or hidden:  # the very first is reported apart
                    log.write("save", name=name, first=number == 0, hidden=hidden, **facts)
    loads = {
        "torch.load": storage.load_torch,
        "torch.load(mmap=True)": storage.load_torch_mapped,
        "DCP": storage.load_dcp,
        "checkpoint of torchelastic": storage.load_ours,
    }
    for _ in range(repetitions):
        for name, load in loads.items():
            began = time.perf_counter()
            load()
            log.write("load", name=name, seconds=time.perf_counter() - began)


def take_times(save: Callable[[], Begun], between: Callable[[], None]) -> dict[str, float]:
    """Of one checkpoint, with something to do before the parameters are written to."""
    began = time.perf_counter()
    begun = save()
    called = time.perf_counter()
    between()
    waiting = time.perf_counter()
    begun.copied()
    waited = time.perf_counter()
    begun.stored()
    stored = time.perf_counter() - began
    return {"seconds": called - began + waited - waiting, "call": called - began, "stored": stored}


def main() -> None:
    parser = workload.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    arguments.accelerator = 0
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    storage = Storage(arguments)
    try:
        measure(storage, arguments.repetitions, StepLog(arguments.record))
    finally:
        storage.store.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
