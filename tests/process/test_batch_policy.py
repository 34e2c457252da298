"""Unequal shares with real processes and DDP: the gradient is that of one process, at any size."""

import pytest
import torch

from tests.process import forked
from tests.process.weighted_ddp import (
    CASES,
    alone,
    in_a_resident_world,
    in_a_sharded_world,
    in_every_world,
)

pytestmark = pytest.mark.usefixtures("forks")

LARGEST = 5


def check(answers, sizes):
    for size in sizes:
        for case in CASES:
            found = [answers[rank][size, case] for rank in range(size)]
            assert all(one == found[0] for one in found)  # bitwise
            for ours, theirs in zip(found[0], alone(case), strict=True):
                torch.testing.assert_close(
                    torch.tensor(ours, dtype=torch.float64),
                    torch.tensor(theirs, dtype=torch.float64),
                    rtol=1e-12,
                    atol=1e-14,
                )


def test_the_gradient_of_ddp_is_that_of_one_process_at_every_size():
    with forked.ranks(in_every_world, list(range(LARGEST)), LARGEST) as answers:
        check(answers, range(1, LARGEST + 1))


def test_batch_policy_holds_with_in_process_workers():
    with forked.ranks(in_a_resident_world, [0, 1, 2], 3) as answers:
        check(answers, [3])


def test_batch_policy_holds_with_sharded_parameters():
    with forked.ranks(in_a_sharded_world, [0, 1, 2], 3) as answers:
        check(answers, [3])
