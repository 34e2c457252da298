"""Programs that cannot run: the job ends, unless other nodes can run them. In virtual time."""

from __future__ import annotations

from tests.unit.rendezvous.round_support import Job, failure, running
from torchelastic.rendezvous.held_out import FAILURES_ALLOWED
from torchelastic.rendezvous.round_state import TRAINED_AFTER

MISSING = "ModuleNotFoundError: No module named 'apex'"


def fail(job: Job, *names: str) -> None:
    for name in names:
        job.say(name, failures=(failure(name, job.world.generation, message=MISSING),))
    job.all_gone()


def test_a_node_that_lacks_a_module_is_held_out_and_the_others_train():
    job = running("2:3", "abc")
    fail(job, "b")
    assert (job.world.phase, job.names, job.world.spares) == ("running", ["a", "c"], ("b",))
    assert job.world.reason.endswith("no restart used; holding out b for 60 s")


def test_node_that_lacks_a_module_spends_no_restart():
    job = running("1:3", "abc", max_restarts=0)
    fail(job, "b")
    assert (job.world.phase, job.names, job.world.restarts.used) == ("running", ["a", "c"], 0)
    job.wait(TRAINED_AFTER)
    fail(job, "c")
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
    fail(job, "b")
    fail(job, "a")
    assert (job.world.phase, job.world.exitcode) == ("closed", 64)
    assert job.world.reason.endswith("; a restart cannot fix this ModuleNotFoundError; giving up")
    assert job.world.cause.node == "a"


def test_the_job_ends_at_once_where_all_nodes_lack_it_or_none_can_be_spared():
    everywhere, needed = running("1:3", "abc"), running("3:3", "abc")
    everywhere.say("a", failures=(failure("a", message=MISSING),))
    everywhere.say("b", failures=(failure("b", message=MISSING),))
    fail(everywhere, "c")
    fail(needed, "b")
    for job in (everywhere, needed):
        assert (job.world.phase, job.world.generation) == ("closed", 0)


def test_a_job_that_has_trained_goes_on_without_one_node_after_the_other():
    job = running("1:3", "abc")
    job.wait(TRAINED_AFTER)
    fail(job, "b")
    assert job.names == ["a", "c"]
    job.wait(TRAINED_AFTER - 1)
    fail(job, "a")
    assert (job.world.phase, job.names) == ("running", ["c"])
    fail(job, "c")
    assert job.world.phase == "closed", "every node lacks it"


def test_nodes_that_are_unfit_and_names_that_nobody_knows_save_nothing():
    job = running("2:3", "ab")
    job.come("c", ready=False, unfit="its --preflight check failed (exit code 3)")
    fail(job, "a")
    assert job.world.phase == "closed"
    garbled = running("1:3", "ab")
    garbled.say("a", failures=(failure("?", message=MISSING),))
    garbled.all_gone()
    assert garbled.world.phase == "closed"
