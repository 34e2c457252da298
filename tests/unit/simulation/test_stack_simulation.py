"""The whole control plane on virtual loops: no seed breaks a law, and each rule taken away is
missed. A seed that fails is replayed by `python -m tests.simulation.simulate --stack --seed N`.
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
)
from tests.simulation.stack_simulation import StackSimulation, violations
from tests.support import SOAK
from tests.unit.simulation import rules
from torchelastic.agent.lifecycle import in_process
from torchelastic.chaos import laws
from torchelastic.rendezvous.embedded import ask_peers
from torchelastic.rendezvous.world import World

pytestmark = pytest.mark.timeout(120 * SOAK)

#: Seeds of one test; the suite has so many tests of them.
SEEDS, TESTS = 4, 2


@pytest.mark.parametrize("first", range(0, SEEDS * TESTS * SOAK, SEEDS))
def test_stack_breaks_no_law(first):
    for seed in range(first, first + SEEDS):
        schedule = made_from(seed)
        assert not violations(schedule), simulate.explained(schedule, StackSimulation)


def test_stack_expects_no_newcomer_to_find_an_endpoint_that_leaves():
    """Seed 21466: the only endpoint leaves when it thaws, before the newcomers have asked it."""
    assert violations(made_from(21466)) == []


@pytest.mark.parametrize("first", range(0, SEEDS * TESTS * SOAK, SEEDS))
def test_stack_breaks_no_law_with_replicas(first):
    for seed in range(first, first + SEEDS):
        schedule = sharded_from(seed)
        assert not violations(schedule), simulate.explained(schedule, StackSimulation)


# --- without one rule ----------------------------------------------------------------------------


def job(
    seed: int, machines: str, *faults: ScheduledFault, resident: bool = True, least: int = 1
) -> Schedule:
    return Schedule(
        seed=seed,
        resident=resident,
        machines=machines,
        min_nodes=least,
        max_nodes=len(machines) + 2,
        remembers=True,
        steps=ENDLESS,
        faults=faults,
    )


def healed_cut(seed: int) -> Schedule:
    """A worker dies, and the network is cut while the others are being stopped."""
    later = random.Random(seed).uniform(0.01, 0.2)
    cut = ScheduledFault(round(8.0 + later, 3), "cut", "ab", "cd")
    faults = (ScheduledFault(8.0, "worker", "a"), cut, ScheduledFault(18.0, "mend"))
    return job(seed, "abcd", *faults, resident=bool(seed % 2), least=2)


def spare_host(seed: int) -> Schedule:
    """The host's worker dies, and the other node is lost before its replacement is there."""
    later = random.Random(seed).uniform(0.01, 0.3)
    return job(
        seed,
        "ab",
        ScheduledFault(8.0, "worker", "a"),
        ScheduledFault(round(8.0 + later, 3), "kill", "b"),
    )


def slow_links(seed: int) -> Schedule:
    """A host is lost, and the others are far from each other."""
    slow = ScheduledFault(7.0, "slow", "bd", "ce", seconds=0.2)
    return job(seed, "abcde", slow, ScheduledFault(8.0, "kill", "a"))


def growth_at_once(seed: int) -> Schedule:
    """The host is lost; the next world is to grow before one of its nodes has heard of it."""
    faults = (
        ScheduledFault(6.0, "join", "g"),
        ScheduledFault(9.4, "cut", "d", "a"),
        ScheduledFault(11.859, "restart", "a"),
    )
    return job(4908 + seed, "abcd", *faults)._replace(max_nodes=4)


def nobody_enters_a_world_that_pauses(change: rules.Set) -> None:
    enter = in_process._enter

    def only_a_running_one(state: in_process.InProcessState, world: World) -> in_process.Step:
        return enter(state, world) if world.phase == "running" else (state, [])

    change(in_process, "_enter", only_a_running_one)


def an_agent_has_as_long_for_three_answers_as_for_one(change: rules.Set) -> None:
    change(ask_peers, "EXCHANGES", 1)


#: The law that is broken without the rule, by one of some schedules.
FOUND_BY = {
    rules.waiting_world_is_not_reported: (healed_cut, 8, 20),
    rules.a_host_that_does_not_train_has_no_vote: (spare_host, 8, 10),
    an_agent_has_as_long_for_three_answers_as_for_one: (slow_links, 8, 5),
    nobody_enters_a_world_that_pauses: (growth_at_once, 8, 10),
}


@pytest.mark.parametrize("rule", FOUND_BY, ids=lambda rule: rule.__name__)
def test_stack_breaks_law_without_one_rule(rule, monkeypatch):
    made, law, seeds = FOUND_BY[rule]
    rule(monkeypatch.setattr)
    broken = ((seed, violations(made(seed))) for seed in range(seeds))
    found, (first, *_) = next(each for each in broken if each[1])
    assert first.law == law
    monkeypatch.undo()
    assert violations(made(found)) == []


# --- replay --------------------------------------------------------------------------------------


def test_stack_has_same_history_in_another_process():
    stack = StackSimulation(made_from(5))
    stack.run()
    code = "from tests.simulation.stack_simulation import *; "
    code += "from tests.simulation.fault_schedule import *; "
    code += "stack = StackSimulation(made_from(5)); stack.run(); print(stack.digest())"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert other.stdout.decode().strip() == stack.digest()
    assert len(stack.history) > 100


def test_stack_failure_is_reported_with_seed_and_short_schedule(monkeypatch):
    rules.a_host_that_does_not_train_has_no_vote(monkeypatch.setattr)
    told = simulate.explained(spare_host(0)._replace(seed=0), StackSimulation)
    assert "replay: --seed 0 --stack" in told
    assert told.count("worker a") == 1


def test_uncaught_exception_is_a_violation(monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug in a callback")

    monkeypatch.setattr(StackSimulation, "_mend", broken)
    found = violations(job(0, "ab", ScheduledFault(8.0, "mend")))
    assert "a bug in a callback" in found[-1].sentence
    assert found[-1].law == 0


@pytest.mark.parametrize(("resident", "most"), [(True, 1.0), (False, 2.0)], ids=["train", "script"])
def test_node_goes_on_at_once_after_its_host_leaves(resident, most):
    """Not after a lease, or a settle time: a goodbye is consent."""
    stack = StackSimulation(job(1, "ab", ScheduledFault(8.0, "leave", "a"), resident=resident))
    assert stack.run() == []
    steps = [event.at for event in stack.history if isinstance(event, laws.StepFinished)]
    around = [at for at in steps if 7.0 < at < 20.0]
    assert max(after - before for before, after in pairwise(around)) < most


def test_stack_job_trains_without_faults():
    stack = StackSimulation(job(0, "abc"))
    assert stack.run() == []
    assert {type(event) for event in stack.history} >= {
        laws.NodeUp,
        laws.WorldPublished,
        laws.StepFinished,
    }
