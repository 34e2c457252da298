"""What a node without a host makes of the answers it has got."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Ballot, Returns
from torchelastic.rendezvous.embedded.election import DOUBLINGS_LIMIT, Poll, Search
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.majority import CANDIDACY_STAGGER, Candidacy, Elector, Electorate, Roll

NODES = frozenset("abcd")


def poll(node: str) -> Poll:
    roll = Roll(2, Electorate(NODES, "a"))
    holding = FailoverState(roll=roll, order=tuple("abcd"), rows={"world": {}})
    return Poll(Elector(node, term=3, generation=2), holding, places=())


@pytest.mark.parametrize(("node", "place"), [("b", 0), ("c", 1), ("d", 2)])
def test_search_after_a_lost_election_lets_earlier_candidates_try_longer(node, place):
    """As long as it must not be the same moment again, whatever an answer takes; not for ever."""
    turns = [poll(node).turn(in_vain) for in_vain in (0, 1, 2, DOUBLINGS_LIMIT, 99)]
    assert turns == [place * CANDIDACY_STAGGER * times for times in (1, 2, 4, 16, 16)]


@pytest.mark.parametrize(
    ("term", "chosen", "stands"),
    [
        (3, "a", True),
        (4, "b", False),  # its vote may have made `b` host, which would yield to a later term
        (4, "c", True),  # its own candidacy, in which the witness has not answered yet
    ],
)
def test_search_that_voted_meanwhile_does_not_run_for_election(term, chosen, stands):
    asker = poll("c")
    asker = replace(asker, elector=replace(asker.elector, term=term, chosen=chosen))
    assert Search(0.0).is_our_turn(asker, 4, now=9.0) is stands


def test_search_asks_for_a_later_term_than_any_voter_knows():
    """`d` knows less, and has voted for itself: it would refuse its vote in that term for ever."""
    stubborn = Elector("d", term=5, chosen="d", generation=0)
    asker = Elector("c", term=3, generation=2)
    first = Candidacy(majority.next_term(asker), "c", 2, binding=False)
    assert majority.refusal(stubborn, first)
    returns = Returns({"d": Ballot("d", False, "", stubborn.term, 0, [], "", 3.0, [])})
    again = Candidacy(majority.next_term(asker, returns.latest_term), "c", 2, binding=False)
    assert not majority.refusal(stubborn, again)
    assert Returns().latest_term == 0


@pytest.mark.parametrize(
    ("generation", "term", "outdated"),
    [
        (6, 7, False),  # the others have gone on, and this node follows them
        (6, 4, False),  # they have, in an earlier term than its own: that host will yield
        (0, 1, True),  # the job was started again
    ],
)
def test_a_resumed_node_is_outdated_where_the_host_knows_less(generation, term, outdated):
    roll = Roll(3, Electorate(frozenset("abc"), "a"))
    asker = Poll(Elector("a", term=5, generation=3), FailoverState(roll), places=("x:1",))
    ballot = Ballot("b", False, "its host answers", term, generation, ["b:1"], "", 3.0, [])
    returns = Returns(ballots={"b": ballot})
    why = asker.why_outdated(returns, waited=True)
    assert why == ("the job has been restarted since" if outdated else "")
    assert not asker.why_outdated(returns, waited=False)
    seen = replace(asker, ended=frozenset("b"))
    assert seen.why_outdated(Returns(), waited=False) == "that run of the job has ended"
    assert not replace(asker, ended=frozenset("x")).why_outdated(Returns(), waited=False)


@pytest.mark.parametrize(
    ("term", "waited", "hosts"),
    [(3, False, ["x:1"]), (2, False, []), (2, True, ["x:1"])],
)
def test_a_host_of_an_earlier_term_is_greeted_after_a_while_so_that_it_yields(term, waited, hosts):
    """It may not know where this node is, which has voted in term 3 and could never follow it."""
    told = Returns({"c": Ballot("c", False, "", term, 2, ["x:1"], "", 3.0, [])})
    assert poll("d").hosts(told, waited=waited) == hosts
    knows_less = Returns({"c": Ballot("c", False, "", 2, 1, ["x:1"], "", 3.0, [])})
    assert poll("d").hosts(knows_less, waited=True) == []


# --- a world that is confirmed -------------------------------------------------------------------

#: d was lost, and a has formed a world of the others: confirmed once three of the four have it.
UNCONFIRMED = majority.formed(Roll(7, Electorate(NODES, "a")), 8, "abc", "a")


def holder(node: str, roll: Roll = UNCONFIRMED) -> Poll:
    holding = FailoverState(roll=roll, order=tuple("abc"), rows={"world": {}})
    return Poll(Elector(node, term=3, generation=roll.generation), holding, places=())


def wish_of(node: str, generation: int, *, granted: bool = True) -> Returns:
    return Returns({node: Ballot(node, granted, "", 3, generation, [], "", 3.0, [])})


@pytest.mark.parametrize(
    ("returns", "confirmed"),
    [
        (wish_of("c", 8), True),  # a, which has formed it, b and c
        (wish_of("c", 7), False),
        (wish_of("c", 8, granted=False), False),  # its disk need not have it
        (Returns(), False),
    ],
)
def test_poll_learns_from_forecasts_that_its_world_is_confirmed(returns, confirmed):
    assert holder("b").found(returns).is_confirmed is confirmed
    assert not holder("b").holding.is_confirmed


@pytest.mark.parametrize(
    ("asked", "wins"),
    [
        (Candidacy(10, "b", 8, binding=True, confirmed=True), True),
        (Candidacy(10, "b", 8, binding=True), False),
        (Candidacy(10, "b", 11, binding=True, confirmed=True), False),  # another world than its own
    ],
)
def test_voters_go_on_without_the_host_that_found_their_world_confirmed(asked, wins):
    """b was elected by c and lost at once. a is back, and d is not: of the four before, a and c are
    no majority, but of the three that have a say they are."""
    voter = holder("c")
    voter = replace(voter, holding=voter.holding.told(asked))
    assert voter.is_won(wish_of("a", 8)) is wins
    assert voter.holding.is_confirmed is wins


@pytest.mark.parametrize(
    ("generation", "rows", "confirmed"),
    [
        (8, {"world": {}}, True),
        (8, {}, False),  # an outline: who had to agree is not known there
        (7, {"world": {}}, False),
    ],
)
def test_failover_state_confirmed_stays_confirmed_under_a_host_that_does_not_know(
    generation, rows, confirmed
):
    last = FailoverState(roll=Roll(generation, Electorate(frozenset("abc"), "a")), rows=rows)
    assert holder("c").holding.following(last).is_confirmed is confirmed


def test_failover_state_of_a_resumed_node_keeps_voter_addresses():
    """Its next agent has that from its file, and no host tells it of nodes that are in no world."""
    last = FailoverState(addresses={node: f"{node}:1" for node in "acdx"})
    held = replace(holder("c").holding, addresses={"a": "a:2"}).following(last)
    assert held.addresses == {"a": "a:2", "c": "c:1", "d": "d:1"}
    confirmed = holder("c", Roll(8, Electorate(frozenset("abc"), "a"))).holding
    assert not confirmed.following(last).addresses
