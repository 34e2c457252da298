"""The store without an agent: several jobs, a state file, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rendezvous.cast import a_few_examples, soon, story
from torchelastic.errors import ConfigError, RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.embedded import EmbeddedStore, state_file
from torchelastic.rendezvous.embedded.service import RendezvousService
from torchelastic.rendezvous.embedded.state_file import KeptJob, RecordedTable, StateFile
from torchelastic.transport.addresses import bind_endpoint
from torchelastic.transport.connect import Endpoint


class Place:
    """A port at which one service after another serves."""

    def __init__(self, path=None, **options):
        self.port = 0
        self.options = {"state_file": None if path is None else str(path), **options}
        self.service = None

    async def start(self):
        self.service = RendezvousService(**self.options)
        self.port = await self.service.listen(bind_endpoint("127.0.0.1", self.port))
        return self

    async def restart(self):
        await self.service.close()
        await self.start()

    @contextlib.asynccontextmanager
    async def client(self, job="job-1", lease=0.0):
        place = Endpoint("127.0.0.1", self.port, job)
        store = await EmbeddedStore.connect([place], timeout=5.0, reconnect_timeout=5.0)
        if lease:
            await store.open_lease(lease)
        try:
            yield store
        finally:
            await store.close()


@contextlib.asynccontextmanager
async def served(path=None, **options):
    place = await Place(path, **options).start()
    try:
        yield place
    finally:
        await place.service.close()


@story
async def test_two_jobs_on_one_endpoint_do_not_meet():
    async with served() as place, place.client("a") as one, place.client("b") as other:
        await one.put("world", {"of": "a"})
        assert (await other.get("")).items == {}
        assert place.service.jobs == ("a", "b")
        assert other.term == 0  # its hosts never change


@story
async def test_a_server_for_one_job_refuses_others():
    async with served(job="a") as place:
        with pytest.raises(RendezvousRefused, match="belongs to job 'a', not to 'b'"):
            async with place.client("b"):
                pass


@pytest.mark.parametrize(
    ("world", "left"),
    [
        pytest.param(None, (), id="nothing was written"),
        pytest.param({"phase": "closed"}, (), id="over"),
        pytest.param({"phase": "running"}, ("job-1",), id="its nodes may come again"),
    ],
)
@story
async def test_a_job_is_forgotten_when_it_is_over_and_all_have_gone(tmp_path, world, left):
    async with served(tmp_path / "state") as place:
        async with place.client(lease=5.0) as store:
            await store.put("member/a", {}, leased=True)
            if world is not None:
                await store.put("world", world)
        await soon(lambda: place.service.jobs == left, "only what is needed is left")
        await place.restart()
        assert place.service.jobs == left
        async with place.client() as store:
            assert list((await store.get("")).items) == ["world"] * len(left)


@story
async def test_a_restart_is_not_noticed(tmp_path):
    async with served(tmp_path / "state") as place, place.client(lease=5.0) as store:
        await store.put("member/a", {"n": 1}, leased=True)
        revision = await store.put("world", {"generation": 3})
        watch = store.watch("world", after=revision)
        coming = asyncio.ensure_future(anext(watch))

        await place.restart()
        assert (await store.get("world")).items["world"].value == {"generation": 3}
        assert await store.keep_alive()
        changed = await store.compare_and_set("world", {"generation": 4}, expected=revision)

        assert (await coming).revision == changed == revision + 1
        await watch.aclose()
        assert not store.lease_lost.is_set()


@story
async def test_service_restart_ends_leases_of_clients_that_do_not_return(tmp_path):
    async with served(tmp_path / "state") as place, place.client() as watcher:
        async with place.client(lease=0.5) as store:
            revision = await store.put("member/a", {}, leased=True)
            await place.service.close()
            store.lose("the node is dead")
        await place.start()
        watch = watcher.watch("member/", after=revision)
        assert (await anext(watch)).item is None
        await watch.aclose()


@story
async def test_service_without_a_state_file_tells_clients_that_it_ends():
    async with served() as place, place.client(lease=5.0) as store:
        await place.service.close()
        with pytest.raises(RendezvousLost, match="was stopped"):
            await store.put("world", {})
        assert store.lease_lost.is_set()
        await place.start()


@story
async def test_changes_are_gathered_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("torchelastic.rendezvous.embedded.state_file.REWRITE_BYTES", 500)
    async with served(tmp_path / "state") as place, place.client() as store:
        for number in range(50):
            await store.put("world", {"generation": number})
        await place.restart()
        assert (await store.get("world")).items["world"].value == {"generation": 49}
        assert (await store.get("world")).revision == 50
    assert (tmp_path / "state").stat().st_size < 2000
    assert os.listdir(tmp_path) == ["state"]


@story
async def test_service_that_cannot_write_confirms_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    failed = asyncio.Event()
    options = {"on_failure": failed.set}
    async with served(tmp_path / "state", **options) as place, place.client() as store:
        await store.put("world", {"generation": 1})
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        monkeypatch.setattr(os, "fdatasync", full)
        writing = asyncio.ensure_future(store.put("world", {"generation": 2}))
        await asyncio.wait_for(failed.wait(), 30.0)
        assert not writing.done()
        assert "No space left" in str(place.service.failure)
        writing.cancel()
        await asyncio.wait([writing])
        store.lose("the test is over")


# --- the file ------------------------------------------------------------------------------------


def test_a_state_file_has_one_server(tmp_path):
    first, second = StateFile(str(tmp_path / "state")), StateFile(str(tmp_path / "state"))
    first.rewrite([])

    with pytest.raises(ConfigError, match="in use by another process"):
        second.read()
    first.close()
    second.close()
    third = StateFile(str(tmp_path / "state"))
    assert third.read() == []
    third.close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


def test_a_state_file_that_is_written_whole_at_that_moment_is_in_use(tmp_path, monkeypatch):
    """Whoever has opened the old one could lock it, and would have it for itself."""
    first, second = StateFile(str(tmp_path / "state")), StateFile(str(tmp_path / "state"))
    first.rewrite([])
    lock = StateFile._lock

    def too_late(file, descriptor):
        monkeypatch.undo()
        first.rewrite([])
        lock(file, descriptor)

    monkeypatch.setattr(StateFile, "_lock", too_late)
    with pytest.raises(ConfigError, match="in use by another process"):
        second.read()
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("path", "entries", "sentence"),
    [
        ("missing/state", None, r"cannot be used .*--state-file"),
        (".", None, r"cannot be used .*--state-file"),
        ("state", [["new", "a", "A"]], "belongs to job 'a', not to 'b'"),
        ("state", [["put", "a", "w", "{}", None, {}, ""]], "damaged .inconsistent entries"),
    ],
)
@story
async def test_a_state_file_that_is_of_no_use_is_refused(tmp_path, path, entries, sentence):
    if entries is not None:
        file = StateFile(str(tmp_path / path))
        file.rewrite(entries)
        file.close()
    with pytest.raises(ConfigError, match=sentence):
        RendezvousService(job="b", state_file=str(tmp_path / path))


# --- journal --------------------------------------------------------------------------------------

# What a store writes down is what it would be told: replayed, it is the same store.


class Written:
    """A job's table, and what it has written down."""

    def __init__(self):
        self.entries = [["new", "job", "store-1"]]
        self.lasting = [True]
        self.table = RecordedTable("job")
        self.table.record = self._record

    def _record(self, entry, lasting):
        self.entries.append(json.loads(json.dumps(entry)))
        self.lasting.append(lasting)

    def replayed(self, now=100.0):
        return state_file.replay(self.entries, now)["job"]

    def as_snapshot(self):
        kept = {"job": KeptJob("store-1", self.table)}
        return json.loads(json.dumps(state_file.snapshot(kept)))


def same(table, other):
    assert other.revision == table.revision
    assert other.get("") == table.get("")
    assert {key: other.lease_of(key) for key in _keys(other)} == {
        key: table.lease_of(key) for key in _keys(table)
    }
    return True


def _keys(table):
    return [row.key for row in table.get("")]


def test_a_table_that_is_replayed_is_the_same():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", '{"n":1}', lease="L", stamp="c/1")
    written.table.put("world", "{}", expected=0, beside={"part/0": "[]"})
    written.table.end_lease("L")

    kept = written.replayed()

    assert kept.name == "store-1"
    assert kept.table.revision_of("c/1") == 1, "a request that is sent again is known again"
    assert same(written.table, kept.table)
    assert _keys(kept.table) == ["part/0", "world"]


def test_journal_change_without_a_lease_is_synced_before_the_answer():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", "{}", lease="L")
    written.table.put("world", "{}")

    assert [entry[0] for entry in written.entries] == ["new", "open", "put", "put"]
    assert written.lasting == [True, False, False, True]


def test_journal_change_without_effect_is_not_written():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("world", "{}", expected=7)
    written.table.open_lease("L", 3.0, 1.0)
    written.table.keep_alive("L", 1.0)
    written.table.end_lease("of nobody")

    assert [entry[0] for entry in written.entries] == ["new", "open"]


def test_leases_begin_again_and_end_with_their_keys():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", "{}", lease="L")

    for entries in (written.entries, written.as_snapshot()):
        table = state_file.replay(entries, 100.0)["job"].table
        assert table.next_deadline() == 103.0
        assert table.keep_alive("L", 102.0)
        assert not table.expire(103.0)
        assert [row.key for row in table.expire(105.0)["L"]] == ["member/a"]


def test_a_client_that_is_up_to_date_gets_only_new_changes():
    written = Written()
    written.table.put("world", "1")
    written.table.put("world", "2")

    for entries in (written.entries, written.as_snapshot()):
        table = state_file.replay(entries, 0.0)["job"].table
        assert table.since("", 2) == []
        (row,) = table.put("world", "3")
        assert table.since("", 2) == [row]


def test_journal_watcher_behind_a_restart_receives_earlier_deletions():
    written = Written()
    written.table.open_lease("L", 3.0, 0.0)
    written.table.put("member/a", "{}", lease="L")
    written.table.end_lease("L")

    table = state_file.replay(written.as_snapshot(), 0.0)["job"].table

    assert [(row.key, row.text) for row in table.since("member/", 1)] == [("member/a", None)]


def test_jobs_are_apart_and_can_be_forgotten():
    entries = [["new", "a", "A"], ["new", "b", "B"], ["put", "a", "world", "{}", None, {}, ""]]

    jobs = state_file.replay(entries, 0.0)
    assert (jobs["a"].table.revision, jobs["b"].table.revision) == (1, 0)
    assert list(state_file.replay([*entries, ["forget", "a"]], 0.0)) == ["b"]


OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("xyz"), st.sampled_from([None, "L", "M"])),
    st.tuples(st.just("open"), st.sampled_from("LM"), st.sampled_from([1.0, 2.0])),
    st.tuples(st.just("end"), st.sampled_from("LM"), st.none()),
)


@a_few_examples
@given(st.lists(OPERATIONS), st.integers(0, 20))
def test_journal_replay_after_a_rewrite_at_any_time_gives_the_same_table(operations, whole_after):
    written = Written()
    for number, (what, name, more) in enumerate(operations):
        if what == "open":
            written.table.open_lease(name, more, 0.0)
        elif what == "end":
            written.table.end_lease(name)
        elif more is None or written.table.seconds_of(more) is not None:
            written.table.put(name, str(number), lease=more)
        if number == whole_after:
            written.entries = written.as_snapshot()

    assert same(written.table, written.replayed().table)


# --- lines ---------------------------------------------------------------------------------------


def text(*entries):
    return state_file.heading() + b"".join(map(state_file.line, entries))


def test_a_line_that_was_not_finished_was_never_told():
    assert state_file.parse(text(), "F") == []
    first = ["new", "jöb\n", "A"]
    whole = text(first, ["new", "b", "B"])

    for end in range(len(text(first)), len(whole)):
        assert state_file.parse(whole[:end], "F") == [first]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not a rendezvous state file"),
        (b"import torch\n", "not a rendezvous state file"),
        (b"00000000 {}\n", "not a rendezvous state file"),
        (state_file.line(["something-else", 1]), "not a rendezvous state file"),
        (state_file.line([state_file.FORMAT, 2]), "another version"),
        (text(["new", "a", "A"]).replace(b'"A"', b'"B"'), "damaged .line 2"),
        (text() + b"\n" + state_file.line(["new", "a", "A"]), "damaged .line 2"),
        (text() + state_file.line({"a": 1}), "damaged .line 2"),
    ],
)
def test_journal_foreign_or_damaged_file_is_refused(data, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        state_file.parse(data, "F")

    assert "\n" not in str(refused.value)
