"""A process that is its own node."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.unit.agent.cast import in_loop
from torchelastic.rendezvous.backend_parameters import parse_url
from torchelastic.rendezvous.membership import node_driver
from torchelastic.rendezvous.world import World, WorldNode
from torchelastic.training import standalone
from torchelastic.training.standalone import config_for
from torchelastic.worker import channel, orders, status_page


def test_standalone_quorum_and_progress_timeout_of_a_url():
    config = config_for(parse_url("tcp://h/r?min_workers=2&quorum=none&progress_timeout=5"), None)
    assert (config.quorum, config.progress_timeout) == ("none", 5.0)
    config = config_for(parse_url("etcd://h/r?min_workers=2"), None)
    assert (config.quorum, config.progress_timeout) == ("majority", None)


def test_the_secret_and_the_certificates_of_a_url():
    text = "tcp://h/r?min_workers=2&secret_file=/s&tls_cert=c&tls_key=k&tls_ca=a"
    config = config_for(parse_url(text), None)
    assert config.rdzv_secret_file == "/s"
    assert (config.rdzv_tls_cert, config.rdzv_tls_key, config.rdzv_tls_ca) == ("c", "k", "a")
    assert "secret_file" not in config.rdzv_configs
    config = config_for(parse_url("tcp://h/r?min_workers=2"), None)
    assert config.rdzv_secret_file is None
    assert config.rdzv_tls_cert is None


# --- what the worker says, and its end -----------------------------------------------------------


class MemberSession:
    """Among the others, as far as this node can tell: what it says is kept, worlds are shown."""

    def __init__(self, config, node, clock, *, on_world, **callbacks):
        self.node, self.show = node, on_world
        self.member = SimpleNamespace(name="a", store="")
        self.backend = SimpleNamespace(addr="127.0.0.1")
        self.said = {}

    async def join(self, **facts):
        self.update(**facts)

    def update(self, **facts):
        self.said.update(facts)
        self.member.store = facts.get("store", self.member.store)

    async def last_words(self): ...

    async def close(self, *, job_closed): ...


class Job:
    """A node whose worker and whose job are the test, in one thread: what happens between two
    `await`s the node finds all at once."""

    def __init__(self, monkeypatch, address="tcp://h/r?min_workers=2", **options):
        monkeypatch.setattr(node_driver, "MemberSession", MemberSession)
        monkeypatch.setattr(standalone, "interface_of", lambda addr: None)
        ours, self.worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = standalone.config_for(parse_url(address), None)
        self.node = standalone.StandaloneNode(config, ours, **options)
        self.world = World(generation=0, phase="running", in_process=True, store="elsewhere:1")

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0)

    def say(self, report):
        self.worker.send(json.dumps(orders.to_json(report)).encode())

    async def hear(self, kind):
        """The next order, which must be of this kind."""
        data = await asyncio.get_running_loop().sock_recv(self.worker, channel.LIMIT)
        assert type(orders.from_json(json.loads(data))) is kind

    def show(self, **changes):
        self.world = replace(self.world, **changes)
        self.node.session.show(self.world)

    async def train(self):
        """Up to the last step of a world with another node."""
        self.worker.setblocking(False)
        self.say(orders.Enlisted())
        await self.hear(orders.StatusPage)
        await self.until(lambda: self.node.session.said.get("standing") == (0,))
        places = dict(nproc=1, role="default", first_role_rank=0, local_ranks=(0,))
        nodes = [
            WorldNode(node=name, name=name, addr=name, node_rank=at, first_rank=at, **places)
            for at, name in enumerate((self.node.node, "b"))
        ]
        self.world = self.world.with_nodes(nodes)
        self.show()
        await self.hear(orders.Enter)

    async def finish(self, *, first):
        """The training is done everywhere: here at `first`, or in the other node only."""
        if first:
            self.say(orders.Finished(0, 5))
            await self.until(lambda: self.node.session.said.get("finished") == 0)
        self.show(phase="over", ending="finished", after=4)
        await self.hear(orders.Over)

    def leave(self):
        self.say(orders.Stopped(0, 5))
        self.worker.close()

    async def said_at_the_end(self):
        """What the node has told the others; once it is done it goes when the job is closed."""
        said = self.node.session.said
        await self.until(lambda: "done" in said or self.running.done())
        if not self.running.done():
            self.show(phase="closed")
        await self.running
        return said

    async def __aenter__(self):
        self.running = asyncio.create_task(self.node._run())
        await self.until(lambda: self.node.session.said)
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        await asyncio.wait({self.running})
        self.worker.close()
        self.node._channel.close()


@pytest.mark.parametrize("first", [True, False], ids=["its data ended", "another's data ended"])
@in_loop
async def test_worker_gone_before_its_last_word_is_taken_up_has_succeeded(monkeypatch, first):
    """It says that it has stopped and closes its end before the node's loop runs again, as every
    script does that ends with the training: the node finds both at once."""
    async with Job(monkeypatch) as job:
        await job.train()
        await job.finish(first=first)
        job.leave()
        assert (await job.said_at_the_end()).get("done") == 0


@pytest.mark.parametrize("word", [None, orders.Stopped(0, 5)], ids=["silent", "stopped"])
@in_loop
async def test_worker_that_leaves_before_the_training_is_done_has_not_succeeded(monkeypatch, word):
    async with Job(monkeypatch) as job:
        await job.train()
        if word is not None:
            job.say(word)
        job.worker.close()
        assert "done" not in await job.said_at_the_end()
        assert job.node.state.reason == "the worker has left the training"


@in_loop
async def test_worker_that_never_stops_leaves_the_job(monkeypatch):
    """Its training thread hangs in user code: no abort reaches it, and the others wait for it."""
    async with Job(monkeypatch, patience=0.05) as job:
        await job.train()
        job.show(phase="over", ending="failure")
        await job.hear(orders.Over)
        await job.running
        await job.hear(orders.Closed)
        assert "not free" in job.node.state.reason


@pytest.mark.parametrize("waiting", [False, True], ids=["hung", "waits for others"])
@in_loop
async def test_worker_without_progress_leaves_unless_it_waits_for_others(monkeypatch, waiting):
    monkeypatch.setattr(standalone, "LOOK", 0.01)
    monkeypatch.setattr(standalone, "limit_for", lambda *_: 0.0)
    async with Job(monkeypatch) as job:
        await job.train()
        for number in (1, 2) if waiting else (1,):
            await job.hear(orders.Ping)
            job.say(orders.Pong(waiting=waiting, number=number))
        if not waiting:
            await job.running
            assert "no progress" in job.node.state.reason


@pytest.mark.parametrize(("step", "trained"), [(5, -1), (6, 0)], ids=["the first", "a later one"])
@in_loop
async def test_generation_has_trained_once_its_worker_is_past_its_first_step(
    monkeypatch, step, trained
):
    async with Job(monkeypatch) as job:
        await job.train()
        worker = status_page.StatusPage(job.node._status_page)
        worker.entered(0, 5)
        worker.entered(0, step)
        worker.close()
        job.say(orders.PeerLost(0, step, "gone"))
        said = job.node.session.said
        await job.until(lambda: said.get("failures"))
        assert (said["trained"], said["holds"]) == (trained, 0)
