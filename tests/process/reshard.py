"""One rank of a world that saves or loads sharded state.

What is loaded is compared with what every rank can compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.process.forked import PATIENCE
from torchelastic.checkpoint import CheckpointStore


def build():
    """A model that no number of ranks divides, sharded over all of them, and its optimizer."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tree_of(model, optimizer, step):
    params, optim = get_state_dict(model, optimizer)
    return {"model": params, "optimizer": optim, "step": step, "replicated": torch.arange(10)}


def full(model):
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@contextmanager
def opened(rank, port, size, directory, writer) -> Iterator[CheckpointStore]:
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    store = CheckpointStore(directory, patience=60, writer=writer)
    yield store
    dist.barrier()
    store.close()


def save(rank: int, port: int, size: int, directory: Path, writer: str) -> str:
    with opened(rank, port, size, directory, writer) as store:
        model, optimizer = build()
        train(model, optimizer, 0, 3)
        own = {"rng": torch.tensor([rank])}
        assert store.save(tree_of(model, optimizer, 3), 3, own=own, together=True)
        store.finish()
        train(model, optimizer, 3, 4)
        # Skipped where another rank is still at the first one.
        store.save(tree_of(model, optimizer, 4), 4, own=own, together=True)
        store.finish()
    return "saved"


def load(rank: int, port: int, size: int, directory: Path) -> tuple[int, list[int] | None]:
    """Which step was loaded, and what of this rank alone."""
    with opened(rank, port, size, directory, "thread") as store:
        model, optimizer = build()
        loaded = store.load(like=tree_of(model, optimizer, 0), together=True)
        tree = loaded.tree
        set_state_dict(
            model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"]
        )
        expected, reference = build()
        step = 0
        for until in (loaded.step, 6):
            train(expected, reference, step, until)
            if step:
                train(model, optimizer, step, until)
            step = until
            for mine, theirs in zip(full(model), full(expected), strict=True):
                torch.testing.assert_close(mine, theirs)
        assert torch.equal(tree["replicated"], torch.arange(10))
        return loaded.step, None if loaded.own is None else loaded.own["rng"].tolist()
