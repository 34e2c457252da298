"""Seats of agents that are started again, with the files of the last ones: who votes, and when."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.rendezvous.embedded.test_node import (
    LEASE,
    PATIENCE,
    Table,
    end,
    enlist,
    lost,
    name_of,
    unused_port,
)
from tests.unit.rendezvous.embedded_support import JOB, story, within
from torchelastic.clock import SystemClock
from torchelastic.errors import RendezvousLost, VoteOutdated
from torchelastic.rendezvous.embedded.ask_peers import Ballot, Returns, VoteRequest, ask_for_votes
from torchelastic.rendezvous.embedded.election import Poll
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.node import EmbeddedNode
from torchelastic.rendezvous.embedded.voter_file import VoterFile
from torchelastic.rendezvous.majority import Elector, Electorate, Roll
from torchelastic.rendezvous.witness.vote_keys import Witness
from torchelastic.rendezvous.witness.witness_client import WitnessClient
from torchelastic.rendezvous.world import WORLD_KEY
from torchelastic.transport import addresses as endpoint
from torchelastic.transport import frames
from torchelastic.transport.connect import Endpoint
from torchelastic.transport.listener import Listener


class FileTable(Table):
    """Nodes that keep files."""

    def __init__(self, *ports: int) -> None:
        super().__init__(*ports)
        self.files: list[VoterFile] = []

    def restart(self, name: str, path: Path, **options) -> EmbeddedNode:
        """The next agent of a node, with the file of the last."""
        file = VoterFile(path / name, name, {"machine": "here", "job": JOB})
        file.resume(gone=(), is_late=False)
        self.files.append(file)
        return self.node(name, file=file, **options)

    async def close(self) -> None:
        await super().close()
        for file in self.files:
            file.close()


@contextlib.asynccontextmanager
async def nodes_at() -> AsyncIterator[FileTable]:
    table = FileTable(unused_port())
    try:
        yield table
    finally:
        await table.close()


async def three_with_files(table: FileTable, path: Path) -> list[EmbeddedNode]:
    nodes = [table.restart(name, path) for name in "abc"]
    for node in nodes:
        await within(PATIENCE, node.open(PATIENCE))
        await enlist(node)
    table.form(0, nodes)
    for node in nodes:
        await node.kept()
    return nodes


async def kill(table: FileTable, node: EmbeddedNode) -> None:
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


async def two_with_witness(table: FileTable, path: Path) -> list[EmbeddedNode]:
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
