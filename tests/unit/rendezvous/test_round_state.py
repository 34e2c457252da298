"""What a leader knows: from reports, and from the leader before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.rendezvous.round_support import Job, failure, running
from torchelastic.rendezvous import round_state


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
        one_by_one = round_state.seen(one_by_one, member, created, 9.0)
        draft.see(member, created, 9.0)
    one_by_one = round_state.lost(one_by_one, "d")
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
