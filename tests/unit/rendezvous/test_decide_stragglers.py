"""Slow nodes give their places to spare ones: once, for free, and never for a smaller world."""

from __future__ import annotations

import pytest

from tests.unit.rendezvous.round_support import Job, running
from torchelastic.config import WorldSizes
from torchelastic.rendezvous import round_state
from torchelastic.rendezvous.decide import slow_nodes, why_to_replace


def find_slow(job: Job, *nodes: str) -> None:
    job.state = round_state.slow_seen(job.state, set(nodes))
    job.settle()


def test_a_slow_node_gives_its_place_and_nothing_is_spent():
    job = running("2:2", "ab")
    job.come("c")
    find_slow(job, "b")
    assert (job.world.phase, job.kinds[-1]) == ("over", "resize")
    assert job.world.reason == "c replaces slow b"
    job.all_gone()
    assert (job.world.phase, job.world.generation, job.names) == ("running", 1, ["a", "c"])
    assert job.world.spares == ("b",)
    assert job.world.restarts.used == 0
    assert job.world.reason.startswith("c replaces slow b")


def test_slow_node_that_was_replaced_does_not_replace_back():
    job = running("2:2", "ab")
    job.come("c")
    find_slow(job, "b")
    job.all_gone()
    assert slow_nodes(job.state) == []
    find_slow(job, "c")
    assert why_to_replace(job.rules, job.state) == "", "b is slow, too, for all that is known"
    assert (job.world.phase, job.names) == ("running", ["a", "c"])
    job.wait(1000)
    assert (job.world.generation, job.names) == (1, ["a", "c"])


def test_a_slow_spare_is_the_last_choice_and_still_one():
    job = running("2:2", "ab")
    job.come("c", "d")
    find_slow(job, "b")
    job.all_gone()
    assert job.names == ["a", "c"]
    job.die("a")
    job.all_gone()
    assert job.names == ["c", "d"]
    job.die("d")
    job.all_gone()
    assert job.names == ["c", "b"]
    assert job.state.slow == frozenset(), "in the world it is judged anew"


@pytest.mark.parametrize("keeps_up_again", [False, True])
def test_slow_node_without_a_spare_stays_until_one_comes(keeps_up_again):
    job = running("2:2", "ab")
    find_slow(job, "b")
    assert (job.world.phase, job.names) == ("running", ["a", "b"])
    if keeps_up_again:
        find_slow(job)
    job.come("c")
    if keeps_up_again:
        assert (job.world.phase, job.world.generation) == ("running", 0)
    else:
        assert job.world.reason == "c replaces slow b"


def test_a_spare_that_is_not_ready_takes_no_place():
    job = running("2:2", "ab")
    job.come("c", ready=False)
    find_slow(job, "b")
    assert job.world.phase == "running"
    job.say("c", ready=True)
    assert job.world.phase == "over"


def test_slow_node_is_kept_if_the_world_would_shrink():
    job = running("2:2", "ab")
    job.come("c", nproc=1)
    find_slow(job, "b")
    assert job.world.phase == "running"
    job.die("a")
    job.all_gone()
    assert job.names == ["b", "c"]


def test_several_slow_nodes_give_as_many_places_as_there_are_spares():
    job = running("3:3", "abc")
    job.come("d")
    find_slow(job, "a", "b")
    job.all_gone()
    assert job.names == ["a", "c", "d"]
    find_slow(job, "a")
    job.come("e", "f")
    assert job.world.reason == "e replaces slow a"


def test_a_spare_left_over_by_its_size_steps_in():
    job = running("1:3", "ab", world_sizes=WorldSizes.parse("2,4"), settle=1.0)
    job.come("c")
    job.wait(10)
    assert (job.world.generation, job.names) == (0, ["a", "b"])
    find_slow(job, "a")
    job.all_gone()
    assert job.names == ["b", "c"], "survivors keep their order"


@pytest.mark.parametrize(
    "said", [{"done": 0, "gone": 0}, {"returned": 0}], ids=["done", "returned"]
)
def test_slow_node_is_kept_once_a_worker_is_done(said):
    job = running("2:2", "ab")
    job.come("c")
    job.say("a", **said)
    find_slow(job, "b")
    assert job.world.phase == "running"


IN_PROCESS = {"in_process": True, "standing": (0, 1)}


@pytest.fixture
def training() -> Job:
    """In-process workers on two nodes, and on a spare."""
    job = Job("2:2")
    job.come("a", "b", **IN_PROCESS)
    job.come("c", **IN_PROCESS)
    assert (job.world.phase, job.names, job.world.in_process) == ("running", ["a", "b"], True)
    return job


def test_in_process_workers_change_between_two_steps(training):
    find_slow(training, "b")
    assert (training.world.phase, training.kinds[-1]) == ("pausing", "resize")
    training.say("a", paused=0, entered=7)
    training.say("b", paused=0, entered=8)
    world = training.world
    assert (world.phase, world.generation, world.after) == ("running", 1, 8)
    assert training.names == ["a", "c"]
    assert world.handing_over == ("b",), "it runs through the step, too"
    assert world.restarts.used == 0
    assert world.reason == "c replaces slow b"
    training.wait(1000)
    assert training.world.generation == 1


def test_a_leave_goes_before(training):
    training.say("a", leaving="SIGTERM")
    find_slow(training, "b")
    assert training.world.ending == "leave"
