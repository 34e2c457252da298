"""The store without an agent: several jobs, a state file, restarts."""

import asyncio
import contextlib
import os

import pytest

from tests.unit.rendezvous.embedded_support import run, soon
from torchelastic.errors import ConfigError, LeaseExpired, RendezvousLost, RendezvousRefused
from torchelastic.rendezvous.embedded import EmbeddedStore, bind_endpoint
from torchelastic.rendezvous.embedded.dial import Endpoint
from torchelastic.rendezvous.embedded.serving import RendezvousService
from torchelastic.rendezvous.embedded.state_file import StateFile


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


def test_two_jobs_on_one_endpoint_do_not_meet():
    async def story():
        async with served() as place, place.client("a") as one, place.client("b") as other:
            await one.put("world", {"of": "a"})
            assert (await other.get("")).items == {}
            assert place.service.jobs == ("a", "b")

    run(story())


def test_a_server_for_one_job_refuses_others():
    async def story():
        async with served(job="a") as place:
            with pytest.raises(RendezvousRefused, match="belongs to job 'a', not to 'b'"):
                async with place.client("b"):
                    pass

    run(story())


def test_its_hosts_never_change():
    async def story():
        async with served() as place, place.client() as store:
            assert store.term == 0

    run(story())


@pytest.mark.parametrize(
    ("world", "left"),
    [
        pytest.param(None, (), id="nothing was written"),
        pytest.param({"phase": "closed"}, (), id="over"),
        pytest.param({"phase": "running"}, ("job-1",), id="its nodes may come again"),
    ],
)
def test_a_job_is_forgotten_when_it_is_over_and_all_have_gone(tmp_path, world, left):
    async def story():
        async with served(tmp_path / "state") as place:
            async with place.client(lease=5.0) as store:
                await store.put("member/a", {}, leased=True)
                if world is not None:
                    await store.put("world", world)
            await soon(lambda: place.service.jobs == left, "only what is needed is left")
            await place.restart()
            assert place.service.jobs == left

    run(story())


def test_a_restart_is_not_noticed(tmp_path):
    async def story():
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

    run(story())


def test_who_does_not_come_back_after_a_restart_is_given_up(tmp_path):
    async def story():
        async with served(tmp_path / "state") as place, place.client() as watcher:
            async with place.client(lease=3.0) as store:
                await store.put("member/a", {}, leased=True)
                await place.service.close()
                store.lose("the node is dead")
            await place.start()
            listing = await watcher.get("")
            assert list(listing.items) == ["member/a"]
            watch = watcher.watch("member/", after=listing.revision)
            assert (await anext(watch)).item is None
            await watch.aclose()

    run(story())


def test_without_a_state_file_it_is_over_for_its_clients_at_once():
    async def story():
        async with served() as place, place.client(lease=5.0) as store:
            await place.service.close()
            with pytest.raises(RendezvousLost, match="was stopped"):
                await store.put("world", {})
            assert store.lease_lost.is_set()
            await place.start()

    run(story())


def test_a_lease_that_ended_before_the_restart_stays_ended(tmp_path):
    async def story():
        async with served(tmp_path / "state") as place:
            async with place.client(lease=5.0) as store:
                await store.put("member/a", {}, leased=True)
                await store.put("world", {"phase": "running"})
            await place.restart()
            async with place.client() as store:
                assert list((await store.get("")).items) == ["world"]
                with pytest.raises(LeaseExpired):
                    await store.put("member/b", {}, leased=True)

    run(story())


def test_changes_are_gathered_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("torchelastic.rendezvous.embedded.state_file.ENOUGH", 2000)

    async def story():
        async with served(tmp_path / "state") as place, place.client() as store:
            for number in range(200):
                await store.put("world", {"generation": number})
            await place.restart()
            assert (await store.get("world")).items["world"].value == {"generation": 199}
            assert (await store.get("world")).revision == 200

    run(story())
    assert (tmp_path / "state").stat().st_size < 6000
    assert os.listdir(tmp_path) == ["state"]


def test_what_cannot_be_written_is_not_said(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    async def story():
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

    run(story())


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


def test_a_state_file_is_nobody_elses_to_read(tmp_path):
    file = StateFile(str(tmp_path / "state"))
    file.rewrite([])
    file.close()

    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["missing/state", "."])
def test_a_path_that_cannot_be_a_state_file_is_named(tmp_path, path):
    async def story():
        with pytest.raises(ConfigError, match=r"cannot be used .*--state-file"):
            RendezvousService(state_file=str(tmp_path / path))

    run(story())


def test_a_state_file_of_another_job_is_refused(tmp_path):
    async def story():
        path = tmp_path / "state"
        async with served(path) as place, place.client("a") as store:
            await store.put("world", {"phase": "running"})
        with pytest.raises(ConfigError, match="belongs to job 'a', not to 'b'"):
            RendezvousService(job="b", state_file=str(path))

    run(story())


def test_entries_that_do_not_fit_together_are_refused(tmp_path):
    async def story():
        file = StateFile(str(tmp_path / "state"))
        file.rewrite([["put", "unknown", "world", "{}", None, {}, ""]])
        file.close()
        with pytest.raises(ConfigError, match=r"is damaged .its entries do not fit together"):
            RendezvousService(state_file=str(tmp_path / "state"))

    run(story())
