"""A worker that has built another model than the others fails alone, and the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.process.test_train import start, stepped, steps, training
from tests.support import poll_for

SAYS = (
    "UnfitError: This worker's state does not fit into the training: parameter '0.weight' is "
    "float32 of shape (64, 16) here and float32 of shape (32, 16) in the others. Start it with "
    "the script and the arguments that the others have."
)


def latest(made) -> int:
    return max(line["step"] for line in made.lines(event="step"))


def test_a_node_with_another_model_ends_and_the_others_train_on(tmp_path):
    flags = "--nnodes=1:3 --nproc-per-node=2"
    with training(tmp_path, flags, steps=100000, slow=0.01) as made:
        first = start(made)
        poll_for(lambda: stepped(made, 5, size=2), what="steps of one node")
        pids = {line["pid"] for line in made.lines(event="step")}
        made.keys.append("model=wide")
        second = start(made)
        assert second.wait(60) == 1
        assert SAYS in second.stderr, made.said()
        reached = latest(made)
        poll_for(lambda: stepped(made, reached + 20, size=2), what="steps of the first node")
        assert {line["pid"] for line in made.lines(event="step")} == pids
        assert len(made.lines(event="start")) == 4, "others were started in their place"
        assert len(first.events("world-formed")) <= 5, "they were taken again and again"
        assert all(len(hashes) == 1 for hashes in steps(made).values())
        first.process.terminate()
        assert first.wait() == 143


def test_a_replacement_with_another_model_is_done_without(tmp_path):
    with training(tmp_path, "--nnodes=1 --nproc-per-node=3", steps=100000, slow=0.01) as made:
        node = start(made)
        poll_for(lambda: stepped(made, 5), what="steps")
        (made._orders / "wide").touch()
        os.kill(made.lines(event="step", rank=1)[0]["pid"], signal.SIGKILL)
        poll_for(lambda: SAYS in node.stderr, what="the misfit", timeout=60)
        reached = latest(made)
        poll_for(lambda: stepped(made, reached + 20, size=2), what="steps of the others")
        assert len(made.lines(event="start")) == 4, "others were started in its place"
        node.process.terminate()
        assert node.wait() == 143


@pytest.mark.slow
def test_a_replacement_with_another_model_that_is_waited_for_ends_the_job(tmp_path):
    flags = "--nnodes=1 --nproc-per-node=2 --world-sizes=2"
    with training(tmp_path, flags, steps=100000, slow=0.01) as made:
        node = start(made)
        poll_for(lambda: stepped(made, 5), what="steps")
        (made._orders / "wide").touch()
        os.kill(made.lines(event="step", rank=1)[0]["pid"], signal.SIGKILL)
        assert node.wait(120) == 1
        assert "the same failure came back at once" in node.stderr
        assert SAYS in node.stderr


def test_without_a_launcher_too(tmp_path):
    with training(tmp_path, steps=100000, slow=0.01) as made:
        url = f"tcp://127.0.0.1:{made.port}/job?min_workers=1&max_workers=2"
        command = [sys.executable, str(made.script), str(made._lines), str(made._orders)]
        command += [*made.keys, f"url={url}"]
        with subprocess.Popen(command) as first:
            try:
                poll_for(lambda: stepped(made, 3), what="steps alone")
                wide = subprocess.run(
                    [*command, "model=wide"], stderr=subprocess.PIPE, text=True, timeout=60
                )
                assert (wide.returncode, SAYS in wide.stderr) == (1, True)
                reached = latest(made)
                poll_for(lambda: stepped(made, reached + 20, size=1), what="more steps alone")
            finally:
                first.kill()
