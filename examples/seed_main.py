"""The program of the usage page, with a `MyState` and a `train_step` that learn something.

With an etcd on this machine:

    python examples/seed_main.py

Without one, each process is a node, and the first process hosts the rendezvous:

    URL="tcp://localhost:29400/1234?min_workers=1&max_workers=2"
    python examples/seed_main.py "$URL" & python examples/seed_main.py "$URL"

Kill one of them: the other continues. Start it again: it joins.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import torchelastic
import torchelastic.distributed as edist
from torchelastic.p2p import CoordinatorP2P

STEPS = 200
BATCH = 64


class MyState(torchelastic.State):
    """A small regression: model, optimizer, and how many steps they have seen."""

    def __init__(self):
        torch.manual_seed(0)  # every worker builds the same S_0
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.step = 0

    def sync(self):
        """Everyone takes over what the worker with the most steps has."""
        source, self.step = edist.all_gather_return_max_long(self.step)
        edist.broadcast_model(source, self.model)
        for momentum in self.momenta():
            if edist.is_distributed_training_run():
                dist.broadcast(momentum, src=source)

    def snapshot(self):
        tensors = [*self.model.parameters(), *self.momenta()]
        return {"step": self.step, "tensors": [tensor.detach().clone() for tensor in tensors]}

    def apply(self, snapshot):
        self.step = snapshot["step"]
        for tensor, saved in zip(
            [*self.model.parameters(), *self.momenta()], snapshot["tensors"], strict=True
        ):
            tensor.data.copy_(saved)

    def momenta(self):
        """SGD's memory, which it makes in its first step; zeros mean the same."""
        for parameter in self.model.parameters():
            slot = self.optimizer.state[parameter]
            if slot.get("momentum_buffer") is None:
                slot["momentum_buffer"] = torch.zeros_like(parameter)
            yield slot["momentum_buffer"]


def batch_of(step):
    """The whole batch of a step: whatever the size of the world, it is the same."""
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def train_step(state):
    if state.step == STEPS:
        raise StopIteration
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets = (tensor[rank::size] for tensor in batch_of(state.step))

    loss = (state.model(inputs) - targets).square().sum() / BATCH
    state.optimizer.zero_grad(set_to_none=False)
    loss.backward()
    dist.all_reduce(loss := loss.detach())
    for parameter in state.model.parameters():
        dist.all_reduce(parameter.grad)  # sums: the loss was divided by the whole batch
    state.optimizer.step()
    state.step += 1
    time.sleep(0.02)  # an accelerator would be busy now

    if rank == 0 and state.step % 20 == 0:
        print(f"step {state.step}: loss {loss.item():.4f} on {size} workers", flush=True)


if __name__ == "__main__":
    min_workers = 1
    max_workers = 1
    run_id = 1234
    etcd_endpoint = "localhost:2379"
    init_method = (
        f"etcd://{etcd_endpoint}/{run_id}?min_workers={min_workers}&max_workers={max_workers}"
    )
    if len(sys.argv) > 1:
        init_method = sys.argv[1]  # which says how many workers, too

    state = MyState()

    coordinator = CoordinatorP2P(
        c10d_backend="gloo",
        init_method=init_method,
        max_num_trainers=max_workers,
        process_group_timeout=60000,
    )

    torchelastic.train(coordinator, train_step, state)
    print(f"done after {state.step} steps", flush=True)
