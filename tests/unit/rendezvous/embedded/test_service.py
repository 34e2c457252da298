"""The store without an agent: several jobs, a state file, restarts."""

import asyncio
import contextlib
import os

import pytest

from tests.unit.rendezvous.embedded_support import soon, story
from torchelastic.errors import ConfigError, RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.embedded import EmbeddedStore, bind_endpoint
from torchelastic.rendezvous.embedded.service import RendezvousService
from torchelastic.rendezvous.embedded.state_file import StateFile
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
