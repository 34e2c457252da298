"""Nodes that cannot reach each other, but all reach the store, as with etcd: in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.unit.rendezvous.cast import Job, failure
from torchelastic.rendezvous import connectivity
from torchelastic.rendezvous.decide import REPORT_TIME, decide

LEASE = 3.0


def in_process(nnodes: str = "1:5", nodes: str = "abcde", **rules) -> Job:
    """A job at etcd whose workers have called `train`, and have taken a step."""
    job = Job(nnodes, probes=True, lease=LEASE, **rules)
    job.come(*nodes, in_process=True, standing=(0, 1))
    job.wait(5)
    assert (job.world.phase, job.world.in_process, job.names) == ("running", True, [*nodes])
    return job


def fall_silent(job: Job, *pairs: str) -> None:
    """Of each pair, the first node has not heard from the second for a lease."""
    for node, other in pairs:
        job.say(node, silent=(other,), silent_in=job.world.generation)


def stop(job: Job, names: str, *, holds: int | None = None) -> None:
    """The agents of these nodes know of the world's end, and report that their workers are gone."""
    generation = job.world.generation
    for name in names:
        held = generation if holds is None else holds
        job.say(name, stopping=generation, gone=generation, holds=held, store=f"{name}:{job.now}")


def probe(job: Job, *sides: str) -> None:
    """Each node finds out that it reaches its own side only."""
    for side in sides:
        away = "".join(other for other in sides if other != side)
        for name in side:
            job.say(name, probed=job.world.probe, unreached=tuple(away))


def cut(job: Job, *sides: str) -> None:
    """The network is cut; all notice, stop, and probe each other."""
    fall_silent(job, sides[0][-1] + sides[1][0])
    stop(job, "".join(sides))
    probe(job, *sides)


def refuse(job: Job, *names: str) -> None:
    """The machines of these nodes refuse connections."""
    job.state = replace(job.state, refused=frozenset(names))
    job.settle()


def to_drop(job: Job) -> tuple[str, ...]:
    return decide(job.rules, job.state, job.now).drop


# --- a world ends, no membership -----------------------------------------------------------------


def test_silence_between_nodes_of_the_world_ends_it_and_names_the_pair():
    job = in_process()
    fall_silent(job, "bc")
    assert (job.world.phase, job.world.ending) == ("over", "node-failure")
    assert job.world.reason == "b cannot reach c"
    assert job.world.probe == job.world.generation + 1
    assert to_drop(job) == ()


@pytest.mark.parametrize(
    ("node", "silent", "generation"),
    [("x", "a", 0), ("a", "x", 0), ("a", "b", -1)],
    ids=["an outsider's word", "of an outsider", "of an earlier world"],
)
def test_other_silence_does_not_end_a_world(node, silent, generation):
    job = in_process(nodes="ab")
    job.come("x", ready=False)
    job.say(node, silent=(silent,), silent_in=generation)
    assert job.world.phase == "running"


def test_the_end_of_a_world_by_silence_uses_no_restart():
    job = in_process()
    cut(job, "abc", "de")
    assert job.world.restarts.used == 0


# --- which side continues ------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [("abc", "de"), ("ab", "cde"), ("ae", "bcd"), ("abcd", "e")])
def test_the_larger_side_continues_from_the_newest_state(sides):
    job = in_process()
    cut(job, *sides)
    larger = max(sides, key=len)
    assert (job.world.phase, job.names) == ("running", [*larger])
    assert job.world.held == ()


def test_cut_into_equal_sides_continues_with_the_lowest_old_rank():
    job = in_process("1:4", "abcd")
    cut(job, "bd", "ac")
    assert job.names == ["a", "c"]


def test_the_side_with_the_newest_state_continues_though_it_is_smaller():
    """After a first cut, the minority has an older state."""
    job = in_process()
    cut(job, "abc", "de")
    fall_silent(job, "ab")
    stop(job, "abc")
    probe(job, "de", "bc", "a")
    assert job.names == ["b", "c"]
    fall_silent(job, "bc")
    stop(job, "bc")
    probe(job, "ade", "b", "c")
    assert job.names == ["b"]
    assert not job.world.held


def test_a_single_pair_that_is_cut_costs_one_node():
    job = in_process("1:4", "abcd")
    fall_silent(job, "bc")
    stop(job, "abcd")
    for name, away in {"a": "", "b": "c", "c": "b", "d": ""}.items():
        job.say(name, probed=job.world.probe, unreached=tuple(away))
    assert job.names == ["a", "b", "d"]


def test_no_side_has_the_whole_state_the_job_waits_and_says_where_it_is():
    job = Job("1:4", probes=True, lease=LEASE, replica_size=4)
    for place, name in enumerate("abcd"):
        where = {"in_process": True, "standing": (0, 1), "place": place % 2, "replica": 4}
        job.come(name, **where, holds=0)
    job.state = replace(job.state, places={name: i % 2 for i, name in enumerate("abcd")})
    job.wait(5)
    assert (job.world.phase, len(job.names)) == ("running", 4)
    fall_silent(job, "bc")
    stop(job, "abcd")
    probe(job, "ac", "bd")  # the same part on each side
    assert job.world.phase == "waiting"
    assert "a, c cannot reach b, d" in job.world.reason


def test_a_side_that_is_too_small_waits_and_says_who_cannot_reach_whom():
    job = in_process("4:5")
    cut(job, "abc", "de")
    assert job.world.phase == "waiting"
    said = "waiting for nodes that reach each other: a, b, c cannot reach d, e"
    assert said in job.world.reason


# --- until the pair connects ---------------------------------------------------------------------


def test_nodes_come_back_when_they_reach_the_others_and_not_before():
    job = in_process()
    cut(job, "abc", "de")
    job.wait(3600)
    assert (job.world.phase, job.names) == ("running", ["a", "b", "c"])
    for name in "abcde":
        job.say(name, unreached=())
    job.wait(job.rules.settle)
    assert job.world.phase == "pausing"


@pytest.mark.parametrize(
    ("probed", "unreached", "joins"), [(-1, "", False), (0, "a", False), (0, "", True)]
)
def test_a_newcomer_joins_once_it_has_reached_every_node_of_the_world(probed, unreached, joins):
    job = in_process("1:3", "ab")
    job.come("c", in_process=True, standing=(0, 1), probed=probed, unreached=tuple(unreached))
    job.wait(5)
    assert (job.world.phase == "pausing") is joins


# --- until the old workers are gone --------------------------------------------------------------


def test_the_next_world_waits_for_a_node_that_is_stopping_its_workers():
    job = in_process("1:3", "abc")
    fall_silent(job, "ab")
    stop(job, "ac")
    probe(job, "a", "bc")
    job.say("b", stopping=job.world.generation)
    job.wait(10 * LEASE)
    assert job.world.phase == "over"
    stop(job, "b")
    assert job.names == ["b", "c"]


def test_a_frozen_node_is_left_out_soon_after_the_end_of_its_world():
    job = in_process("1:3", "abc")
    fall_silent(job, "ab")
    stop(job, "ac")
    probe(job, "ac", "b")
    job.wait(REPORT_TIME - 0.1)
    assert job.world.phase == "over"
    job.wait(0.2)
    assert (job.world.phase, job.names) == ("running", ["a", "c"])
    assert "b" in job.state.members


def test_a_node_that_no_neighbour_finds_silent_has_a_lease_to_report_the_end():
    job = in_process("1:3", "abc")
    fall_silent(job, "ab")
    stop(job, "ab")
    probe(job, "a", "b")
    job.wait(LEASE - 0.1)
    assert job.world.phase == "over"
    job.wait(0.2)
    assert (job.world.phase, job.names) == ("running", ["a"])


def test_a_frozen_node_that_alone_may_have_the_state_is_awaited_until_its_lease_ends():
    """The other one joined, and has stopped before it got the state."""
    job = in_process("1:2", "a")
    job.say("a", holds=0)
    job.come("b", in_process=True, standing=(0, 1), probed=0)
    job.wait(5)
    for name in "ab":
        job.say(name, paused=0, entered=7)
    assert (job.world.generation, job.names) == (1, ["a", "b"])
    fall_silent(job, "ba")
    stop(job, "b", holds=-1)
    probe(job, "b")
    job.wait(100 * LEASE)
    assert job.world.phase == "waiting"
    assert "the newest state, which only a may have" in job.world.reason
    job.die("a")
    assert (job.world.phase, job.names) == ("running", ["b"])


def test_frozen_node_without_any_gone_node_is_awaited_until_its_lease_ends():
    job = in_process("1:2", "ab")
    fall_silent(job, "ab")
    job.wait(100 * LEASE)
    assert job.world.phase == "over"


# --- refused connections -------------------------------------------------------------------------


def test_a_node_that_refuses_connections_is_left_out_at_once_and_then_dropped():
    job = in_process("1:3", "abc")
    refuse(job, "b")
    assert (job.world.phase, job.world.reason) == ("over", "b failed")
    assert to_drop(job) == ()
    stop(job, "ac")
    assert (job.world.phase, job.names) == ("running", ["a", "c"])
    assert job.world.ending is None
    assert job.world.reason.startswith("b failed")
    assert to_drop(job) == ("b",)


def test_the_last_holder_of_the_state_is_not_dropped_for_a_refusal():
    job = in_process("1:2", "a")
    job.say("a", holds=0)
    job.come("b", in_process=True, standing=(0, 1), probed=0)
    job.wait(5)
    for name in "ab":
        job.say(name, paused=0, entered=7)
    refuse(job, "a")
    stop(job, "b", holds=-1)
    assert (job.world.phase, to_drop(job)) == ("waiting", ())
    refuse(job)  # it answers again
    stop(job, "a")
    assert (job.world.phase, job.names) == ("running", ["a", "b"])


@pytest.mark.parametrize(
    ("holds", "dropped"),
    [({}, "bc"), ({"a": 0, "b": 0, "c": 0}, ""), ({"b": 0, "c": -1}, "c"), ({"a": 0}, "bc")],
)
def test_nodes_that_have_state_are_not_dropped_while_the_job_waits(holds, dropped):
    """Resets of a firewall look like refusals of all: the others may lose the state meanwhile."""
    job = Job("4:4", probes=True, lease=LEASE)
    job.come(*"abcd")
    job.wait(5)
    job.die("d")
    for name in "abc":
        job.say(name, gone=0, holds=holds.get(name, -1))
    refuse(job, "b", "c")
    assert (job.world.phase, "".join(to_drop(job))) == ("waiting", dropped)


def test_a_refusal_in_the_name_of_a_living_node_makes_all_probe():
    """A firewall resets connections: the node has reported since, and stops its workers."""
    job = in_process("1:3", "abc")
    refuse(job, "b")
    job.state = replace(job.state, refused=frozenset(), contested=frozenset("b"))
    stop(job, "abc")
    assert (job.world.phase, job.world.probe) == ("over", job.world.generation + 1)
    probe(job, "ac", "b")
    assert job.names == ["a", "c"]


def test_a_spare_that_refuses_connections_is_dropped_while_the_others_train():
    job = in_process("1:2", "ab")
    job.come("c", in_process=True, standing=(0, 1))
    refuse(job, "c")
    assert (job.world.phase, to_drop(job)) == ("running", ("c",))


# --- workers notice first ------------------------------------------------------------------------


def test_a_worker_that_gets_no_answer_makes_all_probe_and_no_node_is_held_out():
    job = in_process()
    said = failure("c", message="lost a peer: no answer from rank 6 at d:1", alive=True)
    job.say("c", failures=(said,))
    assert job.world.probe == job.world.generation + 1
    stop(job, "abcde")
    probe(job, "abc", "de")
    assert (job.names, job.world.held, job.world.restarts.used) == (["a", "b", "c"], (), 0)
    assert "a, b, c cannot reach d, e" in job.world.reason


# --- sides ---------------------------------------------------------------------------------------


def test_sides_are_groups_in_which_all_reach_each_other():
    nodes = "abcdef"
    pairs = {frozenset(pair) for pair in ("ab", "cd", "ce")}
    for side in connectivity.sides(nodes, pairs):
        assert not any(frozenset(pair) in pairs for pair in product(side, side))
        out = set(nodes) - side
        assert all(any(frozenset((one, other)) in pairs for other in side) for one in out)


def test_sides_of_thousands_of_nodes_are_found_quickly():
    nodes = [f"{number:05d}" for number in range(4000)]
    pairs = {frozenset((one, other)) for one in nodes[:128] for other in nodes[2000:2300]}
    found = connectivity.sides(nodes, pairs)
    assert max(map(len, found)) == 4000 - 128


def test_leaver_that_no_other_node_reaches_hands_its_state_over_to_no_world():
    """It would be in the next world again, alone, and in all that follow it."""
    job = in_process("1:2", "ab")
    cut(job, "a", "b")
    job.wait(LEASE)
    assert (job.names, job.world.phase, job.world.generation) == (["a"], "running", 1)
    job.say("a", leaving="SIGTERM")
    job.say("a", paused=1, entered=9)
    assert (job.world.phase, job.world.generation, job.world.after) == ("over", 1, 9)
    job.say("a", gone=1)
    job.die("a")
    assert (job.names, job.world.phase) == (["b"], "running")
