"""Nodes that are held out of the next worlds: for how long, and never at the price of a world."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.rendezvous.round_support import Job, failure, running
from torchelastic.config import WorldSizes
from torchelastic.rendezvous import held_out, round_state
from torchelastic.rendezvous.held_out import ALLOWED, FIRST, LONGEST, MOST
from torchelastic.rendezvous.world import World


def hold_out(job: Job, *names: str) -> None:
    """As if something had told against these nodes when the last world was formed."""
    held = job.world.held
    for name in names:
        held = held_out.hold(held, name, name, "no GPU")
    world = replace(job.world, held=held)
    job.worlds.append(world)
    job.state = round_state.published(job.state, world, job.now)
    job.settle()


def end(job: Job) -> None:
    """The world ends, and nothing tells against any node."""
    job.say("a", failures=(failure("a", exitcode=-9, message="killed", traceback=""),))
    job.all_gone()


def test_a_hold_doubles_up_to_a_limit_and_is_remembered_when_it_is_over():
    held, seconds = (), []
    for _ in range(9):
        held = held_out.end_all_but(held_out.hold(held, "b", "b", "why"), ["b"])
        seconds.append(held[0].seconds)
        held = held_out.end_all_but(held, [])
        assert held[0].seconds == 0
    assert seconds[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert seconds[-1] == LONGEST
    assert held_out.forget(held, ["b"]) == ()


def test_a_node_that_keeps_failing_is_held_out_from_the_third_time_on():
    held = ()
    for times in range(1, ALLOWED + 3):
        held = held_out.note_failure(held, "b", "b", "lost")
        assert held[0].times == times
        assert bool(held[0].seconds) == (times > ALLOWED)


def test_the_list_stays_short_and_running_holds_are_not_dropped_for_others():
    held = ()
    for number in range(MOST + 5):
        held = held_out.note_failure(held, f"n{number}", "n", "lost")
    assert len(held) < MOST
    held = ()
    for number in range(MOST):
        held = held_out.hold(held, f"n{number}", "n", "why")
    assert held_out.hold(held, "more", "more", "why") == held
    assert len(held_out.hold(held, "n3", "n", "why")) == MOST


def test_the_list_travels_in_the_world():
    held = held_out.hold((), "b", "node-b", "x" * 9999)
    world = World(generation=1, phase="waiting", held=held)
    assert World.from_json(json.loads(json.dumps(world.summary()))) == world
    assert len(json.dumps(world.summary())) < 500


def test_a_newcomer_that_is_held_out_comes_in_when_the_time_is_up():
    job = running("1:3", "ab")
    hold_out(job, "c")
    job.come("c")
    job.wait(FIRST - 1)
    assert (job.world.phase, job.wake_at) == ("running", pytest.approx(1.0 + FIRST))
    job.wait(1)
    assert (job.world.phase, job.world.reason) == ("over", "c joins")
    job.all_gone()
    assert job.names == ["a", "b", "c"]
    assert [(one.node, one.seconds) for one in job.world.held] == [("c", 0)]


def test_it_is_a_spare_of_every_world_meanwhile():
    job = running("1:3", "abc")
    hold_out(job, "c")
    job.wait(FIRST - 1)
    end(job)
    assert (job.names, job.world.spares) == (["a", "b"], ("c",))
    assert job.world.held[0].seconds == FIRST
    job.wait(1)
    assert job.world.phase == "over", "the hold went on"
    job.all_gone()
    assert job.names == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("nnodes", "rules", "out", "names"),
    [
        ("3:3", {}, "c", "abc"),
        ("2:3", {}, "bc", "ab"),
        ("1:3", {}, "abc", "a"),
        ("1:3", {"world_sizes": WorldSizes.parse("6")}, "b", "abc"),
        ("1:3", {"world_sizes": WorldSizes.parse("2,6")}, "b", "a"),
    ],
)
def test_a_world_that_cannot_do_without_takes_as_few_as_will_do(nnodes, rules, out, names):
    job = running(nnodes, "abc", **rules)
    hold_out(job, *out)
    end(job)
    assert (job.world.phase, "".join(job.names)) == ("running", names)
    still = {one.node for one in job.world.held if one.seconds}
    assert still == set(out) - set(names), "who is in the world is not held out any more"


def test_those_who_failed_least_often_are_taken_first():
    job = running("2:3", "abc")
    hold_out(job, "b", "b", "c")
    end(job)
    assert job.names == ["a", "c"]


def test_a_new_leader_begins_the_hold_again():
    job = running("1:3", "ab")
    hold_out(job, "c")
    job.come("c")
    job.wait(FIRST - 1)
    job.state = replace(
        round_state.taken_over(job.world, now=1000.0), members=job.state.members
    )  # another machine, another clock
    job.now = 1000.0
    job.settle()
    job.wait(FIRST - 1)
    assert job.world.phase == "running"
    job.wait(1)
    assert job.world.phase == "over"


def test_resident_workers_of_a_held_node_stand_by():
    job = Job("1:3")
    job.come("a", "b", resident=True, standing=(0, 1))
    job.wait(job.rules.settle)
    hold_out(job, "c")
    job.come("c", resident=True, standing=(0, 1))
    job.wait(FIRST - 1)
    assert job.world.phase == "running"
    job.wait(2)
    assert job.world.phase == "pausing"
