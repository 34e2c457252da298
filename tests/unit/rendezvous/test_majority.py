"""The rules of votes, by table. `test_majority_model` plays them all together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.rendezvous.majority_model import elected
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.majority import (
    CANDIDACY_STAGGER,
    Candidacy,
    Elector,
    Electorate,
    Roll,
    confirmed,
    formed,
    refusal,
)

ABC = Electorate(frozenset("abc"), "a")
ABCD = Electorate(frozenset("abcd"), "a")
AB = Electorate(frozenset("ab"), "a")


@pytest.mark.parametrize(
    ("electorate", "votes", "agrees"),
    [
        (ABC, "ab", True),
        (ABC, "bc", True),
        (ABC, "a", False),
        (ABC, "axyz", False),
        (ABCD, "ab", False),
        (ABCD, "bcd", True),
        (AB, "a", True),
        (AB, "b", False),
        (AB, "ab", True),
        (Electorate(frozenset("ab")), "a", False),
        (Electorate(frozenset("ab"), "c"), "ac", False),
        (replace(AB, witness="after-0"), "a", False),
        (replace(AB, witness="after-0"), ["a", "after-0"], True),
        (replace(AB, witness="after-0"), ["b", "after-0"], True),
        (replace(AB, witness="after-0"), ["b", "after-1"], False),
        (replace(ABCD, witness="after-0"), ["c", "d", "after-0"], True),
        (replace(ABCD, witness="after-0"), ["d", "after-0"], False),
        (Electorate(frozenset("a"), "a"), "a", True),
        (Electorate(frozenset()), "a", False),
    ],
)
def test_a_majority_or_of_two_the_host(electorate, votes, agrees):
    assert electorate.agrees(set(votes)) is agrees


W0, W1 = replace(AB, witness="after-0"), replace(ABCD, witness="after-1")


@pytest.mark.parametrize(
    ("electorates", "votes", "missing"),
    [
        ([W0], "a", ("after-0",)),
        ([W0], "b", ("after-0",)),
        ([W0], "ab", ()),
        ([W0], "", None),
        ([ABC], "a", None),
        ([W0, W1], "ab", ("after-1",)),
        ([W0, W1], "bcd", ("after-0",)),
        ([W0, W1], "bc", ("after-0", "after-1")),
        ([W0, ABC], "a", None),
        ([W0, ABC], "ab", ()),
    ],
)
def test_the_witness_is_asked_only_where_it_decides(electorates, votes, missing):
    assert majority.to_claim(electorates, votes) == missing


def test_a_world_of_an_even_electorate_may_have_a_witness():
    assert majority.may_tie("ab", "a")
    assert majority.may_tie("b", "a")
    assert not majority.may_tie("abc", "a")
    assert not majority.may_tie("ab", "c")


def test_witness_claim_of_a_host_confirms_its_own_worlds_only():
    alone = formed(Roll(0, W0), 1, "a", "a", held={"after-0"})
    assert confirmed(alone, {}).before == ()
    assert majority.confirms_itself(alone)
    later = formed(alone, 5, "b", "b")  # of a host of a later term
    assert [each.held for each in later.before] == [False, False]
    assert confirmed(later, {}) == later
    assert majority.from_json(majority.to_json(alone), 1, "a", "a") == alone
    assert formed(Roll(), 3, "ab", "a", witness=True).latest.witness == "after-3"


def test_all_who_must_agree_have_to():
    assert majority.agreed([ABC, AB], "ab")
    assert not majority.agreed([ABC, AB], "bc")
    assert majority.agreed([], "")


def test_earlier_electorate_votes_until_its_majority_has_the_world():
    roll = formed(Roll(3, ABCD), 4, "abe", "a")
    assert roll.electorates == (ABCD, Electorate(frozenset("abe"), "a"))
    assert confirmed(roll, {"a": 4, "b": 4}) == roll
    assert confirmed(roll, {"a": 4, "b": 4, "e": 4}) == roll
    assert confirmed(roll, {"a": 4, "b": 4, "c": 4}).electorates == (roll.latest,)


def test_its_host_has_a_world_by_forming_it_and_a_goodbye_confirms_too():
    assert confirmed(formed(Roll(3, ABC), 4, "ab", "a"), {"b": 4}).before == ()
    assert confirmed(formed(Roll(0, AB), 1, "abc", "a"), {}).before == ()
    assert confirmed(formed(Roll(3, ABC), 4, "a", "a"), {}, gone="b").before == ()


def test_voter_with_another_world_does_not_confirm_this_one():
    """A newer number is that of another host's world: its holder may never have seen this one."""
    roll = formed(Roll(3, ABC), 4, "ab", "a")
    assert confirmed(roll, {"b": 3, "c": 7}) == roll


def test_worlds_that_nobody_took_up_add_up():
    roll = formed(formed(Roll(3, ABC), 4, "ab", "a"), 5, "abd", "a")
    assert len(roll.electorates) == 3
    assert confirmed(roll, {"a": 5}) == roll
    assert confirmed(roll, {"a": 5, "b": 5}).electorates == (roll.latest,)


@pytest.mark.parametrize(
    ("nodes", "gone", "itself"),
    [("abc", "", True), ("ab", "", True), ("bc", "", True), ("b", "", True), ("ade", "", False),
     ("de", "", False), ("ade", "c", True)],
)  # fmt: skip
def test_a_world_with_a_majority_of_the_last_confirms_itself(nodes, gone, itself):
    roll = formed(Roll(3, ABC), 4, nodes, "a")
    assert majority.confirms_itself(roll, gone) is itself


# --- numbers -------------------------------------------------------------------------------------


def test_the_numbers_of_worlds():
    first = majority.next_term(Elector("a"))
    assert (first, majority.next_generation(-1, first)) == (1, 0)
    assert [majority.next_generation(known, 1) for known in (0, 1, 2)] == [1, 2, 3]
    second = majority.next_term(Elector("b", term=1, generation=4))
    assert majority.next_generation(4, second) == 6, "5 may be a number of the old host's"


@pytest.mark.parametrize(
    ("elector", "heard", "term"),
    [
        (Elector("b"), 0, 1),
        (Elector("b"), 4, 5),
        (Elector("b", term=1), 0, 2),
        (Elector("b", term=1, generation=0), 0, 3),
        (Elector("b", term=3, generation=0), 0, 4),
        (Elector("b", term=3, generation=0), 7, 8),
        (Elector("b", term=3, generation=9), 4, 12),
    ],
)
def test_the_term_to_ask_for(elector, heard, term):
    assert majority.next_term(elector, heard) == term


# --- voting --------------------------------------------------------------------------------------

LOST = Elector("b", term=4, chosen="a", generation=7)
ASKED = Candidacy(9, "c", 7, binding=True)


@pytest.mark.parametrize(
    ("elector", "asked", "why"),
    [
        (LOST, ASKED, ""),
        (LOST, replace(ASKED, generation=8), ""),
        (LOST, replace(ASKED, generation=6), "it knows a newer generation, 7"),
        (replace(LOST, has_host=True), ASKED, "its host answers"),
        (LOST, replace(ASKED, term=3), "it has already voted in term 4"),
        (LOST, replace(ASKED, term=4), "it has already voted in term 4"),
        (replace(LOST, term=9, chosen="c"), ASKED, ""),
        (replace(LOST, term=9, chosen="d"), ASKED, "it has already voted in term 9"),
        (replace(LOST, term=10, chosen="c"), ASKED, "it has already voted in term 10"),
        (
            replace(LOST, leaving=True),
            ASKED,
            "it is leaving, and has agreed to what its last host does",
        ),
    ],
)
def test_vote_request_is_granted_or_refused_with_a_reason(elector, asked, why):
    assert refusal(elector, asked) == why
    assert refusal(elector, replace(asked, binding=False)) == why


def test_a_vote_binds_and_a_wish_does_not():
    assert majority.voted(LOST, ASKED) == replace(LOST, term=9, chosen="c")
    assert majority.voted(LOST, replace(ASKED, binding=False)) == LOST


def test_voters_who_have_the_world_show_that_it_was_confirmed():
    """d crashed; a formed a world of the rest, and crashed before saying that it is confirmed: of
    the four, two are no majority, but with a they were one when they took it up."""
    roll = formed(Roll(7, ABCD), 8, "abc", "a")
    assert elected(roll, {"b": 8, "c": 8})
    assert not elected(roll, {"b": 8, "c": 7})
    assert elected(Roll(7, ABC), {"b": 7, "c": 5})
    assert not elected(Roll(7, ABC), {"b": 7})


@pytest.mark.parametrize(
    ("has_host", "term", "may"),
    [(False, 4, True), (False, 5, True), (False, 3, False), (True, 5, False)],
)
def test_voter_follows_no_host_of_an_earlier_term(has_host, term, may):
    assert majority.may_follow(replace(LOST, has_host=has_host), term) is may
    followed = majority.following(LOST, 9, "c")
    assert followed == replace(LOST, term=9, chosen="c", has_host=True)


@pytest.mark.parametrize(
    ("generation", "may"), [(7, False), (8, False), (9, False), (10, True), (11, True)]
)
def test_only_a_newer_world_of_the_present_host_is_taken_up(generation, may):
    """7 it has; 8 and 9 come from somebody before the host of term 11, which took them over."""
    assert majority.may_take_up(Elector("b", 11, "c", 7, has_host=True), generation) is may


def test_a_host_yields_to_a_later_term_only():
    assert majority.must_step_down(4, 5)
    assert not majority.must_step_down(4, 4)
    assert not majority.must_step_down(4, 3)


@pytest.mark.parametrize(("node", "place"), [("b", 0), ("c", 1), ("d", 2), ("z", 3)])
def test_one_after_the_other_stands(node, place):
    assert majority.turn(["b", "a", "c", "d"], node, "a") == place * CANDIDACY_STAGGER
