"""One worker's loop over fixed micro-batches: gradients, generators, buffers, refusals."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.unit.fake_mesh import mesh_at
from torchelastic import TorchState
from torchelastic.data import BatchPolicy, DataLoader, ElasticSampler
from torchelastic.data.fixed_batch import SumTree
from torchelastic.errors import ConfigError
from torchelastic.training import fixed_steps
from torchelastic.training.fixed_sums import Gradients, Held, StepSum, add
from torchelastic.training.state_checks import Traces

DATA = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))


def made(model=None, count=4):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    policy = BatchPolicy.fixed(micro=2, count=count)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TorchState(model=model, optimizer=optimizer, policy=policy)
    return model, policy, state


def loop(model, policy, batch=DATA, **how):
    for micro in policy.accumulate(batch, model, **how):
        micro.backward(model(micro.data).pow(2).mean())


def world_of(*took):
    """A world of workers that need so many microseconds for a micro-batch."""
    return SimpleNamespace(between=None, tell_all=lambda own: [[one, *own[1:]] for one in took])


def gradients(model) -> Gradients:
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def test_gradient_is_the_mean_over_all_samples():
    model, policy, _ = made(nn.Linear(3, 1))
    loop(model, policy)
    found = gradients(model)
    model.zero_grad()
    loss = model(DATA).pow(2).mean()
    loss.backward()
    torch.testing.assert_close(found, gradients(model))
    assert policy.loss == pytest.approx(float(loss.detach()))


def test_partial_step_weighs_samples_and_not_micro_batches():
    model, policy, _ = made(nn.Linear(3, 1))
    loop(model, policy, DATA[:5], total=5)
    found = gradients(model)
    model.zero_grad()
    model(DATA[:5]).pow(2).mean().backward()
    torch.testing.assert_close(found, gradients(model))


def test_random_numbers_depend_on_the_step_and_not_on_what_was_drawn_before():
    model, policy, state = made()
    found = []
    for drawn in (0, 5):
        torch.rand(drawn)
        before = torch.get_rng_state(), random.getstate()
        loop(model, policy)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        found.append(gradients(model))
        model.zero_grad()
        state._fixed.begin()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    vars(state)["step"] = 1
    loop(model, policy)
    assert not torch.equal(found[0][0], gradients(model)[0])


def test_loader_follows_shares_that_change_with_a_world_of_the_same_size(monkeypatch):
    """A batch that the loader has begun, but nobody has taken, is for the world before."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, policy, _ = made()
    dataset = torch.arange(32.0)
    batches = iter(DataLoader(dataset, sampler=ElasticSampler(dataset), policy=policy))
    assert len(next(batches)) == policy.shares(2)[0] == 4
    policy.steps.enter(world_of(1000, 9000))
    assert len(next(batches)) == policy.shares(2)[0] == 8


def test_steps_taken_again_keep_the_shares_of_the_world_before():
    """Which of two workers was wrong shows only if each runs its own micro-batches again."""
    _, policy, _ = made()
    steps = policy.steps
    steps.enter(world_of(1000, 1000))
    steps.traces = Traces()
    steps.traces.again(20, digest=1)
    steps.enter(world_of(1000, 9000))
    assert steps.speeds(2) == (1.0, 1.0)
    steps.traces.certified(20)
    steps.enter(world_of(1000, 9000))
    assert steps.speeds(2) != (1.0, 1.0)


def test_measured_shares_begin_with_the_next_step():
    """This step may have another loop over the same batch."""
    _, policy, _ = made()
    steps = policy.steps
    steps.enter(world_of(1000, 1000))
    steps.tell_all = world_of(1000, 9000).tell_all
    turn = steps.turn
    steps._measure(2)
    assert (steps.speeds(2), steps.turn) == ((1.0, 1.0), turn)
    steps.begin()
    assert steps.speeds(2) != (1.0, 1.0)
    assert steps.turn == turn + 1


def test_step_without_a_loop_has_no_loss():
    """Not that of the step before: a guard would judge it again."""
    model, policy, _ = made(nn.Linear(3, 1))
    policy.steps.begin()
    loop(model, policy)
    assert policy.steps.loss_of_step == policy.loss
    policy.steps.begin()
    assert policy.steps.loss_of_step is None


def test_buffers_are_those_after_the_first_micro_batch():
    model, policy, _ = made(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    alone = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    alone.load_state_dict(model.state_dict())
    loop(model, policy)
    alone(DATA[:2])
    for one, other in zip(model.buffers(), alone.buffers(), strict=True):
        assert torch.equal(one, other)


def test_parameter_that_no_micro_batch_uses_has_no_gradient():
    model, policy, _ = made(nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]))
    for micro in policy.accumulate(DATA, model):
        micro.backward(model[0](micro.data).mean())
    assert [one is None for one in gradients(model)] == [False, False, True, True]


def test_sums_have_the_same_bits_in_any_order_of_micro_batches():
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(64, generator=generator) * 10 ** (one % 5) for one in range(7)]
    used = torch.ones(1)
    found = []
    for order in (range(7), reversed(range(7)), [3, 0, 6, 2, 5, 1, 4]):
        held: Held = {}
        for number in order:
            value = StepSum([leaves[number].clone()], torch.zeros(()), used)
            add(SumTree(7), held, (number, number + 1), value)
        (whole,) = held.values()
        found.append(whole.gradients[0])
    assert all(torch.equal(one, found[0]) for one in found)
    assert not torch.equal(sum(leaves), found[0]), "the order of additions matters here"


def test_bits_of_held_micro_batches_survive_packing():
    for numbers in ([], [0], [61, 62, 63], [5, 124, 199]):
        assert fixed_steps._unpacked(fixed_steps._packed(numbers, 200)) == numbers


def test_old_gradients_are_refused():
    model, policy, _ = made()
    model(DATA).sum().backward()
    with pytest.raises(ConfigError, match="zero_grad"):
        loop(model, policy)


def test_gradients_are_scaled_and_the_loss_is_not_with_a_grad_scaler():
    model, policy, _ = made(nn.Linear(3, 1))
    loop(model, policy)
    plain, loss = gradients(model), policy.loss
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for micro in policy.accumulate(DATA, model):
        micro.backward(model(micro.data).pow(2).mean(), scaler)
    torch.testing.assert_close(gradients(model), [8 * one for one in plain])
    assert policy.loss == loss


def test_backward_of_the_loss_itself_is_refused():
    model, policy, _ = made(nn.Linear(3, 1))
    micros = policy.accumulate(DATA, model)
    model(next(micros).data).pow(2).mean().backward()
    with pytest.raises(ConfigError, match=r"micro\.backward\(loss, scaler\)"):
        next(micros)


def test_second_backward_of_a_micro_batch_is_refused():
    model, policy, _ = made()
    for micro in policy.accumulate(DATA, model):
        micro.backward(model(micro.data).mean())
        with pytest.raises(ConfigError, match="twice"):
            micro.backward(model(micro.data).mean())
        break


def test_gradients_that_fsdp_does_not_reduce_are_refused():
    model, policy, state = made()
    replica = SimpleNamespace(size=1, data_rank=0, data_size=1)
    state._fixed.sharded = fixed_steps.InReplica(replica, lambda: False, lambda: None)
    with pytest.raises(ConfigError, match="set_requires_gradient_sync"):
        loop(model, policy)


def test_loss_of_a_placeholder_does_not_count():
    micro = fixed_steps._FixedMicro(DATA, samples=0, scale=0.0, last=False)
    micro.backward(torch.tensor(float("nan"), requires_grad=True))
    assert micro.loss == 0


def test_sharded_model_of_a_script_is_refused():
    with mesh_at(0, (2,)) as mesh:
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(TypeError, match=r"torchelastic\.train, over torchelastic\.mesh"):
            TorchState(model=model, policy=BatchPolicy.fixed(micro=2, count=2))


def test_batch_of_another_length_is_refused():
    model, policy, _ = made()
    with pytest.raises(ConfigError, match="8 samples"):
        loop(model, policy, DATA[:7])


def test_loop_without_models_is_refused():
    _, policy, _ = made()
    with pytest.raises(ConfigError, match=r"accumulate\(batch, model\)"):
        policy.accumulate(DATA)


def test_model_with_statistics_over_all_workers_is_refused():
    model, policy, _ = made(nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2)))
    with pytest.raises(ConfigError, match="SyncBatchNorm"):
        policy.accumulate(DATA, model)


def reduced_loop(model, policy):
    for micro in policy.accumulate(DATA, model):
        loss = model(micro.data).mean()
        dist.all_reduce(loss.detach())
        micro.backward(loss)


def test_collective_in_the_loop_is_refused():
    model, policy, _ = made()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="called a collective"):
            reduced_loop(model, policy)
    finally:
        dist.destroy_process_group()


def test_other_policies_are_refused_as_part_of_a_state():
    with pytest.raises(TypeError, match=r"BatchPolicy\.fixed"):
        TorchState(model=nn.Linear(1, 1), policy=BatchPolicy.constant_global(8))


def test_digest_of_a_state_tells_one_bit():
    model, _, state = made()
    before = state.digest()
    assert state.digest() == before
    with torch.no_grad():
        next(model.parameters()).view(-1).view(torch.int32)[0] ^= 1
    assert state.digest() != before
