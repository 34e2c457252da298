"""A program as one wrote it for release 0.1, its checkpoints and its own metrics included.

user01.py DIRECTORY STEPS
"""

import io
import sys

import numpy
import torch
import torch.distributed as dist

import torchelastic
import torchelastic.distributed as edist
import torchelastic.metrics as metrics
from torchelastic import SimpleWorkerStats
from torchelastic.checkpoint import FileSystemCheckpointManager, set_checkpoint_manager
from torchelastic.p2p import CoordinatorP2P
from torchelastic.utils.data import CyclingIterator, ElasticDistributedSampler

STEPS = int(sys.argv[2])
DATASET = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))


class UserState(torchelastic.State):
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.epoch = self.start_index = self.steps = 0
        self.dist_model = self.data_iter = None

    def sync(self, world_size, rank):
        source, self.steps = edist.all_gather_return_max_long(self.steps)
        buffer = io.BytesIO()
        torch.save(self.capture_snapshot(), buffer)
        data = edist.broadcast_binary(numpy.frombuffer(buffer.getvalue(), numpy.uint8), source)
        self.apply_snapshot(torch.load(io.BytesIO(data.tobytes()), weights_only=True))
        check_collectives(world_size, rank)
        self.dist_model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.data_iter = CyclingIterator(100, self.batches, self.epoch)

    def batches(self, epoch):
        start = self.start_index if epoch == self.epoch else 0
        sampler = ElasticDistributedSampler(DATASET, start_index=start)
        sampler.set_epoch(epoch)
        for index in sampler:
            yield epoch, DATASET[index]

    def capture_snapshot(self):
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "position": [self.epoch, self.start_index, self.steps],
        }

    def apply_snapshot(self, snapshot):
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epoch, self.start_index, self.steps = snapshot["position"]

    def should_save_checkpoint(self, rank):
        return self.steps % 4 == 0


def check_collectives(world_size, rank):
    """Each of them between real ranks."""
    last = world_size - 1
    assert edist.is_distributed_training_run()
    assert edist.get_rank() == rank
    assert edist.broadcast_long(rank + 10, last) == last + 10
    assert edist.broadcast_bool(rank == 0, 0) is True
    assert edist.broadcast_float_list([rank + 0.1, 2.5], last) == [last + 0.1, 2.5]
    assert edist.all_gather_return_max_long(-rank) == (0, 0)
    large = numpy.full(9 << 20, rank, numpy.uint8) if rank == last else None
    received = edist.broadcast_binary(large, last)
    assert received.size == 9 << 20
    assert (received == last).all()
    model = torch.nn.BatchNorm1d(2)
    model.running_mean.fill_(rank)
    edist.broadcast_model(last, model)
    assert model.running_mean.tolist() == [last, last]


@metrics.prof(group="user")
def train_step(state):
    if state.steps >= STEPS:
        raise StopIteration
    epoch, sample = next(state.data_iter)
    if epoch != state.epoch:
        state.epoch, state.start_index = epoch, 0
    loss = state.dist_model(sample[None]).square().sum()
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.start_index += dist.get_world_size()
    state.steps += 1
    return state, SimpleWorkerStats(progress_rate=1.0)


if __name__ == "__main__":
    metrics.configure(metrics.ConsoleMetricHandler(), "user")
    set_checkpoint_manager(FileSystemCheckpointManager(sys.argv[1]))
    state = torchelastic.train(CoordinatorP2P("gloo"), train_step, UserState())
    total = sum(parameter.sum().item() for parameter in state.model.parameters())
    print(
        f"steps {state.steps} epoch {state.epoch} index {state.start_index} sum {total}", flush=True
    )
