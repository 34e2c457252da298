"""Asking thousands: few connections at a time, and nobody waits for the silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from tests.unit.transport.listener_support import JOB
from torchelastic.rendezvous.embedded import ask_peers as module
from torchelastic.rendezvous.embedded.ask_peers import Ballot, VoteRequest, ask_for_votes
from torchelastic.transport import frames
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.listener import Listener

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
    """What comes back from those who are at the voters' place, or elsewhere."""

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
