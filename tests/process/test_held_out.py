"""A join must not destroy a healthy job, nor must a node that cannot start its workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import PIDS_CGROUP
from tests.process.jobs import job
from tests.support import poll_for


@pytest.fixture
def limit() -> Iterator[Path]:
    """A cgroup that limits processes; those in it are gone when it is removed."""
    made = PIDS_CGROUP / f"torchelastic-test-{os.getpid()}"
    made.mkdir()
    yield made
    poll_for(lambda: not (made / "cgroup.procs").read_text(), what="its processes are gone")
    made.rmdir()


@pytest.mark.slow
@pytest.mark.needs("pids cgroup")
def test_a_node_that_may_start_processes_again_is_back_at_once(tmp_path, limit):
    """`pids.max` keeps it from starting workers: the others continue, and nothing is held out."""
    flags = "--nnodes=1:2 --settle=0.3 --lease=2 --no-zygote"
    with job(tmp_path / "job", flags) as it:
        first = it.start()
        second = it.start()
        poll_for(lambda: it.lines(event="start", world_size=2)[1:], what="a world of both")
        (worker,) = second.events("workers-started")[-1]["pids"]
        for pid in (second.pid, second.agent_pid, worker):
            (limit / "cgroup.procs").write_text(str(pid))
        (limit / "pids.max").write_text("1")
        os.kill(worker, signal.SIGKILL)
        said = "this node stays out of training until it can start"
        poll_for(lambda: said in second.stderr, what="the node says so")
        alone = poll_for(
            lambda: [one for one in first.events("world-formed") if one["size"] == 1][-1:],
            what="a world without it",
        )[0]["generation"]
        (limit / "pids.max").write_text("max")
        back = poll_for(
            lambda: [one for one in first.events("world-formed") if one["generation"] > alone],
            what="a world with it",
            timeout=30,
        )
        assert (back[0]["size"], back[0]["held"]) == (2, {})
        it.order("finish")
        assert [first.wait(), second.wait()] == [0, 0], it.said()


def test_a_job_goes_on_without_a_node_with_which_it_cannot_start(tmp_path):
    """A script that raises at start-up where there are more workers than in its first world."""
    flags = "--nnodes=1:2 --nproc-per-node=1 --settle=0.1 --max-restarts=0"
    with job(tmp_path / "job", flags) as made:
        made.order("train 1")
        first = made.start()
        poll_for(lambda: made.lines(event="step", generation=0), what="a step", timeout=60)
        second = made.start()
        poll_for(lambda: made.lines(event="step", generation=2), what="a step later", timeout=60)
        (third,) = [one for one in first.events("world-formed") if one["generation"] == 2]
        waits = "this node is a spare, held out for 60 s"
        poll_for(lambda: waits in second.stderr, what="the other says so", timeout=60)
        made.order("finish")
        assert first.wait() == 0, made.said()
        assert second.wait() == 0, made.said()
    assert (third["size"], len(third["spares"]), third["restarts_used"]) == (1, 1, 0)
    (newcomer,) = third["spares"]
    assert third["held"][newcomer].startswith("held out for 60 s: generation 1 with ")
    assert third["reason"].startswith(
        f"generation 1 with {newcomer} failed before its first step: rank "
    )
    assert third["reason"].endswith(
        f"ValueError: the batch cannot be split over 2; holding out {newcomer} for 60 s"
    )
