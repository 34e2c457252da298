"""The witness: its storage, the process that asks it, and its votes."""

from __future__ import annotations

import errno
import inspect
import json
import os
import signal

import pytest

from tests.unit.rendezvous.cast import story, within
from torchelastic.errors import ConfigError, RendezvousRefused
from torchelastic.rendezvous.majority import FIRST_VOTE
from torchelastic.rendezvous.witness import vote_keys as asking_module
from torchelastic.rendezvous.witness.vote_keys import (
    Witness,
    WitnessClient,
    WitnessSilent,
    WitnessWatch,
)
from torchelastic.rendezvous.witness.witness_storage import Directory, answer, open_storage

ANSWER_TIMEOUT = 30.0


# --- a directory ---------------------------------------------------------------------------------


def test_a_key_is_created_once_and_whole(tmp_path, monkeypatch):
    storage = open_storage(f"file://{tmp_path}/new")
    assert storage.create("job/a", b"one")
    assert not storage.create("job/a", b"two")
    assert storage.read("job/a") == b"one"
    assert storage.names("job") == ["a"]

    def crash(source, target):
        raise KeyboardInterrupt  # after the file was written, before it has its name

    monkeypatch.setattr(os, "link", crash)
    with pytest.raises(KeyboardInterrupt):
        storage.create("job/b", b"one")
    assert storage.read("job/b") is None
    assert sorted(os.listdir(tmp_path / "new" / "job")) == ["a"]


def test_keys_are_replaced_and_removed(tmp_path):
    storage = Directory(tmp_path)
    assert storage.read("job/0/a") is None
    assert storage.names("job") == []
    for key in ("job/0/a", "job/0/b", "job/c"):
        storage.create(key, b"one")
    storage.replace("job/c", b"two")
    assert storage.read("job/c") == b"two"
    storage.remove("job/0")
    storage.remove("job/nothing")
    assert storage.names("job") == ["c"]


def test_witness_storage_errors_are_reported(tmp_path):
    storage = Directory(tmp_path)
    (tmp_path / "torn").write_text("{")
    assert answer(storage, {"do": "read", "key": "torn"}) == {"value": None}
    assert answer(storage, {"do": "read", "key": "nothing"}) == {}
    assert answer(storage, {"do": "create", "key": "torn", "value": {}}) == {
        "created": False,
        "value": None,
    }
    assert "torn" in answer(storage, {"do": "create", "key": "torn/a"})["error"]


@story
async def test_a_directory_without_hard_links_is_refused(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    found = answer(Directory(tmp_path), {"do": "create", "key": "a", "value": {}})
    assert f"Cannot use --witness {tmp_path}: its file system has no hard links" in found["refused"]
    assert os.listdir(tmp_path) == []


def test_the_driver_of_s3_creates_with_a_conditional_write():
    """As those of gs (`ifGenerationMatch`) and abfs (`overwrite=False`) do, which are not installed
    here; the default of fsspec looks and then writes."""
    s3fs = pytest.importorskip("s3fs")
    assert '"IfNoneMatch": "*"' in inspect.getsource(s3fs.S3FileSystem._pipe_file)


@story
async def test_storage_that_blocks_is_given_up_and_asked_again(tmp_path, monkeypatch):
    started: list[int] = []
    asking = WitnessClient(str(tmp_path), started.append)
    assert await within(ANSWER_TIMEOUT, asking.ask("names", "job")) == {"names": []}
    os.kill(started[0], signal.SIGSTOP)  # as if in a system call that does not return
    monkeypatch.setattr(asking_module, "ANSWER_TIMEOUT", 0.2)
    with pytest.raises(WitnessSilent, match=r"no answer within 0.2 s"):
        await asking.ask("names", "job")
    monkeypatch.setattr(asking_module, "ANSWER_TIMEOUT", ANSWER_TIMEOUT)
    assert await asking.ask("names", "job") == {"names": []}
    assert len(started) == 2
    await asking.close()


@story
async def test_a_url_of_no_use_is_refused_with_a_reason():
    asking = WitnessClient("nonsense://bucket")
    with pytest.raises(ConfigError, match="--witness nonsense://bucket"):
        await within(ANSWER_TIMEOUT, asking.ask("names", "job"))
    await asking.close()


# --- votes ---------------------------------------------------------------------------------------


class Here:
    """Asks in this process, without a process of its own; may fail once after the deed is done."""

    def __init__(self, storage) -> None:
        self.storage = storage
        self.loses_answer = False
        self.asked: list[tuple[str, str]] = []

    async def ask(self, do, key, value=None):
        self.asked.append((do, key))
        found = answer(self.storage, {"do": do, "key": key, "value": value})
        if self.loses_answer:
            self.loses_answer = False
            raise WitnessSilent("no answer within 5 s")
        if "error" in found:
            raise WitnessSilent(found["error"])
        return found

    async def close(self) -> None: ...


def witness(tmp_path, node: str) -> Witness:
    return Witness(Here(Directory(tmp_path)), str(tmp_path), "a/job", node)


async def two(tmp_path) -> tuple[Witness, Witness]:
    a, b = witness(tmp_path, "a"), witness(tmp_path, "b")
    assert await a.found() == ""
    assert await b.confirm() == await a.confirm() != ""
    return a, b


@story
async def test_one_node_gets_a_vote_for_one_term(tmp_path):
    a, b = await two(tmp_path)
    assert await b.claim("after-0", 3)
    assert b.votes(3) == {"after-0"}
    assert b.votes(4) == frozenset()
    assert b.refused(4) == {"after-0": "b"}
    assert not await b.claim("after-0", 4)
    assert not await a.claim("after-0", 1)
    assert a.refused(1) == {"after-0": "b"}
    assert await a.claim("after-1", 1)


@story
async def test_a_claim_without_an_answer_is_no_vote_until_it_is_read(tmp_path):
    _, b = await two(tmp_path)
    b._asking.loses_answer = True
    with pytest.raises(WitnessSilent):
        await b.claim("after-0", 3)
    assert b.votes(3) == frozenset()
    await b.look("after-0")  # its own: no refusal
    assert b.refused(3) == {}
    assert await b.claim("after-0", 3)


@story
async def test_witness_key_that_is_unreadable_is_no_vote(tmp_path):
    a, _ = await two(tmp_path)
    (tmp_path / "a%2Fjob" / "0" / "after-0").write_text("")
    assert not await a.claim("after-0", 1)
    (tmp_path / "a%2Fjob" / "0" / "after-1").write_text(json.dumps({"node": "a"}))
    await a.look("after-1")
    assert a.refused(1) == {"after-0": "", "after-1": ""}


@story
async def test_after_the_job_is_closed_nobody_gets_a_vote_of_it_again(tmp_path):
    """b was cut off while a went on alone, and to the end."""
    a, b = await two(tmp_path)
    assert await a.claim("after-0", 1)
    await a.close_job()
    assert os.listdir(tmp_path / "a%2Fjob") == ["incarnation-0"]
    assert not await b.claim("after-0", 3)
    with pytest.raises(WitnessSilent, match="does not know the job"):
        await b.confirm()


@story
async def test_a_job_begins_again_only_when_the_run_before_is_closed(tmp_path):
    a, _ = await two(tmp_path)
    assert await a.claim(FIRST_VOTE, 1)
    assert a.votes(7) == {FIRST_VOTE}
    again = witness(tmp_path, "c")
    why = await again.found()
    assert "was not closed" in why
    assert f"remove {tmp_path}/a%2Fjob/incarnation-0" in why
    await a.close_job()
    assert await again.found() == ""
    assert again.token != a.token
    assert await again.claim("after-0", 1)
    late = witness(tmp_path, "d")
    assert await late.confirm() == again.token


@story
async def test_a_run_that_was_killed_before_its_first_world_does_not_keep_the_job_waiting(tmp_path):
    a, b = await two(tmp_path)
    again = witness(tmp_path, "c")
    assert await again.found() == ""
    assert not await a.claim(FIRST_VOTE, 1), "it was only slow"
    assert a.is_abandoned
    with pytest.raises(WitnessSilent, match="does not know the job"):
        await b.confirm()
    assert await again.claim(FIRST_VOTE, 1)
    assert not again.is_abandoned
    assert await b.confirm() == again.token
    assert "was not closed" in await a.found()
    assert sorted(os.listdir(tmp_path / "a%2Fjob")) == ["0", "1", "incarnation-0", "incarnation-1"]
    await again.close_job()
    assert await a.found() == ""
    assert await a.claim(FIRST_VOTE, 1)


@story
async def test_a_taker_that_dies_half_way_leaves_no_obstacle(tmp_path):
    a, _ = await two(tmp_path)
    Directory(tmp_path).create("a%2Fjob/0/first", b'{"abandoned": "c"}')
    assert not await a.claim(FIRST_VOTE, 1)
    assert await a.found() == ""
    assert await a.claim(FIRST_VOTE, 1)
    assert "was not closed" in await witness(tmp_path, "d").found()


@story
async def test_an_agent_that_is_started_again_without_a_world_takes_up_its_own_start(tmp_path):
    """It was killed between its claim and the first world, which its file would have."""
    a, _ = await two(tmp_path)
    assert await a.claim(FIRST_VOTE, 1)
    again = witness(tmp_path, "a")
    again.expected = a.token
    assert await again.found() == ""
    assert await again.claim(FIRST_VOTE, 1)
    assert await again.confirm() == again.token != a.token


@story
async def test_witness_start_without_an_answer_counts_as_begun(tmp_path):
    a = witness(tmp_path, "a")

    async def lose_answer_of_create(do, key, value=None, ask=a._asking.ask):
        a._asking.loses_answer = do == "create"
        return await ask(do, key, value)

    a._asking.ask, ask = lose_answer_of_create, a._asking.ask
    with pytest.raises(WitnessSilent):
        await a.found()
    a._asking.ask = ask
    assert await a.found() == ""
    assert (tmp_path / "a%2Fjob" / "incarnation-0").exists()
    assert not (tmp_path / "a%2Fjob" / "incarnation-1").exists()
    assert await a.confirm() == a.token


class Overwriting(Directory):
    def create(self, key, data):
        self.replace(key, data)
        return True


@story
async def test_storage_that_creates_a_key_twice_is_refused(tmp_path):
    made = Witness(Here(Overwriting(tmp_path)), "nfs", "job", "a")
    with pytest.raises(RendezvousRefused, match=r"--witness nfs: .* create the same key"):
        await made.found()


@story
async def test_a_witness_out_of_reach_is_reported_once_and_when_it_is_back(tmp_path):
    _, b = await two(tmp_path)
    said: list[str] = []
    watchdog = WitnessWatch(b, said.append)
    for _ in range(2):
        b._asking.loses_answer = True
        assert await watchdog.look() == ""
    assert await watchdog.look() == b.token
    assert len(said) == 2
    assert "does not respond: no answer within 5 s. Training continues" in said[0]
    assert "responds again" in said[1]
