"""One rank of a world that saves or loads sharded state: `reshard.py save|load DIRECTORY`.

RANK, WORLD_SIZE and a file store (STORE) say which world. What is loaded is printed as sums, and
compared with what every rank can compute.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchelastic.checkpoint import CheckpointStore

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def build():
    """A model that no number of ranks divides, sharded over all of them, and its optimizer."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (SIZE,))
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


def save(store):
    model, optimizer = build()
    train(model, optimizer, 0, 3)
    own = {"rng": torch.tensor([RANK])}
    assert store.save(tree_of(model, optimizer, 3), 3, own=own, together=True)
    store.finish()
    train(model, optimizer, 3, 4)
    # Skipped where another rank is still at the first one.
    store.save(tree_of(model, optimizer, 4), 4, own=own, together=True)
    store.finish()


def load(store):
    model, optimizer = build()
    loaded = store.load(like=tree_of(model, optimizer, 0), together=True)
    tree = loaded.tree
    set_state_dict(
        model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"]
    )
    expected, reference = build()
    train(expected, reference, 0, loaded.step)
    for mine, theirs in zip(full(model), full(expected), strict=True):
        torch.testing.assert_close(mine, theirs)
    train(model, optimizer, loaded.step, 6)
    train(expected, reference, loaded.step, 6)
    for mine, theirs in zip(full(model), full(expected), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(tree["replicated"], torch.arange(10))
    own = None if loaded.own is None else loaded.own["rng"].tolist()
    print(f"rank {RANK} of {SIZE} loaded step {loaded.step}, own {own}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=SIZE
    )
    store = CheckpointStore(sys.argv[2], patience=60, writer=sys.argv[3])
    (save if sys.argv[1] == "save" else load)(store)
    dist.barrier()
    store.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
