"""Ranks that keep the others waiting: who it is, and what all of them were doing, is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.jobs import HERE, Job, job
from tests.support import poll_for

#: With agents that wait for stacks and answers as long as it takes.
PROGRAM = HERE / "patient.py"
ONE_NODE = "--nnodes=1 --nproc-per-node=2"
TWO_NODES = "--nnodes=2 --nproc-per-node=1 --settle=60"
#: More than a step takes on a busy machine.
LIMIT = "--progress-timeout=5"

pytestmark = pytest.mark.timeout(300)


@contextmanager
def stuck(directory: Path, flags: str):
    with job(directory, flags, HERE / "stuck.py") as made:
        made.program = [str(PROGRAM)]
        for _ in range(2 if "--nnodes=2" in flags else 1):
            made.start()
        made.wait_for(lambda: made.steps(rank=1, step=3), "steps", 90)
        yield made


def told(made: Job, kind: str) -> list[dict]:
    events = (event for node in made.nodes for event in node.events(kind))
    return sorted(events, key=lambda event: event["mono"])


def hang(made: Job, number: int = 1) -> dict:
    """The hang of that number, the last one so far."""
    found = poll_for(lambda: told(made, "hang")[number - 1 :], what=f"hang {number}", timeout=90)
    assert len(found) == 1, made.said()
    return found[0]


def goes_on(made: Job, number: int = 1) -> None:
    """After so many workers were killed: all ranks, in another generation."""
    killed = poll_for(lambda: told(made, "worker-killed")[number - 1 :], what="its end")
    assert [event["rank"] for event in killed] == [1]
    for rank in (0, 1):
        poll_for(
            lambda rank=rank: [
                line for line in made.lines(event="step", rank=rank) if line["generation"] >= number
            ],
            what=f"a step of rank {rank} in a later generation",
            timeout=90,
        )


def finish(made: Job) -> None:
    made.give("finish")
    for node in made.nodes:
        assert node.wait(90) == 0, made.said()


def stack_of(event: dict, rank: int) -> str:
    [row] = [row for row in event["ranks"] if row["rank"] == rank]
    return event["stacks"][row["stack"]]


def stacks(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "stacks", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def shown(job_id: str) -> dict:
    """The output for programs."""
    asked = stacks(job_id, "--json")
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def test_hung_rank_in_train_is_reported_with_the_stacks_of_all_ranks(tmp_path):
    """Rank 1 of two nodes is asked, sleeps, and calls another collective: then nobody is to blame,
    and the next world takes the step again.

    Both nodes import torch, and each time five seconds of no progress are waited for."""
    with stuck(tmp_path, f"{TWO_NODES} {LIMIT}") as made:
        check_asked_while_training(made)

        made.give("sleep")
        event = hang(made)
        assert event["missing"] == [1]
        assert event["text"].startswith("rank 1 is missing from all_reduce #")
        assert event["text"].endswith("in which rank 0 waits")
        assert "in sleep_for_ever" in stack_of(event, 1)
        assert "in all_reduce" in stack_of(event, 0)
        assert [row["waiting"] for row in event["ranks"]] == [True, False]
        goes_on(made)
        [killed] = told(made, "worker-killed")
        assert event["text"] in killed["reason"]
        assert "in sleep_for_ever" in killed["stack"]

        made.give("other")
        event = hang(made, 2)
        assert event["text"].startswith("the ranks call different collectives (rank 0 in all")
        assert "rank 1 in broadcast #" in event["text"]
        assert event["missing"] == []
        assert [row["waiting"] for row in event["ranks"]] == [True, True]
        poll_for(
            lambda: {0, 1} == {line["rank"] for line in made.lines(event="step", generation=2)},
            what="steps in the world after that",
            timeout=90,
        )
        assert len(told(made, "worker-killed")) == 1, "nobody else is killed"
        [failed] = [one for one in told(made, "worker-failed") if event["text"] in str(one)]
        assert "no progress for" in str(failed)
        finish(made)


def check_asked_while_training(made: Job) -> None:
    job_id = f"job{made.port}"
    found = shown(job_id)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert all("stuck.py" in row["stack"] for row in found["ranks"])
    assert all(row["step"] >= 3 for row in found["ranks"])
    assert all("#" in row["collective"] for row in found["ranks"])
    assert len({row["node"] for row in found["ranks"]}) == 2
    assert found["unheard"] == []
    assert stacks(job_id, "--rank=0").stdout.startswith("rank 0\n")
    assert "Rank 7 does not exist: the world has ranks 0, 1." in stacks(job_id, "--rank=7").stderr


def test_a_plain_script_can_be_asked_and_goes_on(tmp_path):
    with job(tmp_path, f"{ONE_NODE} --rdzv-id=plain-{os.getpid()}") as made:
        made.program = [str(PROGRAM)]
        node = made.start()
        made.world(0, 2)
        asked = stacks(f"plain-{os.getpid()}")
        assert asked.returncode == 0, asked.stderr
        assert "main thread, most recent call first:" in asked.stdout
        assert "obedient.py" in asked.stdout
        made.order("finish")
        assert node.wait() == 0, made.said()


def test_stacks_of_unknown_job_are_refused():
    asked = stacks("no-such-job")
    assert asked.returncode == 64
    assert "No job 'no-such-job' on this machine" in asked.stderr
