"""Resident workers under a real agent: killed at every point of a step, joined, left, frozen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.process.jobs import Job, child_running, job
from tests.support import poll_for

SCRIPT = Path(__file__).with_name("resident.py")

#: Several workers import torch at the same time, and are replaced, on however few cores.
pytestmark = pytest.mark.timeout(300)

#: Every place of a step, and of the way into a world.
PLACES = (
    "step.begin",
    "collective.before",
    "collective.launched",
    "collective.after",
    "optimizer.before",
    "optimizer.inside",
    "optimizer.after",
    "step.end",
    "sync.begin",
    "sync.end",
    "group.build",
)


@contextmanager
def training(tmp_path, flags="", monkeypatch=None, faults="", **keys):
    if faults:
        monkeypatch.setenv("TORCHELASTIC_FAULTS", faults)
    with job(tmp_path, flags, script=SCRIPT) as made:
        made.keys = [f"{key}={value}" for key, value in keys.items()]
        yield made
    if faults:
        monkeypatch.delenv("TORCHELASTIC_FAULTS")


def start(made: Job, flags: str = ""):
    script = [str(made.script), str(made._lines), str(made._orders), *made.keys]
    return made.start(flags, script=script)


def steps(made: Job) -> dict[int, set[str]]:
    """What the parameters were after each step, on whatever rank and however often."""
    found = defaultdict(set)
    for line in made.lines(event="step"):
        found[line["step"]].add(line["hash"])
    return dict(found)


def stepped(made: Job, step: int, **wanted) -> bool:
    return bool([line for line in made.lines(event="step", **wanted) if line["step"] >= step])


def final(made: Job, workers: int) -> tuple[str, float]:
    done = made.lines(event="done")
    assert len(done) == workers, made.said()
    ends = {(line["hash"], line["lr"], line["step"]) for line in done}
    assert len(ends) == 1, ends
    return done[0]["hash"], done[0]["lr"]


def undisturbed(tmp_path, **keys) -> tuple[dict[int, set[str]], tuple[str, float]]:
    with training(tmp_path / "undisturbed", "--nnodes=1 --nproc-per-node=3", **keys) as made:
        assert start(made).wait(60) == 0, made.said()
        return steps(made), final(made, 3)


HALF = {"model": "plain", "optimizer": "half"}


@pytest.mark.parametrize(
    ("rank", "keys"),
    [
        pytest.param(0, {"model": "norm"}, id="adam-0"),
        pytest.param(2, {"model": "norm"}, id="adam-2", marks=pytest.mark.slow),
        pytest.param(0, HALF, id="half-written-0", marks=pytest.mark.slow),
        pytest.param(2, HALF, id="half-written-2", marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere_and_replaced_the_result_is_the_same_to_the_bit(
    tmp_path, monkeypatch, rank, keys
):
    """One kill per generation, each at another place; the world waits for the replacement."""
    places = [place for place in PLACES if keys.get("optimizer") or place != "optimizer.inside"]
    faults = ";".join(
        f"kill@rank={rank},step={2 + number},place={place},generation={number}"
        if place.startswith(("step", "collective", "optimizer"))
        else f"kill@rank={rank},place={place},generation={number}"
        for number, place in enumerate(places)
    )
    keys = {"steps": 16, **keys}
    flags = "--nnodes=1 --nproc-per-node=3 --world-sizes=3"
    with training(tmp_path / "killed", flags, monkeypatch, faults, **keys) as made:
        node = start(made)
        assert node.wait(120) == 0, made.said()
        killed = [event for event in node.events("worker-exited") if event["exitcode"] == -9]
        assert len(killed) == len(places), made.said()
        found, end = steps(made), final(made, 3)
    assert all(len(hashes) == 1 for hashes in found.values()), found
    expected, expected_end = undisturbed(tmp_path, **keys)
    assert found == expected
    assert end == expected_end


def test_the_others_train_on_until_the_replacement_is_ready(tmp_path):
    flags = "--nnodes=1 --nproc-per-node=3"
    with training(tmp_path, flags, steps=100000, slow=0.01) as made:
        node = start(made)
        poll_for(lambda: stepped(made, 5), what="steps")
        victim = made.lines(event="step", rank=1)[0]["pid"]
        others = {line["pid"] for line in made.lines(event="start")} - {victim}
        os.kill(victim, signal.SIGKILL)
        poll_for(lambda: stepped(made, 0, size=2, generation=1), what="a step of the survivors")
        poll_for(lambda: stepped(made, 0, size=3, generation=2), what="a step with a replacement")
        poll_for(
            lambda: others < {line["pid"] for line in made.lines(event="step", generation=2)},
            what="the survivors' own processes in it",
        )
        assert all(len(hashes) == 1 for hashes in steps(made).values())
        node.process.terminate()
        assert node.wait() == 143


def test_a_node_joins_and_leaves_at_a_boundary(tmp_path):
    with training(tmp_path, "--nnodes=1:2 --nproc-per-node=2", steps=100000, slow=0.01) as made:
        first = start(made)
        poll_for(lambda: stepped(made, 5, size=2), what="steps of one node")
        pids = {line["pid"] for line in made.lines(event="step")}
        second = start(made)
        poll_for(lambda: stepped(made, 5, size=4), what="steps of two nodes", timeout=60)
        poll_for(
            lambda: pids < {line["pid"] for line in made.lines(event="step", size=4)},
            what="the same processes among them",
        )
        second.process.terminate()
        assert second.wait() == 143
        last = max(line["generation"] for line in made.lines(event="step", size=4))
        poll_for(lambda: stepped(made, 0, size=2, generation=last + 1), what="steps of one again")
        entered = {(line["step"], line["rank"]) for line in made.lines(event="enter", size=4)}
        ran = {(line["step"], line["rank"]) for line in made.lines(event="step", size=4)}
        assert entered == ran, "a step was begun and not run to its end"
        assert all(len(hashes) == 1 for hashes in steps(made).values())
        counts = [line["step"] for line in made.lines(event="step", rank=0)]
        assert sorted(counts) == list(range(len(counts))), "a step was lost or run twice"
        first.process.terminate()
        assert first.wait() == 143


def test_a_lost_node_is_no_reason_to_stop(tmp_path):
    flags = "--nnodes=1:2 --nproc-per-node=1"
    with training(tmp_path, flags, steps=100000, slow=0.01) as made:
        first = start(made)
        second = start(made)
        poll_for(lambda: stepped(made, 5, size=2), what="steps of two nodes", timeout=60)
        second.kill()
        poll_for(lambda: stepped(made, 5, size=1), what="steps of the survivor")
        assert all(len(hashes) == 1 for hashes in steps(made).values())
        first.process.terminate()
        assert first.wait() == 143


def test_a_frozen_worker_is_killed_and_replaced(tmp_path):
    flags = "--nnodes=1 --nproc-per-node=2 --progress-timeout=3"
    with training(tmp_path, flags, steps=100000, slow=0.01) as made:
        node = start(made)
        poll_for(lambda: stepped(made, 5), what="steps")
        frozen = made.lines(event="step", rank=1)[0]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        poll_for(lambda: stepped(made, 0, size=1, generation=1), what="a step without it")
        poll_for(lambda: stepped(made, 0, size=2, generation=2), what="a step with another")
        killed = node.events("worker-killed")
        assert [event["rank"] for event in killed] == [1]
        assert "frozen" in killed[0]["reason"]
        readable = shutil.which("py-spy") is not None
        assert ("train_step" if readable else "it is frozen") in killed[0]["stack"]
        node.process.terminate()
        assert node.wait() == 143


@pytest.mark.parametrize("place", ["group.build", "sync.begin"])
@pytest.mark.slow
def test_who_freezes_on_the_way_into_a_world_is_killed(tmp_path, monkeypatch, place):
    flags = "--nnodes=1 --nproc-per-node=2 --progress-timeout=3"
    with training(tmp_path, flags, monkeypatch, f"stop@rank=1,place={place}", steps=4) as made:
        node = start(made)
        assert node.wait(60) == 0, made.said()
        killed = node.events("worker-killed")
        assert [event["rank"] for event in killed] == [1], made.said()
        assert "on the way into generation 0" in killed[0]["reason"]
        assert "(frozen)" in killed[0]["reason"]


@pytest.mark.slow
def test_a_worker_that_hangs_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no py-spy
    flags = "--nnodes=1 --nproc-per-node=2 --progress-timeout=3"
    faults = "sleep=600@rank=1,step=2,place=step.begin"
    with training(tmp_path, flags, monkeypatch, faults, steps=4) as made:
        node = start(made)
        assert node.wait(60) == 0, made.said()
        [killed] = node.events("worker-killed")
        assert killed["reason"].startswith("no progress for ")
        assert "(faults.py, line " in killed["reason"]
        assert "faults.py" in killed["stack"]
        assert "_take_steps" in killed["stack"]


@pytest.mark.slow
def test_the_end_of_the_process_that_holds_the_stores_disturbs_nobody(tmp_path):
    flags = "--nnodes=1 --nproc-per-node=2 --no-zygote"
    with training(tmp_path, flags, steps=100000, slow=0.01) as made:
        node = start(made)
        poll_for(lambda: stepped(made, 5, size=2), what="steps")
        pids = {line["pid"] for line in made.lines(event="step")}
        os.kill(child_running(node.agent_pid, "store_host"), signal.SIGKILL)
        poll_for(lambda: "starting another one" in node.stderr, what="another one")
        reached = max(line["step"] for line in made.lines(event="step"))
        poll_for(lambda: stepped(made, reached + 5, generation=0), what="steps of the same world")
        assert {line["pid"] for line in made.lines(event="start")} == pids
        os.kill(max(pids), signal.SIGKILL)
        poll_for(lambda: stepped(made, 0, size=2, generation=2), what="a world at a new store")
        node.process.terminate()
        assert node.wait() == 143


@pytest.mark.slow
def test_an_error_is_tried_again_and_the_result_is_the_same(tmp_path):
    with training(tmp_path / "erring", "--nnodes=1 --nproc-per-node=3") as made:
        made.order("raise-once a flaky disk", generation=5, rank=1)
        node = start(made)
        assert node.wait(60) == 0, made.said()
        assert len({line["pid"] for line in made.lines()}) == 3, "nobody was replaced"
        end = final(made, 3)
    assert end == undisturbed(tmp_path)[1]


@pytest.mark.parametrize(
    ("order", "rank", "says"),
    [
        ("raise a bug", 1, "the same error came back at step 5 after a rollback"),
        ("fatal no use", 1, "trying again cannot help"),
    ],
)
def test_an_error_that_stays_ends_the_job_and_is_shown(tmp_path, order, rank, says):
    with training(tmp_path, "--nnodes=1 --nproc-per-node=2") as made:
        made.order(order, generation=5, rank=rank)
        node = start(made)
        assert node.wait(60) == 1
        assert says in node.stderr
        assert "train_step" in node.stderr
        tries = [line for line in made.lines(event="enter", rank=rank) if line["step"] == 5]
        assert len(tries) <= 2


def test_data_that_ends_early_on_one_rank_ends_the_training_for_all(tmp_path):
    with training(tmp_path, "--nnodes=1 --nproc-per-node=3", ends="1:7") as made:
        node = start(made)
        assert node.wait(60) == 0, made.said()
        assert {line["step"] for line in made.lines(event="done")} == {7}
        final(made, 3)


def test_without_a_launcher_every_process_is_its_own_node(tmp_path):
    with training(tmp_path, steps=100000, slow=0.01) as made, ExitStack() as stack:
        url = f"tcp://127.0.0.1:{made.port}/job?min_workers=1&max_workers=2"
        command = [sys.executable, str(made.script), str(made._lines), str(made._orders)]
        command += [*made.keys, f"url={url}"]

        def start_process() -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            return process

        start_process()
        poll_for(lambda: stepped(made, 3, size=1), what="steps alone")
        second = start_process()
        poll_for(lambda: stepped(made, 3, size=2), what="steps together")
        second.kill()
        last = max(line["generation"] for line in made.lines(event="step"))
        poll_for(lambda: stepped(made, 0, size=1, generation=last + 1), what="steps alone again")
        assert all(len(hashes) == 1 for hashes in steps(made).values())
