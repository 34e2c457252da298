"""The examples do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.process.jobs import job
from tests.support import poll_for

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PATIENCE = 240.0

#: Several workers import torch and train at the same time, on however few cores.
pytestmark = pytest.mark.timeout(600)

#: What the seed document prints, but for the line with the address, which is not always etcd's.
PRINTED_BEGINNING = """\
if __name__ == "__main__":
    min_workers = 1
    max_workers = 1
    run_id = 1234
    etcd_endpoint = "localhost:2379"
"""
PRINTED_MIDDLE = """\
    state = MyState()

    coordinator = CoordinatorP2P(
        c10d_backend="gloo",
"""
PRINTED_END = """\
    torchelastic.train(coordinator, train_step, state)
"""


@contextmanager
def programs() -> Iterator[list[Program]]:
    """Starts programs, each of which is a node of its own; ends those that are left."""
    started: list[Program] = []
    try:
        yield started
    finally:
        for program in started:
            program.process.kill()
            program.process.wait()


class Program:
    def __init__(self, path: Path, *argv: str, env: dict[str, str] | None = None) -> None:
        self.path = path
        with path.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )

    @property
    def text(self) -> str:
        return self.path.read_text()

    def wait(self) -> None:
        assert self.process.wait(PATIENCE) == 0, self.text


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def test_the_seeds_program_stands_in_the_example_as_printed():
    text = (EXAMPLES / "seed_main.py").read_text()
    for part in (PRINTED_BEGINNING, PRINTED_MIDDLE, PRINTED_END):
        assert part in text


@pytest.mark.slow
def test_the_seeds_program_without_a_launcher(tmp_path):
    """Of two processes one is killed; another takes its place, and the first has lost nothing.

    Three processes import torch.
    """
    url = f"tcp://localhost:{free_port()}/1234?min_workers=2&max_workers=2"
    script = str(EXAMPLES / "seed_main.py")
    with programs() as started:
        started.append(Program(tmp_path / "first", script, url))
        poll_for(lambda: _listens(url), what="the first hosts the rendezvous", timeout=PATIENCE)
        started.append(Program(tmp_path / "second", script, url))
        poll_for(lambda: "step 20:" in started[0].text, what="steps of both", timeout=PATIENCE)
        started[1].process.kill()
        started.append(Program(tmp_path / "third", script, url))
        started[0].wait()
        started[2].wait()
    assert "done after 200 steps" in started[2].text
    steps = [int(step) for step in re.findall(r"step (\d+): .* on 2 workers", started[0].text)]
    assert steps == list(range(20, 201, 20))
    assert losses(started[0].text)[-1] < losses(started[0].text)[0] / 2


def _listens(url: str) -> bool:
    port = int(re.search(r":(\d+)/", url)[1])
    return f":{port:04X} " in Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()


@pytest.mark.slow
def test_imagenet_with_an_agent(tmp_path):
    """A small network learns what images show."""
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2") as one:
        arguments = ["--epochs=2", "--batch-size=64", "--tell-every=4"]
        arguments += [f"--checkpoints={tmp_path}/checkpoints", "--checkpoint-every=8"]
        node = one.start(script=[str(EXAMPLES / "imagenet" / "main.py"), *arguments])
        assert node.wait(PATIENCE) == 0, node.stderr
    assert node.stdout.count("done after 32 steps") == 2
    assert losses(node.stdout)[-1] < losses(node.stdout)[0] / 2
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert len(kept) == 2


@pytest.mark.slow
def test_imagenet_with_the_variables_of_01(tmp_path):
    """A small network learns what images show."""
    variables = {
        "SIZE": "1",
        "RDZV_ENDPOINT": f"tcp://localhost:{free_port()}",
        "JOB_ID": "1",
    }
    with programs() as started:
        script = str(EXAMPLES / "imagenet" / "main.py")
        started.append(
            Program(tmp_path / "out", script, "--epochs=1", "--batch-size=128", env=variables)
        )
        started[0].wait()
        assert "done after 16 steps" in started[0].text


@pytest.mark.slow
def test_language_model_learns_on_after_a_bad_step_and_a_killed_worker(tmp_path, monkeypatch):
    """Its zygote imports torch."""
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@rank=1,step=15,place=optimizer.inside")
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2 --world-sizes=2") as one:
        script = [
            str(EXAMPLES / "train_lm.py"),
            "--steps=40",
            "--tell-every=5",
            "--inject-nan=10:1",
        ]
        node = one.start(script=script)
        assert node.wait(PATIENCE) == 0, node.stderr
    assert node.events("worker-failed")
    assert {one["step"] for one in node.events("step-skipped")} == {10}
    assert "after 40 steps it writes" in node.stdout
    curve = losses(node.stdout)
    assert len(curve) == 8
    assert curve[-1] < curve[0] - 1


@pytest.mark.slow
def test_the_sharded_model_runs(tmp_path):
    """One replica of two workers that split each layer."""
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2") as one:
        script = [str(EXAMPLES / "train_llama_hsdp.py"), "--shard=1", "--tensor=2", "--steps=4"]
        node = one.start(script=script)
        assert node.wait(PATIENCE) == 0, node.stderr
    curve = losses(node.stdout)
    assert len(curve) == 4
    assert curve[-1] < curve[0] - 0.5


@pytest.mark.slow
def test_the_sharded_model_learns_on_while_a_replica_is_lost_and_healed(tmp_path, monkeypatch):
    """Two replicas of two workers; the second loses one, and each sample is used once."""
    monkeypatch.setenv("TORCHELASTIC_FAULTS", "kill@rank=3,step=8,place=joint.before")
    ledger = tmp_path / "ledger"
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=4") as one:
        script = [str(EXAMPLES / "train_llama_hsdp.py"), "--steps=100", f"--ledger={ledger}"]
        node = one.start(script=script)
        assert node.wait(PATIENCE) == 0, node.stderr
    assert node.events("worker-failed")
    went_on = re.findall(r"step +(\d+) .* replica 0 of \d  generation [12]", node.stdout)
    assert went_on[0] == "8"
    assert re.search(r"step +99 .* replica 1 of 2  generation [12]", node.stdout)
    assert losses(node.stdout)[-1] < losses(node.stdout)[0] - 1
    check = [sys.executable, "-m", "torchelastic.data.checker", ledger]
    checked = subprocess.run([*check, "--samples=1588", "--epochs=2"], capture_output=True)
    assert checked.returncode == 0, checked.stdout


def test_the_tales_are_what_their_program_writes(tmp_path):
    """So that nobody wonders where they come from."""
    program = tmp_path / "write_tales.py"
    program.write_text((EXAMPLES / "data" / "write_tales.py").read_text())
    subprocess.run([sys.executable, program], check=True, timeout=60)
    assert (tmp_path / "tales.txt").read_text() == (EXAMPLES / "data" / "tales.txt").read_text()


@pytest.mark.slow
def test_demo_with_bits_shows_one_hash_for_both_jobs(tmp_path):
    """Two jobs, of which one loses a worker and a node and gets another: up to 40 s."""
    command = [sys.executable, str(ROOT / "scripts/demo.py"), "--bits"]
    picture = tmp_path / "picture.svg"
    done = subprocess.run(
        [*command, f"--picture={picture}"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hashes = re.findall(r"\b[0-9a-f]{64}\b", done.stdout)
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert picture.read_text().count(hashes[0]) == 2
