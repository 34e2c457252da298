"""Gradients of a step in micro-batches, against those of one process with the whole batch."""

import gc
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map

from tests.unit.data.worlds import examples
from torchelastic.data.batch_policy import BatchPolicy
from torchelastic.errors import ConfigError

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
    assert plain(found[0]) == first
    assert type(found[0]) is type(batch)
    if second is not None:
        assert plain(found[1]) == second


def plain(tree):
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
