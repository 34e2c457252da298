"""Embedded failover in every order of events: laws 1 and 2 of the design, and that it goes on.

1. At most one world makes progress: once a world has made a step, no older one does.
2. Generations only grow, and no number is given twice.

`SOAK` says how many times as many states and walks as in the suite: 100 searches most of it whole.
"""

from __future__ import annotations

import faulthandler
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.support import SOAK
from tests.unit.rendezvous.majority_model import (
    PROPER,
    Bounds,
    Model,
    Move,
    Options,
    Violation,
    cold,
    running,
)
from tests.unit.rendezvous.majority_search import calm_down, outcome, search, wander
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.majority import Electorate, Roll

pytestmark = pytest.mark.timeout(120 * SOAK)
WIDE = Bounds(elections=12, worlds=12, leaves=1, crashes=1, restarts=3)
STATES = 500 * SOAK
NO_QUORUM = Options(quorum=False)
HOST_TRAINS = Options(quorum=False, hosts_train=True)
TWO_JOBS = Options(quorum=False, may_split=True)
WITNESS = Options(witness=True)
RESTART = Bounds(2, 2, restarts=1)
TELLS_LATER = Options(tells_later=True)
ANNOUNCED = Options(leavers_announce=True)


@pytest.fixture(autouse=True)
def without_watchdog():
    """Looking at the stack of a thread that runs Python, after a minute, can crash the process."""
    if SOAK > 1:
        faulthandler.cancel_dump_traceback_later()


# --- the laws ------------------------------------------------------------------------------------

SEARCHES = {
    "two": (running(2), Bounds(2, 2, leaves=1, crashes=1), PROPER),
    "two, newcomer": (running(2, 1), Bounds(1, 1), PROPER),
    "two, newcomer, two worlds": (running(2, 1), Bounds(1, 2), PROPER),
    "three": (running(3), Bounds(2, 2), PROPER),
    "three, newcomer": (running(3, 1), Bounds(1, 1), PROPER),
    "three, leave": (running(3), Bounds(1, 2, leaves=1), PROPER),
    "three, announced leave": (running(3), Bounds(1, 2, leaves=1), ANNOUNCED),
    "three, everything": (running(3, 1), Bounds(3, 3, leaves=1, crashes=1), PROPER),
    "four": (running(4), Bounds(1, 1), PROPER),
    "one, spare host": (running(2, spare=True), Bounds(2, 3, leaves=1, crashes=1), PROPER),
    "one, spare host, newcomer": (running(2, 1, spare=True), Bounds(2, 2), PROPER),
    "two, spare host": (running(3, spare=True), Bounds(2, 2), PROPER),
    "two, spare host, leave": (running(3, spare=True), Bounds(1, 2, leaves=1), PROPER),
    "three, spare host": (running(4, spare=True), Bounds(1, 1), PROPER),
    "cold": (cold(3), Bounds(2, 1), PROPER),
    "two, restarts": (running(2), Bounds(2, 2, leaves=1, restarts=2), PROPER),
    "two, newcomer, restart": (running(2, 1), RESTART, PROPER),
    "three, restarts": (running(3), Bounds(2, 2, restarts=2), PROPER),
    "three, restart, leave": (running(3), Bounds(1, 2, leaves=1, restarts=1), PROPER),
    "three, restart, workers first": (running(3), RESTART, TELLS_LATER),
    "one, spare host, restarts": (running(2, spare=True), Bounds(2, 2, restarts=2), PROPER),
    "two, spare host, restart": (running(3, spare=True), RESTART, TELLS_LATER),
    "cold, restart": (cold(3), Bounds(2, 1, restarts=1), PROPER),
    "two, takeover": (running(2), Bounds(1, 1, crashes=1), Options(takeover="right")),
    "two, witness": (running(2, witness=True), Bounds(2, 2, leaves=1, crashes=1), WITNESS),
    "two, newcomer, witness": (running(2, 1, witness=True), Bounds(1, 2), WITNESS),
    "two, witness, restarts": (running(2, witness=True), Bounds(2, 2, restarts=2), WITNESS),
    "three, witness": (running(3), Bounds(2, 2), WITNESS),
    "one, spare host, witness": (
        running(2, spare=True, witness=True),
        Bounds(2, 3, leaves=1, crashes=1),
        WITNESS,
    ),
    "four, witness": (running(4, witness=True), Bounds(1, 1), WITNESS),
    # While the only host trains itself, and else what is left of the laws where a job may split.
    "no quorum": (running(3), Bounds(0, 2, leaves=1, crashes=1), HOST_TRAINS),
    "no quorum, newcomer": (running(2, 1), Bounds(0, 2, leaves=1, crashes=1), HOST_TRAINS),
    "two jobs of two": (running(2), Bounds(2, 2), TWO_JOBS),
    "two jobs of three": (running(3), Bounds(1, 1), TWO_JOBS),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_majority_holds_in_every_order_of_events(name):
    first, bounds, options = SEARCHES[name]
    explored = search(Model(bounds, options), first, states=STATES)
    assert explored.is_all or explored.states >= STATES


@pytest.mark.parametrize(
    ("first", "options"),
    [
        (running(3, 1), PROPER),
        (running(4, 1), PROPER),
        (running(5, 2), PROPER),
        (running(2, 1, spare=True), PROPER),
        (running(3, 1, spare=True), PROPER),
        (cold(3), PROPER),
        (running(3, 1), TELLS_LATER),
        (running(3, 1), ANNOUNCED),
        (running(4, 1), TWO_JOBS),
        (running(2, 2, witness=True), WITNESS),
        (running(4, 1, witness=True), WITNESS),
    ],
    ids=[
        *("three", "four", "five", "spare host of one", "spare host of two", "cold"),
        *("workers first", "announced leave", "two jobs", "two, witness", "four, witness"),
    ],
)
def test_majority_holds_in_random_orders_of_events(first, options):
    walks = 25 * SOAK
    ends = [wander(Model(WIDE, options), first, 150, seed) for seed in range(walks)]
    made_steps = sum(end.stepped[0] > 0 for end in ends)
    assert made_steps > walks / 2, "a way that leads nowhere shows nothing"


# --- checks of the check: without any one of the rules it must fail ------------------------------

REFUSAL, VOTED = majority.refusal, majority.voted


def any_vote_will_do(electorates, votes):
    return all(any(node in votes for node in each.nodes) for each in electorates)


def forgets_who_had_to_agree(roll, generation, nodes, host, **more):
    return Roll(generation, Electorate(frozenset(nodes), host))


class Tied(Electorate):
    """The host of two goes on alone although there is a witness."""

    def agrees(self, votes):
        return super().agrees(votes) or (len(self.nodes) == 2 and self.host in votes)


def votes_as_if(**changes):
    return "refusal", lambda elector, asked: REFUSAL(replace(elector, **changes), asked)


class Fault(NamedTuple):
    """A rule that is broken, and where the shortest way to a violation is long, that way."""

    rule: tuple[str, object] | None = None
    options: Options = PROPER
    way: str = ""
    bounds: Bounds = Bounds(2, 2)
    first: str = "three"


VOTES_TWICE = "a asks 3; b asks 3; c votes 3 a; a restarts; a votes 3 b"

FAULTS = {
    "majority": Fault(("agreed", any_vote_will_do)),
    "one vote a term": Fault(
        ("refusal", lambda elector, asked: REFUSAL(replace(elector, chosen=asked.node), asked))
    ),
    # a and b go on while c, which knows nothing of that, is elected by b.
    "no vote for who knows less": Fault(
        votes_as_if(generation=-1),
        way="b stops; a forms a b; b takes 1; c asks 3; b votes 3 c; c forms c; a forms a",
    ),
    "no vote of a leaver": Fault(
        votes_as_if(leaving=False),
        way="b asks 3; c leaves; c votes 3 b; b forms b; c takes 2; a forms a",
    ),
    # a votes for b, which counts on that as on a goodbye, and then for c.
    "a host that leaves votes once": Fault(
        ("voted", lambda elector, asked: replace(VOTED(elector, asked), leaving=False)),
        way=(
            "a leaves; b asks 3; a votes 3 b; b forms b; "
            "c asks 4; a votes 4 c; c forms c; b forms b"
        ),
    ),
    "those before": Fault(
        ("formed", forgets_who_had_to_agree),
        way="b asks 3; c stops; c votes 3 b; b forms b; a forms a",
    ),
    "leaving a number out": Fault(
        ("next_term", lambda elector, heard=0: max(elector.term, heard) + 1),
        way="b asks 2; c stops; c votes 2 b; a forms a; b forms b",
    ),
    "not following an earlier term": Fault(
        ("may_follow", lambda elector, term: not elector.has_host),
        way="a asks 3; b votes 3 a; b follows 1 a; b asks 3; c votes 3 b",
    ),
    # Two worlds that nobody else has: 1 of a, 2 of c. a is elected and shows 1 to b. If that
    # confirmed 1, a could go on with d alone; and b would still vote for c, which has the newer 2.
    "taking up only the host's own worlds": Fault(
        ("may_take_up", lambda elector, generation: generation > elector.generation),
        way=(
            "d follows 1 a; e follows 1 a; b stops; a forms a d e; c asks 3; b votes 3 c; "
            "c forms c; a asks 4; b votes 4 a; d votes 4 a; b takes 1; a forms a d; "
            "d takes 3; c asks 5; b votes 5 c; c forms c; a forms a"
        ),
    ),
    # b knows of neither 1 nor 2: so no majority does, and the next host would use 2 again.
    "who agrees has the world that is left behind": Fault(
        options=Options(agree_to_what_they_have=False),
        way="b stops; a forms a; a forms a; c asks 3; b votes 3 c; c forms c",
    ),
    "stop first": Fault(
        options=Options(stops_first=False),
        way="b stops; a forms a; b takes 1; a forms b; b takes 2; a asks 5",
    ),
    "leavers stop first": Fault(
        options=Options(leavers_stop=False),
        way="b stops; a forms b; b takes 1; b leaves; a forms a; a asks 5",
    ),
    "wait until confirmed": Fault(
        options=Options(waits_until_confirmed=False),
        way="b asks 3; c stops; c votes 3 b; b forms b; a forms a",
    ),
    "a host that does not train waits for the lease of who trains alone": Fault(
        options=Options(waits_for_lease=False), first="one, spare host"
    ),
    "the dead do not vote": Fault(
        options=Options(counts_the_dead=True), bounds=Bounds(2, 2, crashes=1)
    ),
    # What an agent has said, its next one on that machine must know.
    "restarts: with a vote, a file": Fault(options=Options(has_file=False), way=VOTES_TWICE),
    "restarts: votes are written": Fault(options=Options(writes_votes=False), way=VOTES_TWICE),
    # a goes on alone by b's leave; b, who has forgotten world 1, elects c, who never knew of it.
    "restarts: worlds are written": Fault(
        options=Options(writes_worlds=False),
        way=(
            "b stops; a forms a b; b takes 1; b stops; a forms a; "
            "b restarts; c asks 3; b votes 3 c; c forms c"
        ),
    ),
    # c trains alone, by a's word that a majority knows of it: a has forgotten, and elects b.
    "restarts: a host writes first": Fault(
        options=Options(writes_formed=False),
        way=(
            "b asks 3; c stops; a forms c; a restarts; a votes 3 b; b forms a; a takes 2; c takes 1"
        ),
    ),
    # a asks for votes, and takes 1 for confirmed by what b says, who then forgets it, and elects c.
    "restarts: wishes are written": Fault(
        options=TELLS_LATER._replace(writes_wishes=False),
        way=(
            "d follows 1 a; b stops; a forms a d; b takes 1; a asks 4; b restarts; "
            "c asks 5; b votes 5 c; c forms b c; b takes 4; a forms a"
        ),
    ),
    "restarts: leavers forget": Fault(
        options=Options(leavers_forget=False),
        way="b leaves; b restarts; b follows 1 a; a forms b; a forms a; b takes 1",
    ),
    # A takeover trusts that the host died in the world of the two: why it is done only when asked
    # for. Otherwise both go on, or a number comes twice.
    "takeover: the host lives": Fault(
        options=Options(takeover="blind"), bounds=Bounds(2, 2, crashes=1), first="two"
    ),
    "takeover: it had gone on alone": Fault(
        options=Options(takeover="right"), bounds=Bounds(2, 3, crashes=1), first="two"
    ),
    "takeover: it had gone on with a newcomer": Fault(
        options=Options(takeover="right"), bounds=Bounds(2, 3, crashes=1), first="two, newcomer"
    ),
    "witness: each vote once": Fault(
        options=WITNESS._replace(claimed_once=False), first="two, witness"
    ),
    "witness: not while others may step": Fault(
        options=WITNESS._replace(waits_for_lease=False), first="two, witness"
    ),
    "witness: no tie for the host": Fault(
        ("Electorate", Tied), options=WITNESS, first="two, witness"
    ),
    "witness: it knows what its holder does": Fault(
        ("_held", lambda roll: {each.witness for each in roll.before}),
        options=WITNESS,
        first="two, witness",
    ),
    # Without quorum a job can become two, unless its only host trains itself.
    "no quorum: the host does not train": Fault(options=NO_QUORUM, bounds=Bounds(0, 2)),
    "no quorum: another host": Fault(options=HOST_TRAINS, bounds=Bounds(1, 2)),
    "no quorum: newer worlds": Fault(
        ("may_take_up", lambda elector, generation: True),
        TWO_JOBS,
        way="b stops; a forms b; a forms b; b takes 2; b takes 1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_rule_is_needed(name, monkeypatch):
    fault = FAULTS[name]
    assert not isinstance(end_of(fault.way), Violation)
    if fault.rule:
        monkeypatch.setattr(majority, *fault.rule)
    if fault.way:
        assert isinstance(end_of(fault.way, fault.options), Violation)
    else:
        with pytest.raises(Violation):
            search(Model(fault.bounds, fault.options), SEARCHES[fault.first][0], states=20_000)


def end_of(way, options=PROPER):
    moves = [move(line) for line in way.split(";") if line]
    return outcome(Model(options=options), running(3, 2), moves)


def move(line):
    """As it is shown; numbers are terms or generations."""
    node, kind, *words = line.split()
    if kind == "forms":
        return Move(kind, node, (tuple(words),))
    return Move(kind, node, tuple(int(word) if word.isdigit() else word for word in words))


# --- two nodes -----------------------------------------------------------------------------------


def test_host_of_two_continues_alone_and_the_other_only_by_takeover():
    model, cut = Model(), running(2)
    assert calm_down(model, cut, "a").stepped[1].nodes == {"a"}
    assert calm_down(model, cut, "b").stepped == cut.stepped
    dead = outcome(model, cut, [Move("crashes", "a")])
    right = Options(takeover="right")
    assert calm_down(Model(options=right), dead, "b").stepped[1].nodes == {"b"}


@pytest.mark.parametrize("side", ["a", "b", "ab", "cd", "ac", "bd"])
def test_witness_lets_the_half_that_claims_first_continue(side):
    first = running(2 if len(side) == 1 else 4, witness=True)
    others = names(first) - set(side)
    model = Model(options=WITNESS)
    cut = calm_down(model, first, side)
    assert cut.stepped[1].nodes == set(side)
    assert calm_down(model, cut, others).stepped == cut.stepped
    assert calm_down(model, cut, names(first)).stepped[1].nodes == names(first)


@pytest.mark.parametrize("lost", "ab")
def test_witness_lets_two_nodes_survive_the_loss_of_either(lost):
    first = running(2, witness=True)
    dead = outcome(Model(options=WITNESS), first, [Move("crashes", lost)])
    after = calm_down(Model(options=WITNESS), dead, names(dead))
    assert after.stepped[1].nodes == set("ab") - {lost}


# --- a host that does not train ------------------------------------------------------------------


@pytest.mark.parametrize("dead", ["b", "c"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_spare_host_goes_on_without_a_node_that_is_lost_and_started_again(count, dead):
    """As a node without a vote: d stands for it."""
    first = running(count, 4 - count, spare=True)
    lost = outcome(Model(), first, [Move("crashes", dead)])
    after = calm_down(Model(), lost, set("abcd") - {dead})
    assert after.stepped[1].nodes == set("abcd") - {dead}


def test_a_node_that_trains_alone_stops_without_its_spare_host_and_two_do_not():
    for count, goes_on in ((2, False), (3, True)):
        first = running(count, spare=True)
        dead = outcome(Model(), first, [Move("crashes", "a")])
        after = calm_down(Model(), dead, names(dead))
        assert (after.stepped != first.stepped) == goes_on


# --- without quorum ------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["a", "ab", "abc", "abcd"])
def test_quorum_none_lets_the_side_of_the_host_continue(side):
    after = calm_down(Model(options=NO_QUORUM), running(5), side)
    assert after.stepped[1].nodes == set(side)
    assert not after.node("a").roll.before


@pytest.mark.parametrize("worlds", [0, 1, 8])
def test_quorum_none_joins_both_sides_when_the_cut_heals(worlds):
    """However many worlds the old host has formed alone: who has the newest one leads on."""
    model = Model(options=TWO_JOBS)
    alone = [Move("forms", "a", (("a",),))] * worlds
    apart = calm_down(model, outcome(model, running(3), alone), "a")
    apart = calm_down(model, apart, "bc")
    assert apart.node("b").session != apart.node("a").session
    healed = calm_down(model, apart, "abc")
    assert healed.stepped[1].nodes == set("abc")
    assert healed.stepped[0] > max(node.stepped[0] for node in apart.nodes)


# --- it goes on ----------------------------------------------------------------------------------


def names(state):
    return {node.name for node in state.nodes if not node.crashed}


def test_host_that_dies_lets_the_others_continue():
    for first in (running(3), running(3, 1), running(4), running(5)):
        dead = outcome(Model(), first, [Move("crashes", "a")])
        after = calm_down(Model(), dead, names(dead))
        assert after.stepped[1].nodes == names(dead)


@pytest.mark.parametrize(
    ("majority", "minority"), [("cde", "ab"), ("abc", "de"), ("ade", "bc"), ("bcde", "a")]
)
@pytest.mark.parametrize("sooner", ["majority", "minority"])
def test_a_cut_stops_the_minority_until_it_heals(majority, minority, sooner):
    state, model = running(5), Model()
    for half in (majority, minority) if sooner == "majority" else (minority, majority):
        state = calm_down(model, state, half)
    assert state.stepped[1].nodes == set(majority)
    assert calm_down(model, state, "abcde").stepped[1].nodes == set("abcde")


def test_voter_of_a_lost_election_is_not_shut_out():
    """b asked for votes in a term that nobody heard of; a, still host, is of an earlier one."""
    asked = outcome(Model(), running(3), [Move("asks", "b", (3,))])
    assert calm_down(Model(), asked, "abc").stepped[1].nodes == set("abc")
    alone = outcome(Model(), asked, [Move("crashes", "c")])
    assert calm_down(Model(), alone, "ab").stepped[1].nodes == set("ab")


@pytest.mark.parametrize("restarted", ["bc", "ab", "abc"])
def test_restarted_agents_go_on_as_the_voters_they_were(restarted):
    moves = [Move("restarts", name) for name in restarted]
    after = calm_down(Model(), outcome(Model(), running(3), moves), "abc")
    assert after.stepped[1].nodes == set("abc")
    assert after.stepped[0] > 0


def test_agents_that_restart_without_their_files_are_new_nodes_without_a_vote():
    """d and e come in the places of b and c: a, the host, is no majority of the last world."""
    lost = outcome(Model(), running(3, 2), [Move("crashes", name) for name in "bc"])
    assert calm_down(Model(), lost, "ade").stepped[0] == 0


@pytest.mark.parametrize(
    ("first", "options"),
    [
        (running(3, 1), PROPER),
        (running(5), PROPER),
        (cold(3), PROPER),
        (running(2, 2, witness=True), WITNESS),
    ],
    ids=["3", "5", "cold", "2, witness"],
)
def test_from_wherever_chance_has_led_all_come_together(first, options):
    """Nobody has crashed or left for good: then nothing may keep them apart for ever."""
    for seed in range(10 * SOAK):
        state = wander(Model(Bounds(6, 6, restarts=2), options), first, 60, seed)
        after = calm_down(Model(options=options), state, names(first))
        assert after.stepped[1].nodes == names(first), f"after {seed}"


def test_a_cold_start_needs_a_majority_of_the_list():
    assert calm_down(Model(), cold(3), "ab").stepped[1].nodes == set("ab")
    assert calm_down(Model(), cold(3), "a").stepped[0] == -1
    assert calm_down(Model(), cold(3), "abc").stepped[0] == 0
