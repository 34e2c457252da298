"""How worlds end and what follows, by table and in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.rendezvous.cast import Job, failure, lost, running, seen
from torchelastic.config import Grow, WorldSizes
from torchelastic.errors import EXIT_FAILED, EXIT_NOT_ENOUGH_NODES
from torchelastic.rendezvous import round_state
from torchelastic.rendezvous.decide import slow_nodes, waits_for_checkpoint, why_to_replace
from torchelastic.rendezvous.forming import REPEAT_INTERVAL
from torchelastic.rendezvous.held_out import FAILURES_ALLOWED
from torchelastic.rendezvous.round_state import TRAINED_AFTER, StateUpdate, taken_over
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


# --- decide growth --------------------------------------------------------------------------------

# When newcomers come in, and who stays outside.


def test_newcomers_within_the_settle_time_come_in_one_resize():
    job = running("1:5", "ab")
    job.now = 10.0
    job.come("c")
    job.wait(0.5)
    job.come("d")
    job.wait(0.9)
    assert job.world.phase == "running"
    job.wait(0.2)
    assert (job.world.phase, job.kinds[-1]) == ("over", "resize")
    job.all_gone()
    assert (job.names, job.world.generation) == (["a", "b", "c", "d"], 1)
    assert job.world.restarts.used == 0


def test_a_newcomer_is_admitted_only_when_ready():
    job = running("1:3", "ab")
    job.come("c", ready=False)
    job.wait(100)
    assert job.world.phase == "running"
    job.say("c", ready=True)
    assert job.world.phase == "over"


def test_survivors_keep_their_order_and_newcomers_go_last():
    job = running("1:5", "abc")
    job.come("0")
    job.die("a")
    job.all_gone()
    assert job.names == ["b", "c", "0"]


def test_grow_every_holds_newcomers_back():
    job = running("1:3", "ab", grow=Grow.parse("every:60"))
    job.come("c")
    job.wait(50)
    assert job.world.phase == "running"
    job.wait(20)
    assert job.world.phase == "over"


def test_grow_after_checkpoint_waits_for_one():
    job = running("1:3", "ab", grow=Grow.parse("after-checkpoint:/x"))
    job.come("c")
    assert waits_for_checkpoint(job.rules, job.state)
    job.wait(1000)
    assert job.world.phase == "running"
    job.state = replace(job.state, checkpoint=True)
    job.settle()
    assert job.world.phase == "over"


def test_newcomers_held_back_come_in_with_a_restart():
    job = running("1:3", "ab", grow=Grow.parse("every:6000"))
    job.come("c")
    job.say("b", failures=(failure("b"),))
    job.all_gone()
    assert job.names == ["a", "b", "c"]


def test_more_than_max_are_spares_and_step_in_the_moment_a_member_fails():
    job = running("2:2")
    job.come("c")
    job.wait(100)
    assert job.world.generation == 0
    job.die("a")
    job.say("b", gone=0, store="b:9")
    assert job.names == ["b", "c"]


# --- decide causes --------------------------------------------------------------------------------

# What a world tells of its first failure, in virtual time: a node's, too.

BROKEN = "RuntimeError: Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize("first", ["the peers", "the node"])
def test_workers_that_fell_with_a_node_are_its_consequences_whoever_is_heard_first(first):
    job = running("1:4", "abc", max_restarts=0)
    told = [failure("a", message=BROKEN), failure("c", rank=4, message="exit code 1", traceback="")]
    if first == "the node":
        job.die("b")
    job.say("a", failures=(told[0],))
    job.say("c", failures=(told[1],))
    if first == "the peers":
        assert job.world.cause == told[0]
        job.die("b")
    job.all_gone()
    assert (job.world.phase, job.names) == ("running", ["a", "c"])
    assert job.kinds[-1] == "node-failure"
    assert job.world.cause.node == "b"
    assert [one.node for one in job.world.consequences] == ["a", "c"]


def test_lost_nodes_name_the_first_as_the_cause():
    job = running("1:4", "abcd", quorum=False)
    job.die("c")
    job.die("b")
    job.all_gone()
    assert job.world.cause.node == "c"
    assert [one.node for one in job.world.consequences] == ["b"]


def test_failure_reported_before_its_node_was_lost_is_the_cause():
    killed = failure("b", message="killed by SIGKILL", exitcode=-9, traceback="")
    job = running("1:4", "abc")
    job.say("b", failures=(killed,))
    job.die("b")
    job.all_gone()
    assert job.world.cause == killed
    assert [one.is_node for one in job.world.consequences] == [True]
    assert job.kinds[-1] == "failure"


def test_only_the_cause_is_sent_with_its_traceback_and_lines():
    lines = ("step 6", "step 7")
    cause = failure("b", log_lines=lines)
    fell = failure("a", message=BROKEN, log_lines=lines)
    job = running("2:2")
    job.say("a", failures=(fell,))
    job.say("b", failures=(cause,))
    job.all_gone()
    assert job.world.cause == cause
    assert job.world.consequences == (replace(fell, traceback="", log_lines=()),)


def test_a_living_worker_s_own_network_is_not_called_a_lost_peer():
    refused = failure("b", message="ConnectionRefusedError: Connection refused", alive=True)
    job = running("2:2")
    job.say("b", failures=(refused,))
    job.all_gone()
    assert job.world.reason.startswith(refused.sentence())


# --- decide stragglers ----------------------------------------------------------------------------

# Slow nodes give their places to spare ones: once, for free, and never for a smaller world.


def find_slow(job: Job, *nodes: str) -> None:
    job.state = round_state.slow_seen(job.state, set(nodes))
    job.settle()


def test_a_slow_node_gives_its_place_and_nothing_is_spent():
    job = running("2:2", "ab")
    job.come("c")
    find_slow(job, "b")
    assert (job.world.phase, job.kinds[-1]) == ("over", "resize")
    assert job.world.reason == "c replaces slow b"
    job.all_gone()
    assert (job.world.phase, job.world.generation, job.names) == ("running", 1, ["a", "c"])
    assert job.world.spares == ("b",)
    assert job.world.restarts.used == 0
    assert job.world.reason.startswith("c replaces slow b")


def test_slow_node_that_was_replaced_does_not_replace_back():
    job = running("2:2", "ab")
    job.come("c")
    find_slow(job, "b")
    job.all_gone()
    assert slow_nodes(job.state) == []
    find_slow(job, "c")
    assert why_to_replace(job.rules, job.state) == "", "b is slow, too, for all that is known"
    assert (job.world.phase, job.names) == ("running", ["a", "c"])
    job.wait(1000)
    assert (job.world.generation, job.names) == (1, ["a", "c"])


def test_a_slow_spare_is_the_last_choice_and_still_one():
    job = running("2:2", "ab")
    job.come("c", "d")
    find_slow(job, "b")
    job.all_gone()
    assert job.names == ["a", "c"]
    job.die("a")
    job.all_gone()
    assert job.names == ["c", "d"]
    job.die("d")
    job.all_gone()
    assert job.names == ["c", "b"]
    assert job.state.slow == frozenset(), "in the world it is judged anew"


@pytest.mark.parametrize("keeps_up_again", [False, True])
def test_slow_node_without_a_spare_stays_until_one_comes(keeps_up_again):
    job = running("2:2", "ab")
    find_slow(job, "b")
    assert (job.world.phase, job.names) == ("running", ["a", "b"])
    if keeps_up_again:
        find_slow(job)
    job.come("c")
    if keeps_up_again:
        assert (job.world.phase, job.world.generation) == ("running", 0)
    else:
        assert job.world.reason == "c replaces slow b"


def test_a_spare_that_is_not_ready_takes_no_place():
    job = running("2:2", "ab")
    job.come("c", ready=False)
    find_slow(job, "b")
    assert job.world.phase == "running"
    job.say("c", ready=True)
    assert job.world.phase == "over"


def test_slow_node_is_kept_if_the_world_would_shrink():
    job = running("2:2", "ab")
    job.come("c", nproc=1)
    find_slow(job, "b")
    assert job.world.phase == "running"
    job.die("a")
    job.all_gone()
    assert job.names == ["b", "c"]


def test_several_slow_nodes_give_as_many_places_as_there_are_spares():
    job = running("3:3", "abc")
    job.come("d")
    find_slow(job, "a", "b")
    job.all_gone()
    assert job.names == ["a", "c", "d"]
    find_slow(job, "a")
    job.come("e", "f")
    assert job.world.reason == "e replaces slow a"


def test_a_spare_left_over_by_its_size_steps_in():
    job = running("1:3", "ab", world_sizes=WorldSizes.parse("2,4"), settle=1.0)
    job.come("c")
    job.wait(10)
    assert (job.world.generation, job.names) == (0, ["a", "b"])
    find_slow(job, "a")
    job.all_gone()
    assert job.names == ["b", "c"], "survivors keep their order"


@pytest.mark.parametrize(
    "said", [{"done": 0, "gone": 0}, {"returned": 0}], ids=["done", "returned"]
)
def test_slow_node_is_kept_once_a_worker_is_done(said):
    job = running("2:2", "ab")
    job.come("c")
    job.say("a", **said)
    find_slow(job, "b")
    assert job.world.phase == "running"


IN_PROCESS = {"in_process": True, "standing": (0, 1)}


@pytest.fixture
def training() -> Job:
    """In-process workers on two nodes, and on a spare."""
    job = Job("2:2")
    job.come("a", "b", **IN_PROCESS)
    job.come("c", **IN_PROCESS)
    assert (job.world.phase, job.names, job.world.in_process) == ("running", ["a", "b"], True)
    return job


def test_in_process_workers_change_between_two_steps(training):
    find_slow(training, "b")
    assert (training.world.phase, training.kinds[-1]) == ("pausing", "resize")
    training.say("a", paused=0, entered=7)
    training.say("b", paused=0, entered=8)
    world = training.world
    assert (world.phase, world.generation, world.after) == ("running", 1, 8)
    assert training.names == ["a", "c"]
    assert world.handing_over == ("b",), "it runs through the step, too"
    assert world.restarts.used == 0
    assert world.reason == "c replaces slow b"
    training.wait(1000)
    assert training.world.generation == 1


def test_a_leave_goes_before(training):
    training.say("a", leaving="SIGTERM")
    find_slow(training, "b")
    assert training.world.ending == "leave"


# --- incurable ------------------------------------------------------------------------------------

# Programs that cannot run: the job ends, unless other nodes can run them. In virtual time.

MISSING = "ModuleNotFoundError: No module named 'apex'"


def test_a_node_that_lacks_a_module_is_held_out_and_the_others_train():
    job = running("2:3", "abc")
    job.fail("b", message=MISSING)
    assert (job.world.phase, job.names, job.world.spares) == ("running", ["a", "c"], ("b",))
    assert job.world.reason.endswith("no restart used; holding out b for 60 s")


def test_node_that_lacks_a_module_spends_no_restart():
    job = running("1:3", "abc", max_restarts=0)
    job.fail("b", message=MISSING)
    assert (job.world.phase, job.names, job.world.restarts.used) == ("running", ["a", "c"], 0)
    job.wait(TRAINED_AFTER)
    job.fail("c", message=MISSING)
    assert (job.world.phase, job.names) == ("running", ["a"])
    job.say("a", failures=(failure("a", job.world.generation),))
    job.all_gone()
    assert job.world.phase == "closed", "an error of another kind is charged"


def test_a_node_that_is_held_out_for_something_else_saves_nothing():
    """The one that lacks the module is needed."""
    job = running("2:3", "abc", max_restarts=0)
    for _ in range(FAILURES_ALLOWED):
        job.die("c")
        job.all_gone()
        job.come("c")
        job.wait(job.rules.settle)
        job.all_gone()
    job.wait(TRAINED_AFTER)
    job.say("a", failures=(failure("a", job.world.generation, message=MISSING),))
    job.die("c")
    job.all_gone()
    assert (job.world.phase, job.world.cause.node) == ("closed", "a")


def test_the_job_ends_when_the_next_node_lacks_it_too():
    job = running("1:3", "abc")
    job.fail("b", message=MISSING)
    job.fail("a", message=MISSING)
    assert (job.world.phase, job.world.exitcode) == ("closed", 64)
    assert job.world.reason.endswith("; a restart cannot fix this ModuleNotFoundError; giving up")
    assert job.world.cause.node == "a"


def test_the_job_ends_at_once_where_all_nodes_lack_it_or_none_can_be_spared():
    everywhere, needed = running("1:3", "abc"), running("3:3", "abc")
    everywhere.say("a", failures=(failure("a", message=MISSING),))
    everywhere.say("b", failures=(failure("b", message=MISSING),))
    everywhere.fail("c", message=MISSING)
    needed.fail("b", message=MISSING)
    for job in (everywhere, needed):
        assert (job.world.phase, job.world.generation) == ("closed", 0)


def test_a_job_that_has_trained_goes_on_without_one_node_after_the_other():
    job = running("1:3", "abc")
    job.wait(TRAINED_AFTER)
    job.fail("b", message=MISSING)
    assert job.names == ["a", "c"]
    job.wait(TRAINED_AFTER - 1)
    job.fail("a", message=MISSING)
    assert (job.world.phase, job.names) == ("running", ["c"])
    job.fail("c", message=MISSING)
    assert job.world.phase == "closed", "every node lacks it"


def test_nodes_that_are_unfit_and_names_that_nobody_knows_save_nothing():
    job = running("2:3", "ab")
    job.come("c", ready=False, unfit="its --preflight check failed (exit code 3)")
    job.fail("a", message=MISSING)
    assert job.world.phase == "closed"
    garbled = running("1:3", "ab")
    garbled.say("a", failures=(failure("?", message=MISSING),))
    garbled.all_gone()
    assert garbled.world.phase == "closed"


# --- round state ----------------------------------------------------------------------------------

# What a leader knows: from reports, and from the leader before it.


@pytest.mark.parametrize("phase", ["running", "over"])
def test_reports_that_come_at_once_change_what_they_change_one_by_one(phase):
    job = running("1:4", "abcd")
    job.state = replace(job.state, world=replace(job.world, phase=phase))
    told = failure("a")
    records = [
        replace(job.records["a"][0], failures=(told,), gone=0, step=7),
        replace(job.records["b"][0], done=0),
        replace(job.records["c"][0], gone=0),  # for no reason that anybody knows
        replace(job.records["a"][0], failures=(told, failure("a", pid=2)), gone=0),
    ]
    one_by_one, draft = job.state, round_state.StateUpdate(job.state)
    for member in records:
        created = job.records[member.node][1]
        one_by_one = seen(one_by_one, member, created, 9.0)
        draft.see(member, created, 9.0)
    one_by_one = lost(one_by_one, "d")
    draft.lose("d")
    assert draft.finish() == one_by_one
    assert (len(one_by_one.failures), one_by_one.done, one_by_one.step) == (2, {"b"}, 7)
    assert one_by_one.lost == (("c", "d") if phase == "running" else ("d",))


def test_names_of_many_nodes_are_shortened():
    job = running("1:100", "abcdefghijkl")
    job.die(*"abcdefghij")
    assert job.world.reason == "a, b, c, d, e, f, g, h and 2 more failed"


# --- another leader ------------------------------------------------------------------------------


def test_a_new_leader_takes_over_a_running_world_and_misses_the_dead():
    old = running("1:3", "abc")
    job = Job("1:3")
    job.state = round_state.taken_over(old.world, 0.0)
    job.worlds.append(old.world)
    job.records = {name: old.records[name] for name in "bc"}
    for name in "bc":
        job._tell(name)
    assert job.world.phase == "running"
    job.state = round_state.with_missing_lost(job.state)
    job.settle()
    job.all_gone()
    assert (job.world.generation, job.names) == (1, ["b", "c"])


def test_a_new_leader_takes_no_failure_for_one_in_vain():
    old = running("1:2", "a")
    job = Job("1:2")
    job.state = round_state.taken_over(old.world, 0.0)
    job.worlds.append(old.world)
    job.records = dict(old.records)
    job.say("a", failures=(failure("a"),))
    job.all_gone()
    assert (job.world.generation, job.world.restarts.used, job.world.restarts.in_vain) == (1, 1, 0)
