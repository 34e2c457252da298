"""The workers' program of `doctor --gpu`: `gpu_program PATH --device D --notes DIRECTORY`.

Rank 0 writes to `DIRECTORY/PATH.json` what it is doing and, at the end, what it found. Device and
back end are parameters, so the same code runs on `cpu` with gloo. A back end from outside torch is
given as `MODULE:NAME`, and registered by the module's function `register`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchelastic import env

if TYPE_CHECKING:
    import torch

#: The zygote imports it; a plain process that starts here has not.
IS_WARM = "torch._dynamo" in sys.modules

#: Seconds for the ranks to meet.
RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
#: All-reduces before one peer goes silent, and elements of each.
ROUNDS, ELEMENTS = 20, 1 << 20
#: Seconds that the others wait for the silent peer before the abort.
SILENCE_BEFORE_ABORT = 0.5
#: Steps of the training that is killed.
STEPS = 20


class Notes:
    """The notes file, written by rank 0 only."""

    def __init__(self, directory: Path, path: str) -> None:
        self._file = directory / f"{path}.json"
        self._speaks = env.get("RANK", "0") == "0"

    def doing(self, what: str) -> None:
        self._write({"doing": what})

    def found(self, sentence: str) -> None:
        self._write({"found": sentence})

    def _write(self, what: dict[str, str]) -> None:
        if self._speaks:
            self._file.write_text(json.dumps(what))


class Broken(Exception):
    """The path does not work; the sentence says how."""


@dataclass(frozen=True)
class Given:
    """The arguments of a path."""

    device: torch.device
    backend: str
    notes: Notes
    directory: Path


def warm(given: Given) -> None:
    """Use a device for the first time in a forked process."""
    import torch

    device, notes = given.device, given.notes
    if not IS_WARM:
        raise Broken("the worker was not forked from the zygote; see the agent's log")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise Broken("the zygote initialized CUDA before the fork")
    notes.doing("using the device after the fork")
    began = time.monotonic()
    numbers = torch.arange(1024, dtype=torch.float32).reshape(32, 32)
    product = (numbers.to(device) @ numbers.to(device)).cpu()
    if not torch.allclose(product, numbers @ numbers):
        raise Broken("a product computed after the fork is wrong")
    notes.found(f"a forked worker uses {device} after {time.monotonic() - began:.2f} s")


def collective(given: Given) -> None:
    """Run an all-reduce as any script does."""
    import torch.distributed as dist

    device, notes = given.device, given.notes
    use(device)
    notes.doing("making a process group")
    dist.init_process_group(given.backend, timeout=RENDEZVOUS_TIMEOUT)
    notes.doing("in an all-reduce")
    check_sum(device, dist.get_rank(), dist.get_world_size())
    size = dist.get_world_size()
    dist.destroy_process_group()
    notes.found(f"all-reduce of {size} rank(s) on {device.type} works with {given.backend}")


def abort(given: Given) -> None:
    """Abort a collective in which one rank is silent, and build the next group."""
    from torchelastic.torch_private import TCPStore
    from torchelastic.training.group.group import Group

    device, notes = given.device, given.notes
    use(device)
    rank, size = int(env.get("RANK")), int(env.get("WORLD_SIZE"))
    store = TCPStore(
        env.get("MASTER_ADDR"),
        int(env.get("MASTER_PORT")),
        is_master=False,
        timeout=RENDEZVOUS_TIMEOUT,
    )

    def build(generation: int) -> Group:
        notes.doing(f"making the process group of generation {generation}")
        return Group.build(
            store=store,
            rank=rank,
            size=size,
            generation=generation,
            backend=given.backend,
            timeout=RENDEZVOUS_TIMEOUT,
        )

    group = build(0)
    for _ in range(ROUNDS):
        check_sum(device, rank, size)
    group.check_collectives()
    freed = 0.0
    if rank == size - 1:
        store.wait([f"freed/{other}" for other in range(size - 1)], RENDEZVOUS_TIMEOUT)
        group.abort("the others were freed")
    else:
        notes.doing("waiting for the abort to interrupt a collective with a silent peer")
        freed = _be_freed(group, device)
        store.set(f"freed/{rank}", "1")
    if not group.leave():
        raise Broken("a collective may still write to tensors after the abort")
    group = build(1)
    check_sum(device, rank, size)
    group.check_collectives()
    group.leave()
    notes.found(f"the abort took {1000 * freed:.0f} ms with a silent peer; the next group works")


def _be_freed(group: Any, device: torch.device) -> float:
    """Return the seconds from the abort until this thread, which waits for a peer, continues."""
    from torchelastic.training.group.group import GenerationOver

    aborted: list[float] = []

    def end() -> None:
        aborted.append(time.monotonic())
        group.abort("torchelastic doctor tests the abort")

    timer = threading.Timer(SILENCE_BEFORE_ABORT, end)
    timer.start()
    error: Exception | None = None
    try:
        all_reduce(device, 1.0)  # gloo's waits raise; those of CUDA just end
        group.check_collectives()
    except RuntimeError as raised:
        error = group.explain(raised)
    now = time.monotonic()
    timer.join()
    if now < aborted[0]:
        raise Broken("a collective completed without one of its ranks")
    if not isinstance(error, GenerationOver):
        raise Broken(f"the abort raised {error!r}")
    return now - aborted[0]


def train(given: Given) -> None:
    """Kill a rank in a step: the others continue in their processes with a replacement.

    The doctor compares the final states of all ranks.
    """
    lost: list[float] = []
    gained: list[float] = []

    def at_step(state: Any, here: Any) -> None:
        if here.generation == 0 and state.step == STEPS // 2:
            if here.rank == here.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            given.notes.doing("in a step with a killed rank")
            lost.append(time.monotonic())
        elif lost and not gained and here.generation > 0 and state.step > STEPS // 2:
            gained.append(time.monotonic())

    state = _train(given, at_step)
    (given.directory / f"train.{os.getpid()}.bits").write_text(digest_of(state))
    if lost and not gained:
        raise Broken("no step was taken after the kill")
    if lost:  # else this is the replacement
        given.notes.found(
            f"{STEPS} steps with {given.backend}; a killed rank was replaced in "
            f"{gained[0] - lost[0]:.2f} s while the other processes kept running"
        )


def hang(given: Given) -> None:
    """Let a rank sleep in a step while the others wait: the agent names and replaces it."""

    def at_step(state: Any, here: Any) -> None:
        if here.generation == 0 and state.step == STEPS // 2:
            if here.rank == here.size - 1:
                time.sleep(RENDEZVOUS_TIMEOUT.total_seconds() * 10)
            given.notes.doing("waiting for a sleeping rank")

    _train(given, at_step)
    given.notes.found(f"all {STEPS} steps were done")


def _train(given: Given, at_step: Callable[[Any, Any], None]) -> Any:
    """Run some steps of `torchelastic.train`; return the final state."""
    import torch

    import torchelastic
    from torchelastic.p2p import CoordinatorP2P
    from torchelastic.training import session

    device = given.device
    use(device)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given.notes.doing("entering the first world")

    def train_step(state: Any) -> None:
        here = session.current()
        if state.step == STEPS:
            raise StopIteration
        if here.generation == 0:
            given.notes.doing(f"training step {state.step}")
        at_step(state, here)
        optimizer.zero_grad()
        state.model(torch.randn(32, 256, device=device)).square().mean().backward()
        optimizer.step()

    state = torchelastic.TorchState(model=model, optimizer=optimizer)
    return torchelastic.train(CoordinatorP2P(c10d_backend=given.backend), train_step, state)


def snapshot(given: Given) -> None:
    """Train, be killed, and restore the same bits from the agent's memory."""
    import torch

    import torchelastic

    device, notes, directory = given.device, given.notes, given.directory
    use(device)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept = torchelastic.TorchState(model=model, optimizer=optimizer)
    digests = directory / "digests.json"
    notes.doing("restoring")
    step = kept.restore()
    if digests.exists():
        _compare(step, json.loads(digests.read_text()), digest_of(kept), notes)
        return
    known = {}
    for number in range(1, STEPS + 1):
        notes.doing(f"training step {number}")
        optimizer.zero_grad()
        model(torch.randn(32, 256, device=device)).square().mean().backward()
        optimizer.step()
        known[number] = digest_of(kept)
        digests.write_text(json.dumps(known))
        kept.commit()
    notes.doing("being killed and restarted")
    os.kill(os.getpid(), signal.SIGKILL)


def _compare(step: int, known: dict[str, str], digest: str, notes: Notes) -> None:
    if step == 0:
        raise Broken("no snapshot was found in the agent's memory after the restart")
    if known[str(step)] != digest:
        raise Broken(f"step {step} was restored with different bits")
    notes.found(f"step {step} of {STEPS} was restored from memory after a kill, bit for bit")


def digest_of(state: Any) -> str:
    """Hash all parameters, buffers and optimizer state, bit by bit."""
    import torch

    hashed = hashlib.sha256()
    tensors = list(state.module.state_dict().values())
    for entries in state.optimizer.state_dict()["state"].values():
        tensors += [value for value in entries.values() if torch.is_tensor(value)]
    for tensor in tensors:
        # As bytes on the host: a comparison of numbers would take -0.0 for 0.0.
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def all_reduce(device: torch.device, value: float) -> float:
    """Return the sum over all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.full((ELEMENTS,), value, device=device)
    dist.all_reduce(tensor)
    return float(tensor[-1].item())  # copying to the host waits for the stream


def check_sum(device: torch.device, rank: int, size: int) -> None:
    total = all_reduce(device, float(rank + 1))
    if total != size * (size + 1) / 2:
        raise Broken(f"an all-reduce of {size} ranks gave {total:g}")


def use(device: torch.device) -> None:
    """Make it the current device, as scripts do; this initializes CUDA."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def backend_of(device: torch.device, given: str) -> str:
    """Register and return the given back end, or else the default one for the device."""
    module, _, name = given.rpartition(":")
    if module:
        importlib.import_module(module).register()
    return name or ("nccl" if device.type == "cuda" else "gloo")


PATHS: dict[str, Callable[[Given], None]] = {
    "zygote": warm,
    "collective": collective,
    "abort": abort,
    "train": train,
    "hang": hang,
    "snapshot": snapshot,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", choices=PATHS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backend", default="")
    parser.add_argument("--notes", type=Path, required=True)
    args = parser.parse_args()
    import torch

    name = args.device if args.device == "cpu" else f"{args.device}:{env.get('LOCAL_RANK', '0')}"
    device = torch.device(name)
    notes = Notes(args.notes, args.path)
    try:
        backend = backend_of(device, args.backend)
        PATHS[args.path](Given(device, backend, notes, args.notes))
    except Exception as error:  # any error is a result of the check
        _fail(args.notes / f"{args.path}.broken", error)


def _fail(file: Path, error: Exception) -> NoReturn:
    """Exit; the first rank to fail writes why, and the failures of the others follow from it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    with contextlib.suppress(FileExistsError), file.open("x") as place:
        place.write(lines[0].rstrip("."))
        file.with_suffix(".traceback").write_text("".join(traceback.format_exception(error)))
    sys.exit(1)


if __name__ == "__main__":
    main()
