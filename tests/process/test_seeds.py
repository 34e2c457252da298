"""The documents that this project grew from: their examples run as they are shown.

Placeholders are filled in, `bagua` is read as `torchelastic`, missing colons are added; nothing
else. Each command is run twice: the second time, the job runs again. Each test says which lines of
which document it runs. etcd gets other ports than printed and a directory for its data, so that
tests do not meet.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd, any_etcd
from tests.ports import free_port
from tests.process.jobs import Job, Node, job
from tests.support import poll_for
from torchelastic.cli.command_table import DISTRIBUTED_RUN
from torchelastic.cli.parser import parse
from torchelastic.cli.planned_job import launch_config

#: Several nodes import torch at the same time, on however few cores.
pytestmark = pytest.mark.timeout(300)

# --- the documents' words ------------------------------------------------------------------------

SEED_000_LINE_47 = """\
snapshot = state.snapshot()
try:
    train_step(state)
except RuntimeError:
    state.apply(snapshot)
    state.sync()
"""

SEED_000_LINE_112 = """\
import torchelastic
from torchelastic.p2p import CoordinatorP2P

if __name__ == "__main__":
        min_workers = 1
        max_workers = 1
        run_id = 1234
        etcd_endpoint = "localhost:2379"

        state = MyState()

        coordinator = CoordinatorP2P(
            c10d_backend="gloo",
            init_method=f"etcd://{etcd_endpoint}/{run_id}?min_workers={min_workers}&max_workers={max_workers}",
            max_num_trainers=max_workers,
            process_group_timeout=60000,
        )

        torchelastic.train(coordinator, train_step, state)
"""

SEED_001_LINE_23 = """\
model = ...
model.load_state_dict(torch.load(YOUR_CHECKPOINT_PATH))

for train_loop():
    ...
    torch.save(model.state_dict(), YOUR_CHECKPOINT_PATH)
"""

SEED_001_LINE_38 = r"""
python -m bagua.distributed.run \
        --nnodes=$NUM_NODES \
        --nproc_per_node=$NUM_TRAINERS \
        --rdzv_id=$JOB_ID \
        --rdzv_backend=c10d \
        --rdzv_endpoint=$HOST_NODE_ADDR \
        YOUR_TRAINING_SCRIPT.py (--arg1 ... train script args...)
"""

SEED_001_LINE_60 = r"""
python -m bagua.distributed.run \
        --nnodes=1:4 \
        --nproc_per_node=$NUM_TRAINERS \
        --rdzv_id=$JOB_ID \
        --rdzv_backend=c10d \
        --rdzv_endpoint=$HOST_NODE_ADDR \
        YOUR_TRAINING_SCRIPT.py (--arg1 ... train script args...)
"""

SEED_002_LINE_27 = """
etcd --enable-v2
     --listen-client-urls http://0.0.0.0:2379,http://127.0.0.1:4001
     --advertise-client-urls PUBLIC_HOSTNAME:2379
"""

SEED_002_LINE_35 = """
python -m torchelastic.distributed.launch
        --nnodes=NUM_NODES
        --nproc_per_node=TRAINERS_PER_NODE
        --rdzv_id=JOB_ID
        --rdzv_backend=etcd
        --rdzv_endpoint=ETCD_HOST:ETCD_PORT
        YOUR_TRAINING_SCRIPT.py (--arg1 ... train script args...)
"""

SEED_002_LINE_49 = SEED_002_LINE_35.replace("NUM_NODES", "MIN_SIZE:MAX_SIZE")

SEED_002_LINE_82 = """\
def main():
     args = parse_args(sys.argv[1:])
     state = load_checkpoint(args.checkpoint_path)
     initialize(state)

     # torchelastic.distributed.launch ensure that this will work
     # by exporting all the env vars needed to initialize the process group
     torch.distributed.init_process_group(backend=args.backend)

     for i in range(state.epoch, state.total_num_epochs)
          for batch in iter(state.dataset)
              train(batch, state.model)

          state.epoch += 1
          save_checkpoint(state)
"""

# --- what fills their placeholders ---------------------------------------------------------------

SCRIPT_AND_ARGUMENTS = "YOUR_TRAINING_SCRIPT.py (--arg1 ... train script args...)"

#: A worker trains up to the step the test allows. The last rank reads how far that is, the others
#: wait for it inside a collective, as workers do: when it dies, theirs fails too.
GATED = """\
import argparse, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

generation, rank, size = (
    int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE")
)

def tell(what):
    print(f"generation {generation} rank {rank} of {size} {what};")

def wait_until_allowed(step):
    while rank == size - 1 and step > int(Path(os.environ["ALLOWED"]).read_text()):
        time.sleep(0.01)
    dist.barrier()

def train_together(model):
    model(torch.ones(1, 2)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.1 * parameter.grad
"""

RECOVERABLE = (
    GATED
    + '''
dist.init_process_group("gloo")

class Model(torch.nn.Linear):
    """Counts its steps in its own state: the program saves nothing else."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("steps", torch.tensor(0))

def first_model():
    model = Model()
    if rank == 0 and not os.path.exists(sys.argv[1]):
        torch.save(model.state_dict(), sys.argv[1])
    dist.barrier()
    return model

def train_loop():
    tell(f"begins at step {model.steps}")
    while model.steps < 6:
        wait_until_allowed(model.steps + 1)
        yield
        tell(f"has saved step {model.steps}")

def train():
    train_together(model)
    model.steps += 1

'''
    + SEED_001_LINE_23.replace("model = ...", "model = first_model()")
    .replace("for train_loop():", "for _ in train_loop():")
    .replace("    ...\n", "    train()\n    if rank != 0:\n        continue\n")
    .replace("YOUR_CHECKPOINT_PATH", "sys.argv[1]")
)

BY_EPOCHS = (
    GATED
    + """
class State:
    def __init__(self, path):
        self.path, self.epoch, self.total_num_epochs = path, 0, 3
        self.dataset, self.model = range(3), torch.nn.Linear(2, 1)

def parse_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_path", type=Path)
    parser.add_argument("--backend")
    return parser.parse_args(argv)

def load_checkpoint(path):
    return torch.load(path, weights_only=False) if path.exists() else State(path)

def initialize(state):
    torch.manual_seed(state.epoch)
    tell(f"begins at epoch {state.epoch}")
    global steps
    steps = state.epoch * len(state.dataset)

def train(batch, model):
    global steps
    wait_until_allowed(steps + 1)
    train_together(model)
    steps += 1
    tell(f"has done step {steps}, batch {batch}")

def save_checkpoint(state):
    if rank == 0:
        torch.save(state, f"{state.path}.part")
        os.replace(f"{state.path}.part", state.path)

"""
    + SEED_002_LINE_82.replace("total_num_epochs)", "total_num_epochs):").replace(
        "iter(state.dataset)", "iter(state.dataset):"
    )
    + "\nmain()\n"
)


class Gate:
    """How far the workers may go."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "allowed"
        self.open_until(0)

    def open_until(self, step: int) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(str(step))
        part.replace(self.path)


def written(directory: Path, text: str) -> Path:
    script = directory / "YOUR_TRAINING_SCRIPT.py"
    script.write_text(text)
    return script


def launch(it: Job, gate: Gate, command: str, script: Path, *args: str, nodes: int = 0) -> Node:
    """Run a document's command in a shell, as a user would on one more node."""
    directory = it.directory / f"node{len(it.nodes)}"
    command = command.strip().replace("bagua", "torchelastic")
    command = command.replace(SCRIPT_AND_ARGUMENTS, shlex.join([str(script), *args]))
    variables = {
        "NUM_NODES": str(nodes),
        "NUM_TRAINERS": "1",
        "JOB_ID": "seed",
        "HOST_NODE_ADDR": f"127.0.0.1:{it.port}",
        "ALLOWED": str(gate.path),
        "PET_LOG_DIR": f"{directory}/logs",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    node = Node(["bash", "-c", f"exec {command}"], directory, os.environ | variables)
    it.nodes.append(node)
    return node


def expect(it: Job, sentence: str) -> None:
    """Wait until some worker has said it."""

    def said() -> bool:
        return any(re.search(sentence, node.stdout) for node in it.nodes)

    try:
        poll_for(said, what=sentence, timeout=60)
    except AssertionError as error:
        printed = "\n".join(node.stdout for node in it.nodes)
        raise AssertionError(f"{error}\n{it.said()}\n{printed}") from None


def kill_worker(node: Node, rank: int) -> None:
    started = node.events("workers-started")[-1]
    os.kill(started["pids"][started["ranks"].index(rank)], signal.SIGKILL)


# --- seed 001 ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_seed_001_lines_23_and_38_a_fixed_job_waits_for_a_failed_node(tmp_path):
    """Seed 001, lines 23, 38 and 49: recoverable, fault tolerant, "will wait for the node".

    Three nodes import torch.
    """
    script, gate = written(tmp_path, RECOVERABLE), Gate(tmp_path)
    with job(tmp_path / "job") as it:
        command = (SEED_001_LINE_38, script, str(tmp_path / "checkpoint.pt"))
        first = launch(it, gate, *command, nodes=2)
        poll_for(lambda: first.events("joined"), what="the host has joined")
        second = launch(it, gate, *command, nodes=2)
        expect(it, "generation 0 rank 1 of 2 begins at step 0")
        gate.open_until(2)
        expect(it, "rank 0 of 2 has saved step 2")
        second.kill()
        poll_for(lambda: first.events("waiting"), what="the job waits")
        third = launch(it, gate, *command, nodes=2)
        for rank in (0, 1):
            expect(it, f"generation 1 rank {rank} of 2 begins at step 2")
        gate.open_until(6)
        assert [first.wait(), third.wait()] == [0, 0], it.said()
        expect(it, "generation 1 rank 0 of 2 has saved step 6")
        # The same command a second time, as a user repeats it: the job runs again.
        again = [launch(it, gate, *command, nodes=2)]
        poll_for(lambda: again[0].events("joined"), what="the host has joined")
        again.append(launch(it, gate, *command, nodes=2))
        assert [node.wait() for node in again] == [0, 0], it.said()
        expect(it, "generation 0 rank 0 of 2 begins at step 6")


@pytest.mark.slow
def test_seed_001_line_60_an_elastic_job_goes_on_with_the_nodes_there_are(tmp_path):
    """Seed 001, lines 23, 60 and 71: one node, then two, then one. Both import torch."""
    script, gate = written(tmp_path, RECOVERABLE), Gate(tmp_path)
    with job(tmp_path / "job") as it:
        command = (SEED_001_LINE_60, script, str(tmp_path / "checkpoint.pt"))
        first = launch(it, gate, *command)
        gate.open_until(2)
        expect(it, "generation 0 rank 0 of 1 has saved step 2")
        second = launch(it, gate, *command)
        for rank in (0, 1):
            expect(it, f"generation 1 rank {rank} of 2 begins at step 2")
        gate.open_until(4)
        expect(it, "generation 1 rank 0 of 2 has saved step 4")
        second.kill()
        expect(it, "generation 2 rank 0 of 1 begins at step 4")
        gate.open_until(6)
        assert first.wait() == 0, it.said()
        expect(it, "generation 2 rank 0 of 1 has saved step 6")


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("node1.example.com:29401", "node1.example.com:29401"),
        ("node1.example.com", "node1.example.com:29400"),
    ],
)
def test_seed_001_line_55_the_port_defaults_to_29400(address, endpoint):
    argv = f"--nnodes=2 --rdzv_id=1 --rdzv_backend=c10d --rdzv_endpoint={address} s.py".split()
    assert launch_config(parse(argv, DISTRIBUTED_RUN, {}), {}).rdzv_endpoint == endpoint


# --- seed 002 ------------------------------------------------------------------------------------


# What the page leaves to its reader, in as few lines as will do.
MY_STATE = """\
import torch
import torch.distributed as dist
from torchelastic import State

class MyState(State):
    def __init__(self):
        self.weight, self.steps, self.fails, self.synced = torch.zeros(1), 0, 0, 0
    def sync(self):
        self.synced += 1
        if dist.is_initialized():
            dist.broadcast(self.weight, 0)
    def snapshot(self):
        return self.weight.clone(), self.steps
    def apply(self, snapshot):
        weight, self.steps = snapshot
        self.weight.copy_(weight)

def train_step(state):
    if state.steps == 5:
        raise StopIteration
    state.weight += 1
    if state.steps == 3 and not state.fails:
        state.fails = 1
        raise RuntimeError("half-way")
    if dist.is_initialized():
        dist.all_reduce(state.weight.clone())
    state.steps += 1
"""


def test_seed_000_line_47_a_failed_step_is_rolled_back():
    names: dict[str, object] = {}
    exec(MY_STATE + "state = MyState()\n" + SEED_000_LINE_47 * 4, names)
    state = names["state"]
    assert (state.steps, float(state.weight), state.synced) == (3, 3.0, 1)  # type: ignore[attr-defined]


def test_seed_000_line_112_the_program_at_etcd(tmp_path, seeds_etcd):
    text = SEED_000_LINE_112.replace("localhost:2379", seeds_etcd.endpoint)
    ending = 'print("trained", state.steps, float(state.weight), state.synced)\n'
    program = written(tmp_path, MY_STATE + text + "        " + ending)
    for _ in range(2):
        ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=110)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == "trained 5 5.0 2\n"  # one world, and another after the failure


@pytest.fixture
def seeds_etcd(tmp_path) -> Iterator[Etcd]:
    """Seed 002, line 27: etcd, started as printed."""
    program = any_etcd()
    directory = tmp_path / "etcd"
    directory.mkdir()
    etcd = Etcd(directory, program)
    filled = SEED_002_LINE_27.replace("PUBLIC_HOSTNAME", "http://public-hostname.invalid")
    filled = filled.replace("2379", str(etcd.port)).replace("4001", str(free_port()))
    _, *flags = filled.split()
    own = [f"--data-dir={directory}/data", f"--listen-peer-urls=http://127.0.0.1:{free_port()}"]
    try:
        etcd.run([program, *flags, *own])
        poll_for(etcd.answers, what="etcd answers")
        yield etcd
    finally:
        etcd.stop()


def at_etcd(command: str, etcd: Etcd, **filled: str) -> str:
    """A command of seed 002 with its placeholders filled in, on one line."""
    filled |= {"TRAINERS_PER_NODE": "1", "JOB_ID": "seed", "ETCD_HOST": "127.0.0.1"}
    filled |= {"ETCD_PORT": str(etcd.port)}
    for name, value in filled.items():
        command = command.replace(name, value)
    return " ".join(command.split())


@pytest.mark.slow
def test_seed_002_line_35_a_fault_tolerant_job_at_etcd(tmp_path, seeds_etcd):
    """Seed 002, lines 27, 35 and 82: two nodes, which import torch; a worker fails."""
    script, gate = written(tmp_path, BY_EPOCHS), Gate(tmp_path)
    command = at_etcd(SEED_002_LINE_35, seeds_etcd, NUM_NODES="2")
    arguments = (f"--checkpoint_path={tmp_path / 'checkpoint.pt'}", "--backend=gloo")
    with job(tmp_path / "job") as it:
        first = launch(it, gate, command, script, *arguments)
        poll_for(lambda: first.events("joined"), what="the first node has joined")
        second = launch(it, gate, command, script, *arguments)
        gate.open_until(4)
        expect(it, "generation 0 rank 0 of 2 has done step 4, batch 0")
        kill_worker(second, rank=1)
        for rank in (0, 1):
            expect(it, f"generation 1 rank {rank} of 2 begins at epoch 1")
        gate.open_until(9)
        assert [first.wait(), second.wait()] == [0, 0], it.said()


@pytest.mark.slow
def test_seed_002_line_49_an_elastic_job_at_etcd(tmp_path, seeds_etcd):
    """Seed 002, lines 27, 49 and 82: from the smallest number of nodes to the largest.

    Two nodes import torch.
    """
    script, gate = written(tmp_path, BY_EPOCHS), Gate(tmp_path)
    command = at_etcd(SEED_002_LINE_49, seeds_etcd, MIN_SIZE="1", MAX_SIZE="2")
    arguments = (f"--checkpoint_path={tmp_path / 'checkpoint.pt'}", "--backend=gloo")
    with job(tmp_path / "job") as it:
        first = launch(it, gate, command, script, *arguments)
        gate.open_until(4)
        expect(it, "generation 0 rank 0 of 1 has done step 4, batch 0")
        second = launch(it, gate, command, script, *arguments)
        for rank in (0, 1):
            expect(it, f"generation 1 rank {rank} of 2 begins at epoch 1")
        gate.open_until(9)
        assert [first.wait(), second.wait()] == [0, 0], it.said()


@pytest.mark.slow
def test_seed_002_line_82_a_failure_loses_at_most_one_epoch(tmp_path):
    """Seed 002, lines 35, 61 to 74 and 82, on the embedded rendezvous instead of etcd's.

    Its zygote imports torch.
    """
    script, gate = written(tmp_path, BY_EPOCHS), Gate(tmp_path)
    command = (
        "python -m torchelastic.distributed.launch --nnodes=1 --nproc_per_node=2 --rdzv_id=$JOB_ID"
        f" --rdzv_backend=c10d --rdzv_endpoint=$HOST_NODE_ADDR {SCRIPT_AND_ARGUMENTS}"
    )
    with job(tmp_path / "job") as it:
        checkpoint = f"--checkpoint_path={tmp_path / 'checkpoint.pt'}"
        node = launch(it, gate, command, script, checkpoint, "--backend=gloo")
        gate.open_until(5)  # three batches of the first epoch, two of the second
        expect(it, "generation 0 rank 0 of 2 has done step 5, batch 1")
        kill_worker(node, 1)
        for rank in (0, 1):
            expect(it, f"generation 1 rank {rank} of 2 begins at epoch 1")
        gate.open_until(9)
        assert node.wait() == 0, it.said()
        assert re.findall(r"generation 1 rank 0 of 2 has done step (\d)", node.stdout) == [
            *"456789"
        ]


# --- seed 003 ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_seed_003_line_12_the_group_is_restarted_reranked_and_resumes(tmp_path):
    """Seed 003, lines 12, 13 and 16 to 18: a worker is lost, then a node. Two import torch."""
    script, gate = written(tmp_path, RECOVERABLE), Gate(tmp_path)
    command = (
        "torchelastic run --nnodes=1:2 --max-restarts=3 --rdzv-endpoint=$HOST_NODE_ADDR "
        f"{SCRIPT_AND_ARGUMENTS}"
    )
    with job(tmp_path / "job") as it:
        first = launch(it, gate, command, script, str(tmp_path / "checkpoint.pt"))
        expect(it, "generation 0 rank 0 of 1 begins at step 0")
        second = launch(it, gate, command, script, str(tmp_path / "checkpoint.pt"))
        expect(it, "generation 1 rank 1 of 2 begins at step 0")
        gate.open_until(2)
        expect(it, "generation 1 rank 0 of 2 has saved step 2")
        kill_worker(second, rank=1)
        for rank in (0, 1):
            expect(it, f"generation 2 rank {rank} of 2 begins at step 2")
        gate.open_until(4)
        expect(it, "generation 2 rank 0 of 2 has saved step 4")
        second.kill()
        expect(it, "generation 3 rank 0 of 1 begins at step 4")
        gate.open_until(6)
        assert first.wait() == 0, it.said()


def test_seed_003_line_21_the_job_ends_when_max_restarts_is_exceeded(tmp_path):
    with job(tmp_path, "--standalone --max-restarts=1") as it:
        node = it.start()
        os.kill(it.world(0, 1)[0]["pid"], signal.SIGKILL)
        os.kill(it.world(1, 1)[0]["pid"], signal.SIGKILL)
        assert node.wait() == 1, node.stderr
        assert "the only restart is used (--max-restarts)" in node.stderr


@pytest.mark.slow
def test_seed_003_line_13_membership_changes_can_count_as_well(tmp_path):
    """ "The number of allowed failures or membership changes": with --count-resizes."""
    with job(tmp_path, "--nnodes=1:2 --max-restarts=1 --count-resizes") as it:
        first = it.start()
        it.world(0, 1)
        second = it.start()
        workers = it.world(1, 2)
        os.kill(workers[0]["pid"], signal.SIGKILL)
        assert [first.wait(), second.wait()] == [1, 1], it.said()
        assert "the only restart is used (--max-restarts)" in first.stderr
