"""When newcomers come in, and who stays outside."""

from __future__ import annotations

from tests.unit.rendezvous.round_support import failure, running
from torchelastic.config import Grow
from torchelastic.rendezvous import round_state
from torchelastic.rendezvous.decide import waits_for_checkpoint


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
    job.state = round_state.checkpoint_seen(job.state, True)
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
