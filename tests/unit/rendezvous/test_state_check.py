"""The comparison of the workers' states: the verdicts, and what the leader makes of them."""

from __future__ import annotations

import pytest

from tests.unit.rendezvous.cast import Job
from tests.unit.rendezvous.test_decide_in_process import failure, in_process_job
from torchelastic.errors import EXIT_FAILED
from torchelastic.events.failure import OTHER_BITS
from torchelastic.rendezvous.held_out import LONGEST_HOLD
from torchelastic.rendezvous.state_check import Checked, Comparison, Rewind, compare


def rows(digests: str, step: int = 20, *, pins: dict[int, tuple[int, int]] | None = None):
    """A check of workers with these hashes, one letter each, that have pinned step 10."""
    return [
        Checked(rank, step, ord(digest), *(pins or {}).get(rank, (0, 10)))
        for rank, digest in enumerate(digests)
    ]


NO_PIN = (-1, -1)


@pytest.mark.parametrize(
    ("digests", "wrong", "back"),
    [
        ("a", (), None),
        ("aaa", (), None),
        ("aba", (1,), (0, 10)),
        ("baa", (0,), (0, 10)),
        ("aabac", (2, 4), (0, 10)),
        ("ab", (), (0, 10)),
    ],
)
def test_verdict_on_hashes_names_the_minority(digests, wrong, back):
    assert compare(rows(digests)) == Comparison(step=20, wrong=wrong, back=back)


@pytest.mark.parametrize("digests", ["abc", "aabb", "aabbc"])
def test_check_without_majority_ends(digests):
    found = compare(rows(digests))
    assert "no majority" in found.ends
    assert (found.wrong, found.back) == ((), None)


def test_first_check_that_finds_a_difference_ends_the_checks():
    found = compare(rows("aba", pins=dict.fromkeys(range(3), NO_PIN)))
    assert "at the first check" in found.ends


def test_version_to_go_back_to_is_the_newest_that_a_right_worker_has():
    pins = {0: NO_PIN, 1: (1, 15), 2: (0, 10), 3: (0, 5)}
    assert compare(rows("abaa", pins=pins)).back == (0, 10)


# --- what the leader decides ----------------------------------------------------------------------


def checking(nodes: str = "a b c", **rules) -> Job:
    """A job with one worker on each node, none of which may restart."""
    return in_process_job(nodes, max_restarts=0, **rules)


def check(job: Job, digests: str, step: int = 20, pinned: int = 10, odd=()) -> None:
    """All nodes report a check; a letter for each worker."""
    said = rows(digests, step)
    said = [one._replace(odd=at) for one, at in zip(said, odd, strict=True)] if odd else said
    for node in job.world.nodes:
        mine = said[node.first_rank : node.first_rank + node.nproc]
        told = tuple(one._replace(written=0 if pinned >= 0 else -1, pinned=pinned) for one in mine)
        job.say(node.node, checked=told, checked_in=job.world.generation)


def goes_on(job: Job, wrong: str = "") -> None:
    """All workers have stopped, and the worker with a wrong state was replaced."""
    generation = job.world.generation
    for name in [node.node for node in job.world.nodes]:
        if name == wrong:
            failed = failure(name, generation, message=OTHER_BITS + job.world.reason)
            job.say(name, failures=(failed,))
        job.say(name, gone=generation)


def test_equal_states_are_certified_in_the_same_generation():
    job = checking()
    check(job, "aaaaaa")
    assert (job.world.phase, job.world.generation, job.world.certified) == ("running", 0, 20)
    check(job, "bbbbbb", step=30)
    assert (job.world.generation, job.world.certified) == (0, 30)


def test_states_are_compared_only_when_all_workers_have_reported_the_same_step():
    job = checking("a b")
    job.say("a", checked=tuple(rows("aa")), checked_in=0)
    assert job.world.certified == -1
    late = tuple(one._replace(rank=one.rank + 2) for one in rows("aa", step=10))
    job.say("b", checked=late, checked_in=0)
    assert job.world.certified == -1


def test_wrong_worker_is_named_and_the_job_goes_back_without_a_restart():
    job = checking()
    check(job, "aaabaa")
    over = job.world
    assert (over.phase, over.wrong, over.rewind) == ("over", (3,), Rewind(1, 0, 10))
    assert over.reason == (
        "the state of rank 3 on b differs from that of the 5 other workers after step 20 (silent "
        "corruption): training goes back to step 10, where all states were equal"
    )
    goes_on(job, wrong="b")
    assert (job.world.phase, job.world.generation, job.world.wrong) == ("running", 1, ())
    assert job.world.rewind == Rewind(1, 0, 10), "workers that come later need it, too"
    assert job.world.restarts.used == 0


def test_node_with_a_wrong_state_again_is_held_out():
    job = checking()
    check(job, "aaabaa")
    goes_on(job, wrong="b")
    assert [one.seconds for one in job.world.held] == [0.0]
    check(job, "aaabaa", step=40, pinned=30)
    goes_on(job, wrong="b")
    assert [node.node for node in job.world.nodes] == ["a", "c"]
    assert [one.seconds for one in job.world.held] == [LONGEST_HOLD]


def test_two_workers_that_differ_both_go_back_and_nobody_is_named():
    job = checking("a")
    check(job, "ab")
    assert (job.world.phase, job.world.wrong, job.world.rewind) == ("over", (), Rewind(1, 0, 10))
    assert "which of them is wrong is not known yet" in job.world.reason
    goes_on(job)
    assert (job.world.phase, job.world.generation) == ("running", 1)
    assert job.world.blamed == ""


def test_worker_whose_results_changed_first_when_steps_are_taken_again_is_named():
    job = checking("a b")
    check(job, "aaab")
    goes_on(job)
    check(job, "aaaa", odd=(-1, 14, 13, 14))
    assert job.world.phase == "running"
    assert job.world.blamed.startswith("b computes other bits: rank 2 had a wrong state")
    assert [one.name for one in job.world.held] == ["b"]


@pytest.mark.parametrize(
    ("odd", "blamed"),
    [((-1, -1), -1), ((-1, 17), 1), ((15, 16), 0), ((15, 15), -1), ((16, 15), 1)],
)
def test_blame_needs_one_worker_that_changed_before_all_others(odd, blamed):
    said = [one._replace(odd=at) for one, at in zip(rows("aa"), odd, strict=True)]
    assert compare(said).blamed == blamed


def test_difference_that_comes_back_after_every_return_ends_the_job():
    job = checking("a")
    for _ in range(3):
        check(job, "ab")
        goes_on(job)
        assert job.world.phase == "running"
    check(job, "ab")
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)
    assert "3 times already" in job.world.reason


def test_step_certified_in_between_forgets_earlier_differences():
    job = checking("a")
    for step in range(20, 100, 10):
        check(job, "ab", step=step, pinned=step - 10)
        goes_on(job)
        check(job, "aa", step=step)
    assert job.world.phase == "running"
    assert job.world.rewind is not None
    assert job.world.rewind.times == 1


def test_states_without_a_majority_are_not_compared_any_more():
    job = checking("a b")
    check(job, "abcd")
    assert (job.world.phase, job.world.certified) == ("running", -1)
    assert job.world.unchecked.endswith("states are not compared any more")
    check(job, "abcc", step=30)
    assert job.world.phase == "running"


def test_steps_of_a_later_generation_are_certified_anew():
    """All workers were lost: it begins at an older checkpoint."""
    job = in_process_job("a b")
    check(job, "aaaa", step=30)
    job.say("a", failures=(failure("a", exitcode=-9),), gone=0)
    job.say("b", gone=0)
    assert (job.world.generation, job.world.certified) == (1, -1)
    check(job, "bbbb", step=20)
    assert job.world.certified == 20
