"""What a world tells of its first failure, in virtual time: a node's, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.rendezvous.round_support import failure, running

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
