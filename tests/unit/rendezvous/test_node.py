"""Nodes at the embedded rendezvous, in one process, over real sockets: hosts and elections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.ports import free_port as unused_port
from tests.unit.agent.cast import place
from tests.unit.rendezvous.cast import JOB, run, story, within
from torchelastic.clock import SystemClock
from torchelastic.errors import RendezvousLost, VoteOutdated
from torchelastic.rendezvous import majority
from torchelastic.rendezvous.embedded.ask_peers import Ballot, Returns, VoteRequest, ask_for_votes
from torchelastic.rendezvous.embedded.client import EmbeddedStore
from torchelastic.rendezvous.embedded.election import Poll
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.node import EmbeddedNode
from torchelastic.rendezvous.embedded.own_endpoint import OwnEndpoint
from torchelastic.rendezvous.embedded.server import RECONNECT_GRACE
from torchelastic.rendezvous.embedded.voter_file import VoterFile
from torchelastic.rendezvous.leader import CONFIRMED_KEY, ROLL_KEY
from torchelastic.rendezvous.majority import Elector, Electorate, Roll
from torchelastic.rendezvous.witness.vote_keys import Witness, WitnessClient, WitnessSilent
from torchelastic.rendezvous.world import MEMBER_PREFIX, WORLD_KEY, World
from torchelastic.transport import addresses as endpoint
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.frames import Row
from torchelastic.transport.listener import Listener

PATIENCE = 20.0
LEASE = 2.0


class Table:
    """A few nodes of one job, the first endpoint's owner first."""

    def __init__(self, *ports: int) -> None:
        self.places = [Endpoint("localhost", port, JOB) for port in ports]
        self.nodes: list[EmbeddedNode] = []
        self.said: list[str] = []
        self.files: list[VoterFile] = []

    def node(self, name: str, **options) -> EmbeddedNode:
        made = EmbeddedNode(self.places, name, clock=SystemClock(), lease=LEASE, **options)
        self.nodes.append(made)
        return made

    async def sit(self, *names: str, **options) -> list[EmbeddedNode]:
        """Seats that are open, each with its record in the store, and a world of them all."""
        nodes = [self.node(name, **options) for name in names]
        for node in nodes:
            await within(PATIENCE, node.open(PATIENCE))
            await enlist(node)
        self.form(0, nodes)
        return nodes

    def form(
        self,
        generation: int,
        nodes: list[EmbeddedNode],
        trains: str = "",
        *,
        witness: bool = False,
        before: str = "",
    ) -> None:
        """As if the host had published a world, and all had taken it up; not confirmed if these
        nodes were in the one `before`."""
        names = [*trains] or [name_of(node) for node in nodes]
        host = next(name_of(node) for node in nodes if node.is_host)
        roll = majority.from_json(None, generation, names, host, witness=witness)
        roll = replace(roll, before=(majority.electorate(before, host),) if before else ())
        rows = {WORLD_KEY: {"generation": generation}, ROLL_KEY: majority.to_json(roll)}
        addresses = {name_of(node): node.peer for node in nodes}
        for node in nodes:
            node.hold(FailoverState(roll, tuple(names), addresses, rows))

    async def regain(self, node: EmbeddedNode, timeout: float = PATIENCE) -> bool:
        rows = {MEMBER_PREFIX + name_of(node): {"node": name_of(node)}}
        regaining = node.regain(lambda: rows, timeout=timeout, say=self.said.append)
        return await within(PATIENCE + 5, regaining)

    async def regain_when_lost(self, node: EmbeddedNode) -> None:
        await within(PATIENCE, lost(node))
        await self.regain(node)

    async def close(self) -> None:
        for node in reversed(self.nodes):
            await node.close()
        for file in self.files:
            file.close()

    def restart(self, name: str, path: Path, **options) -> EmbeddedNode:
        """The next agent of a node, with the file of the last."""
        file = VoterFile(path / name, name, {"machine": "here", "job": JOB})
        file.resume(gone=(), is_late=False)
        self.files.append(file)
        return self.node(name, file=file, **options)


def name_of(node: EmbeddedNode) -> str:
    return node._node


async def enlist(node: EmbeddedNode) -> None:
    await node.store.open_lease(LEASE)
    await node.store.put(MEMBER_PREFIX + name_of(node), {"node": name_of(node)}, leased=True)


async def end(node: EmbeddedNode) -> None:
    """The end of an agent, as the others see it: its connections break, its port is closed."""
    await node.close()


@contextlib.asynccontextmanager
async def nodes_at(*ports: int) -> AsyncIterator[Table]:
    table = Table(*(ports or (unused_port(),)))
    try:
        yield table
    finally:
        await table.close()


async def lost(node: EmbeddedNode) -> None:
    """Wait until a node has lost its store."""
    while not node.loss:
        await asyncio.sleep(0.01)


async def members(node: EmbeddedNode) -> set[str]:
    listing = await within(PATIENCE, node.store.get(MEMBER_PREFIX))
    return {key.removeprefix(MEMBER_PREFIX) for key in listing.items}


@story
async def test_a_host_whose_name_comes_late_still_hosts(monkeypatch):
    answers = [False, False, True]
    monkeypatch.setattr(endpoint, "_is_this_machine", lambda host: answers.pop(0))
    monkeypatch.setattr("torchelastic.rendezvous.embedded.own_endpoint.LOOK_AGAIN", 0.0)
    place = Endpoint("0.0.0.0", unused_port(), JOB)
    node = EmbeddedNode([place], "a", clock=SystemClock(), lease=LEASE)
    await within(PATIENCE, node.open(PATIENCE))
    assert node.is_host
    await node.close()


@story
async def test_a_store_that_may_be_known_elsewhere_waits_a_lease_for_its_first_world():
    async with nodes_at() as table:
        (a,) = await table.sit("a")
        assert a.may_begin_at > SystemClock().now()
    private = EmbeddedNode([Endpoint("127.0.0.1", 0, JOB)], "a", clock=SystemClock(), lease=LEASE)
    await private.open(PATIENCE)
    assert private.may_begin_at == 0.0
    await private.close()


@story
async def test_the_next_in_order_is_host_when_the_host_ends_and_has_what_the_voters_had():
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        await end(a)
        kept = await asyncio.gather(table.regain(b), table.regain(c))
        assert kept == [True, True]  # their leases and records are in the new store
        assert (b.is_host, c.is_host) == (True, False)
        assert b.term == c.term > 1
        assert await members(c) == {"b", "c"}
        listing = await c.store.get(WORLD_KEY)
        assert listing.items[WORLD_KEY].value == {"generation": 0}


@story
async def test_voter_learns_from_the_request_that_its_world_is_confirmed():
    """Three of the four before have it; should the new host be lost, its voters know that."""
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        table.form(1, [a, b, c], before="abcd")
        await end(a)
        await asyncio.gather(table.regain(b), table.regain(c))
        assert b.is_host
        assert [node._holding.is_confirmed for node in (b, c)] == [True, True]
        listing = await c.store.get(CONFIRMED_KEY)  # and so does who joins b later
        assert listing.items[CONFIRMED_KEY].value == {"generation": 1}


@story
async def test_voter_whose_host_answers_refuses_its_vote():
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        b.store.lose("cut off")
        assert await table.regain(b) is False
        assert not b.is_host  # c told it where the host is
        assert await members(c) >= {"a", "c"}
        assert a.is_host


def test_a_host_that_was_given_up_is_not_waited_for_while_others_still_name_it(monkeypatch):
    async def story():
        async with nodes_at() as table:
            a, b, c = await table.sit("a", "b", "c")
            a._announcing.cancel()
            for purpose in (frames.STORE, frames.ELECTION):  # it takes calls, and never answers
                a._listener.serve(purpose, lambda link, hello: None)
            patience = []
            connect = EmbeddedStore.connect

            async def noted(places, *, timeout, **more):
                patience.append((str(places[0]), timeout))
                if len(patience) == 3:
                    c.store.lose("given up")
                return await connect(places, timeout=timeout, **more)

            monkeypatch.setattr(EmbeddedStore, "connect", noted)
            place = str(b.store.place)
            b.store.lose("given up")
            regained = asyncio.gather(table.regain(b), regain_when_lost(table, c))
            await within(PATIENCE, regained)
            waited = [seconds for address, seconds in patience[:3] if address == place]
            assert waited == pytest.approx([0.1, 0.2, 0.4])
            assert {b.is_host, c.is_host} == {True, False}

    async def regain_when_lost(table, node):
        await lost(node)
        await table.regain(node)

    run(story())


@story
async def test_a_voter_stops_its_workers_first():
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        await end(a)
        regaining = asyncio.create_task(table.regain(b))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(regaining), 0.7)
        await asyncio.gather(regaining, table.regain(c))  # now c's workers have stopped
        assert b.is_host


@story
async def test_a_minority_waits_says_why_and_follows_when_the_others_are_back():
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        await end(a)
        for node in (b, c):  # a cut between them
            node._listener.serve(frames.ELECTION, lambda link, hello: link.abort())
        for node in (b, c):
            with pytest.raises(RendezvousLost, match="1 of 3 nodes are not a majority"):
                await table.regain(node, timeout=0.3)
        for node in (b, c):  # it heals
            node._listener.serve(frames.ELECTION, node._serve_election)
        await asyncio.gather(table.regain(b), table.regain(c))
        assert sum(node.is_host for node in (b, c)) == 1


@pytest.mark.parametrize("may", [False, True])
@story
async def test_second_of_two_nodes_waits_unless_takeover_is_allowed(may):
    async with nodes_at() as table:
        a, b = await table.sit("a", "b", two_node_takeover=may)
        assert (a.is_host, b.is_host, a.term, b.term) == (True, False, 1, 1)
        assert await members(b) == {"a", "b"}
        await end(a)
        if may:
            assert await table.regain(b)
            assert b.is_host
        else:
            with pytest.raises(RendezvousLost, match="--two-node-takeover"):
                await table.regain(b, timeout=0.5)


@story
async def test_a_host_that_leaves_votes_before_it_goes():
    async with nodes_at() as table:
        a, b = await table.sit("a", "b")
        a.say_goodbye()
        rows = {MEMBER_PREFIX + "a": {"node": "a", "leaving": "SIGTERM"}}
        handing = asyncio.create_task(a.hand_over(lambda: rows, PATIENCE))
        await within(PATIENCE, lost(b))
        assert await table.regain(b)
        await within(PATIENCE, handing)
        assert b.is_host
        assert await members(b) == {"a", "b"}  # until its lease ends, as one who leaves


@story
async def test_a_host_does_not_wait_for_a_successor_when_all_leave():
    async with nodes_at() as table:
        a, b = await table.sit("a", "b")
        leaving = {"node": "b", "leaving": "SIGTERM"}
        await b.store.put(MEMBER_PREFIX + "b", leaving, leased=True)
        a.say_goodbye()
        await within(PATIENCE / 2, a.hand_over(dict, PATIENCE))
        assert a.is_host


@story
async def test_an_agent_that_is_new_at_the_old_address_says_that_the_old_one_is_dead():
    """If that is trusted, as a refusal is."""
    async with nodes_at() as table:
        a, b = await table.sit("a", "b", two_node_takeover=True)
        await end(a)
        again = table.node("a2")
        await within(PATIENCE, again.open(PATIENCE))
        await asyncio.gather(table.regain(b), table.regain_when_lost(again))
        assert b.is_host
        assert not again.is_host
        assert again.term == b.term


@story
async def test_a_host_that_was_succeeded_yields_and_follows():
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        for node in (b, c):  # as if a had been frozen for them
            node.store.lose("it does not answer")
        a._listener.serve(frames.ELECTION, lambda link, hello: link.abort())
        await asyncio.gather(table.regain(b), table.regain(c))
        a._listener.serve(frames.ELECTION, a._serve_election)  # it wakes
        await within(PATIENCE, lost(a))
        assert not a.is_host
        await table.regain(a)
        assert a.term == b.term
        assert sum(node.is_host for node in (a, b, c)) == 1


@story
async def test_a_list_of_endpoints_needs_a_majority_of_it():
    async with nodes_at(unused_port(), unused_port(), unused_port()) as table:
        a = table.node("a")
        with pytest.raises(RendezvousLost, match="1 of 3 endpoints are not a majority"):
            await within(PATIENCE, a.open(0.5))


@story
async def test_agents_of_a_list_may_start_in_any_order():
    async with nodes_at(unused_port(), unused_port(), unused_port()) as table:
        nodes = [table.node(name) for name in "abc"]
        late = nodes.pop(0)
        await within(PATIENCE, asyncio.gather(*(node.open(PATIENCE) for node in nodes)))
        await within(PATIENCE, late.open(PATIENCE))
        assert sum(node.is_host for node in table.nodes) == 1


@story
async def test_a_newcomer_finds_the_host_at_any_living_member():
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        await end(a)
        await asyncio.gather(table.regain(b), table.regain(c))
        port = int(c.peer.rpartition(":")[2])
        late = EmbeddedNode(
            [Endpoint("localhost", port, JOB)], "d", clock=SystemClock(), lease=LEASE
        )
        await within(PATIENCE, late.open(PATIENCE))
        assert await members(late) == {"b", "c"}
        await late.close()


@story
async def test_an_agent_is_waited_for_unless_its_machine_says_that_it_is_gone():
    async with nodes_at() as table:
        host, other = await table.sit("a", "b")
        unused = f"127.0.0.1:{unused_port()}"
        for peer, grace in {other.peer: None, unused: 0.0, "": RECONNECT_GRACE}.items():
            record = Row(MEMBER_PREFIX + "b", json.dumps({"peer": peer}), 1, 1)
            assert await within(PATIENCE, host._grace_of([record])) == grace
        assert await host._grace_of([]) == RECONNECT_GRACE


@story
async def test_a_refused_connection_ends_no_lease_of_a_node_that_trains_without_its_host():
    async with nodes_at() as table:
        host, _ = await table.sit("a", "b")
        unused = f"127.0.0.1:{unused_port()}"
        record = Row(MEMBER_PREFIX + "b", json.dumps({"peer": unused}), 1, 1)
        for nodes, grace in {"ab": 0.0, "b": None, "bc": 0.0, "a": 0.0}.items():
            world = World(generation=1, phase="running").with_nodes(map(place, nodes))
            for key, value in {WORLD_KEY: world.summary(), **world.parts()}.items():
                await host.store.put(key, value)
            assert await within(PATIENCE, host._grace_of([record])) == grace, nodes


@story
async def test_a_node_that_trained_alone_is_no_host_without_the_spare_one_that_was():
    async with nodes_at() as table:
        a, b = await table.sit("a", "b")
        table.form(1, [a, b], trains="b")
        await end(a)
        with pytest.raises(RendezvousLost, match="1 of 2 nodes are not a majority"):
            await table.regain(b, timeout=0.5)


@story
async def test_a_spare_host_votes_with_the_others():
    async with nodes_at() as table:
        a, b, c = await table.sit("a", "b", "c")
        table.form(1, [a, b, c], trains="bc")
        await end(b)
        for node in (a, c):
            node.store.lose("it does not answer")
        await asyncio.gather(table.regain(a), table.regain(c))
        assert a.is_host != c.is_host
        assert (a if a.is_host else c).may_begin_at > SystemClock().now()


# --- a witness -----------------------------------------------------------------------------------


async def with_witness(table: Table, directory, *names: str) -> list[EmbeddedNode]:
    """As `Table.sit`, with a witness that has a vote in their world."""
    nodes = []
    for name in names:
        asking = WitnessClient(str(directory))
        node = table.node(name, witness=Witness(asking, str(directory), JOB, name))
        await within(PATIENCE, node.open(PATIENCE))
        await within(PATIENCE, node.witness.confirm())
        await enlist(node)
        nodes.append(node)
    table.form(0, nodes, witness=True)
    return nodes


@story
async def test_second_of_two_nodes_becomes_host_with_the_witness_vote(tmp_path):
    async with nodes_at() as table:
        a, b = await with_witness(table, tmp_path, "a", "b")
        await end(a)
        assert await table.regain(b)
        assert b.is_host
        assert b.witness.votes(b.term) == {"after-0"}


@story
async def test_a_witness_that_has_voted_for_the_other_keeps_a_node_waiting(tmp_path):
    async with nodes_at() as table:
        a, b = await with_witness(table, tmp_path, "a", "b")
        assert await a.witness.claim("after-0", a.term)  # it has gone on alone
        for purpose in (frames.ELECTION, frames.STORE):
            a._listener.serve(purpose, lambda link, hello: link.abort())
        b.store.lose("a cut")
        with pytest.raises(RendezvousLost, match="the witness voted for them"):
            await table.regain(b, timeout=0.5)
        assert b.term == a.term, "it asked nobody for votes: the other need not yield"


@story
async def test_an_answer_of_the_witness_that_is_lost_costs_no_vote(tmp_path):
    async with nodes_at() as table:
        a, b = await with_witness(table, tmp_path, "a", "b")
        ask = b.witness._asking.ask
        answers = iter([False])

        async def lose_one_answer(do, key, value=None):
            found = await ask(do, key, value)
            if do == "create" and not next(answers, True):
                raise WitnessSilent("no answer within 5 s")
            return found

        b.witness._asking.ask = lose_one_answer
        await end(a)
        await table.regain(b)
        assert b.is_host
        assert b.witness.votes(b.term) == {"after-0"}


@story
async def test_a_witness_out_of_reach_is_said_to_be_waited_for(tmp_path):
    async with nodes_at() as table:
        a, b = await with_witness(table, tmp_path, "a", "b")

        async def silent(do, key, value=None):
            raise WitnessSilent("no answer within 5 s")

        b.witness._asking.ask = silent
        await end(a)
        sentence = f"waiting for the witness at {tmp_path}: no answer within 5 s"
        with pytest.raises(RendezvousLost, match=sentence):
            await table.regain(b, timeout=0.5)


@story
async def test_an_earlier_run_that_was_not_closed_keeps_a_job_from_beginning(tmp_path):
    async with nodes_at() as table:
        (a,) = await with_witness(table, tmp_path, "a")
        await a.witness.claim(majority.FIRST_VOTE, a.term)
        await end(a)
    async with nodes_at() as table:
        again = table.node(
            "b", witness=Witness(WitnessClient(str(tmp_path)), str(tmp_path), JOB, "b")
        )
        with pytest.raises(RendezvousLost, match="was not closed"):
            await within(PATIENCE, again.open(1.0))
    async with nodes_at() as table:
        third = Witness(WitnessClient(str(tmp_path)), str(tmp_path), JOB, "c")
        await third.confirm()
        await third.close_job()
        await third.close()
        (node,) = await with_witness(table, tmp_path, "d")
        assert node.is_host


# --- node restarts --------------------------------------------------------------------------------

# Agents that are started again with the files of the last ones.


async def three_with_files(table: Table, path: Path) -> list[EmbeddedNode]:
    nodes = [table.restart(name, path) for name in "abc"]
    for node in nodes:
        await within(PATIENCE, node.open(PATIENCE))
        await enlist(node)
    table.form(0, nodes)
    for node in nodes:
        await node.kept()
    return nodes


async def kill(table: Table, node: EmbeddedNode) -> None:
    """The agent ends without a word; its file is free."""
    await end(node)
    table.files[table.nodes.index(node)].close()


@pytest.mark.parametrize("killed", ["ab", "bc", "abc"])
@story
async def test_agents_that_are_started_again_vote_as_before(killed, tmp_path):
    async with nodes_at() as table:
        nodes = dict(zip("abc", await three_with_files(table, tmp_path), strict=True))
        terms = {node.term for node in nodes.values()}
        for name in killed:
            await kill(table, nodes[name])
        again = [table.restart(name, tmp_path) for name in killed]
        left = [nodes[name] for name in "abc" if name not in killed and not nodes[name].is_host]
        await asyncio.gather(
            *(within(PATIENCE, node.open(PATIENCE)) for node in again),
            *(table.regain(node) for node in left),
        )
        nodes.update(zip(killed, again, strict=True))
        assert sum(node.is_host for node in nodes.values()) == 1
        assert {node.term for node in nodes.values()} != terms or "a" not in killed


@story
async def test_a_vote_is_given_when_the_disk_has_it(tmp_path, monkeypatch):
    async with nodes_at() as table:
        a, b, c = await three_with_files(table, tmp_path)
        write, goes_on = VoterFile._write, threading.Event()

        def slow(file):
            assert goes_on.wait(PATIENCE)
            write(file)

        monkeypatch.setattr(VoterFile, "_write", slow)
        await end(a)
        regaining = asyncio.gather(table.regain(b), table.regain(c))
        # One of them has voted for the other, and the other does not know it.
        while max(b._elector.term, c._elector.term) == 1:
            await asyncio.sleep(0.01)
        assert [node.is_host for node in (b, c)] == [False, False]
        goes_on.set()
        await regaining
        assert b.is_host or c.is_host
        again = VoterFile(tmp_path / "c", "c", {"machine": "here", "job": JOB})
        table.files[2].close()
        assert again.resume(gone=(), is_late=False)
        assert again.resumed.term == c.term
        again.close()


@story
async def test_a_wish_is_answered_when_the_disk_has_the_world(tmp_path):
    """It may show the candidate that this world is confirmed."""
    async with nodes_at() as table:
        _, _, c = nodes = await three_with_files(table, tmp_path)
        table.form(1, nodes)
        c._host_lost()
        wish = VoteRequest(term=9, node="b", generation=1, binding=False, confirmed=False)
        at = Endpoint.at(c.peer, JOB, c.credentials)
        returns = await ask_for_votes({"c": at}, wish, enough=lambda returns: False)
        assert returns.ballots["c"].generation == 1
        table.files[2].close()
        again = VoterFile(tmp_path / "c", "c", {"machine": "here", "job": JOB})
        assert again.resume(gone=(), is_late=False)
        assert again.generation == 1
        again.close()


@story
async def test_a_host_is_host_when_the_disk_has_it_and_forgets_when_it_says_goodbye(
    tmp_path, monkeypatch
):
    async with nodes_at() as table:
        write, goes_on = VoterFile._write, threading.Event()

        def slow(file):
            assert goes_on.wait(PATIENCE)
            write(file)

        monkeypatch.setattr(VoterFile, "_write", slow)
        a = table.restart("a", tmp_path)
        opening = asyncio.create_task(a.open(PATIENCE))
        while not a.term:
            await asyncio.sleep(0.01)
        assert not a.is_host
        goes_on.set()
        await within(PATIENCE, opening)
        assert a.is_host
        assert (tmp_path / "a").exists()
        a.say_goodbye()
        await a.kept()
        assert not (tmp_path / "a").exists()


def ballot(node: str, generation: int) -> Ballot:
    return Ballot(node, True, "", 1, generation, [], "", 0.0, [])


@pytest.mark.parametrize(
    ("asked", "answer", "is_won"),
    [
        ("a", ballot("a", 0), True),
        ("a", ballot("new", -1), False),  # in the place of a, which has ended
        ("node1:29400", ballot("a", 0), True),  # started again, and found at the endpoint
        ("node1:29400", ballot("new", -1), False),
    ],
)
def test_votes_are_of_nodes_and_not_of_places(asked, answer, is_won):
    roll = Roll(0, Electorate(frozenset("abc"), "c"))
    holding = FailoverState(roll, rows={WORLD_KEY: {}})
    poll = Poll(Elector("b", 1, "c", 0), holding, places=("node1:29400",))
    assert poll.is_won(Returns({asked: answer})) == is_won


@pytest.mark.parametrize("place", ["replaced", "a host that cannot be followed"])
@story
async def test_resumed_node_of_a_restarted_job_joins_as_a_new_node(place, tmp_path):
    async with nodes_at() as table:
        nodes = await three_with_files(table, tmp_path)
        addresses = {name_of(node): node.peer for node in nodes}
        table.form(7, nodes)  # the new job has not come as far
        await nodes[1].kept()
        for node in nodes:
            await kill(table, node)
        again = table.node("a2")
        await within(PATIENCE, again.open(PATIENCE))
        if place == "replaced":
            port = int(addresses["c"].rpartition(":")[2])
            sockets = endpoint.listen_beside("localhost", 0, port)
            other = Listener(JOB)
            other.serve(frames.ELECTION, again._serve_election)
            await other.listen(sockets)
        stale = table.restart("b", tmp_path)
        began = SystemClock().now()
        with pytest.raises(VoteOutdated, match="has been restarted since"):
            await within(PATIENCE, stale.open(PATIENCE))
        assert (SystemClock().now() - began > LEASE) == (place != "replaced")
        assert not (tmp_path / "b").exists()
        if place == "replaced":
            await other.close()


# --- starting the job again ----------------------------------------------------------------------


@story
async def test_an_endpoint_without_its_file_waits_for_nodes_that_have_a_world(tmp_path, caplog):
    """Its disk was full, for example: the others have the newest state, and elect a host."""
    async with nodes_at() as table:
        a, b, c = await three_with_files(table, tmp_path)
        table.form(5, [a, b, c])
        for node in (b, c):
            await node.kept()
        await kill(table, a)
        await kill(table, b)
        surviving = asyncio.create_task(table.regain(c))
        again = table.node("a2")
        await within(PATIENCE, again.open(PATIENCE))
        await within(PATIENCE, lost(again))
        assert (
            "has generation 5 of job 'job-1' and has lost its host: this node does" in caplog.text
        )
        joining = asyncio.create_task(table.regain(again))
        b2 = table.restart("b", tmp_path)
        await within(PATIENCE, asyncio.gather(b2.open(PATIENCE), surviving, joining))
        assert sum(node.is_host for node in (b2, c)) == 1
        assert again.term == b2.term == c.term > 5


@pytest.mark.parametrize("who", ["survives", "is started again"])
@story
async def test_a_node_of_an_ended_run_does_not_keep_the_job_from_starting_again(who, tmp_path):
    """It was cut off, or killed, before the end, which `a` saw."""
    async with nodes_at() as table:
        a, b, c = await three_with_files(table, tmp_path)
        table.form(5, [a, b, c])
        await c.kept()
        for node in (a, b, *([c] if who == "is started again" else [])):
            await kill(table, node)
        table.places = [replace(place, ended=("a",)) for place in table.places]
        again = table.node("a2")
        await within(PATIENCE, again.open(PATIENCE))
        if who == "survives":
            with pytest.raises(RendezvousLost, match="ended while this node was cut off"):
                await table.regain(c)
        else:
            stale = table.restart("c", tmp_path)
            with pytest.raises(VoteOutdated, match=r"generation 5 .* but that run of the job has"):
                await within(PATIENCE, stale.open(PATIENCE))


@story
async def test_an_endpoint_of_an_ended_run_hears_from_newcomers_that_it_has_ended(tmp_path):
    async with nodes_at() as table:
        nodes = await three_with_files(table, tmp_path)
        for node in nodes:
            await kill(table, node)
        stale = table.restart("a", tmp_path)
        opening = asyncio.create_task(stale.open(PATIENCE))
        table.places = [replace(place, ended=("c",)) for place in table.places]
        newcomer = asyncio.create_task(table.node("c2").open(PATIENCE))
        with pytest.raises(VoteOutdated, match="that run of the job has ended"):
            await within(PATIENCE, opening)
        await stale.close()
        again = table.node("a2")
        await within(PATIENCE, asyncio.gather(again.open(PATIENCE), newcomer))
        assert again.is_host


@pytest.mark.parametrize("joins_closed", [False, True])
@story
async def test_a_new_node_waits_for_the_host_of_an_ended_run_to_exit(joins_closed):
    async with nodes_at() as table:
        (old,) = await table.sit("a")
        await old.store.put(WORLD_KEY, {"phase": "closed", "generation": 0})
        new = table.node("b", joins_closed=joins_closed)
        opening = asyncio.create_task(new.open(PATIENCE))
        if joins_closed:
            await within(PATIENCE, opening)
            assert not new.is_host
            return
        closing = asyncio.create_task(old.close(PATIENCE))
        await within(PATIENCE, opening)
        assert new.is_host
        await closing


# --- with a witness ------------------------------------------------------------------------------


def witness(directory: Path, name: str) -> Witness:
    return Witness(WitnessClient(str(directory)), str(directory), JOB, name)


async def two_with_witness(table: Table, path: Path) -> list[EmbeddedNode]:
    nodes = []
    for name in "ab":
        node = table.restart(name, path, witness=witness(path / "w", name))
        await within(PATIENCE, node.open(PATIENCE))
        await within(PATIENCE, node.witness.confirm())
        await enlist(node)
        nodes.append(node)
    table.form(0, nodes, witness=True)
    for node in nodes:
        await node.kept()
    return nodes


@pytest.mark.parametrize("run", ["the same", "another"])
@story
async def test_restarted_agent_keeps_the_witness_vote_only_in_the_same_run(run, tmp_path):
    (tmp_path / "w").mkdir()
    async with nodes_at() as table:
        a, b = await two_with_witness(table, tmp_path)
        token = a.witness.token
        for node in (a, b):
            await kill(table, node)
        if run == "another":
            other = witness(tmp_path / "w", "c")
            await other.confirm()
            await other.close_job()
            await other.close()
            other = witness(tmp_path / "w", "c")
            assert await other.found() == ""
            await other.close()
        again = table.restart("b", tmp_path, witness=witness(tmp_path / "w", "b"))
        if run == "another":
            with pytest.raises(RendezvousLost, match="another run of the job"):
                await within(PATIENCE, again.open(1.0))
            return
        await within(PATIENCE, again.open(PATIENCE))
        assert again.is_host
        assert again.witness.votes(again.term) == {"after-0"}
        assert again.witness.token == token


# --- the endpoint an agent takes for its own ------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "taken", "ours"), [(None, None, 0), (None, 0, 1), (1, None, 1), (1, 0, 1), (1, 1, None)]
)
def test_an_agent_listens_at_its_own_endpoint_or_at_the_first_free_one(own, taken, ours):
    """Both are of this machine; `own` and `taken` are their numbers, None for none."""
    places = [Endpoint("127.0.0.1", free_port(), "job") for _ in range(2)]
    named = None if own is None else (places[own].host, places[own].port)

    async def found() -> Endpoint | None:
        listener = Listener("job")
        made = OwnEndpoint(places, listener, clock=SystemClock(), is_host=None, own=named)
        try:
            await made.listen()
            assert listener.port
            return made.ours
        finally:
            await listener.close()

    with socket.socket() as other:
        if taken is not None:
            # An earlier connection at this port may be in TIME_WAIT.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((places[taken].host, places[taken].port))
            other.listen()
        assert asyncio.run(found()) == (None if ours is None else places[ours])
