"""One place has the whole job's story: real agents, whose leader is killed, frozen or at etcd."""

from __future__ import annotations

import os
import signal

import pytest

from tests.process.jobs import HERE, Job, Node, job
from tests.support import poll_for
from torchelastic.events.log import read
from torchelastic.events.record import Record

RESIDENT = HERE / "resident.py"
PATIENCE = 90.0
#: Events of one agent: several times those of a start.
MUCH = 50


def own(node: Node) -> list[Record]:
    [path] = (node.directory / "logs").rglob("events.jsonl")
    return list(read(path))


def collected(node: Node) -> list[Record]:
    paths = list((node.directory / "logs").rglob("job.jsonl"))
    return list(read(paths[0])) if paths else []


def keys(records: list[Record]) -> set[tuple[str, float, str]]:
    return {record.key for record in records}


def has_all(leader: Node, *nodes: Node) -> bool:
    """Whether a node has gathered everything that these have written."""
    return all(keys(own(node)) <= keys(collected(leader)) for node in nodes)


def steps_of(made: Job, rank: int) -> int:
    return len(made.lines(event="step", rank=rank))


def test_the_next_leader_has_the_whole_story_of_the_living(tmp_path):
    """It dies while it is told much; the next one alone says what the goodput was, once."""
    with job(tmp_path, "--nnodes=2:3 --settle=60 --no-zygote") as it:
        first, second, third = it.start(), it.start(), it.start()
        it.world(0, 3)
        poll_for(lambda: has_all(first, first, second, third), what="the story", timeout=PATIENCE)
        assert collected(second) == collected(third) == []
        left = (second, third)
        for node in left:
            agent = node.agent_pid
            poll_for(lambda n=node, a=agent: said(n, a) > MUCH, what="much to tell")
        first.kill()
        [leader, *_] = poll_for(
            lambda: [node for node in left if is_world_of_two(node) and has_all(node, *left)],
            what="the story",
            timeout=PATIENCE,
        )
        story = collected(leader)
        assert {record.type for record in story} >= {"agent-started", "joined", "workers-started"}
        assert len(keys(story)) == len(story), "nothing is told twice"
        assert all(record.heard is not None for record in story)
        it.order("finish")
        assert [second.wait(), third.wait()] == [0, 0], it.said()
        assert all(own(node)[-1].type == "job-ended" for node in left)
        assert [node.stderr.count("] goodput ") for node in left] == [
            int(node is leader) for node in left
        ], it.said()
        assert "from this node's events only" not in leader.stderr


def said(node: Node, agent: int) -> int:
    """How many events an agent has written, after one more signal that it tells of."""
    os.kill(agent, signal.SIGUSR1)
    return len(own(node))


def is_world_of_two(node: Node) -> bool:
    return any(record["size"] == 2 for record in node.events("world-formed"))


def test_a_full_disk_costs_the_story_and_not_the_job(tmp_path):
    with job(tmp_path, "--nnodes=2 --no-zygote") as it:
        leader = it.start()
        [log] = poll_for(
            lambda: list((leader.directory / "logs").rglob("events.jsonl")), what="its log"
        )
        log.with_name("job.jsonl").symlink_to("/dev/full")  # before there is a world to tell of
        other = it.start()
        it.world(0, 2)
        told = "Collected events are lost"
        poll_for(lambda: told in leader.stderr, what="a word of that", timeout=PATIENCE)
        it.order("finish")
        assert [leader.wait(), other.wait()] == [0, 0], it.said()
        assert leader.stderr.count(told) == 1


@pytest.mark.slow
def test_training_goes_on_while_the_leader_is_frozen(tmp_path):
    """Its agent, that is: nobody waits for it, and what it has missed it is told later."""
    with job(tmp_path, "--nnodes=2 --lease=600", RESIDENT, steps=1_000_000, model="plain") as it:
        leader, other = it.start(), it.start()
        for rank in (0, 1):
            poll_for(lambda r=rank: steps_of(it, r) > 5, what="training", timeout=PATIENCE)
        poll_for(lambda: collected(leader), what="a beginning", timeout=PATIENCE)
        os.kill(leader.agent_pid, signal.SIGSTOP)
        try:
            for rank in (0, 1):
                enough = steps_of(it, rank) + 20
                poll_for(
                    lambda r=rank, n=enough: steps_of(it, r) >= n, what="steps", timeout=PATIENCE
                )
            last = poll_for(lambda: other.events("progress"), what="progress")[-1]
        finally:
            os.kill(leader.agent_pid, signal.SIGCONT)
        seen = (last["node"], last["mono"], "progress")
        poll_for(lambda: seen in keys(collected(leader)), what="what was missed", timeout=PATIENCE)
