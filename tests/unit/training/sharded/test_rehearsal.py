"""A worker that waits for its first world rehearses the optimizer's step."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchelastic.training.sharded.rehearsal import rehearse


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def derivations(call):
    """Call it; return how often torch derived a placement meanwhile."""
    names = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name == "propagate_op_sharding_non_cached":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(names)


@pytest.mark.parametrize(
    ("make", "width"),
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 11, id="SGD"),
        pytest.param(lambda p: torch.optim.AdamW(p), 13, id="AdamW"),
        pytest.param(lambda p: torch.optim.AdamW(p, foreach=True), 17, id="foreach"),
    ],
)
def test_a_rehearsed_step_derives_nothing_and_changed_nothing(mesh, make, width):
    model = fully_shard(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)), mesh=mesh)
    optimizer, hooked = make(model.parameters()), []
    before = [one.to_local().clone() for one in model.parameters()]
    hook = register_optimizer_step_pre_hook(lambda *_: hooked.append(1))
    assert derivations(lambda: rehearse([optimizer])) > 0
    hook.remove()
    assert not hooked
    assert not optimizer.state
    for one, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(one.to_local(), old)
    for _ in range(2):
        model(torch.ones(2, width)).sum().backward()
        assert derivations(optimizer.step) == 0


def test_an_optimizer_that_cannot_be_rehearsed_is_left_alone(mesh):
    model = fully_shard(nn.Linear(3, 3), mesh=mesh)
    rehearse([torch.optim.LBFGS(model.parameters()), torch.optim.Adagrad(model.parameters())])
