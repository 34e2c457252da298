"""The joint all-reduce of a step, and the completion of a step that others have committed."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.unit.fake_mesh import mesh_at
from torchelastic import env
from torchelastic.errors import ConfigError
from torchelastic.tensors.dtensors import zeros_like
from torchelastic.training.group.group import PeerLostError
from torchelastic.training.sharded import mesh
from torchelastic.training.sharded.between import Buckets, FullyShardedModels, buckets
from torchelastic.training.sharded.rehearsal import rehearse
from torchelastic.training.sharded.sharding import FromCopies, FromGradients, Sharding, copies
from torchelastic.training.state import FIRST, TORN, base_of, missing_parts
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
        parts = replica, [self.model], [self.optimizer], NoSnapshots()
        self.sharding = Sharding(*parts, averages=True)
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


# --- the version that a world goes on from --------------------------------------------------------


OLD, NEW = (4, 10), (4, 11)


@pytest.mark.parametrize(
    ("versions", "ready", "replica", "base"),
    [
        pytest.param([FIRST] * 4, "....", 2, FIRST, id="nobody has trained"),
        pytest.param([NEW] * 4, "....", 2, NEW, id="all have committed"),
        pytest.param([NEW, NEW, FIRST, FIRST], "....", 2, NEW, id="a replica is new"),
        pytest.param([NEW, FIRST, FIRST, NEW], "....", 2, NEW, id="parts of two replicas"),
        pytest.param([OLD, OLD, NEW, NEW], "....", 2, NEW, id="a replica was interrupted"),
        pytest.param([NEW, OLD, NEW, FIRST], ".r..", 2, NEW, id="one part can be completed"),
        pytest.param([OLD, OLD, OLD, OLD], "r.rr", 2, OLD, id="nobody has committed"),
        pytest.param([OLD, OLD, (5, 11), (5, 11)], "nn..", 2, (5, 11), id="the next generation"),
        pytest.param([(5, 11), OLD], ".n", 2, (5, 11), id="its first step, completed"),
        pytest.param([(5, 11), OLD], ".r", 2, TORN, id="another step"),
        pytest.param([NEW, OLD, NEW, OLD], "....", 2, TORN, id="a part is behind, and not ready"),
        pytest.param([NEW, FIRST], "..", 2, TORN, id="a part is lost"),
        pytest.param([TORN, NEW, TORN, NEW], "....", 2, TORN, id="a part is torn"),
        pytest.param([TORN] * 2, "..", 2, TORN, id="all are torn"),
        pytest.param([(-1, 30), (-1, 30), NEW, FIRST], "....", 2, (-1, 30), id="a checkpoint"),
        pytest.param([OLD, NEW], "..", 1, NEW, id="replicas of one"),
    ],
)
def test_the_freshest_version_that_is_whole(versions, ready, replica, base):
    """`r`: the worker can complete its next step, of generation 4; `n`: of generation 5."""
    assert base_of(versions, [{"r": 4, "n": 5}.get(one, -1) for one in ready], replica) == base


def test_the_parts_of_the_freshest_version_that_are_lost():
    assert missing_parts([NEW, FIRST, FIRST, OLD], NEW, 2) == [1]
    assert missing_parts([NEW, NEW, OLD], NEW, 2) == []


# --- averages between replicas --------------------------------------------------------------------


def test_buckets_have_one_dtype_and_a_limit():
    small = [torch.zeros(10) for _ in range(5)]
    half = torch.zeros(4, dtype=torch.float16)
    large = torch.zeros(100)
    found = [[one.numel() for one in each] for each in buckets([*small, half, large, half], 120)]
    assert found == [[10, 10, 10], [10, 10], [4], [100], [4]]


def test_gradients_are_averaged_once_at_the_end_of_each_backward_that_reduces():
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(3)]
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    calls, wanted = [], True

    def average(tensor):
        calls.append(tensor.numel())
        tensor.mul_(0.5)

    made = Buckets([*parameters, frozen], average, lambda: wanted)

    def backward():
        for one in parameters:
            one.grad = None
        sum((one * number).sum() for number, one in enumerate(parameters, 1)).backward()
        return [one.grad[0, 0].item() for one in parameters]

    assert backward() == [0.5, 1.0, 1.5]
    wanted = False
    assert backward() == [1.0, 2.0, 3.0]
    made.forget()
    wanted = True
    assert backward() == [0.5, 1.0, 1.5]
    assert calls == [18, 18]
    made.begin()
    frozen.requires_grad_(True)  # in the step
    frozen.sum().backward()
    assert frozen.grad.tolist() == [0.5, 0.5]


# --- copies before a write ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "optimizers", "expected"),
    [
        pytest.param(None, 1, None, id="found out"),
        pytest.param(False, 1, False, id="never"),
        pytest.param(True, 1, True, id="always"),
        pytest.param(None, 2, True, id="several optimizers"),
    ],
)
def test_copies(wanted, optimizers, expected):
    assert copies(wanted, optimizers) is expected


def test_several_optimizers_cannot_do_without():
    with pytest.raises(ConfigError, match="leave copy_before_write=False out"):
        copies(False, 2)


# --- FSDP2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [pytest.param(2, id="none at the root"), pytest.param(1)])
def test_accumulation_is_noticed_whichever_modules_have_the_parameters(inner):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        for part in [*model[:inner], model]:
            fully_shard(part, mesh=mesh)
        models = FullyShardedModels([model])
        assert models.reduces
        model.set_requires_gradient_sync(False)
        assert not models.reduces
    finally:
        dist.destroy_process_group()


def test_zero_gradients_are_sharded_as_their_parameters():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (1,))).weight
        zeros = zeros_like(weight)
        assert (zeros.placements, zeros.device_mesh) == (weight.placements, weight.device_mesh)
        assert (zeros.shape, zeros.stride()) == (weight.shape, weight.stride())
        assert not zeros.requires_grad
        assert not zeros.to_local().any()
    finally:
        dist.destroy_process_group()


# --- the mesh -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "asked", "local_rank", "local_size", "place", "coordinate"),
    [
        pytest.param(2, None, 3, 4, 0, 1, id="two replicas on a node"),
        pytest.param(4, None, 3, 4, 0, 3, id="one replica on a node"),
        pytest.param(2, 2, 2, 4, 0, 0, id="the size is asked for, too"),
        pytest.param(4, 4, 1, 2, 1, 3, id="a replica on two nodes"),
        pytest.param(1, None, 1, 2, 0, 0, id="replicas of one"),
    ],
)
def test_coordinates(size, asked, local_rank, local_size, place, coordinate):
    found = mesh.coordinate_of(
        size, asked=asked, local_rank=local_rank, local_size=local_size, place=place
    )
    assert found == coordinate


@pytest.mark.parametrize(
    ("size", "asked", "message"),
    [(8, None, "pass --replica-size 8"), (4, 2, "--replica-size is 2"), (3, None, "of 3.$")],
)
def test_meshes_that_do_not_fit(size, asked, message):
    with pytest.raises(ConfigError, match=message):
        mesh.coordinate_of(size, asked=asked, local_rank=0, local_size=4, place=0)


@pytest.mark.parametrize(
    ("sizes", "data", "coordinate", "place"),
    [
        ({"shard": 4}, ("shard",), 3, (3, 4, True)),
        ({"shard": 2, "tensor": 2}, ("shard",), 2, (1, 2, True)),
        ({"shard": 2, "tensor": 2}, ("shard",), 3, (1, 2, False)),
        ({"tensor": 4}, ("shard",), 0, (0, 1, True)),
        ({"tensor": 4}, ("shard",), 2, (0, 1, False)),
        ({"stage": 2, "rows": 2, "columns": 2}, ("rows", "columns"), 3, (3, 4, True)),
        ({"stage": 2, "rows": 2, "columns": 2}, ("rows", "columns"), 7, (3, 4, False)),
    ],
)
def test_workers_read_different_samples_along_some_dimensions(sizes, data, coordinate, place):
    replica = SimpleNamespace(coordinate=coordinate)
    mesh._place_data(replica, sizes, data)
    assert (replica.data_rank, replica.data_size, replica.is_recorder) == place


def test_a_dimension_that_is_not_there():
    with pytest.raises(ConfigError, match="'rows', which is not a dimension"):
        mesh._place_data(SimpleNamespace(coordinate=0), {"shard": 2}, ("rows",))


@pytest.mark.parametrize("sizes", [{}, {"shard": 0}, {"shard": 2.0}])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ConfigError, match="sizes of at least 1"):
        mesh.mesh(sizes)


def test_a_process_without_an_agent(monkeypatch):
    monkeypatch.setattr(env, "get", lambda name, default=None: default)
    with pytest.raises(ConfigError, match="start the script with 'torchelastic run'"):
        mesh.mesh({"shard": 2})


# --- the rehearsal of a step ----------------------------------------------------------------------


@pytest.fixture
def one_rank_mesh():
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
def test_a_rehearsed_step_derives_nothing_and_changed_nothing(one_rank_mesh, make, width):
    model = fully_shard(
        nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)), mesh=one_rank_mesh
    )
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


def test_an_optimizer_that_cannot_be_rehearsed_is_left_alone(one_rank_mesh):
    model = fully_shard(nn.Linear(3, 3), mesh=one_rank_mesh)
    rehearse([torch.optim.LBFGS(model.parameters()), torch.optim.Adagrad(model.parameters())])
