"""A script that brings its state to storage and back in every way there is, and takes the time.

What counts as blocked is the time until the training may write to its parameters again. Each way
has what it wrote on the disk, by fsync, before the next one begins.
"""

import argparse
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workload
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from workload import StepLog

import torchelastic
from torchelastic import checkpoint


class Storage:
    """One state and its ways to the storage. A way returns what waits until all is there."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.directory: Path = arguments.checkpoint.parent / "storage"
        self.directory.mkdir()
        self.model, self.optimizer = workload.build(arguments.size)
        workload.take_step(self.model, self.optimizer, arguments)
        self.state = torchelastic.TorchState(model=self.model, optimizer=self.optimizer)
        self.store = checkpoint.CheckpointStore(self.directory / "ours", keep_last=1)
        checkpoint.set_checkpoint_manager(self.store)
        # Kept for as long as the script runs: a new one would have new memory every time.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._shared_stager = DefaultStager(StagingOptions(False, True, False, False))
        self._count = 0

    def ours(self) -> Callable[[], object]:
        self._count += 1
        checkpoint.save(self.state, self._count)
        return checkpoint.finish

    def torch_save(self) -> Callable[[], object]:
        with (self.directory / "torch.pt").open("wb") as stream:
            torch.save(self._tree(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        return lambda: None

    def dcp_as_it_is(self) -> Callable[[], object]:
        """With all settings as they are: a thread, and new memory each time."""
        return dcp.async_save(self._tree(), checkpoint_id=self.directory / "dcp").result

    def dcp_thread(self) -> Callable[[], object]:
        """With memory that is used again."""
        return dcp.async_save(
            self._tree(), checkpoint_id=self.directory / "dcp-thread", async_stager=self._stager
        ).result

    def dcp_process(self) -> Callable[[], object]:
        """With a process, and memory that it shares and that is used again."""
        return dcp.async_save(
            self._tree(),
            checkpoint_id=self.directory / "dcp-process",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._shared_stager,
        ).result

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
    }
    for number in range(repetitions + 1):
        for name, (save, written) in saves.items():
            if written:
                storage.clear(written)
            began = time.perf_counter()
            wait = save()
            blocked = time.perf_counter() - began
            wait()
            stored = time.perf_counter() - began
            log.write("save", name=name, seconds=blocked, stored=stored, first=number == 0)
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
