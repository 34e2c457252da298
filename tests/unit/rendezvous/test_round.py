"""Which world comes next, by table and in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.config import Grow, WorldSizes
from torchelastic.errors import EXIT_FAILED, EXIT_NOT_ENOUGH_NODES
from torchelastic.failure import Failure
from torchelastic.rendezvous import resident, round_state
from torchelastic.rendezvous.forming import SAY_EVERY, WARM_UP_PATIENCE
from torchelastic.rendezvous.round import waits_for_checkpoint
from torchelastic.rendezvous.round_state import RoundRules, RoundState
from torchelastic.rendezvous.world import Member, World


class Job:
    """A leader without a store: members come and go, `now` moves, worlds are taken as published."""

    def __init__(self, nnodes: str = "1:4", **rules) -> None:
        low, high = map(int, nnodes.split(":"))
        self.rules = RoundRules(min_nodes=low, max_nodes=high, **rules)
        self.state = RoundState()
        self.now = 0.0
        self.worlds: list[World] = []
        self.kinds: list[str | None] = []
        self.wake_at: float | None = None
        self.records: dict[str, tuple[Member, int]] = {}
        self.revision = 0

    def come(self, *names: str, ready: bool = True, **fields) -> None:
        for name in names:
            self.revision += 1
            member = Member(
                node=name,
                name=name,
                addr=name,
                **{"nproc": 2, "store": f"{name}:{self.revision}", **fields},
                ready=ready,
            )
            self.records[name] = (member, self.revision)
            self._tell(name)

    def say(self, name: str, **changes) -> None:
        member, created = self.records[name]
        self.records[name] = (replace(member, **changes), created)
        self._tell(name)

    def _tell(self, name: str) -> None:
        member, created = self.records[name]
        self.state = round_state.seen(self.state, member, created, self.now)
        self.settle()

    def die(self, *names: str) -> None:
        for name in names:
            del self.records[name]
            self.state = round_state.lost(self.state, name)
        self.settle()

    def settle(self) -> None:
        for _ in range(10):
            decision = resident.decide(self.rules, self.state, self.now)
            self.wake_at = decision.wake_at
            if decision.world is None:
                return
            self.worlds.append(decision.world)
            self.kinds.append(decision.kind)
            self.state = round_state.published(self.state, decision.world, self.now)
        raise AssertionError(f"no rest: {self.worlds[-3:]}")

    def wait(self, seconds: float) -> None:
        """Let time pass, waking whenever the round asked for it."""
        end = self.now + seconds
        while self.wake_at is not None and self.wake_at <= end:
            self.now = max(self.now, self.wake_at)
            self.settle()
        self.now = end

    def all_gone(self) -> None:
        """Every member that stays stops its workers and offers a fresh store."""
        for name, (member, _) in list(self.records.items()):
            if self.world.phase == "over" and not member.leaving:
                self.revision += 1
                self.say(name, gone=self.world.generation, store=f"{name}:{self.revision}")

    @property
    def world(self) -> World:
        return self.worlds[-1]

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.world.nodes]


def failure(node: str, generation: int = 0, message: str = "ValueError: no", **fields) -> Failure:
    made = {
        "rank": 0,
        "local_rank": 0,
        "pid": 1,
        "exitcode": 1,
        "traceback": f'  File "train.py", line 3\n{message}',
        **fields,
    }
    return Failure(generation=generation, node=node, message=message, **made)


def running(nnodes: str = "1:4", nodes: str = "ab", **rules) -> Job:
    """A job whose first world runs on `nodes`."""
    job = Job(nnodes, **rules)
    job.come(*nodes)
    job.wait(job.rules.settle)
    assert (job.world.phase, job.world.generation, job.names) == ("running", 0, list(nodes))
    return job


# --- the first world -----------------------------------------------------------------------------


def test_complete_at_once_when_max_is_there():
    job = Job("1:2")
    job.come("a")
    assert job.world.phase == "waiting"
    job.come("b")
    assert job.world.phase == "running"
    assert job.names == ["a", "b"]
    assert job.world.reason == "the job starts"


def test_between_min_and_max_each_arrival_prolongs_the_settle_time():
    job = Job("1:4", settle=1.0)
    job.come("a")
    job.wait(0.9)
    job.come("b")
    job.wait(0.9)
    assert job.world.phase == "waiting"
    job.wait(0.2)
    assert job.names == ["a", "b"]
    assert job.world.generation == 0


def test_a_member_that_warms_up_is_waited_for():
    job = Job("1:3")
    job.come("a")
    job.come("b", ready=False)
    job.wait(WARM_UP_PATIENCE / 2)
    assert job.world.phase == "waiting"
    job.say("b", ready=True)
    job.wait(1.0)
    assert job.names == ["a", "b"]


def test_settling_and_warming_up_go_on_side_by_side():
    job = Job("1:3", settle=1.0)
    job.come("a", ready=False)
    job.wait(5.0)
    job.say("a", ready=True)
    assert job.names == ["a"]


def test_a_member_that_never_warms_up_does_not_hold_the_others_for_ever():
    job = Job("1:3")
    job.come("a")
    job.come("b", ready=False)
    job.wait(WARM_UP_PATIENCE + 1)
    assert job.names == ["a"]


def test_below_min_the_job_waits_and_says_so_every_minute():
    job = Job("2:2", wait_for_nodes=0)
    job.come("a")
    assert job.world.reason == "waiting for nodes: 1 of at least 2 there"
    job.wait(3 * SAY_EVERY + 1)
    assert [world.phase for world in job.worlds] == ["waiting"] * 4


def test_below_min_for_too_long_ends_the_job():
    job = Job("2:2", wait_for_nodes=100)
    job.come("a")
    job.wait(101)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_NOT_ENOUGH_NODES)
    assert "--wait-for-nodes" in job.world.reason


def test_nodes_that_warm_up_are_not_missing():
    job = Job("2:2", wait_for_nodes=100)
    job.come("a", "b", ready=False)
    job.wait(1000)
    assert job.world.phase == "waiting"
    assert job.world.reason == "warming up: 2 of at least 2 there"


def test_ranks_follow_unequal_nodes_and_roles():
    job = Job("3:3")
    job.come("a", nproc=1, role="actor")
    job.come("b", nproc=3, role="learner")
    job.come("c", nproc=2, role="actor")
    places = [(node.name, node.first_rank, node.first_role_rank) for node in job.world.nodes]
    assert places == [("a", 0, 0), ("b", 1, 0), ("c", 4, 1)]
    assert (job.world.size, job.world.role_size("actor")) == (6, 3)


def test_static_places_are_obeyed_and_a_second_claim_is_a_spare():
    job = Job("2:2")
    job.come("late", node_rank=1)
    job.come("twin", node_rank=1)
    job.come("first", node_rank=0)
    assert job.names == ["first", "late"]


def test_the_world_names_the_first_nodes_own_store():
    job = running("2:2")
    assert job.world.store == "a:1"


# --- worker failure ------------------------------------------------------------------------------


def test_a_failure_restarts_the_same_nodes_only_when_all_workers_are_gone():
    job = running("2:2")
    job.say("b", failures=(failure("b"),), gone=0, store="b:9")
    assert job.world.phase == "over"
    assert job.kinds[-1] == "failure"
    job.say("a", gone=0, store="a:9")
    assert (job.world.phase, job.world.generation, job.names) == ("running", 1, ["a", "b"])
    assert job.world.ledger.used == 1
    assert "ValueError: no" in job.world.reason
    assert "1 of 100 restarts used" in job.world.reason
    assert job.world.cause == failure("b")


def test_no_store_serves_two_generations():
    job = running("2:2")
    job.say("b", failures=(failure("b"),), gone=0)
    job.say("a", gone=0, store="")
    assert job.world.phase == "over"
    job.say("a", store="a:9")
    assert (job.world.phase, job.world.store) == ("running", "a:9")


def test_when_the_budget_is_spent_the_first_failure_of_the_job_is_named():
    job = running("2:2", max_restarts=0)
    lost_peer = failure("a", message="RuntimeError: Connection closed by peer [127.0.0.1]:1")
    job.say("a", failures=(lost_peer,))
    job.say("b", failures=(failure("b"),))
    job.all_gone()
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)
    assert job.world.cause == failure("b")
    assert job.world.consequences == (replace(lost_peer, traceback=""),)
    assert "--max-restarts 0" in job.world.reason


def test_a_failure_of_an_older_generation_is_history():
    job = running("2:2")
    job.say("b", failures=(failure("b"),))
    job.all_gone()
    assert job.world.generation == 1
    job.say("b", failures=(failure("b", generation=0),))
    assert job.world.phase == "running"


def test_success_needs_every_node():
    job = running("2:2")
    job.say("a", done=0, gone=0)
    assert job.world.phase == "running"
    job.say("b", done=0, gone=0)
    assert (job.world.phase, job.world.exitcode) == ("closed", 0)


def test_a_node_that_finished_may_go():
    job = running("2:2")
    job.say("a", done=0, gone=0)
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
    assert (job.world.phase, job.names, job.world.ledger.used) == ("running", ["a", "c"], 0)
    assert job.world.reason.startswith("b failed")


def test_survivors_errors_are_not_charged_when_a_node_failed():
    """Their collectives fail before the dead node's connection is given up."""
    job = running("1:2", max_restarts=0)
    job.say("a", failures=(failure("a", message="RuntimeError: Connection reset by peer"),), gone=0)
    assert (job.world.phase, job.kinds[-1]) == ("over", "failure")
    job.die("b")
    job.say("a", store="a:9")
    assert (job.world.phase, job.names) == ("running", ["a"])
    assert job.kinds[-1] == "node-failure"


def test_a_leave_is_not_waited_for():
    job = running("1:4", "abc")
    job.say("b", leaving="SIGTERM")
    assert (job.world.phase, job.kinds[-1]) == ("over", "leave")
    job.all_gone()
    assert (job.world.phase, job.names) == ("running", ["a", "c"])
    job.die("b")
    assert job.world.phase == "running"
    assert "b leaves (SIGTERM)" in job.world.reason


def test_count_resizes_makes_membership_changes_spend_the_budget():
    job = running("1:4", "abc", max_restarts=1, count_resizes=True)
    job.die("c")
    job.all_gone()
    assert job.world.ledger.used == 1
    job.die("b")
    job.all_gone()
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_FAILED)


def test_below_min_after_a_failure_waits_then_goes_on_with_a_replacement():
    job = running("2:2")
    job.die("b")
    job.all_gone()
    assert (job.world.phase, job.world.missing) == ("waiting", ("b",))
    job.come("c")
    assert (job.world.phase, job.names, job.world.generation) == ("running", ["a", "c"], 1)


def test_a_node_that_was_given_up_and_came_back_is_a_newcomer():
    job = running("1:3", "ab")
    job.come("a")  # a new key: its lease had ended
    assert (job.world.phase, job.kinds[-1]) == ("over", "node-failure")
    job.say("a", gone=0)
    job.say("b", gone=0, store="b:9")
    assert job.names == ["a", "b"]


def test_everybody_leaves():
    job = running("1:2")
    job.say("a", leaving="SIGTERM")
    job.say("b", leaving="SIGTERM")
    assert job.world.phase in ("over", "waiting")


# --- growth --------------------------------------------------------------------------------------


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
    assert job.world.ledger.used == 0


def test_a_newcomer_that_fills_the_job_comes_in_at_once():
    job = running("1:3", "ab")
    job.come("c")
    assert job.world.phase == "over"


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


@pytest.mark.parametrize(
    ("sizes", "nodes", "size"),
    [
        ("2,4,8,16", "abc", 2),
        ("multiple:4", "abc", 2),
        ("2,4,8,16", "abcdefg", 4),
        ("4,6", "abc", 3),
    ],
)
def test_the_largest_allowed_world_runs_and_the_rest_are_spares(sizes, nodes, size):
    job = Job("1:8", world_sizes=WorldSizes.parse(sizes))
    job.come(*nodes)
    job.wait(1.0)
    assert len(job.world.nodes) == size
    assert len(job.world.spares) == len(nodes) - size


def test_a_newcomer_that_allows_no_larger_world_stays_a_spare():
    job = Job("1:8", world_sizes=WorldSizes.parse("2,4,8"))
    job.come("a", "b")
    job.wait(1.0)
    job.come("c")
    job.wait(100)
    assert job.world.generation == 0
    job.come("d")
    job.wait(1.0)
    assert job.world.phase == "over"


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
    one_by_one, draft = job.state, round_state.Draft(job.state)
    for member in records:
        created = job.records[member.node][1]
        one_by_one = round_state.seen(one_by_one, member, created, 9.0)
        draft.see(member, created, 9.0)
    one_by_one = round_state.lost(one_by_one, "d")
    draft.lose("d")
    assert draft.finish() == one_by_one
    assert (len(one_by_one.failures), one_by_one.done, one_by_one.step) == (2, {"b"}, 7)
    assert one_by_one.lost == (("c", "d") if phase == "running" else ("d",))


def test_of_many_nodes_the_first_are_named():
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
    job.state = round_state.without_the_vanished(job.state)
    job.settle()
    job.all_gone()
    assert (job.world.generation, job.names) == (1, ["b", "c"])


def test_a_new_leader_takes_no_failure_for_one_at_once():
    old = running("1:2", "a")
    job = Job("1:2")
    job.state = round_state.taken_over(old.world, 0.0)
    job.worlds.append(old.world)
    job.records = dict(old.records)
    job.say("a", failures=(failure("a"),))
    job.all_gone()
    assert (job.world.generation, job.world.ledger.used, job.world.ledger.repeats) == (1, 1, 0)


def test_a_world_survives_the_wire():
    job = running("2:2", max_restarts=0)
    job.say("a", failures=(failure("a"),))
    job.all_gone()
    assert World.from_json(job.world.to_json()) == job.world
    assert World.from_json({**job.world.to_json(), "from_a_newer_release": 1}) == job.world


def test_world_sizes_count_workers_not_nodes():
    job = Job("1:8", world_sizes=WorldSizes.parse("multiple:3"))
    job.come("a", nproc=2)
    job.come("b", nproc=1)
    job.come("c", nproc=2)
    job.wait(1.0)
    assert (job.names, job.world.spares) == (["a", "b"], ("c",))


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
def test_what_falls_with_a_resize_or_a_leave_is_not_charged(told, what):
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
        ({"world_sizes": WorldSizes.parse("multiple:5")}, {}, "has no use for 4 workers"),
        ({}, {"node_rank": 0}, "two of them claim the same --node-rank"),
    ],
)
def test_nodes_that_cannot_form_a_world_do_not_wait_for_ever(rules, fields, sentence):
    job = Job("2:2", wait_for_nodes=100, **rules)
    job.come("a", "b", **fields)
    job.wait(101)
    assert (job.world.phase, job.world.exitcode) == ("closed", EXIT_NOT_ENOUGH_NODES)
    assert sentence in job.world.reason


def test_no_newcomer_undoes_finished_work():
    job = running("1:3", "ab")
    job.say("a", done=0, gone=0)
    job.come("c")
    job.wait(100)
    assert job.world.phase == "running"


def test_success_after_a_restart_has_no_cause():
    job = running("1:2", "a")
    job.say("a", failures=(failure("a"),))
    job.all_gone()
    job.say("a", done=1, gone=1)
    assert (job.world.phase, job.world.cause) == ("closed", None)


def test_a_node_that_does_not_get_rid_of_its_workers_is_named_every_minute():
    job = running("2:2")
    job.say("a", failures=(failure("a"),), gone=0)
    job.wait(SAY_EVERY + 1)
    assert (job.world.phase, job.world.reason) == ("over", "waiting for the workers of b to end")


def test_a_generation_after_a_wait_says_so():
    job = running("2:2")
    job.die("b")
    job.all_gone()
    job.come("c")
    assert job.world.reason == "enough nodes are there again"
