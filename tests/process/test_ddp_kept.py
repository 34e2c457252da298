"""DDP kept while ranks die, come and go: the parameters are those of an undisturbed run, exactly.

With four ranks the last bit of a sum of gradients tells how the buckets were laid out. These tests
fail when torch changes what `torchelastic.training.group.ddp` relies on.
"""

import functools

import pytest
import torch

from tests.process import forked
from tests.process.kept_ddp import Run, World, train
from tests.process.weighted_ddp import (
    CASES,
    alone,
    in_a_resident_world,
    in_a_sharded_world,
    in_every_world,
)

pytestmark = pytest.mark.usefixtures("forks")

FOUR = (0, 1, 2, 3)
STEPS = 7
#: Small enough for several buckets.
CAP = {"bucket_cap_mb": 0.003}


def run(*worlds, **how):
    """What the members of the last world have in the end."""
    numbers = sorted({number for world in worlds for number in world.members})
    with forked.ranks(train, numbers, Run(worlds, **how)) as answers:
        for world in worlds:
            assert world.dies is None or answers[world.dies] is None
        return {number: answers[number] for number in worlds[-1].members}


def final(answers):
    """The parameters that all have."""
    digests = {answer[0] for answer in answers.values()}
    assert len(digests) == 1
    return digests.pop()


@functools.cache
def undisturbed(options=(), **how):
    return run(World(FOUR, STEPS), options=CAP | dict(options), **how)


def killed(*deaths, **how):
    """The parameters after rank 2 has died in each of these steps, after so many collectives, and
    another worker has taken its place each time."""
    worlds, members = [], list(FOUR)
    for newcomer, (step, at) in enumerate(deaths, len(FOUR)):
        worlds.append(World(tuple(members), step + 1, dies=members[2], at=at))
        members[2] = newcomer
    return final(run(*worlds, World(tuple(members), STEPS), **how))


def test_the_bits_are_those_of_plain_ddp():
    kept, plain = undisturbed(), undisturbed(plain=True)
    assert final(kept) == final(plain)
    # In the second step the buckets are laid out anew: one broadcast, torch needs two.
    assert kept[0][1] == [1, 3, *[2] * (STEPS - 2)]
    assert plain[0][1] == [1, 4, *[2] * (STEPS - 2)]


def test_a_new_ddp_in_the_middle_of_a_run_would_change_the_bits():
    worlds = World(FOUR, 4), World(FOUR, STEPS)
    assert final(run(*worlds, options=CAP, plain=True)) != final(undisturbed())
    assert final(run(*worlds, options=CAP)) == final(undisturbed())


@pytest.mark.parametrize("deaths", [[(0, 0), (2, 1), (5, 0)], [(1, 0), (1, 1)]])
def test_workers_killed_in_backward_are_replaced(deaths):
    assert killed(*deaths, options=CAP) == final(undisturbed())


@pytest.mark.parametrize(
    "option", ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"]
)
def test_options_of_ddp_hold(option):
    usual = final(undisturbed(options=((option, True),)))
    assert killed((0, 0), (4, 1), options=CAP | {option: True}) == usual


def test_sizes_given_one_by_one_hold():
    sizes = {"bucket_cap_mb_list": (0.002, 0.004)}
    assert killed((0, 0), (3, 1), options=sizes) == final(run(World(FOUR, STEPS), options=sizes))


def test_the_first_step_is_done_again_as_it_was_begun():
    """Its second backward has other buckets than its first."""
    usual = final(undisturbed(backwards=2))
    assert killed((0, 3), options=CAP, backwards=2) == usual


def test_a_model_may_be_used_late():
    assert killed((2, 0), (3, 1), options=CAP, idle=2) == final(undisturbed(idle=2))


def test_shrink_and_grow():
    """Survivors keep their buckets, newcomers take them, wherever the run is when they come."""
    later = World((0, 1, 3), 4), World((0, 1, 3, 4), STEPS)
    died = run(World(FOUR, 2, dies=2, at=1), *later, options=CAP)
    left = run(World(FOUR, 1), *later, options=CAP)
    assert final(died) == final(left)


def test_one_alone_and_then_more():
    worlds = World((0,), 3), World((0, 1), 5), World((0, 1, 2), STEPS)
    answers = run(*worlds, options=CAP)
    final(answers)
    assert [len(answers[number][1]) for number in (0, 1, 2)] == [7, 4, 2]


# --- unequal shares: the gradient is that of one process, at any size ----------------------------

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
