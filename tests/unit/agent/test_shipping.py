"""Agents ship their events to the leader, whoever it is and whatever becomes of it."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from tests.unit.agent.cast import PATIENCE, in_loop
from torchelastic.agent.telemetry import clock_offset, shipper
from torchelastic.agent.telemetry import collector as collector_module
from torchelastic.agent.telemetry.collector import Begin, CollectedLog, Heard, Lines, LogCollector
from torchelastic.agent.telemetry.shipper import LogShipper
from torchelastic.clock import SystemClock
from torchelastic.errors import RendezvousLost, RendezvousRefused
from torchelastic.events.log import EventLog, read
from torchelastic.events.types import Note
from torchelastic.rendezvous.store import Item, Listing
from torchelastic.rendezvous.world import LEADER_KEY, MEMBER_PREFIX
from torchelastic.transport import frames as wire
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.auth import ANONYMOUS
from torchelastic.transport.connect import Endpoint, connect_once
from torchelastic.transport.listener import Listener


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Nobody waits for anything that a test does not wait for."""
    for name in ("SETTLING", "SETTLING_MORE", "SPREAD"):
        monkeypatch.setattr(shipper, name, 0.0)
    monkeypatch.setattr(shipper, "TRY_AGAIN", 0.01)
    monkeypatch.setattr(clock_offset, "LINGER", 0.0)
    monkeypatch.setattr(collector_module, "PAUSE", 0.001)


class Store:
    """The store, as all nodes see it."""

    def __init__(self):
        self.values = {}
        self.lost = False
        self.asked = 0

    async def get(self, prefix):
        self.asked += 1
        if self.lost:
            raise RendezvousLost("gone")
        found = {key: value for key, value in self.values.items() if key.startswith(prefix)}
        return Listing(1, {key: Item(value, 1, 1) for key, value in found.items()})


class Clock(SystemClock):
    """Of a machine that was booted at another time."""

    def __init__(self, ahead):
        self.ahead = ahead

    def now(self):
        return super().now() + self.ahead


class Node:
    """An agent's log, its end of the gathering and its port."""

    def __init__(self, name, directory, store, ahead=0.0):
        self.name, self.store, self.clock = name, store, Clock(ahead)
        self.directory = directory / name
        self.directory.mkdir()
        path = self.directory / "events.jsonl"
        self.log = EventLog(path, job="job", node=name, clock=self.clock)
        self.collected = CollectedLog(self.directory / "job.jsonl")
        self.collector = LogCollector(self.collected, self.clock)
        self.leaders = []
        self.shipper = LogShipper(
            self.log, name, "job", self.collector, self.clock, on_leader=self.leaders.append
        )
        self.listener = Listener("job")

    async def open(self):
        self.port = await self.listener.listen(bind_endpoint("127.0.0.1", 0))
        member = {"peer": f"127.0.0.1:{self.port}", "name": f"node-{self.name}"}
        self.store.values[MEMBER_PREFIX + self.name] = member
        backend = SimpleNamespace(
            store=self.store, credentials=ANONYMOUS, serve=self.listener.serve
        )
        self.shipper.open(backend)

    def say(self, text):
        self.log.emit(Note(text=text))

    def has(self):
        """Who said what, as this node has gathered it."""
        return [(one.node, one.fields["text"]) for one in self.story() if one.type == "note"]

    def story(self):
        return list(read(self.directory / "job.jsonl"))

    async def close(self):
        await self.shipper.close()
        await self.collector.close()
        await self.listener.close()
        self.log.close()


@contextlib.asynccontextmanager
async def nodes(directory, *names, ahead=()):
    store = Store()
    store.values[LEADER_KEY] = {"node": names[0]}
    made = [Node(name, directory, store, dict(ahead).get(name, 0.0)) for name in names]
    try:
        for one in made:
            await one.open()
        yield store, *made
    finally:
        for one in made:
            await one.close()


async def until(probe):
    while not (found := probe()):
        await asyncio.sleep(0.002)
    return found


def begin(*made, count=None):
    for one in made:
        one.shipper.turn_to(count or len(made))


@in_loop
async def test_times_are_the_leaders_whatever_clock_the_others_have(tmp_path):
    async with nodes(tmp_path, "a", "b", ahead=[("b", 1e6)]) as (_, a, b):
        b.say("x")
        before = a.clock.now()
        begin(a, b)
        await until(a.has)
        [record] = [one for one in a.story() if one.node == "b"]
        assert record.mono > 1e6
        assert 0 < record.heard <= a.clock.now()
        # It was said before, and is never said to be earlier than it was.
        assert record.heard - before == pytest.approx(record.mono - before - 1e6, abs=5.0)
        assert record.heard >= record.mono - 1e6 - 1e-5


@in_loop
async def test_the_leader_has_what_all_say_and_a_new_one_the_whole_story_of_the_living(tmp_path):
    async with nodes(tmp_path, "a", "b", "c") as (store, a, b, c):
        for one in (a, b, c):
            one.say("1")
        begin(a, b, c)
        await until(lambda: len(a.has()) == 3)
        b.say("2")
        await until(lambda: len(a.has()) == 4)
        assert sorted(a.has()) == [("a", "1"), ("b", "1"), ("b", "2"), ("c", "1")]
        assert b.has() == c.has() == []
        await a.close()
        store.values[LEADER_KEY] = {"node": "b"}
        c.say("3")
        begin(b, c)
        await until(lambda: len(b.has()) == 4)
        assert sorted(b.has()) == [("b", "1"), ("b", "2"), ("c", "1"), ("c", "3")]
        assert (a.leaders, b.leaders, c.leaders) == ([], ["node-a"], ["node-a", "node-b"])


@in_loop
async def test_batch_taken_during_write_is_written_too(tmp_path):
    collector = LogCollector(CollectedLog(tmp_path / "job.jsonl"), SystemClock())
    second = asyncio.get_running_loop().create_future()

    def take_more(_):
        """In the moment between the writer's end and that of its task."""
        second.set_result(collector.take("a", b"2\n", 2.0))

    collector.take("a", b"1\n", 1.0).add_done_callback(take_more)
    await (await second)
    await collector.close()
    assert (tmp_path / "job.jsonl").read_bytes() == b"1\n2\n"


@in_loop
async def test_a_leader_that_leads_again_is_told_nothing_twice(tmp_path):
    async with nodes(tmp_path, "a", "b") as (store, a, b):
        b.say("1")
        begin(a, b)
        await until(a.has)
        store.values[LEADER_KEY] = {"node": "b"}
        b.say("2")
        begin(a, b)
        await until(lambda: len(b.has()) == 2)
        store.values[LEADER_KEY] = {"node": "a"}
        b.say("3")
        begin(a, b)
        await until(lambda: len(a.has()) == 3)
        assert a.has() == [("b", "1"), ("b", "2"), ("b", "3")]


@in_loop
async def test_a_file_that_cannot_be_read_costs_what_is_there_only(tmp_path, monkeypatch):
    monkeypatch.setattr(shipper, "RECENT", 4)
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        for number in range(50):
            b.say(str(number))
        b.log.close()
        b.log.path.unlink()
        b.log.path.mkdir()  # as a disk that fails
        begin(a, b)
        await until(lambda: len(a.has()) == 4)
        assert a.has() == [("b", str(number)) for number in range(46, 50)]


@in_loop
async def test_a_leader_whose_disk_is_full_takes_all_and_keeps_nothing(tmp_path):
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        (a.directory / "job.jsonl").symlink_to("/dev/full")
        begin(a, b)
        for number in range(3):
            b.say(str(number))
            await b.shipper.last_words(PATIENCE)
        assert b.shipper._told.is_set()
        assert a.collected.dropped > 0


@in_loop
async def test_a_leader_that_does_not_answer_is_waited_for_by_nobody(tmp_path, monkeypatch):
    """As one that is frozen: it takes the connection, and nothing more."""
    monkeypatch.setattr(shipper, "RECENT", 16)
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        frozen = asyncio.Event()
        a.listener.serve(wire.EVENTS, lambda link, hello: frozen.set())
        begin(b)
        await frozen.wait()
        for number in range(100):
            b.say(str(number))
        assert len(b.shipper._recent) == shipper.RECENT, "what is kept in memory is bounded"
        a.listener.serve(wire.EVENTS, a.collector.admit)
        b.shipper._talk.cancel()  # as when its patience ends
        await until(lambda: len(a.has()) == 100)


@in_loop
async def test_shipper_takes_leader_from_world_without_asking(tmp_path):
    async with nodes(tmp_path, "a", "b") as (store, a, b):
        b.say("1")
        begin(a, b)
        await until(a.has)
        asked = store.asked
        b.shipper.turn_to(2, "a")
        b.say("2")
        await until(lambda: len(a.has()) == 2)
        assert store.asked == asked
        store.values[LEADER_KEY] = {"node": "b"}
        b.shipper.turn_to(2, "b")
        await until(lambda: len(b.has()) == 2)


@in_loop
async def test_a_store_that_is_lost_is_looked_at_again(tmp_path):
    async with nodes(tmp_path, "a", "b") as (store, a, b):
        store.lost = True
        b.say("x")
        begin(a, b)
        await until(lambda: not b.shipper._turned.is_set())
        store.lost = False
        await until(a.has)


@in_loop
async def test_last_words_reach_a_leader_that_was_never_spoken_to(tmp_path, monkeypatch):
    monkeypatch.setattr(shipper, "SETTLING", 3600.0)
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        begin(a, b)
        b.say("the end")
        await b.shipper.last_words(PATIENCE)
        await until(a.has)
        await b.shipper.close()
        await a.collector.wait_alone(PATIENCE)
        assert a.has() == [("b", "the end")]


# --- the leader's end ----------------------------------------------------------------------------


async def call(node):
    place = Endpoint("127.0.0.1", node.port, "job", ANONYMOUS)
    link, _ = await connect_once(place, purpose=wire.EVENTS, timeout=PATIENCE)
    return link


BEGIN = wire.pack(Begin("b"))
RUDE = {
    "who?": [wire.pack_before(Lines(1.0), b"{}\n")],
    "no line": [BEGIN, wire.pack_before(Lines(1.0), b"half a li")],
    "no time": [BEGIN, wire.pack_before(Lines(float("inf")), b"{}\n")],
    "out of turn": [BEGIN, *[wire.pack_before(Lines(1.0), b"{}\n")] * 2],
    "too much": [BEGIN, wire.pack_before(Lines(1.0), b" " * (2 << 20) + b"\n")],
    "not for us": [wire.pack(Heard(1.0, 1.0))],
}


@pytest.mark.parametrize("frames", RUDE.values(), ids=RUDE)
@in_loop
async def test_collector_disconnects_misbehaving_agent(frames, tmp_path):
    async with nodes(tmp_path, "a") as (_, a):
        link = await call(a)
        for frame in frames:
            link.send(frame)
        link.deliver_to(lambda answer: None)
        await link.ended


@in_loop
async def test_only_so_many_are_listened_to(tmp_path, monkeypatch):
    monkeypatch.setattr(collector_module, "MOST_AGENTS", 1)
    async with nodes(tmp_path, "a") as (_, a):
        link = await call(a)
        with pytest.raises(RendezvousRefused, match="no more event connections"):
            await call(a)
        link.abort()
        await until(lambda: not a.collector._agents)
        (await call(a)).abort()


@in_loop
async def test_a_line_is_written_before_it_is_answered(tmp_path):
    async with nodes(tmp_path, "a") as (_, a):
        link = await call(a)
        link.send(Begin("z"))
        answer = wire.parse(await link.next_frame(), collector_module.ANSWERS)
        assert answer.upto == collector_module.NOTHING
        before = a.clock.now()
        link.send(wire.pack_before(Lines(7.5), b'{"x":1}\n{"x":2}\n'))
        answer = wire.parse(await link.next_frame(), collector_module.ANSWERS)
        assert answer.upto == a.collector.upto("z") == 7.5
        assert before <= answer.at <= a.clock.now()
        assert (a.directory / "job.jsonl").read_bytes() == b'{"x":1}\n{"x":2}\n'
        link.abort()
