"""Majorities of the last world when nodes cannot be reached, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.rendezvous.cast import Job, failure, seen
from tests.unit.rendezvous.majority_model import elected
from torchelastic.agent.lifecycle import script
from torchelastic.agent.lifecycle.node_state import WorldSeen
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.config import WorldSizes
from torchelastic.rendezvous import majority, round_state
from torchelastic.rendezvous.round_state import RoundState, WitnessVotes


def hosted(nnodes: str = "1:5", *, term: int = 1, **rules) -> Job:
    """A job whose leader hosts the store, as node `a`."""
    job = Job(nnodes, settle=1.0, **rules)
    job.state = round_state.hosted(RoundState(), "a", term, None, quorum=job.rules.quorum)
    return job


def train(job: Job, *names: str) -> None:
    job.come(*names)
    job.wait(2.0)
    assert job.world.phase == "running"
    assert {node.node for node in job.world.nodes} == set(names)
    accept(job, *names)


def accept(job: Job, *names: str) -> None:
    for name in names:
        job.say(name, accepted=job.world.generation)
    members = job.state.members.keys()
    assert round_state.departing(job.state) - members == round_state.votes(job.state) - members
    job.state = round_state.confirmed(job.state)
    job.settle()


def stop(job: Job, *names: str) -> None:
    for name in names:
        job.say(name, gone=job.world.generation)


@pytest.mark.parametrize(
    ("nodes", "left", "goes_on"),
    [
        ("abc", "ab", True),
        ("abc", "a", False),
        ("ab", "a", True),  # the host holds the tie of two
        ("abcd", "ab", False),
        ("abcd", "abc", True),
        ("abcde", "abc", True),
        ("abcde", "ab", False),
    ],
)
def test_a_majority_of_the_last_world_goes_on(nodes, left, goes_on):
    job = hosted()
    train(job, *nodes)
    job.die(*(node for node in nodes if node not in left))
    stop(job, *left)
    assert (job.world.phase == "running") == goes_on
    if not goes_on:
        assert job.world.phase == "waiting"
        assert f"{len(left)} of the {len(nodes)} nodes of generation 0" in job.world.reason


@pytest.mark.parametrize(
    "job",
    [lambda: hosted(quorum=False), lambda: Job("1:5", settle=1.0)],
    ids=["without the rule", "the store is outside"],
)
def test_quorum_none_continues_with_the_nodes_of_the_leader(job):
    job = job()
    train(job, *"abcde")
    job.die(*"bcde")
    stop(job, "a")
    assert [node.node for node in job.world.nodes] == ["a"]
    assert job.world.phase == "running"


def test_quorum_none_keeps_no_list_of_voters():
    """Those who cannot be reached never take a world up: none would ever be confirmed."""
    job = hosted(quorum=False)
    train(job, *"abcde")
    job.die(*"bcde")
    for name in [f"n{number}" for number in range(50)]:
        stop(job, "a")
        job.come(name)
        job.wait(2.0)
        stop(job, "a")
        assert job.names == ["a", name]
        job.die(name)
    assert job.world.generation > 50
    assert job.state.roll is None


def test_quorum_none_elects_the_host_by_the_newest_world():
    """A failover candidate holds it: earlier nodes have no vote, they may be gone for good."""
    held = majority.from_json(None, 9, "afg", "a")
    assert elected(held, dict.fromkeys("fg", 9))


def test_quorum_none_with_a_later_host_asks_no_node():
    first = hosted()
    train(first, *"abcde")
    later = taken_over(first, "b", "b", quorum=False)
    assert (later.names, later.world.phase) == (["b"], "running")
    assert later.state.roll is None


def test_announced_leave_counts_as_consent():
    job = hosted()
    train(job, *"abcd")
    for name in "bcd":
        job.say(name, leaving="SIGTERM")
    job.die(*"bcd")
    assert round_state.departing(job.state) == set("bcd")
    stop(job, "a")
    assert [node.node for node in job.world.nodes] == ["a"]


def test_one_after_the_other_may_fail():
    """Each world is confirmed before the next node goes: a majority of it is enough."""
    job = hosted()
    train(job, *"abcde")
    for left in ("abcd", "abc", "ab", "a"):
        gone = {node.node for node in job.world.nodes} - set(left)
        job.die(*gone)
        stop(job, *left)
        assert job.world.phase == "running", left
        accept(job, *left)


def test_nodes_that_come_back_bring_the_majority_and_strangers_do_not():
    job = hosted()
    train(job, *"abc")
    job.die("b", "c")
    stop(job, "a")
    job.come("d", "e")
    job.wait(10.0)
    assert job.world.phase == "waiting"
    job.come("b", gone=0)
    job.wait(1.0)
    assert {"a", "b"} <= {node.node for node in job.world.nodes}
    assert job.world.phase == "running"


def test_a_world_that_is_no_majority_waits_until_enough_have_taken_it_up():
    job = hosted(world_sizes=WorldSizes.parse("4,10"))
    train(job, *"abcde")  # two workers each
    job.die("e")
    stop(job, *"abcd")
    assert [node.node for node in job.world.nodes] == ["a", "b"]
    assert job.world.phase == "agreeing"
    accept(job, "a", "b")
    assert job.world.phase == "agreeing"
    accept(job, "c")  # three of five
    assert job.world.phase == "running"


def test_a_world_whose_node_goes_before_it_is_agreed_on_is_given_up():
    """Those who had to agree to it agree to the next one, too, though they are not in it."""
    job = hosted(world_sizes=WorldSizes.parse("4,10"))
    train(job, *"abcde")
    job.die("e")
    stop(job, *"abcd")
    generation = job.world.generation
    assert (job.names, job.world.phase) == (["a", "b"], "agreeing")
    job.die("b")
    assert job.world.phase == "over"
    accept(job, "c", "d")
    job.say("a", gone=generation)
    assert (job.names, job.world.phase) == (["a", "c"], "running")
    assert job.world.generation == generation + 1


def agreeing_on_two_of_five() -> Job:
    job = hosted(world_sizes=WorldSizes.parse("4,10"))
    train(job, *"abcde")
    job.die("e")
    stop(job, *"abcd")
    assert (job.names, job.world.phase) == (["a", "b"], "agreeing")
    return job


def test_a_world_that_cannot_be_agreed_on_any_more_is_given_up():
    """Its own nodes are there, but too few of those before it: that is said, and waited for."""
    job = agreeing_on_two_of_five()
    generation = job.world.generation
    accept(job, "a", "b")
    job.die("c")
    assert job.world.phase == "agreeing"  # d may still take it up
    job.die("d")
    assert (job.world.phase, job.world.ending) == ("over", "node-failure")
    stop(job, "a", "b")
    assert job.world.phase == "waiting"
    assert job.world.reason.startswith("waiting for a majority")
    job.come("c", accepted=generation)
    job.wait(2.0)
    assert job.world.phase in ("running", "agreeing")
    assert job.world.generation > generation


def test_a_world_that_nobody_takes_up_is_given_up_after_a_while():
    job = agreeing_on_two_of_five()
    job.wait(59.0)
    assert job.world.phase == "agreeing"
    job.wait(2.0)
    assert job.world.phase == "over"


def test_a_cut_that_heals_leaves_nobody_waiting():
    """c and d were cut off when a formed a world with all four, and never heard of it."""
    job = hosted()
    train(job, *"abcd")
    job.say("c", gone=0)
    job.say("d", gone=0)
    job.say("a", failures=(failure("a"),))
    stop(job, "a", "b")
    assert (job.world.phase, job.world.generation) == ("running", 1)
    job.die("c", "d")
    stop(job, "a", "b")
    assert job.world.phase == "waiting"
    assert "2 of the 4 nodes of generation 1" in job.world.reason
    job.come("c", "d", gone=0)
    job.wait(10.0)
    assert job.world.phase == "waiting"  # they may have workers of it, as far as is known
    assert "but the workers of c, d have not been reported as stopped" in job.world.reason
    node = ScriptState(node="c", generation=0)
    _, commands = script.handle(node, WorldSeen(job.world))
    for command in commands:
        job.say("c", **command.changes)
    assert (job.world.phase, job.world.generation) == ("running", 2)
    assert job.names == [*"abcd"]


def test_the_first_world_of_a_store_that_knows_nothing_waits():
    job = hosted()
    job.state = RoundState(may_begin_at=3.0, host="a", term=1, roll=majority.Roll())
    job.come("a", "b")
    job.wait(2.0)
    assert job.state.world is None or not job.state.world.nodes
    job.wait(3.0)
    assert job.world.phase == "running"


def test_first_world_with_all_nodes_does_not_wait():
    job = hosted("2:2")
    job.state = RoundState(may_begin_at=3.0, host="a", term=1, roll=majority.Roll())
    job.come("a")
    assert job.world.phase == "waiting"
    job.come("b")
    assert job.world.phase == "running"


def taken_over(
    first: Job,
    host: str,
    *names: str,
    term: int = 3,
    quorum: bool = True,
    may_begin_at: float = 0.0,
) -> Job:
    """The job under another host, with these nodes as they were."""
    later = Job("1:7", settle=1.0, quorum=quorum)
    state = round_state.taken_over(first.world, 0.0)
    roll = first.state.roll
    assert roll is not None
    stored = majority.to_json(roll)
    hosted = round_state.hosted(state, host, term, stored, quorum=quorum)
    later.state = replace(hosted, may_begin_at=may_begin_at)
    for name in names:
        later.records[name] = first.records[name]
        later.state = seen(later.state, *first.records[name], 0.0)
    later.state = round_state.with_missing_lost(later.state)
    later.settle()
    return later


def test_a_new_host_goes_on_without_those_who_did_not_vote():
    """Those who voted have stopped: nobody of them counts as failed."""
    first = hosted()
    train(first, *"abc")
    later = taken_over(first, "b", "b", "c")
    assert (later.names, later.world.phase) == (["b", "c"], "running")
    assert later.world.reason.startswith("a failed")
    assert later.world.generation == 2  # the number that the old host may have given is left out
    assert (later.world.host, later.world.term) == ("b", 3)


def test_a_new_host_waits_for_nobody_who_never_saw_the_last_world():
    """It could not even be told of it any more: it follows a later host."""
    first = hosted()
    train(first, *"abc")
    first.die("a")
    stop(first, "b", "c")  # c is cut off before it hears of generation 1
    first.say("b", accepted=1)
    later = taken_over(first, "b", "b", "c")
    assert (later.world.phase, later.world.generation) == ("running", 2)


def test_a_world_that_was_being_agreed_on_ends_with_its_host():
    first = hosted("1:7", world_sizes=WorldSizes.parse("6,14"))
    train(first, *"abcdefg")
    first.die("g")
    stop(first, *"abcdef")
    assert first.world.phase == "agreeing"
    later = taken_over(first, "b", *"bcde")
    assert later.world.phase == "running"


def test_finished_node_that_is_cut_off_has_not_agreed():
    """It may vote for another host."""
    job = hosted()
    train(job, *"abc")
    job.say("b", done=0, gone=0)
    job.die("b", "c")
    stop(job, "a")
    assert job.world.phase == "waiting"


def test_leavers_are_awaited_when_all_nodes_leave():
    job = Job("1:1", settle=1.0)
    job.come("a")
    job.come("b")
    assert job.names == ["a"]
    job.say("a", leaving="SIGTERM")
    assert job.world.phase == "over"
    job.say("a", gone=0)
    assert (job.names, job.world.phase) == (["b"], "running")


def test_the_first_world_of_a_later_host_has_a_number_that_all_take_up():
    job = hosted("2:2", term=4)
    job.come("a")
    job.come("b")
    assert job.world.phase == "running"
    assert job.world.generation >= majority.first_generation(4)


# --- a host that does not train ------------------------------------------------------------------


def with_spare_host(*others: str, term: int = 1) -> Job:
    """The workers of the host, a, have died, and their replacements are on their way."""
    job = hosted("1:5", term=term)
    train(job, "a", *others)
    for name in ("a", *others):
        job.say(name, in_process=True, standing=(0, 1), peer=f"{name}:1")
    job.say("a", standing=(), starting=2, failures=(failure("a", exitcode=-9),), gone=0)
    stop(job, *others)
    assert (job.names, job.world.phase) == ([*others], "running")
    accept(job, "a", *others)
    return job


def test_others_know_where_a_spare_host_is():
    job = with_spare_host("b")
    assert job.world.candidates == {"b": "b:1", "a": "a:1"}
    again = job.world.with_nodes(job.world.nodes, ["c"])
    assert again.candidates == job.world.candidates


@pytest.mark.parametrize("others", ["b", "bc"])
def test_a_spare_host_goes_on_when_a_node_is_lost_and_comes_back_without_a_vote(others):
    job = with_spare_host(*others)
    job.die("b")
    job.come("new", in_process=True, standing=(0, 1))
    stop(job, *others[1:])
    assert job.world.phase == "running"
    accept(job, "a", *job.names)
    job.say("a", standing=(0, 1), starting=0)
    job.wait(60.0)
    for name in job.names:
        job.say(name, paused=job.world.generation, entered=3)
    assert (set(job.names), job.world.phase) == ({"a", *others[1:], "new"}, "running")


def test_missing_voters_of_all_electorates_are_reported():
    job = with_spare_host(*"bcd")
    job.die(*"cd")
    stop(job, "b")
    assert job.world.phase == "waiting"
    assert (
        "2 of the 4 nodes (those of generation 1 and its host) can be reached" in job.world.reason
    )
    assert job.world.missing == ("c", "d")
    later = taken_over(with_spare_host(*"bcd"), "b", "b")
    assert "1 of the 4 nodes (those of generation 1 and its host)" in later.world.reason
    assert later.world.missing == ("c", "d", "the host of generation 1")


def test_a_host_that_takes_over_waits_for_the_lease_of_who_trains_alone():
    """b may be cut off, and needs nobody for a step."""
    first = with_spare_host("b")
    later = taken_over(first, "a", may_begin_at=3.0)
    later.come("a", "c", in_process=True, standing=(0, 1))
    assert (later.world.phase, later.wake_at) == ("waiting", 3.0)
    later.wait(3.0)
    assert (later.names, later.world.phase) == (["a", "c"], "running")


@pytest.mark.parametrize(("leaving", "phase"), [("SIGTERM", "running"), ("", "agreeing")])
def test_a_host_that_leaves_agrees_to_what_its_successor_forms(leaving, phase):
    """Its record is in the next store, with its vote, until its lease ends."""
    first = with_spare_host("b")
    first.say("a", leaving=leaving)
    later = taken_over(first, "b", "a", "b", may_begin_at=3.0)
    assert (later.names, later.world.phase) == (["b"], phase)
    assert (round_state.confirmed(later.state).roll.before == ()) == bool(leaving)


@pytest.mark.parametrize(("stopped", "goes_on"), [("b", False), ("ab", True)])
def test_a_host_that_leaves_is_waited_for_where_its_vote_is_wanted(stopped, goes_on):
    job = hosted()
    train(job, *"ab")
    job.say("a", leaving="SIGTERM")
    stop(job, *stopped)
    assert job.world.phase == ("running" if goes_on else "over")


def test_host_that_takes_over_does_not_wait_for_stopped_nodes():
    first = with_spare_host("b")
    later = taken_over(first, "a", "a", "b", may_begin_at=3.0)
    assert (later.names, later.world.phase) == (["b"], "running")


@pytest.mark.parametrize(("confirmed", "goes_on"), [(-1, False), (1, True)])
def test_a_leader_that_leads_again_knows_what_was_confirmed(confirmed, goes_on):
    """Its own lease had ended; the node that had taken the last world up is gone meanwhile."""
    job = hosted()
    train(job, *"abc")
    job.die("c")
    stop(job, "a", "b")
    assert job.names == ["a", "b"]
    stored = majority.to_json(job.state.roll)
    accept(job, "a", "b")
    assert stored["before"]
    assert job.state.roll is not None
    again = round_state.taken_over(job.world, job.now)
    again = round_state.hosted(again, "a", 1, stored, confirmed=confirmed)
    member, created = job.records["a"]
    again = seen(again, replace(member, gone=1), created, job.now)
    votes = round_state.votes(again)
    assert majority.agreed(again.roll.electorates, votes) == goes_on


# --- a witness -----------------------------------------------------------------------------------


def witnessed(job: Job, **known) -> None:
    job.state = replace(job.state, witness=WitnessVotes(url="/shared", **known))
    job.settle()


def with_witness(*nodes: str, **tokens: str) -> Job:
    """A world of these nodes, hosted by `a`, which read the same token at the witness."""
    job = hosted()
    for node in nodes:
        job.come(node, witness=tokens.get(node, "token"))
    job.wait(2.0)
    accept(job, *nodes)
    return job


def test_the_first_world_needs_the_first_vote_of_the_witness():
    job = hosted()
    witnessed(job)
    for node in "ab":
        job.come(node, witness="token")
    job.wait(2.0)
    assert job.claims == (majority.FIRST_VOTE,)
    witnessed(job, refused={majority.FIRST_VOTE: "c"})
    job.wait(10.0)
    assert (job.world.phase, job.claims) == ("waiting", ())
    assert "another node has started the job again" in job.world.reason
    witnessed(job, held=frozenset({majority.FIRST_VOTE}))
    assert (job.world.phase, job.names) == ("running", ["a", "b"])


@pytest.mark.parametrize(
    ("nodes", "tokens", "votes"),
    [
        ("ab", {}, True),
        ("abcd", {}, True),
        ("abc", {}, False),  # no tie
        ("a", {}, False),
        ("ab", {"b": "another"}, False),
        ("ab", {"b": ""}, False),
        ("ab", {"a": "", "b": ""}, False),
    ],
)
def test_a_witness_votes_where_nodes_are_an_even_number_and_all_read_its_token(
    nodes, tokens, votes
):
    job = with_witness(*nodes, **tokens)
    assert job.world.witness == ("token" if votes else "")
    assert job.state.roll.latest.witness == ("after-0" if votes else "")


@pytest.mark.parametrize(("nodes", "left"), [("ab", "a"), ("abcd", "ab"), ("abcd", "ac")])
def test_half_of_the_nodes_go_on_with_the_vote_of_the_witness(nodes, left):
    job = with_witness(*nodes)
    job.die(*set(nodes) - set(left))
    assert job.claims == ()  # not before its own workers have stopped
    stop(job, *left)
    assert (job.world.phase, job.claims) == ("over", ("after-0",))
    witnessed(job, held=frozenset({"after-0"}))
    assert (job.world.phase, job.names) == ("running", list(left))
    assert job.state.roll.before[0].held
    accept(job, *left)
    assert not job.state.roll.before, "confirmed: nobody else can have that vote"


def test_witness_is_asked_only_where_it_decides():
    job = with_witness(*"abcd")
    job.die("d")
    stop(job, *"abc")
    assert (job.world.phase, job.claims) == ("running", ())
    fixed = hosted("2:2")
    for node in "ab":
        fixed.come(node, witness="token")
    fixed.die("b")
    stop(fixed, "a")
    assert (fixed.world.phase, fixed.claims) == ("waiting", ())  # it could not form a world


def test_a_witness_that_has_voted_for_another_node_is_not_asked_again():
    job = with_witness(*"ab")
    job.die("b")
    stop(job, "a")
    witnessed(job, refused={"after-0": "b"})
    assert (job.world.phase, job.claims) == ("waiting", ())
    assert "1 of the 2 nodes of generation 0 can be reached" in job.world.reason
    assert "the witness voted for b" in job.world.reason
    job.come("b", gone=0, witness="token")
    job.wait(1.0)
    assert (job.world.phase, job.names) == ("running", ["a", "b"])


def test_a_witness_that_does_not_answer_is_waited_for():
    job = with_witness(*"ab")
    job.die("b")
    stop(job, "a")
    witnessed(job, silent="no answer within 5 s")
    assert (job.world.phase, job.claims) == ("waiting", ("after-0",))
    said = "waiting for the witness at /shared: no answer within 5 s, for 1 h more"
    assert job.world.reason == said
    witnessed(job, held=frozenset({"after-0"}))
    assert job.world.phase == "running"


def test_a_host_outside_the_world_claims_after_a_lease():
    """Of three that train one has stopped, so that no step is made; still it waits."""
    job = hosted("1:3", lease=5.0)
    job.come("a", witness="token", ready=False)
    for node in "bcd":
        job.come(node, witness="token")
    job.wait(60.0)
    assert (job.names, job.state.roll.latest.witness) == (["b", "c", "d"], "after-0")
    accept(job, *"abcd")
    job.die("c", "d")
    stop(job, "b")
    assert (job.world.phase, job.claims) == ("waiting", ())
    job.wait(4.0)
    assert job.claims == ()
    job.wait(2.0)
    assert job.claims == ("after-0",)


def test_a_job_has_ended_when_it_is_closed_or_all_others_said_goodbye():
    job = with_witness(*"ab")
    assert not round_state.has_ended(job.state)
    job.die("b")
    assert not round_state.has_ended(job.state)
    polite = with_witness(*"ab")
    polite.say("b", leaving="SIGTERM")
    polite.die("b")
    assert round_state.has_ended(polite.state)
    assert round_state.has_ended(hosted().state)  # nobody ever came
