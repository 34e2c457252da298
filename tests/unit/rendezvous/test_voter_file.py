"""The file of a node's vote: its content, its use by the next agent, bad disks."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.rendezvous.cast import soon, story
from torchelastic.config import LaunchConfig
from torchelastic.errors import RendezvousError
from torchelastic.events import job_registry
from torchelastic.rendezvous.embedded import voter_file
from torchelastic.rendezvous.embedded.failover_state import FailoverState
from torchelastic.rendezvous.embedded.voter_file import FILE, Voter, VoterFile, claim, why_void
from torchelastic.rendezvous.majority import Elector, Electorate, Roll
from torchelastic.rendezvous.world import WORLD_KEY

CONFIG = LaunchConfig(min_nodes=1, max_nodes=4, run_id="job", rdzv_endpoint="node1:29400")
COMMAND = ["train.py", "--lr=1"]
BEFORE = Electorate(frozenset("abcd"), "a")
ROLL = Roll(7, Electorate(frozenset("abc"), "a"), (BEFORE,))
ROWS = {WORLD_KEY: {"generation": 7, "phase": "running"}, "part/0": {"nodes": []}}
VOTER = Voter(5, "b", FailoverState(ROLL, ("a", "b"), {"a": "node1:29400"}, ROWS))
LATER = replace(VOTER, term=9, chosen="c")


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def agent(config: LaunchConfig = CONFIG) -> VoterFile:
    """An agent of the job that starts here."""
    file = claim(config, COMMAND)
    about = {"name": "host", "endpoint": "", "command": COMMAND, "events": Path("/nowhere")}
    # Of a process that is gone, so that only the lock says whether an agent is there.
    job_registry.register(config.run_id, file.node, pid=1 << 22, **about)
    return file


async def keep(file: VoterFile, voter: Voter, *, leaving: bool = False) -> None:
    elector = Elector(file.node, voter.term, voter.chosen, voter.generation, leaving=leaving)
    await file.keep(elector, voter.holding)


def killed() -> VoterFile:
    """One that has been here, and spoken, and was killed."""
    file = agent()
    asyncio.run(keep(file, VOTER))
    file.close()
    return file


# --- what is in it -------------------------------------------------------------------------------


def test_a_file_says_all_that_a_voter_must_know():
    assert Voter.from_json(VOTER.to_json()) == VOTER
    first = killed()
    again = agent()
    assert (again.node, again.resumed, again.generation) == (first.node, VOTER, 7)
    again.close()


@pytest.mark.parametrize(
    ("changed", "is_as"),
    [
        ({"holding": replace(VOTER.holding, rows={**ROWS, WORLD_KEY: {"phase": "over"}})}, True),
        ({"term": 6}, False),
        ({"chosen": "c"}, False),
        ({"holding": replace(VOTER.holding, roll=replace(ROLL, before=()))}, False),
        ({"holding": replace(VOTER.holding, rows={})}, False),
    ],
)
def test_only_what_matters_is_written(changed, is_as):
    file = agent()
    asyncio.run(keep(file, VOTER))
    before = file.path.stat()
    asyncio.run(keep(file, replace(VOTER, **changed)))
    assert (file.path.stat().st_size == before.st_size) == is_as
    file.close()


def test_the_last_that_was_written_whole_counts(monkeypatch):
    file = agent()
    asyncio.run(keep(file, VOTER))
    asyncio.run(keep(file, LATER))
    file.close()
    with file.path.open("ab") as torn:
        torn.write(b'12345678 ["voter", {')
    again = agent()
    assert again.resumed == LATER
    asyncio.run(keep(again, VOTER))  # what was torn is not in its way
    again.close()
    last = agent()
    assert last.resumed == VOTER
    last.close()


# --- who may go on from it -----------------------------------------------------------------------


def test_every_agent_of_a_machine_has_a_file_of_its_own():
    first, second = agent(), agent()
    for file in (first, second):
        asyncio.run(keep(file, VOTER))
        file.close()
    files = [agent() for _ in range(3)]
    assert {file.node for file in files[:2]} == {first.node, second.node}
    assert files[2].resumed is None
    assert files[2].node not in {first.node, second.node}
    for file in files:
        file.close()


@pytest.mark.parametrize("config", [{"max_nodes": 1}, {"rdzv_backend": "etcd"}])
def test_voter_file_of_a_job_without_votes_is_not_written(config, registry):
    file = claim(replace(CONFIG, **config), COMMAND)
    asyncio.run(keep(file, VOTER))
    assert not list(registry.rglob(FILE))


OURS = {"machine": "m", "job": "job", "command": ["a"], "agreement": "x", "node": "a"}


@pytest.mark.parametrize(
    ("said", "facts", "why"),
    [
        ({}, {}, ""),
        ({"machine": "other"}, {}, "another machine"),
        ({"command": ["b"]}, {}, "another command"),
        ({"agreement": "y"}, {}, "another agreement"),
        ({"node": "b"}, {}, "another node"),
        ({}, {"is_late": True}, "stopped waiting"),
        ({}, {"gone": "b"}, ""),
        ({}, {"gone": "bd"}, "gone for good"),
    ],
)
def test_voter_file_of_another_machine_job_or_run_is_void(said, facts, why):
    found = why_void(VOTER, {**OURS, **said}, OURS, **facts)
    assert why in found
    assert bool(found) == bool(why)


def test_a_file_of_another_machine_is_left_alone(monkeypatch):
    """A directory that several machines have: a lock there may not hold."""
    first = killed()
    monkeypatch.setattr(voter_file, "_machine", lambda: "another")
    other = agent()
    assert other.resumed is None
    assert first.path.exists()
    monkeypatch.undo()
    other.close()


def test_a_file_that_was_copied_is_of_one_node(registry):
    first = killed()
    copied = first.path.parent.with_name("copied")
    shutil.copytree(first.path.parent, copied)
    entry = (copied / "agent.json").read_text().replace(first.node, "copied")
    (copied / "agent.json").write_text(entry)
    files = [agent(), agent()]
    assert [file.resumed for file in files].count(VOTER) == 1
    assert "copied" not in {file.node for file in files}
    for file in files:
        file.close()


def test_nodes_that_were_here_and_have_no_file_never_come_back():
    """The job has ended for two of three: the third, which was killed before, is of no use."""
    ended = [agent(), agent()]
    for file in ended:
        file.discard()
    third = agent()
    roll = Roll(3, Electorate(frozenset({third.node, *(file.node for file in ended)}), third.node))
    asyncio.run(keep(third, Voter(1, third.node, FailoverState(roll))))
    third.close()
    again = agent()
    assert again.resumed is None
    assert not third.path.exists()
    again.close()


def test_a_node_that_said_goodbye_or_has_ended_is_never_resumed():
    left = killed()
    again = agent()
    asyncio.run(keep(again, LATER, leaving=True))
    asyncio.run(keep(again, LATER))
    assert not left.path.exists()
    again.close()
    assert agent().resumed is None


# --- disks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fdatasync", "write"])
def test_voter_file_on_a_full_disk_is_removed_and_the_node_goes_on(call, monkeypatch, caplog):
    file = agent()
    asyncio.run(keep(file, VOTER))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, full)
        asyncio.run(keep(file, LATER))
        asyncio.run(keep(file, VOTER))  # said once
    assert caplog.text.count("vote is lost if its agent restarts") == 1
    assert "No space left" in caplog.text
    file.close()
    again = agent()
    assert again.resumed is None
    again.close()


@story
async def test_a_vote_is_kept_where_no_thread_can_be_started(monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    file = agent()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        await keep(file, VOTER)
    file.close()
    again = agent()
    assert again.resumed == VOTER
    again.close()


def test_a_vote_that_can_neither_be_written_nor_taken_back_ends_the_node(monkeypatch):
    """Its next agent would find an older one."""
    file = agent()
    asyncio.run(keep(file, VOTER))

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "write", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(RendezvousError, match=r"Cannot write or remove .*: remove it"):
        asyncio.run(keep(file, LATER))


@story
async def test_a_slow_disk_keeps_the_answer_back_and_not_the_loop(monkeypatch, caplog):
    monkeypatch.setattr(voter_file, "SLOW_WRITE", 0.0)
    goes_on, reached = threading.Event(), threading.Event()

    def slow(descriptor):
        reached.set()
        assert goes_on.wait(20)

    file = agent()
    await keep(file, VOTER)
    monkeypatch.setattr(os, "fdatasync", slow)
    task = asyncio.create_task(keep(file, LATER))
    await soon(reached.is_set, "it is being written")
    assert not task.done()
    goes_on.set()
    await task
    assert "other nodes had to wait" in caplog.text
    file.close()
    assert (file.path.name, file.path.parent.name) == (FILE, file.node)
