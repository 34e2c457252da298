"""How worlds end and what follows, by table and in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.rendezvous.round_support import Job, failure, running
from torchelastic.config import WorldSizes
from torchelastic.errors import EXIT_FAILED, EXIT_NOT_ENOUGH_NODES
from torchelastic.rendezvous.forming import REPEAT_INTERVAL
from torchelastic.rendezvous.round_state import StateUpdate, taken_over
from torchelastic.rendezvous.world import Base

# --- worker failure ------------------------------------------------------------------------------


def test_a_failure_restarts_the_same_nodes_only_when_all_workers_are_gone():
    job = running("2:2")
    job.say("b", failures=(failure("b"),), gone=0, store="b:9")
    assert job.world.phase == "over"
    assert job.kinds[-1] == "failure"
    job.say("a", gone=0, store="a:9")
    assert (job.world.phase, job.world.generation, job.names) == ("running", 1, ["a", "b"])
    assert job.world.restarts.used == 1
    assert "ValueError: no" in job.world.reason
    assert "1 of 100 restarts used" in job.world.reason
    assert job.world.cause == failure("b")


def test_no_store_serves_two_generations():
    job = running("1:2", nodes="a")
    job.say("a", failures=(failure("a"),), gone=0, store="")
    assert job.world.phase == "over"
    job.say("a", store="a:9")
    assert (job.world.phase, job.world.store) == ("running", "a:9")


@pytest.mark.parametrize(
    ("stores", "met_at"), [(("a:9", "b:9"), "a:9"), (("", "b:9"), "b:9"), (("a:9", ""), "a:9")]
)
def test_a_node_whose_store_host_is_being_replaced_blocks_nothing(stores, met_at):
    job = running("2:2")
    job.say("b", failures=(failure("b"),), gone=0, store=stores[1])
    job.say("a", gone=0, store=stores[0])
    assert (job.world.phase, job.names, job.world.store) == ("running", ["a", "b"], met_at)


def test_budget_spent_names_the_first_failure():
    job = running("2:2", max_restarts=0)
    lost_peer = failure("a", message="RuntimeError: Connection closed by peer [127.0.0.1]:1")
    job.say("a", failures=(lost_peer,))
    job.say("b", failures=(failure("b"),))
    job.all_gone()
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)
    assert job.world.cause == failure("b")
    assert job.world.consequences == (replace(lost_peer, traceback=""),)
    assert "--max-restarts 0" in job.world.reason


@pytest.mark.parametrize(("last", "phase"), [(3, "closed"), (2, "running")])
def test_decide_same_exception_on_all_ranks_twice_before_a_step_closes_the_job(last, phase):
    job = running("2:2")
    for generation in (0, 1):
        for node, ranks in (("a", (0, 1)), ("b", (2, last))):
            failures = tuple(failure(node, generation, rank=rank) for rank in ranks)
            job.say(node, failures=failures)
        job.all_gone()
    assert (job.world.phase, job.world.restarts.repeats) == (phase, 2)


def test_a_failure_of_an_older_generation_is_history():
    job = running("2:2")
    job.say("b", failures=(failure("b"),))
    job.all_gone()
    assert job.world.generation == 1
    job.say("b", failures=(failure("b", generation=0),))
    assert job.world.phase == "running"


@pytest.mark.parametrize("goes", [False, True], ids=["waits", "goes"])
def test_success_needs_every_node_though_one_that_finished_may_go(goes):
    job = running("2:2")
    job.say("a", done=0, gone=0)
    if goes:
        job.die("a")
    assert job.world.phase == "running"
    job.say("b", done=0, gone=0)
    assert (job.world.phase, job.world.exitcode) == ("closed", 0)


# --- node failure and leave ----------------------------------------------------------------------


def test_a_node_failure_goes_on_without_settling_and_spends_nothing():
    job = running("1:4", "abc", settle=60.0)
    job.now = 100.0
    job.die("b")
    assert (job.world.phase, job.kinds[-1]) == ("over", "node-failure")
    job.all_gone()
    assert (job.world.phase, job.names, job.world.restarts.used) == ("running", ["a", "c"], 0)
    assert job.world.reason.startswith("b failed")
    assert (job.world.cause.node, job.world.cause.is_node) == ("b", True)
    assert job.world.cause.sentence().startswith("b failed: its connection or lease ended")
    assert job.world.consequences == ()


def test_a_leave_is_not_waited_for():
    job = running("1:4", "abc")
    job.say("b", leaving="SIGTERM")
    assert (job.world.phase, job.kinds[-1]) == ("over", "leave")
    job.all_gone()
    assert (job.world.phase, job.names) == ("running", ["a", "c"])
    job.die("b")
    assert job.world.phase == "running"
    assert "b leaves (SIGTERM)" in job.world.reason


@pytest.mark.parametrize("in_process", [False, True])
def test_a_leave_and_its_end_that_become_known_at_once(in_process):
    """A leader that stood still takes both up before it decides."""
    job = running(nodes="ab")
    if in_process:
        for name in "ab":
            job.say(name, in_process=True, standing=(0, 1))
        assert job.world.in_process
    member, created = job.records.pop("b")
    draft = StateUpdate(job.state)
    draft.see(replace(member, leaving="SIGTERM"), created, job.now)
    draft.lose("b")
    job.state = draft.finish()
    job.settle()
    assert (job.world.phase, job.kinds[-1]) == ("over", "leave")
    assert "b has left" in job.world.reason


def test_one_of_those_that_leave_stores_the_state():
    job = running("1:4", "abc")
    assert job.world.saver == ""
    job.say("c", leaving="SIGTERM")
    assert job.world.saver == "c"
    job.say("b", leaving="SIGTERM")
    job.all_gone()
    assert (job.names, job.world.saver) == (["a"], "c")
    job.die("b")
    job.die("c")
    job.come("d")
    job.wait(60)
    assert (job.world.phase, job.world.saver) == ("over", ""), "of what is over last"


def test_base_of_a_generation_is_published_with_the_next_world():
    job = running("1:4", "abc")
    published = len(job.worlds)
    job.say("a", base=Base(0, -1, 0))
    assert len(job.worlds) == published, "all who hold anything know it"
    job.die("c")
    assert (job.world.phase, job.world.base) == ("over", Base(0, -1, 0))
    job.all_gone()
    assert (job.world.phase, job.world.base) == ("running", Base(0, -1, 0))
    job.say("b", base=Base(1, 0, 7))
    job.say("a", base=Base(0, -1, 0))
    job.die("b")
    job.all_gone()
    assert (job.names, job.world.base) == (["a"], Base(1, 0, 7)), "whoever has told it"


def test_nodes_outside_the_world_hear_at_once_what_it_began_from():
    job = running("1:2", "ab")
    job.come("c")
    published = len(job.worlds)
    job.say("a", base=Base(0, -1, 0))
    job.say("b", base=Base(0, -1, 0))
    assert len(job.worlds) == published + 1
    assert (job.world.phase, job.world.generation) == ("running", 0)
    assert (job.world.base, job.kinds[-1]) == (Base(0, -1, 0), None)


def test_a_new_leader_knows_what_was_published():
    job = running("1:2", "ab")
    job.come("c")
    job.say("a", base=Base(0, -1, 0))
    assert taken_over(job.world, 0.0).base == Base(0, -1, 0)


def test_leaver_stores_the_state_when_a_failure_ends_the_generation():
    job = running("1:4", "abc")
    job.say("b", failures=(failure("b"),), leaving="SIGTERM")
    assert (job.world.ending, job.world.saver) == ("failure", "b")


def test_count_resizes_makes_membership_changes_spend_the_budget():
    job = running("1:4", "abc", max_restarts=1, count_resizes=True)
    job.die("c")
    job.all_gone()
    assert job.world.restarts.used == 1
    job.die("b")
    job.all_gone()
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)
    assert job.world.cause.node == "b"


def test_job_below_min_after_a_failure_waits_for_a_replacement():
    job = running("2:2")
    job.die("b")
    job.all_gone()
    assert (job.world.phase, job.world.missing) == ("waiting", ("b",))
    job.come("c")
    assert (job.world.phase, job.names, job.world.generation) == ("running", ["a", "c"], 1)
    assert job.world.reason == "enough nodes are available again"


def test_a_node_that_was_given_up_and_came_back_is_a_newcomer():
    job = running("1:3", "ab")
    job.come("a")  # a new key: its lease had ended
    assert (job.world.phase, job.kinds[-1]) == ("over", "node-failure")
    job.say("a", gone=0)
    job.say("b", gone=0, store="b:9")
    assert job.names == ["a", "b"]


# --- awkward moments -----------------------------------------------------------------------------


def test_a_member_whose_workers_are_gone_without_a_word_has_failed():
    """Its lease ended and it joined anew before any leader saw it missing."""
    job = running("1:2", "a")
    job.say("a", gone=0, store="a:9")
    assert [world.phase for world in job.worlds[-2:]] == ["over", "running"]
    assert job.kinds[-1] == "node-failure"


@pytest.mark.parametrize(
    "told",
    [
        failure("a", message="RuntimeError: Connection closed by peer"),
        failure("a", message="SystemExit: 1", stopped=True),
    ],
    ids=["a broken connection", "a worker's own answer to SIGTERM"],
)
@pytest.mark.parametrize("what", ["resize", "leave"])
def test_failure_during_a_resize_or_leave_is_not_charged(told, what):
    job = running("1:4", "abc", max_restarts=0)
    if what == "resize":
        job.come("d")
    else:
        job.say("b", leaving="SIGTERM")
    assert job.kinds[-1] == what
    job.say("a", failures=(told,))
    job.all_gone()
    assert (job.world.phase, job.kinds[-1], job.world.cause) == ("running", what, None)


@pytest.mark.parametrize(
    ("rules", "fields", "sentence"),
    [
        ({"world_sizes": WorldSizes.parse("multiple:5")}, {}, "allows no world of 4 workers"),
        ({}, {"node_rank": 0}, "two nodes have the same --node-rank"),
    ],
)
def test_nodes_that_cannot_form_a_world_do_not_wait_for_ever(rules, fields, sentence):
    job = Job("2:2", wait_for_nodes=100, **rules)
    job.come("a", "b", **fields)
    job.wait(101)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_NOT_ENOUGH_NODES)
    assert sentence in job.world.reason


@pytest.mark.parametrize(
    "said", [{"done": 0, "gone": 0}, {"returned": 0}], ids=["done", "returned"]
)
def test_no_newcomer_undoes_finished_work(said):
    job = running("1:3", "ab")
    job.say("a", **said)
    job.come("c")
    job.wait(100)
    assert job.world.phase == "running"


@pytest.mark.parametrize(
    ("said", "generation", "phase"),
    [
        ({"done": 0, "gone": 0}, 0, "closed"),
        ({"gone": 0}, 1, "running"),  # it did not finish: the others have to
    ],
    ids=["it finishes first", "its workers are stopped"],
)
def test_a_leave_while_scripts_are_ending_restarts_only_what_is_not_finished(
    said, generation, phase
):
    job = running("1:2", "ab")
    job.say("a", returned=0)
    job.say("b", leaving="SIGTERM")
    assert job.world.phase == "running"
    job.say("b", leaving="SIGTERM", **said)
    job.die("b")
    if phase == "running":
        assert job.world.phase == "over"
        job.all_gone()
    else:
        job.say("a", done=0, gone=0)
    assert (job.world.generation, job.world.phase) == (generation, phase)


def test_a_failure_restarts_scripts_that_are_ending():
    job = running("2:2", "ab")
    job.say("a", returned=0)
    job.say("b", failures=(failure("b"),))
    job.all_gone()
    assert (job.world.generation, job.world.phase) == (1, "running")


def test_a_job_whose_workers_all_finish_while_a_resize_stops_them_is_done():
    job = running("1:3", "ab")
    job.come("c")
    job.wait(100)
    assert (job.world.phase, job.world.ending) == ("over", "resize")
    job.say("a", done=0, gone=0)
    job.say("b", done=0, gone=0)
    assert (job.world.phase, job.world.exitcode) == ("closed", 0)
    assert job.world.reason == "every worker succeeded"


def test_success_after_a_restart_has_no_cause():
    job = running("1:2", "a")
    job.say("a", failures=(failure("a"),))
    job.all_gone()
    job.say("a", done=1, gone=1)
    assert (job.world.phase, job.world.cause) == ("closed", None)


def test_a_node_that_does_not_get_rid_of_its_workers_is_named_every_minute():
    job = running("2:2")
    job.say("a", failures=(failure("a"),), gone=0)
    job.wait(REPEAT_INTERVAL + 1)
    assert (job.world.phase, job.world.reason) == ("over", "waiting for the workers of b to stop")


# --- worlds that fail as soon as they begin ------------------------------------------------------


def just_begun(nnodes: str = "2:2", **rules) -> Job:
    job = Job(nnodes, **rules)
    job.come("a", "b")
    assert (job.world.phase, job.now) == ("running", 0.0)
    return job


def fall(job: Job, number: int) -> None:
    """The world cannot even be built; no two of its failures are quite the same."""
    message = f"lost a peer: connect to port {number}: connection refused"
    job.say("a", failures=(failure("a", job.world.generation, message, alive=True),))
    job.all_gone()


def test_meanwhile_it_is_reported_why_and_once():
    job = just_begun()
    fall(job, 0)
    fall(job, 1)
    assert (job.world.phase, job.world.generation) == ("over", 1)
    assert job.world.reason.endswith(
        "connection refused; the last 2 generations failed right after start, before their "
        "first step; the next one starts in 0.25 s"
    )
    told = len(job.worlds)
    job.say("b", doubts=())
    assert len(job.worlds) == told
    job.wait(0.24)
    assert job.world.phase == "over"
    job.wait(0.01)
    assert job.world.phase == "running"
    assert job.world.reason.endswith("; 2 of 100 restarts used")
    fall(job, 2)
    assert job.wake_at == job.now + 0.5


def test_a_world_that_lived_or_made_a_step_is_followed_at_once():
    job = just_begun()
    for number in range(4):
        job.say("b", step=number)
        fall(job, number)
    for number in range(4):
        job.wait(5.0)
        fall(job, number)
    assert (job.world.phase, job.world.generation) == ("running", 8)


def test_a_job_that_ends_does_not_wait():
    job = just_begun(max_restarts=1)
    fall(job, 0)
    fall(job, 1)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)


def test_lost_node_once_known_lets_the_others_continue_at_once():
    job = just_begun("1:2")
    fall(job, 0)
    fall(job, 1)
    assert job.world.phase == "over"
    job.die("b")
    assert (job.names, job.world.phase, job.now) == (["a"], "running", 0.0)
