"""The joint all-reduce of a step, and the completion of a step that others have committed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.unit.fake_mesh import mesh_at
from torchelastic.errors import ConfigError
from torchelastic.training.group.group import PeerLostError
from torchelastic.training.sharded.sharding import FromCopies, FromGradients, Sharding
from torchelastic.training.undo import Undo


class Joint:
    """A group that counts its all-reduces; one of a broken world fails."""

    def __init__(self):
        self.count, self.is_broken = 0, False

    def allreduce(self, *_):
        self.count += 1
        if self.is_broken:
            raise PeerLostError("broken")


class NoSnapshots:
    def begin(self, *_): ...

    def before_write(self): ...

    def vote(self):
        return None


class Worker:
    """A sharded training of one plain model, without a process group."""

    def __init__(self, optimizer):
        self.model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimizer = optimizer(self.model.parameters())
        self.undo = Undo([self.model], [self.optimizer], [])
        replica = SimpleNamespace(size=2)
        self.sharding = Sharding(replica, [self.model], [self.optimizer], NoSnapshots())
        self.joint = Joint()
        group = SimpleNamespace(between=None, joint=self.joint)
        world = SimpleNamespace(group=group, generation=0, before_commit=None)
        self.undo.enter(0, None)
        self.sharding.enter(world, self.undo.writes)
        self.before_commit = world.before_commit

    def step(self, body):
        """Take a step as the loop does; return the number of its joint all-reduces."""
        before = self.joint.count
        self.undo.begin((0, 0))
        body()
        self.before_commit()
        self.undo.committed()
        return self.joint.count - before

    def write(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_every_step_has_one_joint_all_reduce():
    worker = Worker(sgd)

    def with_a_collective_after_the_write():
        worker.write()
        worker.undo.before_collective()

    assert worker.step(worker.write) == 1
    assert worker.step(worker.write) == 1
    assert not worker.undo.writes.copying
    # Workers of another replica may have none: with a second one here, both would wait for ever.
    assert worker.step(with_a_collective_after_the_write) == 1
    assert worker.undo.writes.copying
    assert worker.step(worker.write) == 1
    assert worker.step(lambda: None) == 1


def test_an_interrupted_step_joins_again():
    worker = Worker(sgd)
    worker.step(worker.write)
    record = worker.undo.begin((0, 1))
    worker.joint.is_broken = True
    with pytest.raises(PeerLostError):
        worker.write()
    worker.sharding.interrupted()
    worker.undo.undo(record)
    worker.joint.is_broken = False
    assert worker.step(worker.write) == 1


class Factored(torch.optim.SGD):
    """An optimizer whose first write makes state with a layout of its own."""

    nested = False

    def step(self, closure=None):
        weight = self.param_groups[0]["params"][0]
        mesh = weight.device_mesh
        rows = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        self.state[weight]["factors"] = {"rows": rows} if self.nested else rows


@pytest.mark.parametrize("nested", [False, True])
def test_state_that_no_peer_could_take_is_refused_at_the_first_write(nested):
    worker = Worker(sgd)
    with mesh_at(0, (2,)) as mesh:
        part = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
        worker.sharding._optimizers = [Factored([nn.Parameter(part)], lr=0.1)]
        worker.sharding._optimizers[0].nested = nested

        def write():
            worker.write()
            worker.sharding._optimizers[0].step()

        with pytest.raises(ConfigError, match="Factored keeps 'factors' sharded otherwise"):
            worker.step(write)


def test_a_fused_optimizer_completes_a_step_with_its_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    made = []
    hook = optimizer.register_step_pre_hook(lambda *_: made.append(FromGradients(optimizer)))
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)  # writes nothing: its gradients are in `made`
    assert weight.tolist() == [1.0, 1.0, 1.0]
    scaler.update(1.0)
    hook.remove()
    (completion,) = made
    completion.complete()
    assert weight.tolist() == [0.5, 0.5, 0.5]
    assert not hasattr(optimizer, "grad_scale")


def test_copies_of_a_step_have_the_gradients_that_another_optimizer_accumulates():
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (one, other)]
    other.grad = torch.full((2,), 3.0)
    completion = FromCopies(optimizers)
    other.grad = torch.zeros(2)  # rolled back
    completion.complete()
    assert other.grad.tolist() == [3.0, 3.0]
