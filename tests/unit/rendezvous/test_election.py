"""A node without a host: the answers of its peers, and its decisions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest

from tests.unit.transport.cast import JOB
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded import ask_peers as module
from torchelastic.rendezvous.embedded.ask_peers import Ballot, Returns, VoteRequest, ask_for_votes
from torchelastic.rendezvous.embedded.election import DOUBLINGS_LIMIT, Poll, Search
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.majority import CANDIDACY_STAGGER, Candidacy, Elector, Electorate, Roll
from torchelastic.transport import frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.listener import Listener

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


# --- ask peers ------------------------------------------------------------------------------------

# Asking thousands: few connections at a time, and nobody waits for the silent.

WISH = VoteRequest(term=2, node="a", generation=0, binding=False, confirmed=False)
VOTE = VoteRequest(term=2, node="a", generation=0, binding=True, confirmed=False)
GRANTED = Ballot("b", True, "", 1, 0, [], "", 3.0, [])
HOURS = 3600.0


class Voters:
    """Any number of agents behind one port, who answer once `quorum` of them were asked."""

    def __init__(self, quorum=1):
        self.asked, self.quorum = [], quorum

    def converse(self, link, hello):
        link.send(frames.Welcome(frames.PROTOCOL, frames.VERSION, "", False, 1))
        link.deliver_to(lambda payload: self.hear(link))

    def hear(self, link):
        self.asked.append(link)
        if len(self.asked) >= self.quorum:
            for waiting in self.asked:
                waiting.send(GRANTED)
            self.asked.clear()


@contextlib.asynccontextmanager
async def voting(voters):
    listener = Listener(JOB)
    listener.serve(frames.ELECTION, voters.converse)
    await listener.listen(bind_endpoint("127.0.0.1", 0))
    try:
        yield Endpoint("127.0.0.1", listener.port, JOB)
    finally:
        await listener.close()


@contextlib.contextmanager
def silence():
    """A port whose connections are never answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as silent:
        yield Endpoint("127.0.0.1", silent.getsockname()[1], JOB)


@pytest.fixture
def few(monkeypatch):
    """Eight at a time, and patience without end."""
    monkeypatch.setattr(module, "BATCH_SIZE", 8)
    monkeypatch.setattr(module, "BATCH_DELAY", HOURS)
    monkeypatch.setattr(module, "EXCHANGE_TIMEOUT", HOURS)
    monkeypatch.setattr(module, "STOPPING_TIMEOUT", HOURS)


@pytest.fixture
def most_at_once(monkeypatch):
    """The numbers of exchanges that were under way, as each began."""
    exchange, under_way, seen = module._exchange, [0], []

    async def counted(*arguments):
        under_way[0] += 1
        seen.append(under_way[0])
        try:
            return await exchange(*arguments)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(module, "_exchange", counted)
    return seen


def never(returns):
    return False


def has_answers(count):
    return lambda returns: len(returns.ballots) == count


def ask(voters, places, asked=WISH, enough=never):
    """The answers of agents at the voters' addresses, or elsewhere."""

    async def asking():
        async with voting(voters) as place:
            returns = await asyncio.wait_for(ask_for_votes(places(place), asked, enough=enough), 30)
            voters.heard = len(returns.links)  # over which the winner tells them
            returns.close()
            return returns

    return asyncio.run(asking())


def many(place, count, name="n"):
    return {f"{name}{number}": place for number in range(count)}


def test_votes_asked_of_many_peers_go_out_in_batches(few, most_at_once):
    returns = ask(Voters(), lambda place: many(place, 60))
    assert len(returns.ballots) == 60
    assert max(most_at_once) == 8


def test_votes_asked_of_few_peers_go_out_together(few):
    """Nobody answers before all eight have been asked."""
    assert len(ask(Voters(8), lambda place: many(place, 8)).ballots) == 8


def test_votes_asked_with_a_silent_batch_continue_with_the_next(few, monkeypatch):
    monkeypatch.setattr(module, "BATCH_DELAY", 0.01)
    with silence() as nobody:
        returns = ask(
            Voters(),
            lambda place: {**many(nobody, 24), **many(place, 12, "m")},
            enough=has_answers(12),
        )
    assert set(returns.ballots) == {f"m{number}" for number in range(12)}


def test_votes_delayed_by_stopping_workers_arrive_concurrently(few, monkeypatch):
    monkeypatch.setattr(module, "BATCH_DELAY", 0.01)
    voters = Voters(40)
    returns = ask(voters, lambda place: many(place, 40), VOTE)
    assert len(returns.ballots) == voters.heard == 40


def test_votes_asked_of_silent_peers_end_at_the_timeout(few, monkeypatch):
    monkeypatch.setattr(module, "BATCH_DELAY", 0.001)
    monkeypatch.setattr(module, "EXCHANGE_TIMEOUT", 0.05)
    with silence() as nobody:
        assert not ask(Voters(), lambda place: many(nobody, 40)).ballots


def test_votes_asked_with_enough_answers_stop_waiting_for_silent_peers(few):
    with silence() as nobody:
        returns = ask(
            Voters(),
            lambda place: {**many(place, 4, "m"), **many(nobody, 24)},
            enough=has_answers(4),
        )
    assert len(returns.ballots) == 4


def test_votes_asked_of_no_peer_or_a_refusing_one_return_at_once():
    assert not ask(Voters(), lambda place: {}).ballots
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = Endpoint("127.0.0.1", server.getsockname()[1], JOB)
    assert ask(Voters(), lambda place: {"b": nobody}).refused == {"b"}
