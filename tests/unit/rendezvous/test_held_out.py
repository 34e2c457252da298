"""Nodes that are held out of the next worlds: for how long, and never at the price of a world."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.rendezvous.round_support import Job, failure, running
from torchelastic.config import WorldSizes
from torchelastic.rendezvous import held_out, round_state
from torchelastic.rendezvous.held_out import FAILURES_ALLOWED, FIRST_HOLD, LONGEST_HOLD, NODES_LIMIT
from torchelastic.rendezvous.world import World


def hold_out(job: Job, *names: str, unable: bool = False) -> None:
    """As if something had told against these nodes when the last world was formed."""
    held = job.world.held
    for name in names:
        held = held_out.hold(held, name, name, "no GPU", unable=unable)
    world = replace(job.world, held=held)
    job.worlds.append(world)
    job.state = round_state.published(job.state, world, job.now)
    job.settle()


def out_of(job: Job) -> set[str]:
    return {one.node for one in job.world.held if one.seconds}


def fail(job: Job, *names: str, message: str) -> None:
    for name in names:
        job.say(name, failures=(failure(name, job.world.generation, message=message),))
    job.all_gone()


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
    assert seconds[:3] == [FIRST_HOLD, 2 * FIRST_HOLD, 4 * FIRST_HOLD]
    assert seconds[-1] == LONGEST_HOLD
    assert held_out.forget(held, ["b"]) == ()


def test_a_node_that_keeps_failing_is_held_out_from_the_third_time_on():
    held = ()
    for times in range(1, FAILURES_ALLOWED + 3):
        held = held_out.note_failure(held, "b", "b", "lost")
        assert held[0].times == times
        assert bool(held[0].seconds) == (times > FAILURES_ALLOWED)


def test_the_list_stays_short_and_running_holds_are_not_dropped_for_others():
    held = ()
    for number in range(NODES_LIMIT + 5):
        held = held_out.note_failure(held, f"n{number}", "n", "lost")
    assert len(held) < NODES_LIMIT
    held = ()
    for number in range(NODES_LIMIT):
        held = held_out.hold(held, f"n{number}", "n", "why")
    assert held_out.hold(held, "more", "more", "why") == held
    assert len(held_out.hold(held, "n3", "n", "why")) == NODES_LIMIT


def test_the_list_travels_in_the_world():
    held = held_out.hold((), "b", "node-b", "x" * 9999)
    world = World(generation=1, phase="waiting", held=held)
    assert World.from_json(json.loads(json.dumps(world.summary()))) == world
    assert len(json.dumps(world.summary())) < 500


def test_a_newcomer_that_is_held_out_comes_in_when_the_time_is_up():
    job = running("1:3", "ab")
    hold_out(job, "c")
    job.come("c")
    job.wait(FIRST_HOLD - 1)
    assert (job.world.phase, job.wake_at) == ("running", pytest.approx(1.0 + FIRST_HOLD))
    job.wait(1)
    assert (job.world.phase, job.world.reason) == ("over", "c joins")
    job.all_gone()
    assert job.names == ["a", "b", "c"]
    assert [(one.node, one.seconds) for one in job.world.held] == [("c", 0)]


def test_a_held_out_node_whose_machine_is_fixed_comes_in_at_once():
    job = running("1:3", "ab")
    hold_out(job, "c")
    job.come("c", unfit="a process could not be started (Resource temporarily unavailable)")
    job.wait(job.rules.settle + 1)
    assert job.world.phase == "running"
    job.say("c", unfit="")
    job.wait(job.rules.settle)
    assert (job.world.phase, job.world.reason) == ("over", "c joins")
    job.all_gone()
    assert job.names == ["a", "b", "c"]
    job.say("c", unfit="a process could not be started (Resource temporarily unavailable)")
    fail(job, "c", message="could not start the workers")
    assert job.names == ["a", "b"], "without it at the first failure"


def test_held_node_is_a_spare_of_every_world():
    job = running("1:3", "abc")
    hold_out(job, "c")
    job.wait(FIRST_HOLD - 1)
    end(job)
    assert (job.names, job.world.spares) == (["a", "b"], ("c",))
    assert job.world.held[0].seconds == FIRST_HOLD
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


def test_held_nodes_with_the_fewest_failures_are_taken_first():
    job = running("2:3", "abc")
    hold_out(job, "b", "b", "c")
    end(job)
    assert job.names == ["a", "c"]


@pytest.mark.parametrize(
    ("holds", "out", "unable", "names"),
    [
        ({"c": 3}, "c", False, "abc"),
        ({"a": 2, "b": 2, "c": 3}, "c", False, "abc"),
        ({"a": 3, "c": 3}, "c", False, "ab"),
        ({}, "c", False, "ab"),
        ({"b": 3, "c": 3}, "bbc", False, "ac"),
        ({"c": 3}, "bcc", False, "ac"),
        ({"c": 3}, "c", True, "ab"),
    ],
    ids=["alone", "newer", "not alone", "nobody", "least often", "only that one", "unable"],
)
@pytest.mark.parametrize("is_in_process", [False, True], ids=["script", "train"])
def test_held_node_alone_with_the_newest_state_is_let_in(holds, out, unable, names, is_in_process):
    job = running("1:3", "abc")
    trains = {"in_process": True, "standing": (0, 1)} if is_in_process else {}
    for name in "abc":
        job.say(name, holds=holds.get(name, -1), **trains)
    hold_out(job, *out, unable=unable)
    end(job)
    assert "".join(job.names) == names
    assert out_of(job) == set(out) - set(names)


@pytest.mark.parametrize(("holds", "phase"), [(3, "running"), (-1, "waiting")])
def test_held_node_is_let_in_before_others_started_only_for_its_state(holds, phase):
    job = Job("1:2")
    job.come("a", "b", in_process=True, standing=(0, 1))
    hold_out(job, "b")
    job.say("a", failures=(failure("a", exitcode=-9, message="killed"),), standing=(), starting=2)
    job.say("a", gone=0)
    job.say("b", gone=0, holds=holds)
    assert job.world.phase == phase
    assert job.names == (["b"] if phase == "running" else ["a", "b"])


@pytest.mark.parametrize(("holds", "back"), [((1, 1), True), ((-1, 1), False), ((0, 1), False)])
def test_a_newcomer_that_alone_has_the_newest_state_is_tried_again_within_the_budget(holds, back):
    job = running("1:2", "a")
    job.say("a", trained=0)
    job.come("b")
    job.wait(5)
    job.all_gone()
    for name, held in zip("ab", holds, strict=True):
        job.say(name, holds=held)
    assert (job.world.generation, job.names) == (1, ["a", "b"])
    fail(job, "a", "b", message="lost a peer: connection closed")
    assert (job.names, job.world.restarts.used) == ((["a"], 0) if back else (["a", "b"], 1))
    assert out_of(job) == ({"b"} if back else set())
    assert ("holding out b" in job.world.reason) == back


def test_a_node_that_keeps_being_lost_is_not_held_out_while_it_alone_has_the_state():
    job = running("1:3", "abc")
    for holds_too, names in ((-1, "abc"),) * (FAILURES_ALLOWED + 1) + ((3, "ab"),):
        job.say("a", holds=holds_too)
        job.die("c")
        job.come("c", holds=3)
        job.all_gone()
        assert (job.names, out_of(job)) == (list(names), set("abc") - set(names))
        assert ("holding out" in job.world.reason) == (names == "ab")


def test_a_node_that_alone_has_the_state_is_not_left_out_for_a_pair():
    """Others are, one after the other, until it can train."""
    job = running("1:3", "abc")
    job.say("c", holds=3)
    refused = "Gloo connectFullMesh failed: Connection refused, remote=[c]:59264"
    fail(job, "a", "b", message=f"RuntimeError: {refused}")
    assert (job.names, out_of(job)) == (["b", "c"], {"a"})
    fail(job, "b", message=f"RuntimeError: {refused}")
    assert (job.names, out_of(job)) == (["c"], {"a", "b"})


@pytest.mark.parametrize("why", ["no start", "no module"])
def test_node_that_cannot_hand_over_its_state_is_held_out_anyway(why):
    job = running("1:3", "abc")
    job.say("c", holds=3)
    if why == "no module":
        fail(job, "c", message="ModuleNotFoundError: No module named 'apex'")
    else:
        for _ in range(FAILURES_ALLOWED + 1):
            assert job.names == ["a", "b", "c"]
            fail(job, "c", message="ValueError: no")
    assert (job.names, out_of(job)) == (["a", "b"], {"c"})


def test_a_new_leader_begins_the_hold_again():
    job = running("1:3", "ab")
    hold_out(job, "c")
    job.come("c")
    job.wait(FIRST_HOLD - 1)
    job.state = replace(
        round_state.taken_over(job.world, now=1000.0), members=job.state.members
    )  # another machine, another clock
    job.now = 1000.0
    job.settle()
    job.wait(FIRST_HOLD - 1)
    assert job.world.phase == "running"
    job.wait(1)
    assert job.world.phase == "over"


def test_in_process_workers_of_a_held_node_stand_by():
    job = Job("1:3")
    job.come("a", "b", in_process=True, standing=(0, 1))
    job.wait(job.rules.settle)
    hold_out(job, "c")
    job.come("c", in_process=True, standing=(0, 1))
    job.wait(FIRST_HOLD - 1)
    assert job.world.phase == "running"
    job.wait(2)
    assert job.world.phase == "pausing"
