"""What a step consists of in worlds of any size: shares, micro-batches, learning rates."""

import gc
import warnings
from collections import namedtuple
from functools import cache

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils._pytree import tree_map

from tests.unit.data.worlds import examples
from torchelastic.data.batch_policy import BatchPolicy, MicroBatchSlice
from torchelastic.data.learning_rate import SampleSchedule
from torchelastic.data.shares import Plan, Share, every_nth, turns_left
from torchelastic.errors import ConfigError
from torchelastic.training.torch_state import TorchState

SIZES = st.integers(1, 97)
MICROS = st.none() | st.integers(1, 40)


@st.composite
def policies(draw):
    micro = draw(MICROS)
    if draw(st.booleans()):
        return BatchPolicy.constant_global(draw(st.integers(1, 500)), micro=micro)
    return BatchPolicy.scale_with_world(draw(st.integers(1, 40)), micro=micro)


#: Whatever may be left at the end of an epoch.
REMAINDERS = st.none() | st.integers(1, 500)


@pytest.mark.parametrize(
    ("batch", "size", "shares"),
    [
        (8, 1, (8,)),
        (8, 2, (4, 4)),
        (8, 3, (3, 3, 2)),
        (8, 7, (2, 1, 1, 1, 1, 1, 1)),
        (3, 5, (1, 1, 1, 0, 0)),
        (256, 3, (86, 85, 85)),
    ],
)
def test_the_global_batch_is_shared_out_evenly(batch, size, shares):
    policy = BatchPolicy.constant_global(batch)
    assert policy.batch(size) == batch
    assert policy.shares(size) == policy.shares(size, batch) == shares


@pytest.mark.parametrize(
    ("batch", "micro", "size", "count"),
    [(256, None, 1, 1), (256, 32, 1, 8), (256, 32, 3, 3), (256, 32, 8, 1), (257, 32, 8, 2)],
)
def test_shares_are_cut_into_micro_batches(batch, micro, size, count):
    assert BatchPolicy.constant_global(batch, micro=micro).micro_batches(size) == count


def test_a_rank_with_fewer_samples_than_micro_batches_has_empty_ones():
    policy = BatchPolicy.constant_global(7, micro=1)
    assert policy.cuts(0, 4) == (MicroBatchSlice(0, 1, 4 / 7), MicroBatchSlice(1, 2, 4 / 7))
    assert policy.cuts(3, 4) == (MicroBatchSlice(0, 1, 4 / 7), MicroBatchSlice(1, 1, 0.0))
    assert policy.cuts(4, 5, batch=3) == (MicroBatchSlice(0, 0, 0.0),)


@examples(50)
@given(policies(), SIZES, REMAINDERS)
def test_shares_add_up_and_every_sample_weighs_the_same(policy, size, batch):
    total = batch or policy.batch(size)
    shares = policy.shares(size, batch)
    assert len(shares) == size
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
    count = policy.micro_batches(size, batch)
    for rank, share in enumerate(shares):
        cuts = policy.cuts(rank, size, batch)
        assert len(cuts) == count
        assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
        assert cuts[-1].stop == share
        assert all(cut.stop - cut.start <= (policy.micro or share) for cut in cuts)
        assert policy.weight(rank, size, batch) == pytest.approx(share * size / total)
        for cut in cuts:
            assert cut.scale == pytest.approx((cut.stop - cut.start) * size / total)


def test_the_batch_grows_with_the_world():
    policy = BatchPolicy.scale_with_world(32)
    assert [policy.batch(size) for size in (1, 3, 5)] == [32, 96, 160]
    assert policy.shares(3) == (32, 32, 32)


@pytest.mark.parametrize(
    ("rule", "base_size", "factors"),
    [
        ("linear", 1, {1: 1.0, 4: 4.0}),
        ("linear", 4, {1: 0.25, 4: 1.0, 6: 1.5}),
        ("sqrt", 1, {1: 1.0, 4: 2.0, 9: 3.0}),
        (lambda ratio: 1 + ratio, 2, {2: 2.0, 6: 4.0}),
    ],
)
def test_the_learning_rate_follows_the_batch(rule, base_size, factors):
    policy = BatchPolicy.scale_with_world(8, lr_rule=rule, base_size=base_size)
    assert {size: policy.lr_factor(size) for size in factors} == factors
    assert BatchPolicy.constant_global(8).lr_factor(5) == 1.0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: BatchPolicy.constant_global(0), "The batch is 0"),
        (lambda: BatchPolicy.constant_global(8, micro=0), "micro is 0"),
        (lambda: BatchPolicy.scale_with_world(0), "per_rank is 0"),
        (lambda: BatchPolicy.scale_with_world(8, base_size=0), "base_size is 0"),
        (lambda: BatchPolicy.scale_with_world(8, lr_rule="cubic"), "linear, sqrt, or a function"),
        (lambda: BatchPolicy.constant_global(8).shares(0), "The size of a world is 0"),
        (lambda: BatchPolicy.constant_global(8).shares(2, 0), "The batch is 0"),
    ],
)
def test_policy_refuses_invalid_arguments(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


# --- shares ---------------------------------------------------------------------------------------


EACH_2 = BatchPolicy.scale_with_world(2)
ALL_5 = BatchPolicy.constant_global(5)


@pytest.mark.parametrize(
    ("policy", "position", "length", "size", "drop_last", "spans"),
    [
        (EACH_2, 0, 8, 2, False, [(0, 2, 4), (4, 6, 8)]),
        (EACH_2, 0, 7, 2, False, [(0, 2, 4), (4, 6, 7)]),
        (EACH_2, 0, 7, 2, True, [(0, 2, 4)]),
        (EACH_2, 3, 4, 2, False, [(3, 4, 4)]),
        (EACH_2, 4, 4, 2, False, []),
        (EACH_2, 0, 0, 2, False, []),
        (ALL_5, 0, 11, 2, False, [(0, 3, 5), (5, 8, 10), (10, 11, 11)]),
        (ALL_5, 0, 11, 2, True, [(0, 3, 5), (5, 8, 10)]),
    ],
)
def test_the_steps_of_two_ranks(policy, position, length, size, drop_last, spans):
    first, second = (Plan(position, length, rank, size, policy, drop_last) for rank in range(size))
    assert list(first) == [Share(begin, middle, begin, end) for begin, middle, end in spans]
    assert list(second) == [Share(middle, end, begin, end) for begin, middle, end in spans]
    assert len(first) == len(spans)


class Own(BatchPolicy):
    """A policy of a user's own, with mistakes."""

    def __init__(self, batch, *shares):
        self._samples, self._shares = batch, shares

    def batch(self, size):
        return self._samples

    def shares(self, size, batch=None):
        return self._shares


@pytest.mark.parametrize("policy", [Own(0), Own(4, 4), Own(4, 2, 1), Own(4, 5, -1)])
def test_a_policy_that_loses_samples_is_refused(policy):
    with pytest.raises(ConfigError, match=r"policy\."):
        list(Plan(0, 10, 0, 2, policy))


any_policy = st.one_of(
    st.builds(BatchPolicy.scale_with_world, st.integers(1, 5)),
    st.builds(BatchPolicy.constant_global, st.integers(1, 20)),
)


@examples(50)
@given(
    length=st.integers(0, 60),
    policy=any_policy,
    worlds=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 4)), max_size=6),
)
def test_in_any_sequence_of_worlds_each_position_is_taken_once(length, policy, worlds):
    """`worlds` are sizes, and how many steps each of them commits."""
    taken, position = [], 0
    for size, steps in [*worlds, (3, length)]:
        plans = [list(Plan(position, length, rank, size, policy)) for rank in range(size)]
        for shares in list(zip(*plans, strict=True))[:steps]:
            taken += [at for share in shares for at in range(share.start, share.stop)]
            position = shares[0].end
            assert {share[2:] for share in shares} == {shares[0][2:]}
    assert taken == list(range(length))


@pytest.mark.parametrize(
    ("position", "length", "drop_last", "ranks"),
    [
        (0, 6, False, [[0, 2, 4], [1, 3, 5]]),
        (0, 5, False, [[0, 2, 4], [1, 3, 0]]),
        (0, 5, True, [[0, 2], [1, 3]]),
        (4, 5, False, [[4], [4]]),
        (5, 5, False, [[], []]),
    ],
)
def test_in_turns(position, length, drop_last, ranks):
    found = [list(every_nth(position, length, rank, 2, drop_last=drop_last)) for rank in (0, 1)]
    assert found == ranks
    assert turns_left(position, length, 2, drop_last=drop_last) == len(ranks[0])


# --- gradients of a step in micro-batches, against those of one process with the whole batch ------


Pair = namedtuple("Pair", "x y")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def samples(count):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count, 3, generator=generator, dtype=torch.float64),
        torch.randn(count, 2, generator=generator, dtype=torch.float64),
    )


def gradients(network):
    return [parameter.grad for parameter in network.parameters()]


def whole(inputs, targets):
    network = model()
    nn.functional.mse_loss(network(inputs), targets).backward()
    return gradients(network)


def in_a_world(policy, size, inputs, targets):
    """What DDP makes of it: the mean of the gradients of all ranks."""
    total, added, at = len(inputs), None, 0
    for rank, share in enumerate(policy.shares(size, total)):
        network = model()
        mine = [part[at : at + share] if share else part[:1] for part in (inputs, targets)]
        for micro in policy.accumulate(mine, network, total=total, rank=rank, size=size):
            x, y = micro.data
            micro.backward(nn.functional.mse_loss(network(x), y))
        at += share
        found = gradients(network)
        added = found if added is None else [a + b for a, b in zip(added, found, strict=True)]
    return [gradient / size for gradient in added]


@examples(10)
@given(st.integers(1, 24), st.none() | st.integers(1, 5), st.integers(1, 11))
def test_the_gradient_is_that_of_all_samples_at_any_size(total, micro, size):
    policy = BatchPolicy.constant_global(24, micro=micro)
    inputs, targets = samples(total)
    for ours, theirs in zip(
        in_a_world(policy, size, inputs, targets), whole(inputs, targets), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


class Exchanging(nn.Module):
    """What DDP and fully_shard have for saying whether the next backward exchanges gradients."""

    def __init__(self):
        super().__init__()
        self.require_backward_grad_sync = True


class Sharded(nn.Module):
    require_backward_grad_sync = None

    def set_requires_gradient_sync(self, on):
        self.on = on


def three(network, *more):
    policy = BatchPolicy.constant_global(3, micro=1)
    return policy.accumulate(torch.zeros(3), network, *more, rank=0, size=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile, of torch.jit
def test_gradients_are_exchanged_in_the_last_backward_only():
    network, inside, other = Exchanging(), Exchanging(), Sharded()
    seen = [
        (network.require_backward_grad_sync, inside.require_backward_grad_sync, other.on)
        for _ in three(network, torch.compile(inside, backend="eager"), other)
    ]
    assert seen == [(False,) * 3, (False,) * 3, (True,) * 3]
    assert other.require_backward_grad_sync is None


def test_a_loop_that_is_left_early_leaves_the_exchange_on():
    network = Exchanging()
    for _ in three(network):
        break
    assert network.require_backward_grad_sync


def fails_in_the_middle(network):
    loop = three(network)  # with a name it is held by the error
    for _ in loop:
        raise RuntimeError("a peer is lost")


def test_a_failed_step_whose_error_is_kept_does_not_touch_the_next():
    network = Exchanging()
    with pytest.raises(RuntimeError) as kept:
        fails_in_the_middle(network)
    assert not network.require_backward_grad_sync
    seen = []
    for micro in three(network):
        if micro.samples and len(seen) == 1:
            kept.value.__traceback__ = None
            del kept
            gc.collect()  # ends it, in the middle of the next
        seen.append(network.require_backward_grad_sync)
    assert seen == [False, False, True]
    assert network.require_backward_grad_sync


@pytest.mark.parametrize(
    ("batch", "first", "second"),
    [
        (torch.arange(4), [0, 1], [2, 3]),
        ({"a": torch.arange(4), "b": ["p", "q", "r", "s"]}, {"a": [0, 1], "b": ["p", "q"]}, None),
        (Pair(torch.arange(4), [5, 6, 7, 8]), Pair([0, 1], [5, 6]), Pair([2, 3], [7, 8])),
        ([torch.arange(4), (torch.arange(4),)], [[0, 1], ([0, 1],)], None),
    ],
)
def test_a_batch_is_cut_whatever_it_is_made_of(batch, first, second):
    policy = BatchPolicy.constant_global(4, micro=2)
    found = [micro.data for micro in policy.accumulate(batch, rank=0, size=1)]
    assert plain_tree(found[0]) == first
    assert type(found[0]) is type(batch)
    if second is not None:
        assert plain_tree(found[1]) == second


def plain_tree(tree):
    return tree_map(lambda one: one.tolist() if isinstance(one, torch.Tensor) else one, tree)


def test_anything_else_is_cut_by_a_function():
    policy = BatchPolicy.constant_global(4, micro=2)
    found = policy.accumulate("abcd", rank=0, size=1, cut=lambda batch, a, b: batch[a:b])
    assert [micro.data for micro in found] == ["ab", "cd"]


@pytest.mark.parametrize("batch", [torch.zeros(3), [torch.zeros(4), torch.zeros(3)], 7, []])
def test_a_batch_that_is_not_the_share_is_refused(batch):
    with pytest.raises(ConfigError, match=r"This rank's share is 4 samples, but .* Pass total="):
        BatchPolicy.constant_global(4).accumulate(batch, rank=0, size=1)


def test_placeholder_of_an_empty_share_has_no_weight():
    policy = BatchPolicy.constant_global(4)
    (micro,) = policy.accumulate(torch.ones(1), total=2, rank=2, size=3)
    assert (micro.samples, micro.scale, micro.last) == (0, 0.0, True)
    assert len(micro.data) == 1


# --- schedules by samples, against torch's own with the same samples in equal batches -------------


UNIT = 8


def warmup_then_cosine(optimizer):
    warmup = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of SequentialLR's way to begin
        return lrs.SequentialLR(
            optimizer, [warmup, lrs.CosineAnnealingLR(optimizer, T_max=40)], milestones=[5]
        )


SCHEDULERS = {
    "StepLR": lambda optimizer: lrs.StepLR(optimizer, 3, gamma=0.7),
    "ExponentialLR": lambda optimizer: lrs.ExponentialLR(optimizer, 0.93),
    "CosineAnnealingLR": lambda optimizer: lrs.CosineAnnealingLR(optimizer, T_max=40),
    "OneCycleLR": lambda optimizer: lrs.OneCycleLR(optimizer, 0.5, total_steps=1000),
    "LambdaLR": lambda optimizer: lrs.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": warmup_then_cosine,
}
BATCHES = st.lists(st.integers(0, 40), max_size=12)


def optimizer(rate=0.1):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    made = torch.optim.SGD([{"params": [one]} for one in parameters], lr=rate, momentum=0.9)
    made.param_groups[1]["lr"] = rate / 3 if isinstance(rate, float) else rate.clone()
    return made


def rates(made):
    return [float(group["lr"]) for group in made.param_groups]


def torchs_rates(name, steps):
    """Torch's own scheduler after so many steps."""
    return trajectory(name)[steps]


@cache
def trajectory(name):
    made = optimizer()
    scheduler = SCHEDULERS[name](made)
    made.step()
    found = [rates(made)]
    for _ in range(100):
        scheduler.step()
        found.append(rates(made))
    return found


@pytest.fixture
def world(monkeypatch):
    def of(size):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))

    of(1)
    return of


@pytest.mark.parametrize("name", SCHEDULERS)
@examples(10)
@example(batches=[UNIT] * 29)  # equal ones are the scheduler itself
@given(batches=BATCHES)
def test_the_rate_depends_on_the_samples_alone(name, batches):
    made = optimizer()
    schedule = SampleSchedule(SCHEDULERS[name](made), unit=UNIT)
    for number, batch in enumerate(batches, 1):
        made.step()
        schedule.step(batch)
        assert schedule.samples == sum(batches[:number])
        assert rates(made) == schedule.get_last_lr() == torchs_rates(name, schedule.samples // UNIT)


@pytest.mark.parametrize("name", SCHEDULERS)
@examples(10)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12), data=st.data())
def test_the_factor_of_one_world_leaves_nothing_in_the_next(name, sizes, data):
    """Bitwise, and though everything is loaded into new objects somewhere on the way."""
    policy = BatchPolicy.scale_with_world(UNIT, lr_rule="sqrt", base_size=2)
    made = optimizer()
    schedule = SampleSchedule(SCHEDULERS[name](made), unit=UNIT, policy=policy)
    restart = data.draw(st.integers(0, len(sizes)))
    samples = 0
    with pytest.MonkeyPatch.context() as patch:
        for number, size in enumerate(sizes):
            if number == restart:
                made, schedule = loaded(name, made, schedule, policy)
            patch.setenv("RANK", "0")
            patch.setenv("WORLD_SIZE", str(size))
            made.step()
            expected = [
                rate * policy.lr_factor(size) for rate in torchs_rates(name, samples // UNIT)
            ]
            assert rates(made) == expected
            schedule.step()
            samples += UNIT * size


def loaded(name, old, old_schedule, policy):
    made = optimizer()
    schedule = SampleSchedule(SCHEDULERS[name](made), unit=UNIT, policy=policy)
    made.load_state_dict(old.state_dict())
    made.step()  # so that torch does not warn of the order
    schedule.load_state_dict(old_schedule.state_dict())
    return made, schedule


def test_a_step_uses_the_rate_of_the_world_it_is_taken_in(world):
    made = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    policy = BatchPolicy.scale_with_world(1)
    SampleSchedule(lrs.StepLR(made, 100), unit=1, policy=policy)
    (parameter,) = made.param_groups[0]["params"]
    for size, left in ((2, -1.0), (3, -4.0), (1, -5.0)):
        world(size)
        parameter.grad = torch.ones(1)
        made.step()
        assert parameter.item() == left


def test_a_rate_that_is_a_tensor_stays_that_tensor(world):
    made = optimizer(torch.tensor(0.5))
    held = made.param_groups[0]["lr"]
    policy = BatchPolicy.scale_with_world(UNIT)
    schedule = SampleSchedule(lrs.StepLR(made, 1, gamma=0.5), unit=UNIT, policy=policy)
    world(2)
    made.step()
    assert made.param_groups[0]["lr"] is held
    assert held.item() == 1.0
    schedule.step()  # two units
    assert held.item() == 0.25


def test_a_step_of_a_torch_state_is_undone_with_it(world):
    model = torch.nn.Linear(1, 1)
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    policy = BatchPolicy.scale_with_world(UNIT)
    schedule = SampleSchedule(lrs.StepLR(made, 1, gamma=0.5), unit=UNIT, policy=policy)
    state = TorchState(model=model, optimizer=made, scheduler=schedule)
    world(4)
    made.step()
    snapshot = state.snapshot()
    schedule.step()
    assert schedule.samples == 4 * UNIT
    world(2)
    state.apply(snapshot)
    assert (schedule.samples, schedule.scheduler.last_epoch) == (0, 0)
    assert rates(made) == schedule.get_last_lr() == [2.0]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=0), "unit is 0"),
        (lambda made: SampleSchedule(lrs.ReduceLROnPlateau(made), unit=1), "step it yourself"),
        (
            lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=1).step(),
            "needs the samples of all ranks",
        ),
        (lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=1).step(-1), "samples is -1"),
        (
            lambda made: SampleSchedule(lrs.StepLR(made, 1), unit=9).load_state_dict(
                SampleSchedule(lrs.StepLR(made, 1), unit=8).state_dict()
            ),
            "unit is 9, but this state was saved with 8",
        ),
    ],
)
def test_schedule_refuses_invalid_arguments(wrong, told):
    with pytest.raises(ConfigError, match=told):
        wrong(optimizer())
