"""The whole control plane on virtual loops: no seed breaks a law, and each rule taken away is
missed. A seed that fails is replayed by `python -m tests.simulation.simulate --seed N`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.simulation import simulate
from tests.simulation.fault_schedule import (
    ENDLESS,
    Schedule,
    ScheduledFault,
    made_from,
    sharded_from,
    shrunk,
)
from tests.simulation.job_simulation import JobSimulation, violations
from tests.support import SOAK
from torchelastic.agent.lifecycle import in_process, script
from torchelastic.agent.lifecycle.node_state import Phase, Rejoin, ReportMember, WorkersGone
from torchelastic.chaos import laws
from torchelastic.rendezvous import choosing, forming, majority, round_state
from torchelastic.rendezvous.embedded import ask_peers
from torchelastic.rendezvous.embedded.election import Poll
from torchelastic.rendezvous.world import World

pytestmark = pytest.mark.timeout(120 * SOAK)

#: Seeds of one test; the suite has so many tests of them.
SEEDS, TESTS = 4, 2


@pytest.mark.parametrize("first", range(0, SEEDS * TESTS * SOAK, SEEDS))
def test_simulation_breaks_no_law(first):
    for seed in range(first, first + SEEDS):
        schedule = made_from(seed)
        assert not violations(schedule), simulate.explained(schedule)


def test_simulation_expects_no_newcomer_to_find_an_endpoint_that_leaves():
    """Seed 21466: the only endpoint leaves when it thaws, before the newcomers have asked it."""
    assert violations(made_from(21466)) == []


@pytest.mark.parametrize("first", range(0, SEEDS * TESTS * SOAK, SEEDS))
def test_simulation_breaks_no_law_with_replicas(first):
    for seed in range(first, first + SEEDS):
        schedule = sharded_from(seed)
        assert not violations(schedule), simulate.explained(schedule)


# --- without one rule ----------------------------------------------------------------------------


def job(machines: str, *faults: ScheduledFault, seed: int = 0, **fields) -> Schedule:
    made = {"resident": True, "min_nodes": 1, "max_nodes": len(machines) + 2, "remembers": False}
    return Schedule(
        seed=seed, machines=machines, steps=ENDLESS, faults=faults, **{**made, **fields}
    )


def healed_cut(seed: int) -> Schedule:
    """A worker dies, and the network is cut while the others are being stopped."""
    cut = ScheduledFault(soon_after(8.0, seed, 0.2), "cut", "ab", "cd")
    faults = (ScheduledFault(8.0, "worker", "a"), cut, ScheduledFault(18.0, "mend"))
    return job("abcd", *faults, seed=seed, resident=bool(seed % 2), min_nodes=2, remembers=True)


def soon_after(at: float, seed: int, most: float = 0.3) -> float:
    return round(at + random.Random(seed).uniform(0.01, most), 3)


def spare_host(seed: int) -> Schedule:
    """The host's worker dies, and the other node is lost before its replacement is there."""
    lost = ScheduledFault(soon_after(8.0, seed), "kill", "b")
    return job("ab", ScheduledFault(8.0, "worker", "a"), lost, seed=seed, remembers=True)


def slow_links(seed: int) -> Schedule:
    """A host is lost, and the others are far from each other."""
    slow = ScheduledFault(7.0, "slow", "bd", "ce", seconds=0.2)
    return job("abcde", slow, ScheduledFault(8.0, "kill", "a"), seed=seed, remembers=True)


def all_links_slow(seed: int) -> Schedule:
    """A host is lost, and the next candidates are far from each other and from the rest."""
    slow = (ScheduledFault(7.0, "slow", "a", "bcde", seconds=0.2), slow_links(seed).faults[0])
    return job("abcde", *slow, ScheduledFault(soon_after(9.0, seed), "kill", "a"), seed=seed)


def growth_at_once(seed: int) -> Schedule:
    """The host is lost; the next world is to grow before one of its nodes has heard of it."""
    faults = (
        ScheduledFault(6.0, "join", "g"),
        ScheduledFault(9.4, "cut", "d", "a"),
        ScheduledFault(11.859, "restart", "a"),
    )
    return job("abcd", *faults, seed=4908 + seed, max_nodes=4, remembers=True)


def frozen_host(seed: int) -> Schedule:
    """A host freezes, and the other node of its world is started again."""
    frozen = ScheduledFault(soon_after(20.4, seed), "freeze", "a")
    again = ScheduledFault(soon_after(30.1, seed), "restart", "b")
    return job("abc", ScheduledFault(9.4, "kill", "c"), frozen, again, seed=seed)


def three_hosts(seed: int) -> Schedule:
    """Three hosts are lost, one after the other; then newcomers are needed."""
    lost = zip((14.5, 17.7, 25.7), "aeb", strict=True)
    faults = [ScheduledFault(soon_after(at, seed), "kill", name) for at, name in lost]
    return job("abcde", *faults, seed=seed, min_nodes=3)


def host_lost_at_start(seed: int) -> Schedule:
    """The host is killed before all workers have called `train`."""
    return job("abc", ScheduledFault(soon_after(2.0, seed, 3.0), "kill", "a"), seed=seed)


# Each takes a rule away, by an attribute that is set as `monkeypatch.setattr` does.


def waiting_world_is_not_reported(change) -> None:
    change(World, "has_ended", property(lambda world: world.phase == "over"))


def host_that_does_not_train_has_no_vote(change) -> None:
    def of_nodes(nodes, host, *args, **more):
        return majority.Electorate(frozenset(nodes), host)

    change(majority, "electorate", of_nodes)


def pausing_world_is_not_entered(change) -> None:
    enter = in_process._enter

    def only_running(state, world):
        return enter(state, world) if world.phase == "running" else (state, [])

    change(in_process, "_enter", only_running)


def three_answers_have_the_time_of_one(change) -> None:
    change(ask_peers, "EXCHANGES", 1)


def loser_stands_again_at_once(change) -> None:
    turn = Poll.turn
    change(Poll, "turn", lambda poll, in_vain=0: turn(poll))


def leader_forgets_what_was_confirmed(change) -> None:
    hosted = round_state.hosted

    def unconfirmed(*args, confirmed=-1, **more):
        return hosted(*args, confirmed=-1, **more)

    change(round_state, "hosted", unconfirmed)


def newcomer_does_not_see_world_of_earlier_host(change) -> None:
    change(World, "is_under_way", property(lambda world: True))


def node_tells_next_host_that_ended_workers_stand(change) -> None:
    gone, silent = script._gone, ReportMember({"in_process": False, "standing": ()})

    def without_report(state, event):
        state, commands = gone(state, event)
        if any(isinstance(command, Rejoin) for command in commands):
            commands = [one for one in commands if one != silent]
        return state, commands

    at = (Phase.STOPPING, WorkersGone)
    change(script, "TRANSITIONS", {**script.TRANSITIONS, at: without_report})


def replaced_worker_counts_as_if_it_had_state(change) -> None:
    change(choosing, "_has_whole", lambda member, ranks, size: True)


def broken_replica_is_in_world(change) -> None:
    change(choosing, "_in_whole_replicas", lambda state, member, ranks, size: ranks)
    change(choosing.replicas, "whole_blocks", lambda ranks, size: [(rank,) for rank in ranks])


def ranks_ignore_places_in_replicas(change) -> None:
    change(forming, "in_world_order", lambda rules, state, chosen: chosen)


#: The law that is broken without the rule, by one of some schedules.
FOUND_BY = {
    waiting_world_is_not_reported: (healed_cut, 8, range(20)),
    host_that_does_not_train_has_no_vote: (spare_host, 8, range(10)),
    three_answers_have_the_time_of_one: (slow_links, 8, range(5)),
    loser_stands_again_at_once: (all_links_slow, 8, range(10)),
    pausing_world_is_not_entered: (growth_at_once, 8, range(10)),
    leader_forgets_what_was_confirmed: (frozen_host, 8, range(10)),
    newcomer_does_not_see_world_of_earlier_host: (three_hosts, 8, range(10)),
    node_tells_next_host_that_ended_workers_stand: (host_lost_at_start, 8, range(10)),
    replaced_worker_counts_as_if_it_had_state: (sharded_from, 3, range(583, 590)),
    broken_replica_is_in_world: (sharded_from, 9, range(5)),
    ranks_ignore_places_in_replicas: (sharded_from, 9, range(5)),
}


@pytest.mark.parametrize("rule", FOUND_BY, ids=lambda rule: rule.__name__)
def test_simulation_breaks_law_without_one_rule(rule, monkeypatch):
    made, law, seeds = FOUND_BY[rule]
    rule(monkeypatch.setattr)
    broken = ((seed, violations(made(seed))) for seed in seeds)
    found, (first, *_) = next(each for each in broken if each[1])
    assert first.law == law
    monkeypatch.undo()
    assert violations(made(found)) == []


# --- replay --------------------------------------------------------------------------------------


def test_simulation_has_same_history_in_another_process():
    simulation = JobSimulation(made_from(5))
    simulation.run()
    code = "from tests.simulation.job_simulation import *; "
    code += "from tests.simulation.fault_schedule import *; "
    code += "simulation = JobSimulation(made_from(5)); simulation.run(); print(simulation.digest())"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert other.stdout.decode().strip() == simulation.digest()
    assert len(simulation.history) > 100


def test_simulation_failure_is_reported_with_seed_and_short_schedule(monkeypatch):
    host_that_does_not_train_has_no_vote(monkeypatch.setattr)
    told = simulate.explained(spare_host(0)._replace(seed=0))
    assert "replay: --seed 0\n" in told
    assert told.count("worker a") == 1


def test_schedule_is_shrunk_to_needed_faults():
    schedule = made_from(7, faults=12, machines=5)
    needed = {schedule.faults[3], schedule.faults[9]}
    short = shrunk(schedule, lambda other: needed <= set(other.faults))
    assert set(short.faults) == needed


def test_uncaught_exception_is_a_violation(monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug in a callback")

    monkeypatch.setattr(JobSimulation, "_mend", broken)
    found = violations(job("ab", ScheduledFault(8.0, "mend")))
    assert "a bug in a callback" in found[-1].sentence
    assert found[-1].law == 0


@pytest.mark.parametrize(("resident", "most"), [(True, 1.0), (False, 2.0)], ids=["train", "script"])
def test_node_goes_on_at_once_after_its_host_leaves(resident, most):
    """Not after a lease, or a settle time: a goodbye is consent."""
    leave = ScheduledFault(8.0, "leave", "a")
    simulation = JobSimulation(job("ab", leave, seed=1, resident=resident, remembers=True))
    assert simulation.run() == []
    steps = [event.at for event in simulation.history if isinstance(event, laws.StepFinished)]
    around = [at for at in steps if 7.0 < at < 20.0]
    assert max(after - before for before, after in pairwise(around)) < most


def test_simulated_job_trains_without_faults():
    simulation = JobSimulation(job("abc"))
    assert simulation.run() == []
    assert {type(event) for event in simulation.history} >= {
        laws.NodeUp,
        laws.WorldPublished,
        laws.StepFinished,
    }
