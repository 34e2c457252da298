"""Worlds of in-process workers: members, ends, and failures during a pause."""

from __future__ import annotations

import pytest

from tests.unit.rendezvous.cast import Job
from torchelastic.config import WorldSizes
from torchelastic.errors import EXIT_FAILED, EXIT_USAGE
from torchelastic.events.failure import Failure


def in_process_job(nodes: str = "a b", nnodes: str = "1:4", **rules) -> Job:
    """A job whose nodes have two workers each, all of which have called `train`."""
    job = Job(nnodes, **rules)
    job.come(*nodes.split())
    job.now += 10
    job.settle()
    for name in nodes.split():
        job.say(name, in_process=True, standing=(0, 1))
    return job


def failure(node: str, generation: int = 0, **fields) -> Failure:
    facts = {"rank": 0, "local_rank": 0, "pid": 7, "exitcode": -9, "message": "killed by SIGKILL"}
    return Failure(generation=generation, node=node, **{**facts, **fields})


def workers(job: Job) -> dict[str, tuple[int, ...]]:
    return {node.name: node.local_ranks for node in job.world.nodes}


def test_world_is_in_process_when_all_workers_have_called_train():
    job = Job("2:2")
    job.come("a", "b")
    job.say("a", in_process=True, standing=(0, 1))
    assert not job.world.in_process
    job.say("b", in_process=True, standing=(0, 1))
    assert (job.world.in_process, job.world.generation, job.world.phase) == (True, 0, "running")


def test_world_with_a_failure_before_train_is_not_in_process():
    job = Job("2:2")
    job.come("a", "b")
    job.say("a", failures=(failure("a"),))
    job.say("b", in_process=True, standing=(0, 1))
    assert (job.world.in_process, job.world.phase) == (False, "over")


def test_a_lost_worker_is_left_out_at_once_and_comes_back_by_agreement():
    job = in_process_job()
    job.say("a", failures=(failure("a"),), standing=(1,), starting=1)
    assert job.world.phase == "over"
    job.say("a", gone=0)
    job.say("b", gone=0)
    assert (job.world.phase, job.world.generation) == ("running", 1)
    assert workers(job) == {"a": (1,), "b": (0, 1)}
    assert [job.world.rank("a", 1), job.world.rank("b", 0), job.world.rank("b", 1)] == [0, 1, 2]
    job.say("a", standing=(0, 1), starting=0)
    assert job.world.phase == "pausing"
    job.say("a", paused=1, entered=16)
    assert job.world.phase == "pausing"
    job.say("b", paused=1, entered=17)
    assert (job.world.phase, job.world.generation, job.world.after) == ("running", 2, 17)
    assert workers(job) == {"a": (0, 1), "b": (0, 1)}


def test_world_of_a_fixed_size_waits_for_the_replacement():
    job = in_process_job(world_sizes=WorldSizes(allowed=(4,)))
    job.say("a", failures=(failure("a"),), standing=(1,), starting=1, gone=0)
    job.say("b", gone=0)
    assert job.world.phase == "waiting"
    assert "killed by SIGKILL; 1 of 100 restarts used; waiting for 1 worker" in job.world.reason
    job.say("a", standing=(0, 1), starting=0)
    assert (job.world.phase, job.world.generation, job.world.after) == ("running", 1, None)


def test_a_node_may_bring_some_of_its_workers_only():
    job = in_process_job(world_sizes=WorldSizes(allowed=(3,)))
    assert workers(job) == {"a": (0, 1), "b": (0,)}
    job = in_process_job(world_sizes=WorldSizes(allowed=(2, 4)))
    job.say("b", failures=(failure("b"),), standing=(0,), starting=1, gone=0)
    job.say("a", gone=0)
    assert workers(job) == {"a": (0, 1)}


def test_a_failure_while_the_workers_are_asked_voids_the_question():
    job = in_process_job("a", nnodes="1:2")
    job.come("b", in_process=True, standing=(0, 1))
    job.now += 10
    job.settle()
    assert job.world.phase == "pausing"
    job.say("a", failures=(failure("a"),), standing=(0,), gone=-1)
    assert (job.world.phase, job.world.after) == ("over", None)
    job.say("a", paused=0, entered=5)
    assert job.world.phase == "over"
    job.say("a", gone=0)
    assert (job.world.phase, job.world.generation, job.world.after) == ("running", 1, None)
    assert workers(job) == {"a": (0,), "b": (0, 1)}


def test_answers_about_an_older_generation_do_not_count():
    job = in_process_job("a", nnodes="1:2")
    job.say("a", paused=-1, entered=99)
    job.come("b", in_process=True, standing=(0, 1))
    job.now += 10
    job.settle()
    assert job.world.phase == "pausing"


def test_a_leave_goes_by_agreement_and_the_others_go_on():
    job = in_process_job()
    job.say("b", leaving="SIGTERM")
    assert (job.world.phase, job.world.reason) == ("pausing", "b leaves (SIGTERM)")
    job.say("a", paused=0, entered=3)
    job.say("b", paused=0, entered=3)
    assert (job.world.phase, job.world.after) == ("running", 3)
    assert workers(job) == {"a": (0, 1)}
    assert job.world.restarts.used == 0


def test_leaver_that_alone_has_the_state_meets_a_newcomer_first():
    job = in_process_job("a", nnodes="1:2")
    job.come("b", in_process=True, standing=(0, 1))
    job.say("a", leaving="SIGTERM")
    job.say("a", paused=0, entered=3)
    assert (job.world.generation, job.world.after) == (1, 3)
    assert workers(job) == {"a": (0, 1), "b": (0, 1)}
    assert (job.world.phase, job.world.reason) == ("pausing", "a leaves (SIGTERM)")
    for name in ("a", "b"):
        job.say(name, paused=1, entered=4)
    assert (job.world.phase, job.world.after, workers(job)) == ("running", 4, {"b": (0, 1)})


def test_the_last_node_that_leaves_ends_its_world_at_the_boundary_too():
    job = in_process_job("a", nnodes="1:1")
    job.say("a", leaving="SIGTERM")
    job.say("a", paused=0, entered=3)
    assert (job.world.phase, job.world.after) == ("over", 3)
    job.say("a", gone=0)
    assert job.world.phase == "waiting"


@pytest.mark.parametrize(("word", "ending"), [("SIGTERM", "leave"), ("", "node-failure")])
def test_leaver_gone_before_the_boundary_ends_the_generation(word, ending):
    job = in_process_job()
    job.say("b", leaving=word)
    job.die("b")
    assert (job.world.phase, job.world.ending) == ("over", ending)
    job.say("a", gone=0)
    assert (job.world.phase, job.world.generation, job.world.restarts.used) == ("running", 1, 0)


def leave_at_min() -> Job:
    """Two nodes are needed and one leaves: the workers run through step 3, then wait."""
    job = in_process_job(nnodes="2:2")
    job.say("b", leaving="SIGTERM")
    for name in ("a", "b"):
        job.say(name, paused=0, entered=3)
    assert (job.world.phase, job.world.after) == ("over", 3)
    return job


def test_death_in_the_last_agreed_step_ends_the_generation_for_the_others():
    job = leave_at_min()
    job.die("b")
    assert (job.world.phase, job.world.after) == ("over", None)
    job.say("a", gone=0)
    assert job.world.phase == "waiting"
    job = leave_at_min()
    job.say("a", failures=(error("a", 0, step=3),))
    assert (job.world.phase, job.world.after) == ("over", None)
    job = leave_at_min()
    job.say("b", gone=0)
    job.die("b")
    assert (job.world.phase, job.world.after) == ("over", 3), "it went after the step"


@pytest.mark.parametrize("word", ["gone", "failure", "death"])
def test_a_leaver_is_missed_until_it_has_run_the_step_the_others_are_in(word):
    job = in_process_job("a b c", nnodes="1:3")
    job.say("c", leaving="SIGTERM")
    for name in ("a", "b", "c"):
        job.say(name, paused=0, entered=3)
    assert (job.world.generation, job.world.handing_over) == (1, ("c",))
    if word == "gone":
        job.say("c", gone=0)
    elif word == "failure":
        job.say("c", failures=(failure("c", 0),))
    if word != "failure":
        job.die("c")
    assert job.world.phase == ("running" if word == "gone" else "over")


@pytest.mark.parametrize(
    ("step", "ending", "used"),
    [pytest.param(3, "leave", 0, id="last-step"), pytest.param(4, "failure", 1, id="next-step")],
)
def test_peer_lost_in_the_last_step_before_a_leave_uses_no_restart(step, ending, used):
    """The leaver's agent has killed its worker: the others need not wait for its evaluation."""
    job = in_process_job("a b c", nnodes="1:3")
    job.say("c", leaving="SIGTERM")
    for name in ("a", "b", "c"):
        job.say(name, paused=0, entered=3)
    lost_peer = "lost a peer: Connection closed by peer"
    job.say("a", failures=(error("a", 1, step=step, message=lost_peer),))
    assert (job.world.phase, job.world.ending) == ("over", ending)
    job.say("c", gone=0)
    job.die("c")
    gone(job, 1)
    assert (job.world.phase, job.world.restarts.used) == ("running", used)
    assert ("c leaves (SIGTERM)" in job.world.reason) == (ending == "leave")


def test_a_death_in_the_last_step_does_not_fail_a_training_that_is_done():
    job = in_process_job()
    job.say("b", finished=0, finished_after=12, failures=(failure("b"),))
    assert job.world.ending == "finished"
    job.say("a", done=0, gone=0)
    job.say("b", done=0, gone=0)
    assert (job.world.phase, job.world.exitcode) == ("closed", 0)


def test_a_world_does_not_wait_for_a_worker_that_cannot_start():
    job = in_process_job(world_sizes=WorldSizes(allowed=(4,)))
    job.say("a", failures=(failure("a"),), standing=(1,), starting=1, gone=0)
    job.say("b", gone=0)
    assert job.world.phase == "waiting"
    job.say("a", failures=(failure("a", exitcode=1, message="ImportError: x", fatal=True),))
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_USAGE)
    assert "ImportError: x: a replacement cannot start" in job.world.reason


def test_nodes_that_have_ended_are_not_waited_for_in_train():
    job = Job("2:2")
    job.come("a", "b")
    job.say("a", done=0, gone=0)
    job.say("b", in_process=True, standing=(0, 1))
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)


def test_the_end_of_the_data_ends_the_training_for_all():
    job = in_process_job()
    job.say("a", finished=0, finished_after=12)
    assert (job.world.phase, job.world.ending, job.world.after) == ("over", "finished", 11)
    job.say("a", done=0, gone=0)
    assert job.world.phase == "over"
    job.say("b", done=0, gone=0)
    assert (job.world.phase, job.world.exitcode) == ("closed", 0)


def test_a_failure_after_the_training_ends_the_job_with_it():
    job = in_process_job()
    job.say("a", finished=0, finished_after=12)
    job.say("b", failures=(failure("b", exitcode=1, message="OSError: disk full"),))
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)
    assert "after training was done" in job.world.reason


def test_a_lease_lost_after_the_training_does_not_fail_a_job_whose_node_comes_back():
    job = in_process_job()
    job.say("a", finished=0, finished_after=12)
    b, _ = job.records["b"]
    job.die("b")
    assert (job.world.phase, job.world.reason) == (
        "over",
        "training is done; waiting for b to come back",
    )
    job.say("a", done=0, gone=0)
    job.wait(5.0)
    job.come("b", in_process=True, standing=b.standing, gone=0)
    job.wait(100.0)
    assert job.world.phase == "over"
    job.say("b", done=0)
    assert (job.world.phase, job.world.exitcode) == ("closed", 0)


def test_a_node_that_does_not_come_back_after_the_training_ends_the_job():
    job = in_process_job()
    job.say("a", finished=0, finished_after=12)
    job.die("b")
    job.say("a", done=0, gone=0)
    job.wait(59.0)
    assert job.world.phase == "over"
    job.wait(2.0)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)
    assert job.world.reason == "after training was done: b failed"


def test_a_failure_while_a_lost_node_is_waited_for_ends_the_job():
    job = in_process_job()
    job.say("b", finished=0, finished_after=12)
    job.die("b")
    assert job.world.phase == "over"
    job.say("a", failures=(failure("a", exitcode=1, message="OSError: disk full"),))
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)


def test_worker_left_behind_by_finished_peers_has_not_failed():
    job = in_process_job()
    job.say("a", finished=0, finished_after=12)
    hint = failure("b", alive=True, exitcode=1, message="lost a peer: Connection closed by peer")
    job.say("b", failures=(hint,))
    job.say("a", done=0, gone=0)
    job.say("b", done=0, gone=0)
    assert (job.world.phase, job.world.exitcode) == ("closed", 0)


def error(node: str, generation: int, step: int, **fields) -> Failure:
    facts = {"message": "ValueError: x", "traceback": "Traceback", "exitcode": 1}
    return failure(node, generation, alive=True, step=step, **{**facts, **fields})


def gone(job: Job, generation: int, **fields) -> None:
    for name in ("a", "b"):
        job.say(name, gone=generation, **fields)


def test_an_error_is_tried_again_once_then_ends_the_job():
    job = in_process_job()
    job.say("a", failures=(error("a", 0, step=7),), step=7)
    gone(job, 0)
    assert (job.world.phase, job.world.restarts.used) == ("running", 1)
    job.say("b", failures=(error("b", 1, step=7, rank=3),), step=7)
    gone(job, 1)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_USAGE)
    assert "same error again at step 7 after a rollback" in job.world.reason


def test_another_error_or_another_step_is_tried_again():
    job = in_process_job()
    for generation, what in enumerate(
        (error("a", 0, step=7), error("a", 1, step=8), error("a", 2, step=8, message="KeyError: y"))
    ):
        job.say("a", failures=(what,), step=what.step)
        gone(job, generation)
        assert job.world.phase == "running", what


def test_an_error_that_cannot_be_retried_ends_the_job_at_once():
    job = in_process_job()
    job.say("a", failures=(error("a", 0, step=7, fatal=True),))
    gone(job, 0)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_USAGE)


def test_a_lost_peer_is_only_a_hint():
    job = in_process_job()
    hint = error("b", 0, step=7, message="lost a peer: Connection closed by peer", traceback="")
    job.say("b", failures=(hint,))
    assert job.world.phase == "over"
    job.say("a", failures=(failure("a"),), standing=(1,))
    gone(job, 0)
    assert job.world.cause is not None
    assert job.world.cause.message == "killed by SIGKILL"


def test_nodes_of_one_in_process_worker_each_need_no_launcher():
    job = Job("2:3", settle=0.0)
    job.come("a", "b", nproc=1, in_process=True, standing=(), starting=1)
    assert job.worlds[-1].phase == "waiting"
    job.say("a", standing=(0,), starting=0)
    job.say("b", standing=(0,), starting=0)
    job.now += 1
    job.settle()
    assert (job.world.in_process, job.world.size) == (True, 2)
