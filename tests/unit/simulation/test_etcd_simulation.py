"""The whole control plane with etcd: nodes are cut from each other, never from etcd. A seed that
fails is replayed by `python -m tests.simulation.simulate --etcd --seed N`."""

from __future__ import annotations

import pytest

from tests.simulation import simulate
from tests.simulation.fault_schedule import ENDLESS, Schedule, ScheduledFault, peers_from
from tests.simulation.job_simulation import JobSimulation, violations
from tests.support import SOAK
from torchelastic.agent.agent import Agent
from torchelastic.chaos import laws
from torchelastic.rendezvous import choosing, decide, forming

pytestmark = pytest.mark.timeout(120 * SOAK)

#: Seeds of one test; the suite has so many tests of them.
SEEDS, TESTS = 4, 2
FAILED_ONCE = (
    *(19, 54, 56, 79, 122, 355, 1349),  # steps that living nodes had were dropped (law 3)
    *(1163, 1172),  # newcomer held out: a leaver was lost in the last step before it entered
    6082,  # newcomer held out: its own worker was killed
    20762,  # a firewall refuses connections in the name of a frozen agent
    20774,  # a cut between two of the four nodes that have left the fifth behind
    21529,  # a node has left when the training was done
    21717,  # a leaver behind a cut alone has the newest state, and forms worlds of itself
)
CUT_AT, HEALED_AT = 10.0, 25.0


@pytest.mark.parametrize("first", range(0, SEEDS * TESTS * SOAK, SEEDS))
def test_etcd_simulation_breaks_no_law(first):
    for seed in range(first, first + SEEDS):
        schedule = peers_from(seed)
        assert not violations(schedule), simulate.explained(schedule)


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_etcd_simulation_breaks_no_law_in_seeds_that_failed_once(seed):
    assert violations(peers_from(seed)) == []


def test_holder_of_state_that_may_be_held_out_is_missed(monkeypatch):
    """The rule that nodes which alone have the newest state are in the next world."""
    for module in (choosing, forming, decide):
        monkeypatch.setattr(module, "holders_left_out", lambda rules, state, chosen: [])
    assert {broken.law for broken in violations(peers_from(19))} == {3}


def job(seed: int, *faults: ScheduledFault, resident: bool = True) -> Schedule:
    return Schedule(
        seed=seed,
        resident=resident,
        machines="abcde",
        min_nodes=1,
        max_nodes=7,
        remembers=False,
        steps=ENDLESS,
        faults=faults,
        etcd=True,
    )


def steps_of(simulation: JobSimulation, begin: float, end: float) -> list[laws.StepFinished]:
    return [
        event
        for event in simulation.history
        if isinstance(event, laws.StepFinished) and begin < event.at < end
    ]


@pytest.mark.parametrize("resident", [True, False], ids=["train", "script"])
@pytest.mark.parametrize("minority", ["a", "ab", "e", "de"])
def test_cut_lets_larger_side_train_and_all_after_it_heals(minority, resident):
    """The first node, a, leads."""
    majority = "".join(node for node in "abcde" if node not in minority)
    cut = ScheduledFault(CUT_AT, "cut", minority, majority)
    simulation = JobSimulation(job(0, cut, ScheduledFault(HEALED_AT, "mend"), resident=resident))
    assert simulation.run() == []
    trained = {step.node for step in steps_of(simulation, CUT_AT + 8.0, HEALED_AT)}
    assert trained == set(majority)
    assert {step.node for step in steps_of(simulation, HEALED_AT + 10.0, HEALED_AT + 15.0)} == set(
        "abcde"
    )


def test_leaver_behind_cut_is_given_up_by_its_peers():
    """Seed 888: its agent says that its worker is gone, and nothing from the worker gets through.
    Only the silence between workers shows that the last step cannot end."""
    others = ScheduledFault(20.511, "cut", "bcde", "a")
    simulation = JobSimulation(job(888, others, ScheduledFault(20.511, "leave", "a")))
    assert simulation.run() == []
    assert {step.node for step in steps_of(simulation, 26.0, 28.0)} == set("bcde")


def test_agent_that_raises_is_a_violation(monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug in the agent")

    monkeypatch.setattr(Agent, "_is_waited_for", broken)
    found = violations(job(0, ScheduledFault(CUT_AT, "leave", "a")))
    assert "a bug in the agent" in found[-1].sentence


def test_etcd_job_trains_without_faults():
    simulation = JobSimulation(job(0))
    assert simulation.run() == []
    assert {step.node for step in steps_of(simulation, 50.0, 60.0)} == set("abcde")


def test_etcd_job_goes_on_at_once_after_lost_node():
    """The ring notices its end, long before its lease does."""
    simulation = JobSimulation(job(0, ScheduledFault(CUT_AT, "kill", "c")))
    assert simulation.run() == []
    assert steps_of(simulation, CUT_AT + 0.3, CUT_AT + 2.0)
