"""One test for each thing we use of torch's inside; run on a new release first."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torchelastic import torch_private
from torchelastic.errors import ConfigError
from torchelastic.torch_private import version_of


def init_alone():
    soon = timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=soon)


@pytest.fixture
def group():
    """torch's default group, of gloo and of one rank."""
    init_alone()
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def ddp(group):
    return DistributedDataParallel(nn.Linear(2, 3), bucket_cap_mb=1)


def backward_of(model):
    model(torch.ones(1, 2)).sum().backward()


def test_each_name_has_a_test():
    names = [name for name in vars(torch_private) if re.match("[a-zA-Z]", name)]
    ours = re.findall(r"^(?:def )?(\w+)[(:]", Path(torch_private.__file__).read_text(), re.M)
    tested = Path(__file__).read_text()
    assert [name for name in names if name in ours and name not in tested] == []
    assert len(ours) > 20


# --- tensors and modules --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_half_precision_do_not_overflow(dtype):
    assert torch_private.norms_of([torch.full((4,), 60000, dtype=dtype)])[0] == 120000


def test_copy_all_copies_and_tells_of_what_does_not_fit():
    rooms = [torch.zeros(2), torch.zeros(3)]
    torch_private.copy_all(rooms, [torch.ones(2), torch.ones(3)])
    assert [one.sum() for one in rooms] == [2, 3]
    with pytest.raises(RuntimeError):
        torch_private.copy_all(rooms, [torch.ones(5), torch.ones(3)])
    with pytest.raises(TypeError):
        torch_private.copy_all(rooms, [None, None])


def test_add_all_adds_in_place():
    sums = [torch.ones(2), torch.ones(3)]
    torch_private.add_all(sums, [torch.ones(2), torch.ones(3)])
    assert [one.sum() for one in sums] == [4, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_large_values_do_not_overflow(dtype):
    norms = torch_private.norms_of([torch.full((4,), 60000.0, dtype=dtype), torch.zeros(2)])
    assert [round(float(one), -3) for one in norms] == [120000, 0]


def test_version_of_a_tensor_grows_with_each_write():
    tensor = torch.zeros(2)
    seen = [version_of(tensor)]
    tensor.add_(1)
    seen.append(version_of(tensor))
    tensor[0] = 3
    seen.append(version_of(tensor))
    assert seen == sorted(set(seen))


def test_an_optimizer_step_raises_the_version_of_its_parameters():
    for foreach in (False, True):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        before = version_of(parameter)
        torch.optim.AdamW([parameter], foreach=foreach).step()
        assert version_of(parameter) > before


def test_running_statistics_change_without_a_trace():
    """If that is mended, buffers of NormBase need no care of their own."""
    layer = nn.BatchNorm1d(2)
    assert isinstance(layer, torch_private.NormBase)
    assert isinstance(nn.SyncBatchNorm(2), torch_private.NormBase)
    mean, before = layer.running_mean, layer.running_mean.clone()
    version = version_of(mean)
    layer(torch.randn(4, 2))
    assert layer.running_mean is mean
    assert not mean.equal(before)
    assert version_of(mean) == version


def test_buffers_of_a_module_are_the_dictionary_that_it_uses():
    layer = nn.BatchNorm1d(2)
    torch_private.buffers_of(layer)["running_mean"] = torch.full((2,), 7.0)
    assert layer.running_mean.tolist() == [7, 7]
    assert dict(layer.named_buffers()).keys() == torch_private.buffers_of(layer).keys()


def test_parameters_and_children_of_a_module_are_those_that_it_uses():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2)))
    first, second = torch_private.children_of(model).values()
    assert [first, second] == [*model.children()]
    assert torch_private.own_parameters_of(first) == {"weight": first.weight, "bias": None}
    assert not torch_private.own_parameters_of(second)
    first.weight = nn.Parameter(torch.ones(2, 2))
    assert torch_private.own_parameters_of(first)["weight"] is first.weight


def test_a_state_dict_carries_the_versions_of_its_layers():
    state = nn.BatchNorm1d(2).state_dict()
    versions = torch_private.layer_versions(state)
    assert versions[""]["version"] == 2
    assert torch_private.layer_versions({}) is None
    torch_private.set_layer_versions(state, {"": {"version": 1}})
    assert torch_private.layer_versions(state) == {"": {"version": 1}}


def test_a_part_of_a_dtensor_is_memory_with_an_offset(group):
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    torch_private.local_of(tensor).fill_(5)
    assert tensor.full_tensor().sum() == 30
    other = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    assert hash(torch_private.spec_of(other)) == hash(torch_private.spec_of(tensor))
    assert torch_private.spec_of(other) == torch_private.spec_of(tensor)


def test_fsdp2_on_tensor_parallelism_makes_strided_shards():
    assert torch_private.strided_shard()(0, split_factor=2).split_factor == 2


def test_parameters_of_fsdp1_are_known():
    assert not torch_private.is_of_fsdp1(nn.Parameter(torch.ones(1)))


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="sharded train needs it")
def test_fsdp2_tells_its_parameters_and_forgets_gradients(group, monkeypatch):
    stream = torch.cpu.Stream()  # `tests.late_backend` may have put another one there
    monkeypatch.setattr(torch.cpu, "current_stream", lambda _=None: stream)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model[0], mesh=(mesh := init_device_mesh("cpu", (1,))))
    fully_shard(model, mesh=mesh)
    managed = [one for part in (model[0], model) for one in torch_private.fsdp_parameters(part)]
    assert {id(one) for one in managed} == {id(one) for one in model.parameters()}
    assert torch_private.fsdp_reduces(model)
    assert not torch_private.fsdp_has_run(model)
    model.set_requires_gradient_sync(False)
    assert not torch_private.fsdp_reduces(model)
    model(torch.ones(1, 2)).sum().backward()
    assert torch_private.fsdp_has_run(model)
    for part in (model[0], model):
        torch_private.fsdp_forget_gradients(part)
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()
    assert model[1].bias.grad.to_local().item() == 1  # and not 2


def test_a_group_of_nccl_needs_a_device(group):
    assert "cpu" in torch_private.device_types_of(group)
    soon = timedelta(seconds=20)
    with pytest.raises(ConfigError, match="not 'mpi'"):
        torch_private.native_group("mpi", dist.HashStore(), 0, 1, soon)
    with pytest.raises(ConfigError, match="NCCL needs a GPU"):
        torch_private.native_group("nccl", dist.HashStore(), 0, 1, soon)


def test_a_scaler_keeps_its_numbers_where_we_look():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert all(name in vars(scaler) for name in torch_private.SCALER_TENSORS)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scale, growth = (vars(scaler)[name] for name in torch_private.SCALER_TENSORS)
    assert (scale.item(), growth.item()) == (8, 0)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    torch_private.scaler_stages(scaler).clear()
    scaler.unscale_(optimizer)


# --- autograd -------------------------------------------------------------------------------------


def test_backward_goes_through_the_engine_that_is_set():
    begun, nodes, ended = [], [], []

    class Engine(torch_private.Engine):
        def run_backward(self, *args, **kwargs):
            begun.append(kwargs.get("accumulate_grad"))
            return super().run_backward(*args, **kwargs)

    tensor = torch.ones(1, requires_grad=True)

    def at_gradient(_):
        nodes.append(torch_private.current_node())
        for number in range(3):
            torch_private.at_end_of_backward(lambda number=number: ended.append(number))

    tensor.register_hook(at_gradient)
    torch_private.use_engine(Engine)
    try:
        (2 * tensor).sum().backward()
    finally:
        torch_private.use_engine(torch_private.Engine)
    (2 * tensor).sum().backward()
    assert begun == [True]
    assert None not in nodes
    assert torch_private.current_node() is None
    assert ended == [0, 1, 2] * 2, "callbacks do not run in the order in which they were queued"


def test_backward_raises_the_error_of_a_callback():
    def refuse():
        raise ZeroDivisionError

    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: torch_private.at_end_of_backward(refuse))
    with pytest.raises(ZeroDivisionError):
        tensor.sum().backward()


def test_one_function_of_torch_enters_the_engine():
    assert torch_private.RUN_BACKWARD is not None
    assert torch_private.RUN_BACKWARD.co_filename.endswith("torch/autograd/graph.py")


# --- process groups -------------------------------------------------------------------------------


@pytest.fixture
def making():
    """Have torch make its groups by this function."""
    yield torch_private.make_gloo_of
    torch_private.make_gloo_of(torch_private.Gloo)
    torch_private.count_groups_anew()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_torch_makes_its_gloo_by_the_name_that_we_replace(making):
    given = []

    class Gloo(torch_private.Gloo):
        def __init__(self, *args, **kwargs):
            given.append(kwargs)
            super().__init__(*args, **kwargs)

    making(Gloo)
    init_alone()
    assert torch_private.groups() == [dist.group.WORLD]
    (options,) = given
    assert [name for name, value in options.items() if value] == ["timeout"]


def test_a_group_that_could_not_be_made_is_counted(making):
    init_alone()
    first = torch_private.name_of_group(dist.group.WORLD)
    assert first
    assert torch_private.name_of_group(object()) == ""
    dist.destroy_process_group()
    assert torch_private.groups() == []
    making(lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        init_alone()
    making(torch_private.Gloo)
    torch_private.count_groups_anew()
    init_alone()
    assert torch_private.name_of_group(dist.group.WORLD) == first


def test_a_group_counts_its_collectives_and_tells_its_backend(group):
    dist.all_reduce(torch.ones(1))
    before = torch_private.launched_in(group)
    dist.all_reduce(torch.ones(1))
    assert torch_private.launched_in(group) == before + 1
    assert hasattr(torch_private.backend_of(group, "cpu"), "allreduce")
    assert torch_private.count_groups() == len(torch_private.groups())


def test_a_gloo_serves_a_group_of_cpp_and_tells_its_timeout():
    store: torch_private.Store = torch_private.PrefixStore("here", dist.HashStore())
    assert torch_private.TCPStore is dist.TCPStore
    gloo = torch_private.Gloo(store, 0, 1, timeout=timedelta(seconds=17))
    assert torch_private.timeout_of(gloo) == timedelta(seconds=17)
    made = torch_private.group_of_backend(store, gloo, 0, 1)
    room = [torch.zeros(1)]
    made.allgather_into_tensor_coalesced(room, [torch.ones(1)]).wait()
    assert room[0] == 1


def test_collectives_run_in_a_group_that_torch_distributed_does_not_know():
    store, soon = dist.HashStore(), timedelta(seconds=20)

    def rank(number):
        gloo = torch_private.Gloo(store, number, 2, timeout=soon)
        group = torch_private.group_of_backend(store, gloo, number, 2)
        parts, whole, told = torch.zeros(2), torch.zeros(2), torch.tensor([float(number)])
        own = torch.tensor([10.0 * number, 10.0 * number + 1])
        torch_private.begin_all_to_all(group, parts, own, [1, 1], [1, 1]).wait()
        torch_private.begin_all_gather(group, whole, parts.sum().view(1)).wait()
        torch_private.begin_broadcast(group, told, 1).wait()
        return [*parts.tolist(), *whole.tolist(), *told.tolist()]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [[0, 10, 10, 12, 1], [1, 11, 10, 12, 1]]


def test_a_receive_from_anybody_tells_the_source():
    store, soon = dist.HashStore(), timedelta(seconds=20)
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda rank: torch_private.Gloo(store, rank, 2, timeout=soon), range(2))
        first, second = made
    received = torch.zeros(1)
    receiving = first.recv_anysource([received], 7)
    second.send([torch.ones(1)], 0, 7).wait()
    receiving.wait()
    assert (torch_private.source_of(receiving), received) == (1, 1)


def test_a_future_raises_what_its_function_raises():
    future = torch.futures.Future()
    torch_private.unwrap_by(future, lambda value: 1 / value)
    future.set_result(0)
    with pytest.raises(ZeroDivisionError):
        future.wait()


def test_work_of_a_future_is_done_when_it_is():
    future = torch.futures.Future()
    future.set_result([torch.ones(1)])
    work = torch_private.work_of(future)
    assert work.wait()
    assert work.get_future().value()[0] == 1


# --- DistributedDataParallel ----------------------------------------------------------------------


def test_parameters_of_ddp_have_numbers(ddp):
    parameters, sparse = torch_private.parameters_of_ddp(ddp)
    assert [id(one) for one in parameters] == [id(one) for one in ddp.module.parameters()]
    assert sparse == [False, False]


def test_assign_buckets_fills_each_up_to_its_limit():
    parameters = [torch.zeros(4) for _ in range(4)]
    made = torch_private.assign_buckets(parameters, [16, 32], [False] * 4)
    assert sorted(map(sorted, made)) == [[0], [1, 2], [3]]


def test_bucket_limits_are_those_asked_for(ddp, group):
    assert torch_private.bucket_limits(ddp) == [1 << 20]
    assert torch_private.limits_by_hand(ddp) == []
    first, others = torch_private.bucket_limits(DistributedDataParallel(nn.Linear(1, 1)))
    assert 0 < first < others


def test_a_reducer_is_shown_a_group_to_lay_out_its_buckets(ddp, group):
    heard = []

    class Group(dist.ProcessGroup):
        def broadcast(self, tensors, options=None):
            heard.append(tensors[0].tolist())
            future = torch.futures.Future()
            future.set_result(tensors)
            return torch_private.work_of(future)

        def getBackendName(self):
            return "contract"

    assert not torch_private.rebuild_buckets(ddp), "no gradient has come yet"
    backward_of(ddp)
    stand_in = Group(0, 1)
    torch_private.show_group(ddp, stand_in)
    assert not torch_private.has_rebuilt(ddp)
    assert torch_private.rebuild_buckets(ddp)
    assert torch_private.has_rebuilt(ddp)
    torch_private.show_group(ddp, group)
    numbers, sizes = heard
    assert (sorted(numbers[:-1]), numbers[-1], sizes) == ([0, 1], 1, [2])
    backward_of(ddp)
    # As if a backward had been left half-way: the numbers come in their order, and it goes on.
    del heard[:]
    torch_private.forget_backward(ddp)
    torch_private.count_all_ready(ddp)
    torch_private.show_group(ddp, stand_in)
    assert torch_private.rebuild_buckets(ddp)
    torch_private.show_group(ddp, group)
    assert heard[0][:-1] == [0, 1]
    backward_of(ddp)


def test_renew_reducer_keeps_hooks_and_the_static_graph(group, recwarn):
    called = []

    def hook(state, bucket):
        called.append(state)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DistributedDataParallel(nn.Linear(2, 3), static_graph=True)
    ddp.register_comm_hook("mine", hook)
    backward_of(ddp)
    before = ddp.reducer
    torch_private.renew_reducer(ddp)
    assert ddp.reducer is not before
    assert ddp.static_graph
    backward_of(ddp)
    assert called == ["mine", "mine"]
    assert [str(one.message) for one in recwarn if "static" in str(one.message)] == []


def test_the_excepthook_below_those_of_process_groups(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):
        init_alone()
        dist.destroy_process_group()
    assert sys.excepthook.__module__ == "torch.distributed.distributed_c10d"
    assert torch_private.excepthook_below(sys.excepthook) is sys.__excepthook__
