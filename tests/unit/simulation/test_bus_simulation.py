"""The control plane in simulation: no seed breaks a law, and each rule taken away is missed.

`SOAK` says how many times as many seeds as in the suite. A seed that fails is replayed by
`python -m tests.simulation.simulate --seed N`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation import simulate
from tests.simulation.bus.bus_simulation import violations
from tests.simulation.fault_schedule import (
    Schedule,
    ScheduledFault,
    made_from,
    sharded_from,
    shrunk,
)
from tests.support import SOAK
from tests.unit.simulation import rules

pytestmark = pytest.mark.timeout(120 * SOAK)

#: Seeds of one test; the suite has so many tests of them.
SEEDS, TESTS = 25, 4


@pytest.mark.parametrize("first", range(0, SEEDS * TESTS * SOAK, SEEDS))
def test_bus_breaks_no_law(first):
    for seed in range(first, first + SEEDS):
        schedule = made_from(seed)
        assert not violations(schedule), simulate.explained(schedule)


@pytest.mark.parametrize("first", range(0, SEEDS * TESTS * SOAK, SEEDS))
def test_bus_breaks_no_law_with_replicas(first):
    for seed in range(first, first + SEEDS):
        schedule = sharded_from(seed)
        assert not violations(schedule), simulate.explained(schedule)


@pytest.mark.parametrize("seed", [397, 590, 736, 1900, 2415])
def test_bus_breaks_no_law_in_seeds_that_replicas_failed(seed):
    """A worker that was starting when its node moved to another place; a replaced worker that
    counted as if it had the state; a record that was old when its node voted; the only node with a
    shard, which moved."""
    assert not violations(sharded_from(seed))


@pytest.mark.parametrize("seed", [88644, 88941])
def test_bus_breaks_no_law_in_seeds_it_modeled_wrongly(seed):
    """A client that had said hello often to a frozen host heard of no world; the agent after one
    that had handed over and frozen had its vote."""
    assert not violations(made_from(seed))


# --- without one rule ----------------------------------------------------------------------------

#: What finds that a rule is missing: the seed that did first, or nearly.
FOUND_BY = {
    rules.waiting_world_is_not_reported: 428,
    rules.a_host_that_does_not_train_has_no_vote: 246,
    rules.a_leader_forgets_what_was_confirmed: 427,
    rules.newcomers_do_not_see_the_world_of_an_earlier_host: 344,
    rules.candidate_in_vain_stands_again_at_once: 256,
    rules.candidate_never_asks_for_later_term: 3079,
    rules.voter_stands_all_the_same: 23994,
    rules.holder_of_state_may_be_left_out: 15978,
    rules.only_the_winner_knows_that_its_world_is_confirmed: 39515,
    rules.resumed_node_forgets_addresses_of_others: 74220,
}
#: How many seeds may be tried, from a bit before the one that is known.
TRIED, BEFORE = 20, 5


@pytest.mark.parametrize("rule", FOUND_BY, ids=lambda rule: rule.__name__)
def test_bus_breaks_law_without_one_rule(rule, monkeypatch):
    first = FOUND_BY[rule] - BEFORE
    seeds = range(first, first + TRIED)
    assert not any(violations(made_from(seed)) for seed in (FOUND_BY[rule],))
    rule(monkeypatch.setattr)
    broken = next((found for seed in seeds if (found := violations(made_from(seed)))), None)
    assert broken is not None
    assert broken[0].law == (3 if rule.__name__.startswith("holder_of_state") else 8)


#: The same for replicas: the seed, and the law that is broken.
REPLICAS_FOUND_BY = {
    rules.a_replaced_worker_counts_as_if_it_had_the_state: (590, 3),
    rules.the_only_node_with_a_shard_may_move: (2415, 3),
    rules.a_block_without_one_of_its_workers_is_in_the_world: (0, 9),
    rules.nodes_are_in_the_order_in_which_they_came: (0, 9),
}


@pytest.mark.parametrize("rule", REPLICAS_FOUND_BY, ids=lambda rule: rule.__name__)
def test_bus_breaks_law_without_one_rule_about_replicas(rule, monkeypatch):
    first, law = REPLICAS_FOUND_BY[rule]
    rule(monkeypatch.setattr)
    found = (violations(sharded_from(seed)) for seed in range(first, first + TRIED))
    assert law in {one.law for broken in found for one in broken}


def job(machines: str, *faults: ScheduledFault, min_nodes: int = 1, seed: int = 0) -> Schedule:
    return Schedule(
        seed=seed,
        resident=True,
        machines=machines,
        min_nodes=min_nodes,
        max_nodes=len(machines) + 2,
        remembers=False,
        steps=1 << 20,
        faults=faults,
    )


#: As the shrinker has left them.
SHORT = {
    "a host that is a spare, and the others are started again": (
        rules.a_host_that_does_not_train_has_no_vote,
        job("ab", ScheduledFault(30.447, "worker", "a"), ScheduledFault(30.647, "kill", "b")),
    ),
    "a host freezes, and the other node of its world is started again": (
        rules.a_leader_forgets_what_was_confirmed,
        job(
            "abc",
            ScheduledFault(9.4, "kill", "c"),
            ScheduledFault(20.4, "freeze", "a"),
            ScheduledFault(30.1, "restart", "b"),
        ),
    ),
    "the host is killed before all workers have called train": (
        rules.a_node_takes_along_that_its_workers_are_in_process,
        job("abc", ScheduledFault(4.059, "kill", "a"), seed=5843),
    ),
    "the host leaves before those of its world have heard of it": (
        rules.a_spare_node_cannot_host,
        job(
            "abcd",
            ScheduledFault(6.097, "cut", "a", "bcd", both_ways=False),
            ScheduledFault(8.360, "mend"),
            ScheduledFault(8.545, "leave", "b"),
            ScheduledFault(8.545, "cut", "d", "abc"),
            ScheduledFault(8.595, "freeze", "c"),
            seed=16439,
        ),
    ),
    "newcomers, after the third host": (
        rules.newcomers_do_not_see_the_world_of_an_earlier_host,
        job(
            "abcde",
            ScheduledFault(14.567, "kill", "a"),
            ScheduledFault(17.696, "kill", "e"),
            ScheduledFault(25.765, "kill", "b"),
            min_nodes=3,
        ),
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_bus_breaks_law_8_in_short_schedule_without_one_rule(name, monkeypatch):
    rule, schedule = SHORT[name]
    assert violations(schedule) == []
    rule(monkeypatch.setattr)
    assert [one.law for one in violations(schedule)[:1]] == [8]


# --- replay, and shorter ones --------------------------------------------------------------------


def test_bus_replays_seed_exactly_in_another_process():
    argv = [sys.executable, "-m", "tests.simulation.simulate", "--seed", "5"]
    env = {**os.environ, "PYTHONHASHSEED": "1"}  # sets have another order than here
    other = subprocess.run(argv, env=env, capture_output=True, check=True).stdout
    assert other.rpartition(b"\n1 schedule,")[0] == simulate.told(made_from(5)).encode()


def test_failure_is_reported_with_seed_and_short_schedule(monkeypatch):
    rules.a_host_that_does_not_train_has_no_vote(monkeypatch.setattr)
    told = simulate.explained(made_from(246))
    assert "replay: --seed 246" in told
    assert told.count("worker a") == 1
    assert len(told.splitlines()) < 12


def test_schedule_is_shrunk_to_needed_faults():
    schedule = made_from(7, faults=12, machines=5)
    needed = {schedule.faults[3], schedule.faults[9]}
    short = shrunk(schedule, lambda other: needed <= set(other.faults))
    assert set(short.faults) == needed


def test_seed_makes_its_own_schedule():
    assert made_from(3) == made_from(3)
    assert made_from(3).faults != made_from(4).faults
