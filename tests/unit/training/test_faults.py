"""Faults strike where, when and how the plan says, and nowhere else."""

import os
import signal
import time

import pytest

from torchelastic import faults
from torchelastic.errors import ConfigError


@pytest.fixture(autouse=True)
def no_plan():
    yield
    faults.plan("")
    faults.position(rank=-1, step=-1, generation=-1)


def struck(place, **position):
    """Whether a `raise` strikes when the place is passed once."""
    faults.position(**{"rank": 0, "step": 0, "generation": 0, **position})
    try:
        faults.at(place)
    except faults.FaultInjected:
        return True
    return False


def test_without_a_plan_nothing_happens():
    assert not any(struck(place) for place in faults.PLACES)


def test_reading_faults():
    first = faults.Fault(kind="stop", place="step.end", rank=0, step=5, generation=2, n=3)
    second = faults.Fault(kind="sleep", place="sync.end", generation=None, seconds=0.5)
    third = faults.Fault(kind="kill", place="step.begin")
    text = (
        "stop@rank=0,step=5,place=step.end,generation=2,n=3;"
        " sleep=0.5 @ place=sync.end , generation=any ;kill@place=step.begin;"
    )
    assert faults.parse(text) == (first, second, third)


def test_what_is_not_understood_is_named():
    for text, named in (
        ("burn@place=step.end", "burn"),
        ("kill@place=nowhere", "nowhere"),
        ("kill@place=step.end,color=red", "color"),
        ("kill@rank=1", "place"),
        ("kill@place=step.end,rank=one", "one"),
        ("sleep=long@place=step.end", "long"),
        ("kill", "place"),
    ):
        with pytest.raises(ConfigError, match=named):
            faults.parse(text)


def test_every_condition_must_hold():
    faults.plan("raise@rank=1,step=3,place=step.begin")
    assert struck("step.begin", rank=1, step=3)
    assert not struck("step.begin", rank=0, step=3)
    assert not struck("step.begin", rank=1, step=4)
    assert not struck("step.end", rank=1, step=3)


def test_a_thread_that_is_a_step_behind_passes_places_of_its_own_step():
    faults.plan("raise@place=snapshot.sealing,step=3,n=2;raise@place=snapshot.copy,step=4")
    faults.position(rank=0, step=3, generation=0)
    faults.at("snapshot.sealing", step=3)
    faults.position(rank=0, step=4, generation=0)
    faults.at("snapshot.copy", step=3)
    with pytest.raises(faults.FaultInjected, match=r"snapshot.sealing of rank 0, step 3"):
        faults.at("snapshot.sealing", step=3)
    with pytest.raises(faults.FaultInjected, match=r"snapshot.copy of rank 0, step 4"):
        faults.at("snapshot.copy", step=4)


def test_a_replacement_does_not_die_of_what_killed_the_first():
    faults.plan("raise@rank=1,step=3,place=step.begin")
    assert not struck("step.begin", rank=1, step=3, generation=1)
    faults.plan("raise@rank=1,step=3,place=step.begin,generation=any")
    assert struck("step.begin", rank=1, step=3, generation=1)


def test_the_second_time_a_place_is_passed_in_a_step():
    faults.plan("raise@place=collective.before,n=2")
    assert not struck("collective.before", step=7)
    with pytest.raises(faults.FaultInjected, match=r"collective.before of rank 0, step 7"):
        faults.at("collective.before")
    faults.at("collective.before")
    assert not struck("collective.before", step=8)


def test_the_plan_comes_from_the_environment_if_it_has_one(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "raise@place=sync.end")
    faults.load()
    assert struck("sync.end")
    monkeypatch.delenv(faults.VARIABLE)
    faults.plan("raise@place=sync.begin")
    faults.load()
    assert struck("sync.begin")


def end_of_child(plan, flags=0):
    """How a forked child that passes `step.begin` under the plan ends, or stops."""
    faults.plan(plan)
    child = os.fork()
    if child == 0:
        faults.position(rank=0, step=0, generation=0)
        faults.at("step.begin")
        os._exit(7)
    _, status = os.waitpid(child, flags)
    return child, status


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_the_process_ends(kind, code):
    _, status = end_of_child(f"{kind}@place=step.begin")
    assert os.waitstatus_to_exitcode(status) == code


def test_stop_and_go_on():
    child, status = end_of_child("stop@place=step.begin", os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_sleep():
    faults.plan("sleep=0.02@place=step.begin")
    began = time.monotonic()
    assert not struck("step.begin")
    assert time.monotonic() - began >= 0.02
