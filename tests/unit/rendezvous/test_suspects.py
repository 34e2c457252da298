"""Which nodes an ended generation tells against, in virtual time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.rendezvous.cast import Job, failure, running
from torchelastic.config import WorldSizes, format_endpoint
from torchelastic.rendezvous import held_out, round_state, suspects
from torchelastic.rendezvous.forming import WARM_UP_TIMEOUT
from torchelastic.rendezvous.held_out import (
    FAILURES_ALLOWED,
    FIRST_HOLD,
    FORGIVE_AFTER,
    LONGEST_HOLD,
    LOST_HOLD,
    NODES_LIMIT,
)
from torchelastic.rendezvous.round_state import TRAINED_AFTER, RoundRules
from torchelastic.rendezvous.suspects import pairs
from torchelastic.rendezvous.world import World

NO = "ValueError: no"
KILLED = {"exitcode": -9, "message": "killed by SIGKILL", "traceback": ""}


def trains(job: Job, *names: str) -> None:
    """The nodes tell, as they do with whatever they say next, that they have taken a step."""
    for name in names or job.names:
        member, created = job.records[name]
        job.records[name] = (replace(member, trained=job.world.generation), created)


def grown(nnodes: str = "1:4", first: str = "a", newcomers: str = "b", **rules) -> Job:
    """A job that has trained, and has been resized for newcomers."""
    job = running(nnodes, first, **rules)
    trains(job)
    job.come(*newcomers)
    job.wait(5)
    job.all_gone()
    assert (job.world.generation, job.names) == (1, [*first, *newcomers])
    return job


def hold_times(job: Job) -> dict[str, float]:
    return {one.name: one.seconds for one in job.world.held if one.seconds}


def test_a_join_that_fails_before_its_first_step_is_undone_and_costs_nothing():
    job = grown(max_restarts=0)
    job.fail("a", "b")
    assert (job.world.phase, job.world.generation, job.names) == ("running", 2, ["a"])
    assert job.world.reason == (
        "generation 1 with b failed before its first step: rank 0 on a (local rank 0, pid 1): "
        f"{NO}; holding out b for 60 s"
    )
    assert (job.world.spares, hold_times(job)) == (("b",), {"b": FIRST_HOLD})
    assert job.world.restarts.used == 0


OTHER_BITS = "OtherBitsError: rank 1 computes other bits"


def test_newcomer_that_computes_other_bits_is_held_out_for_an_hour_at_no_cost():
    job = grown(max_restarts=0)
    job.fail("b", message=OTHER_BITS)
    assert (job.world.phase, job.names) == ("running", ["a"])
    assert hold_times(job) == {"b": LONGEST_HOLD}
    assert job.world.reason.endswith("; b computes other bits; holding out b for 1 h")
    (held,) = job.world.held
    assert held.sentence() == "held out for 1 h: rank 1 computes other bits"


def test_node_that_computes_other_bits_again_is_held_out_however_late():
    job = running("1:4", "abc")
    trains(job)
    job.fail("b", message=OTHER_BITS)
    assert (job.names, hold_times(job)) == (["a", "b", "c"], {}), "only the worker is replaced"
    assert job.world.reason.endswith("b computes other bits; held out if it does so again")
    trains(job)
    job.now += 10 * FORGIVE_AFTER
    job.fail("b", message=OTHER_BITS)
    assert (job.names, hold_times(job)) == (["a", "c"], {"b": LONGEST_HOLD})


def test_node_that_computes_other_bits_but_is_needed_stays():
    job = running("2:2", "ab", max_restarts=3)
    trains(job)
    for _ in range(2):
        job.fail("b", message=OTHER_BITS)
        assert (job.names, hold_times(job)) == (["a", "b"], {})
    assert job.world.reason.endswith("b computes other bits; the job needs it, so it stays")


def test_failure_in_step_before_newcomer_entered_holds_nobody_out():
    """A leaver was lost in the last step of the generation before, which the others ran through."""
    job = grown(max_restarts=3)
    job.fail("a", before=True)
    assert (job.world.generation, job.names) == (2, ["a", "b"])
    assert hold_times(job) == {}


def test_newcomer_that_fails_is_retried_after_growing_holds():
    job = grown(max_restarts=3)
    began = []
    for _ in range(12):
        job.fail("b", "a")
        assert (job.world.phase, job.names) == ("running", ["a"])
        trains(job)
        left = job.now
        job.wait(3600)
        job.all_gone()
        assert job.names == ["a", "b"]
        began.append(job.world.generation)
    assert job.now - left == 3600
    assert began == list(range(3, 27, 2)), "nothing between the tries"


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("it has taken a step", lambda job: trains(job, "b")),
        ("somebody killed a worker", lambda job: job.fail("a", **KILLED)),
        ("a node failed", lambda job: job.die("b")),
        ("its node ends by itself", lambda job: job.fail("b", message="UnfitError: no")),
    ],
)
def test_other_ends_of_a_resized_world_are_not_put_down_to_the_newcomer(why, change):
    job = grown()
    change(job)
    if job.world.generation == 1:
        job.fail("a")
    assert hold_times(job) == {}, why


@pytest.mark.parametrize(("lived", "back"), [(TRAINED_AFTER, True), (TRAINED_AFTER / 2, False)])
def test_job_without_steps_is_judged_by_the_lifetime_of_its_world(lived, back):
    job = running("1:2", "a")
    job.now += lived - job.rules.settle
    job.come("b")
    job.wait(job.rules.settle)
    job.all_gone()
    assert job.names == ["a", "b"]
    job.fail("a", "b")
    assert job.names == (["a"] if back else ["a", "b"])


def test_a_world_that_lived_long_without_a_step_has_not_trained_where_steps_are_reported():
    job = grown()
    job.now += 10 * TRAINED_AFTER
    job.fail("a", "b")
    assert job.names == ["a"]


def test_the_first_world_has_no_newcomers():
    job = running("1:2", "ab")
    job.fail("a", "b")
    assert (job.names, job.world.restarts.used) == (["a", "b"], 1)


def test_a_newcomer_of_a_world_that_never_trained_stays_one():
    job = grown("1:4", "a", "b")
    job.fail("a", **KILLED)
    assert job.names == ["a", "b"], "a kill from outside says nothing of b"
    job.fail("a", "b")
    assert job.names == ["a"]


def test_only_the_newcomers_that_failed_are_held_out_if_no_other_node_did():
    job = grown("1:4", "a", "bc")
    job.fail("c")
    assert job.names == ["a", "b"]


@pytest.mark.parametrize(
    ("nnodes", "rules"), [("2:2", {}), ("1:3", {"world_sizes": WorldSizes.parse("4")})]
)
def test_a_replacement_that_the_world_needs_is_tried_again_within_the_budget(nnodes, rules):
    job = running(nnodes, "ab", max_restarts=1, **rules)
    trains(job)
    job.come("c")
    job.die("b")
    job.all_gone()
    assert job.names == ["a", "c"]
    job.fail("a", "c")
    assert (job.names, job.world.restarts.used, hold_times(job)) == (["a", "c"], 1, {})
    job.fail("a", "c")
    assert job.world.phase == "closed"


def test_resident_workers_go_back_too_and_keep_their_state():
    job = Job("1:2")
    job.come("a", in_process=True, standing=(0, 1))
    job.wait(job.rules.settle)
    trains(job)
    job.come("b", in_process=True, standing=(0, 1))
    job.say("a", paused=0, entered=7)
    assert (job.world.generation, job.names) == (1, ["a", "b"])
    told = {"message": NO, "alive": True, "step": 8}
    job.say("a", failures=(failure("a", 1, **told),))
    job.say("a", gone=1)
    job.say("b", gone=1)
    assert (job.world.phase, job.names, job.world.spares) == ("running", ["a"], ("b",))
    assert job.world.reason.endswith(f"at step 8: {NO}; holding out b for 60 s")
    assert job.world.restarts.used == 0


def back_to_two() -> Job:
    """A job that needs two nodes holds c out, and waits for new workers of a."""
    job = Job("2:3")
    job.come("a", "b", in_process=True, standing=(0, 1))
    job.wait(job.rules.settle)
    trains(job)
    job.come("c", in_process=True, standing=(0, 1))
    for name in "ab":
        job.say(name, paused=0, entered=7)
    assert job.names == ["a", "b", "c"]
    job.say("a", failures=(failure("a", 1, NO),), standing=(), starting=2)
    for name in "abc":
        job.say(name, gone=1)
    assert (job.world.phase, job.world.enough, hold_times(job)) == (
        "waiting",
        True,
        {"c": FIRST_HOLD},
    )
    assert "waiting for 2 workers to start" in job.world.reason
    return job


def test_no_world_is_made_of_a_held_node_while_the_workers_of_others_start():
    job = back_to_two()
    job.wait(WARM_UP_TIMEOUT - 1)
    job.say("a", standing=(0, 1), starting=0)
    assert (job.world.phase, job.names, hold_times(job)) == (
        "running",
        ["a", "b"],
        {"c": FIRST_HOLD},
    )


def test_a_worker_that_hangs_at_its_start_is_not_awaited_until_the_hold_ends():
    job = back_to_two()
    job.wait(WARM_UP_TIMEOUT - 1)
    assert job.world.phase == "waiting"
    job.wait(1)
    assert (job.world.phase, job.names, hold_times(job)) == ("running", ["b", "c"], {})
    assert WARM_UP_TIMEOUT < FIRST_HOLD


def test_a_held_node_is_taken_in_when_the_others_cannot_start():
    job = Job("2:3")
    job.come("a", "b", "c", in_process=True, standing=(0, 1))
    job.wait(job.rules.settle)
    held = held_out.hold((), "c", "c", "no")
    job.state = replace(job.state, world=replace(job.world, held=held), held_since={"c": job.now})
    job.say("a", failures=(failure("a", 0, NO),), standing=(), starting=0)
    for name in "abc":
        job.say(name, gone=0)
    assert (job.world.phase, job.names, hold_times(job)) == ("running", ["b", "c"], {})


def test_fatal_error_ends_the_job_despite_a_newcomer():
    job = grown()
    job.fail("b", fatal=True)
    assert job.world.phase == "closed"
    assert job.world.reason.endswith("a restart cannot help")


# --- nodes that keep failing ---------------------------------------------------------------------


def lose(job: Job, name: str) -> None:
    """A node loses its lease and joins anew, once the others have gone on without it."""
    trains(job)
    job.die(name)
    job.all_gone()
    assert name not in job.names
    job.come(name, gone=job.world.generation - 1)


def test_a_node_that_keeps_being_lost_is_held_out_for_a_short_time_each_time():
    """Its network flaps: the same agent comes back, and soon trains again."""
    job = running("1:3", "abc")
    for hold in (0.0, 0.0, *(LOST_HOLD,) * 6):
        lose(job, "c")
        said = "c was lost repeatedly; holding out c for 15 s"
        assert (hold_times(job).get("c", 0.0), said in job.world.reason) == (hold, bool(hold))
        if hold:
            job.wait(hold - 0.1)
            assert (job.names, job.world.phase) == (["a", "b"], "running")
        job.wait(0.1 if hold else 5)
        job.all_gone()
        assert job.names == ["a", "b", "c"]
    assert job.world.restarts.used == 0


def test_failures_of_a_node_are_forgotten_after_it_trained():
    job = running("1:3", "abc")
    for _ in range(5 * FAILURES_ALLOWED):
        job.now += FORGIVE_AFTER
        lose(job, "c")
        assert [one.times for one in job.world.held] == [1]
        job.wait(5)
        job.all_gone()
    job.now += FORGIVE_AFTER
    job.fail("a", **KILLED)
    assert job.world.held == ()


def test_the_loss_of_most_nodes_tells_against_none():
    job = running("1:3", "abc", quorum=False)
    for _ in range(FAILURES_ALLOWED + 2):
        job.die("b", "c")
        job.all_gone()
        job.come("b", "c", gone=job.world.generation - 1)
        job.wait(5)
        job.all_gone()
    assert (job.names, job.world.held) == (["a", "b", "c"], ())


def test_a_flaky_node_that_the_world_needs_is_let_in_anyway():
    job = running("2:2", "ab")
    for _ in range(FAILURES_ALLOWED + 3):
        job.die("b")
        job.all_gone()
        assert "going on without" not in job.world.reason
        job.come("b", gone=job.world.generation)
        job.wait(5)
        assert (job.world.phase, job.names) == ("running", ["a", "b"])


@pytest.mark.parametrize(
    "message",
    [
        NO,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1234, unhandled cuda error",
        "KeyError: 'Broken pipe'",
    ],
)
def test_a_node_whose_workers_alone_keep_failing_at_start_is_held_out(message):
    job = running("1:3", "abc")
    for used in range(1, FAILURES_ALLOWED + 1):
        job.fail("b", message=message)
        assert (job.names, job.world.restarts.used) == (["a", "b", "c"], used)
        job.wait(2)
    job.fail("b", message=message)
    assert job.names == ["a", "c"]
    assert job.world.restarts.used == FAILURES_ALLOWED
    assert job.world.reason.endswith("b keeps failing at start; holding out b for 60 s")


def test_a_failing_node_that_the_world_needs_spends_restarts():
    job = running("2:2", "ab", max_restarts=4)
    for used in range(1, 5):
        job.fail("b")
        job.wait(2)
        assert (job.names, job.world.restarts.used, hold_times(job)) == (["a", "b"], used, {})
    job.fail("b")
    assert job.world.phase == "closed"


def test_nodes_that_are_not_ready_do_not_make_up_for_one_that_keeps_failing():
    """It would be taken in at once, and fail again, without an end: that uses no restart."""
    job = running("2:3", "ab", max_restarts=4)
    job.come("c", ready=False)
    for used in range(1, 5):
        job.fail("b")
        job.wait(2)
        assert (job.names, job.world.restarts.used, hold_times(job)) == (["a", "b"], used, {})
    job.fail("b")
    assert job.world.phase == "closed"


@pytest.mark.parametrize(
    "message",
    [
        "DistStoreError: Timed out after 61 seconds waiting for clients. 2/3 clients joined.",
        "DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection reset by peer",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "OSError: [Errno 104] Connection reset by peer",
        "ConnectionError: a peer is gone",
    ],
)
def test_node_whose_workers_lose_a_connection_at_start_is_not_counted_as_failing(message):
    """Its network flaps, or another node's."""
    job = running("1:3", "abc")
    for used in range(1, FAILURES_ALLOWED + 3):
        job.fail("a", message=message)
        job.wait(2)
        assert (job.names, job.world.restarts.used) == (["a", "b", "c"], used)
    assert job.world.held == ()


def test_node_whose_workers_fail_after_another_node_is_not_counted_as_failing():
    """A script tells in its own words that a peer is gone, while it is stopped."""
    job = running("1:5", "abcde")
    for name in "cde"[: FAILURES_ALLOWED + 1]:
        job.die(name)
        assert job.world.ending == "node-failure"
        job.fail("b", message="RuntimeError: training failed")
        job.wait(2)
    assert job.names == ["a", "b"]
    assert "b" not in [one.name for one in job.world.held]


def test_newcomers_are_held_out_whichever_of_them_waited_in_vain():
    job = grown("1:4", "a", "bc")
    job.fail("c", message="RuntimeError: Connection closed by peer [10.0.0.2]:4711")
    assert job.names == ["a"]


def test_a_new_host_blames_nobody_for_who_has_not_reached_it_yet():
    state = round_state.hosted(running("1:3", "abc").state, "a", 2, None)
    state = replace(state, lost=("b",), members={})
    found = suspects.find(RoundRules(min_nodes=1, max_nodes=3), state, None, ())
    assert found == suspects.HoldDecision(())


def test_a_start_that_fails_on_several_nodes_tells_against_none():
    job = running("1:3", "abc")
    for _ in range(FAILURES_ALLOWED + 1):
        job.fail("b", "c")
        job.wait(2)
    assert (job.names, job.world.held) == (["a", "b", "c"], ())


def test_the_same_error_on_every_node_still_ends_the_job():
    """However the nodes are held out one after the other, in search of a culprit."""
    job = running("1:3", "abc", max_restarts=100)
    for _ in range(30):
        if job.world.phase == "closed":
            break
        job.fail(job.names[0])
        job.wait(2)
    assert job.world.phase == "closed"
    assert job.now < 1000


# --- workers that cannot connect to each other ----------------------------------------------------

#: What gloo says where a connection is refused, and where its packets are dropped.
REFUSED = (
    "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: "
    "Connection refused, remote=[{addr}]:59264$1"
)
DROPPED = "RuntimeError: Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]"
NO_STORE = (
    "DistNetworkError: The client socket has failed to connect to any network address of "
    "({addr}, 40001). The client socket has failed to connect to {addr}:40001 (errno: 110)."
)
NO_RANK = "PeerLostError: no answer from rank {rank} at 10.9.0.3:4711"
NO_ADDRESS = "PeerLostError: no answer from {addr}:4711"


@pytest.mark.parametrize(
    ("says", "left", "pair"),
    [
        ({"b": REFUSED.format(addr="c")}, "ab", "b cannot connect to c"),
        ({"b": NO_STORE.format(addr="a")}, "ac", "b cannot connect to a"),
        ({"c": NO_RANK.format(rank=2)}, "ab", "c cannot connect to b"),
        ({"a": NO_ADDRESS.format(addr="b")}, "ac", "a cannot connect to b"),
        # The node of most pairs, not the newest.
        ({"a": REFUSED.format(addr="b"), "c": REFUSED.format(addr="b")}, "ac", "to b"),
        # Only one side is named: the newest of those that say so.
        ({"a": DROPPED, "b": DROPPED}, "ac", "b cannot connect to some other nodes"),
        ({"a": REFUSED.format(addr="172.16.0.9")}, "bc", "a cannot connect to some other nodes"),
    ],
)
def test_a_world_that_cannot_connect_goes_on_without_one_of_the_pair(says, left, pair):
    job = running("2:4", "abc", max_restarts=0)
    for name, message in says.items():
        told = failure(name, job.world.generation, message=message)
        job.say(name, failures=(told,))
    job.all_gone()
    assert (job.world.phase, job.names) == ("running", [*left])
    assert pair in job.world.reason
    assert job.world.restarts.used == 0


@pytest.mark.parametrize(
    ("reaches", "names"),
    [
        pytest.param([("b",), ()], "abc", id="again"),
        pytest.param([()], "ab", id="all-the-time"),  # a firewall between the workers
        pytest.param([("b",)], "ab", id="not-yet"),
        pytest.param([("a",), ()], "ab", id="another"),
    ],
)
def test_hold_for_a_pair_ends_when_the_pair_connects(reaches, names):
    job = running("2:4", "abc", max_restarts=0)
    job.fail("b", message=REFUSED.format(addr="c"))
    assert (job.names, hold_times(job)) == (["a", "b"], {"c": FIRST_HOLD})
    trains(job)
    for unreached in reaches:
        job.say("c", unreached=unreached)
    job.wait(5)
    job.all_gone()
    assert job.names == [*names]


LOST = "lost a peer: connection closed by peer"


def silence(job: Job, **says: int | str) -> None:
    """Workers of these nodes get no answer from a rank (two to a node), or say something else."""
    for name, told in says.items():
        message = f"lost a peer: {NO_RANK.format(rank=told)}" if isinstance(told, int) else told
        said = failure(name, job.world.generation, message=message, traceback="", alive=True)
        job.say(name, failures=(said,))
    job.all_gone()


@pytest.mark.parametrize(
    ("says", "left", "pair"),
    [
        ({"b": 4}, "abd", "b cannot connect to c"),
        ({"c": 2}, "abd", "c cannot connect to b"),
        # The first to speak may only have lost who found it out.
        ({"a": LOST, "b": 4}, "abd", "b cannot connect to c"),
        # Both ends of a node that nobody reaches.
        ({"a": 2, "b": 4}, "acd", "a cannot connect to b"),
        # Several ranks behind one address.
        ({"b": "lost a peer: no answer from ranks 4, 5 at 10.9.0.3:4711"}, "abd", "to c"),
        # A connection that a script that trains does not get is its own affair, an error no pair's.
        ({"b": REFUSED.format(addr="c")}, "abcd", ""),
        ({"a": NO, "b": 4}, "abcd", ""),
    ],
)
def test_a_world_that_has_trained_goes_on_without_one_of_two_nodes_that_fall_silent(
    says, left, pair
):
    job = running("2:4", "abcd", max_restarts=3)
    trains(job)
    silence(job, **says)
    assert (job.world.phase, job.names) == ("running", [*left])
    assert pair in job.world.reason
    assert (job.world.restarts.used == 0) is (left != "abcd")


def test_a_second_pair_shows_that_the_first_choice_was_wrong():
    """b is cut off from c and d, which the pair of b and d does not show."""
    job = running("3:4", "abcd")
    trains(job)
    silence(job, b=6)
    assert (job.names, hold_times(job)) == (["a", "b", "c"], {"d": FIRST_HOLD})
    silence(job, c=2)
    assert (job.names, hold_times(job)) == (["a", "c", "d"], {"b": FIRST_HOLD})


@pytest.mark.parametrize(
    ("says", "held", "lost", "still"),
    [
        ({"b": 4}, "c", "b", ""),
        ({"b": 4}, "c", "a", "c"),
        # It is clear which of them it was.
        ({"a": 2, "b": 4}, "b", "a", "b"),
        ({"a": 2, "b": 4}, "b", "c", "b"),
    ],
)
def test_a_node_is_let_back_in_when_the_other_one_of_its_pair_is_lost(says, held, lost, still):
    job = running("1:4", "abcd")
    trains(job)
    silence(job, **says)
    assert hold_times(job) == {held: FIRST_HOLD}
    trains(job)
    job.die(lost)
    job.all_gone()
    assert hold_times(job) == dict.fromkeys(still, FIRST_HOLD)
    assert (held in job.names) is (not still)


@pytest.mark.parametrize(("silent", "left"), [(2, "abd"), (6, "abc")], ids=["b", "d"])
def test_a_newcomer_is_held_out_for_a_pair_only_if_it_is_in_it(silent, left):
    job = grown("2:4", "abc", "d")
    silence(job, c=silent)
    assert job.names == [*left]


@pytest.mark.parametrize("addr", ["10.9.0.3", "fd77::2", "fd77:0:1::a3"])
def test_a_node_is_known_by_its_address(addr):
    world = running("1:4", "ab").world
    a, b = world.nodes
    world = world.with_nodes((a, b._replace(addr=addr)), ())
    [found] = pairs(world, [failure("a", message=f"no answer from {format_endpoint(addr, 4711)}")])
    assert found.sentence() == "workers of a cannot connect to b"


def test_a_server_of_the_user_is_no_worker():
    job = running("1:3", "abc")
    message = "ConnectionError: Failed to connect to the tracking server at 10.7.0.1:5000"
    job.fail("a", "b", "c", message=message)
    assert (job.names, job.world.restarts.used, job.world.held) == (["a", "b", "c"], 1, ())


def test_unconnected_pair_is_reported_in_one_line():
    job = running("2:4", "abc")
    trace = "\nException raised from throwTimeoutError at socket.cpp:1041\nframe #0: c10::Error"
    job.fail("b", message=NO_STORE.format(addr="a") + trace)
    assert "\n" not in job.world.reason
    assert "\n" not in job.world.held[0].reason


def test_a_pair_that_the_job_needs_is_named():
    job = running("2:2", "ab")
    job.fail("b", message=REFUSED.format(addr="a"))
    assert (job.world.phase, job.names) == ("running", ["a", "b"])
    assert "workers of b cannot connect to a" in job.world.reason
    assert job.world.restarts.used == 1


def test_an_agent_that_is_started_again_is_not_held_out_for_the_one_before_it():
    job = running("1:4", "ab")
    for _ in range(FAILURES_ALLOWED + 3):
        job.die("b")
        job.all_gone()
        job.come("b", resumed=True)
        job.wait(5)
        job.all_gone()
        assert job.names == ["a", "b"]
    assert hold_times(job) == {}
    # The same agent comes back: its connection, or its machine, is what fails.
    for _ in range(FAILURES_ALLOWED + 1):
        job.die("b")
        job.all_gone()
        job.come("b")
        job.wait(5)
        job.all_gone()
    assert (job.names, hold_times(job)) == (["a"], {"b": LOST_HOLD})


# --- held out -------------------------------------------------------------------------------------

# Nodes that are held out of the next worlds: for how long, and never at the price of a world.


def hold_out(job: Job, *names: str, unable: bool = False) -> None:
    """As if something had told against these nodes when the last world was formed."""
    held = job.world.held
    for name in names:
        held = held_out.hold(held, name, name, "no GPU", unable=unable)
    world = replace(job.world, held=held)
    job.worlds.append(world)
    job.state = round_state.published(job.state, world, job.now)
    job.settle()


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
    job.fail("c", message="could not start the workers")
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
    assert set(hold_times(job)) == set(out) - set(names)


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
    job.fail("a", "b", message="lost a peer: connection closed")
    assert (job.names, job.world.restarts.used) == ((["a"], 0) if back else (["a", "b"], 1))
    assert set(hold_times(job)) == ({"b"} if back else set())
    assert ("holding out b" in job.world.reason) == back


def test_a_node_that_keeps_being_lost_is_not_held_out_while_it_alone_has_the_state():
    job = running("1:3", "abc")
    for holds_too, names in ((-1, "abc"),) * (FAILURES_ALLOWED + 1) + ((3, "ab"),):
        job.say("a", holds=holds_too)
        job.die("c")
        job.come("c", holds=3)
        job.all_gone()
        assert (job.names, set(hold_times(job))) == (list(names), set("abc") - set(names))
        assert ("holding out" in job.world.reason) == (names == "ab")


def test_a_node_that_alone_has_the_state_is_not_left_out_for_a_pair():
    """Others are, one after the other, until it can train."""
    job = running("1:3", "abc")
    job.say("c", holds=3)
    refused = "Gloo connectFullMesh failed: Connection refused, remote=[c]:59264"
    job.fail("a", "b", message=f"RuntimeError: {refused}")
    assert (job.names, set(hold_times(job))) == (["b", "c"], {"a"})
    job.fail("b", message=f"RuntimeError: {refused}")
    assert (job.names, set(hold_times(job))) == (["c"], {"a", "b"})


@pytest.mark.parametrize("why", ["no start", "no module"])
def test_node_that_cannot_hand_over_its_state_is_held_out_anyway(why):
    job = running("1:3", "abc")
    job.say("c", holds=3)
    if why == "no module":
        job.fail("c", message="ModuleNotFoundError: No module named 'apex'")
    else:
        for _ in range(FAILURES_ALLOWED + 1):
            assert job.names == ["a", "b", "c"]
            job.fail("c", message="ValueError: no")
    assert (job.names, set(hold_times(job))) == (["a", "b"], {"c"})


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
