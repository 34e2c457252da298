"""Forming worlds: times to wait, sizes, ranks."""

from __future__ import annotations

import copy

import pytest

from tests.unit.rendezvous.cast import Job, failure
from torchelastic.config import WorldSizes
from torchelastic.errors import EXIT_NOT_ENOUGH_NODES
from torchelastic.rendezvous import round_state
from torchelastic.rendezvous.forming import (
    CHANGE_INTERVAL,
    REPEAT_INTERVAL,
    WARM_UP_TIMEOUT,
    time_limit,
)


def test_complete_at_once_when_max_is_there():
    job = Job("1:2")
    job.come("a")
    assert job.world.phase == "waiting"
    job.come("b")
    assert job.world.phase == "running"
    assert job.names == ["a", "b"]
    assert job.world.reason == "the job starts"
    first = job.world.start
    assert first == job.world.nodes[0].node
    job.die("a")
    job.all_gone()
    assert (job.world.generation, job.world.start) == (1, first), "whoever is lost"


def test_first_world_waits_for_the_store_of_its_only_node():
    job = Job("1:1")
    job.come("a", store="")
    job.say("a", store="a:9")
    assert (job.world.phase, job.world.store) == ("running", "a:9")


def test_arrival_between_min_and_max_prolongs_the_settle_time():
    job = Job("1:4", settle=1.0)
    job.come("a")
    job.wait(0.9)
    job.come("b")
    job.wait(0.9)
    assert job.world.phase == "waiting"
    job.wait(0.2)
    assert job.names == ["a", "b"]
    assert job.world.generation == 0


def test_a_member_that_warms_up_is_waited_for():
    job = Job("1:3")
    job.come("a")
    job.come("b", ready=False)
    job.wait(WARM_UP_TIMEOUT / 2)
    assert job.world.phase == "waiting"
    never = copy.deepcopy(job)
    job.say("b", ready=True)
    job.wait(1.0)
    assert job.names == ["a", "b"]
    never.wait(WARM_UP_TIMEOUT / 2 + 1)
    assert never.names == ["a"]


def test_settling_and_warming_up_go_on_side_by_side():
    job = Job("1:3", settle=1.0)
    job.come("a", ready=False)
    job.wait(5.0)
    job.say("a", ready=True)
    assert job.names == ["a"]


def test_job_below_min_waits_and_says_so_every_minute():
    job = Job("2:2", wait_for_nodes=0)
    job.come("a")
    assert job.world.reason == "waiting for nodes: 1 of at least 2 joined"
    job.wait(3 * REPEAT_INTERVAL + 1)
    assert [world.phase for world in job.worlds] == ["waiting"] * 4


def test_arrivals_while_the_job_waits_are_reported_in_batches():
    job = Job("4:4", wait_for_nodes=100)
    job.come("a")
    job.wait(1)
    job.come("b")
    job.come("c")
    assert job.world.reason.startswith("waiting for nodes: 1 of at least 4 joined")
    job.wait(CHANGE_INTERVAL)
    assert job.world.reason.startswith("waiting for nodes: 3 of at least 4 joined")
    assert len(job.worlds) == 2
    assert job.world.patience == pytest.approx(95, abs=1)
    assert job.world.reason.endswith(time_limit(job.world.patience))
    job.come("d")
    assert (job.world.phase, job.world.patience) == ("running", None)


def test_enough_nodes_and_too_few_again_are_reported_at_once():
    job = Job("2:2", wait_for_nodes=100)
    job.come("a", ready=False)
    assert not job.world.enough
    job.wait(0.2)
    job.come("b", ready=False)
    assert (job.world.reason, job.world.enough) == ("warming up: 2 of at least 2 joined", True)
    job.die("b")
    assert job.world.reason.startswith("waiting for nodes: 1 of at least 2 joined")
    assert not job.world.enough
    job.come("c")
    job.say("a", ready=True)
    assert (job.world.phase, job.world.enough) == ("running", False)


def test_job_below_min_for_too_long_ends():
    job = Job("2:2", wait_for_nodes=100)
    job.come("a")
    job.wait(101)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_NOT_ENOUGH_NODES)
    assert "--wait-for-nodes" in job.world.reason


def test_nodes_that_warm_up_are_not_missing():
    job = Job("2:2", wait_for_nodes=100)
    job.come("a", "b", ready=False)
    job.wait(1000)
    assert job.world.phase == "waiting"
    assert job.world.reason == "warming up: 2 of at least 2 joined"


def test_ranks_follow_unequal_nodes_and_roles():
    job = Job("3:3")
    job.come("a", nproc=1, role="actor")
    job.come("b", nproc=3, role="learner")
    job.come("c", nproc=2, role="actor")
    places = [(node.name, node.first_rank, node.first_role_rank) for node in job.world.nodes]
    assert places == [("a", 0, 0), ("b", 1, 0), ("c", 4, 1)]
    assert (job.world.size, job.world.role_size("actor")) == (6, 3)


def test_static_places_are_obeyed_and_a_second_claim_is_a_spare():
    job = Job("2:2")
    job.come("late", node_rank=1)
    job.come("twin", node_rank=1)
    job.come("first", node_rank=0)
    assert job.names == ["first", "late"]


@pytest.mark.parametrize(
    ("holds", "slow", "names"),
    [
        ({}, "", "ab"),
        ({"c": 3}, "", "ac"),
        ({"a": 3, "b": 3, "c": 3}, "", "ab"),
        ({"b": 3, "c": 2}, "", "ab"),
        ({"c": 3}, "c", "ac"),
        ({"a": 3, "b": 3}, "b", "ac"),
    ],
    ids=["nobody", "a spare", "all", "an older state", "slow, alone", "slow, not alone"],
)
@pytest.mark.parametrize("is_in_process", [False, True], ids=["script", "train"])
@pytest.mark.parametrize("limit", ["nodes", "sizes"])
def test_holder_of_the_newest_state_is_in_the_next_world(holds, slow, names, is_in_process, limit):
    """The last world may never have begun, without the only node that has the state."""
    many = limit == "sizes"
    job = Job("1:4" if many else "2:2", world_sizes=WorldSizes.parse("4" if many else "1,2,3,4"))
    job.come("a", "b", "c")
    job.wait(1.0)
    assert job.names == ["a", "b"]
    trains = {"in_process": True, "standing": (0, 1)} if is_in_process else {}
    for name in "abc":
        job.say(name, holds=holds.get(name, -1), **trains)
    job.state = round_state.slow_seen(job.state, frozenset(slow))
    job.say("a", failures=(failure("a"),))
    job.all_gone()
    assert (job.world.generation, job.names) == (1, list(names))


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "nodes", "size"),
    [
        ("2,4,8,16", "abc", 2),
        ("multiple:4", "abc", 2),
        ("2,4,8,16", "abcdefg", 4),
        ("4,6", "abc", 3),
    ],
)
def test_the_largest_allowed_world_runs_and_the_rest_are_spares(sizes, nodes, size):
    job = Job("1:8", world_sizes=WorldSizes.parse(sizes))
    job.come(*nodes)
    job.wait(1.0)
    assert len(job.world.nodes) == size
    assert len(job.world.spares) == len(nodes) - size


def test_a_newcomer_that_allows_no_larger_world_stays_a_spare():
    job = Job("1:8", world_sizes=WorldSizes.parse("2,4,8"))
    job.come("a", "b")
    job.wait(1.0)
    job.come("c")
    job.wait(100)
    assert job.world.generation == 0
    job.come("d")
    job.wait(1.0)
    assert job.world.phase == "over"


def test_world_sizes_count_workers_not_nodes():
    job = Job("1:8", world_sizes=WorldSizes.parse("multiple:3"))
    job.come("a", nproc=2)
    job.come("b", nproc=1)
    job.come("c", nproc=2)
    job.wait(1.0)
    assert (job.names, job.world.spares) == (["a", "b"], ("c",))


def test_a_node_that_is_unfit_is_not_waited_for_and_the_reason_to_wait_names_it():
    job = Job("1:2", settle=1.0)
    job.come("a")
    job.come("b", ready=False, unfit="its --preflight check failed (exit code 3)")
    job.wait(job.rules.settle)
    assert (job.world.phase, job.names) == ("running", ["a"])

    waiting = Job("2:2")
    waiting.come("a")
    waiting.come("b", ready=False, unfit="its --preflight check failed (exit code 3)")
    waiting.wait(10)
    assert waiting.world.reason.startswith(
        "waiting for nodes: 1 of at least 2 joined, without b (its --preflight check failed (exit "
        "code 3)), for "
    )
    waiting.say("b", ready=True, unfit="")
    assert waiting.world.phase == "running"
