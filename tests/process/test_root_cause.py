"""Real agents, real ends of workers and nodes: who failed first, and who fell because of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.jobs import Job, Node, job
from tests.support import poll_for

LINKED = Path(__file__).with_name("linked.py")
RESIDENT = Path(__file__).with_name("resident.py")
BROKEN = "Connection closed by peer"


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


def linked(tmp_path: Path, flags: str):
    # They ignore SIGTERM: on a busy machine, too, they have the time to notice each other's end.
    patient = f"--no-zygote --redirects=3 --shutdown-timeout=100 {flags}"
    return job(tmp_path / "job", patient, script=LINKED)


def shown() -> dict:
    """The last failure, as `status` has it from the logs of all agents."""
    command = [sys.executable, "-m", "torchelastic", "status", "--json", "job"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    (told,) = json.loads(ended.stdout)
    return told["failure"]


def verdict(node: Node) -> dict:
    """What the leader has found in the end."""
    found = poll_for(lambda: node.events("restart-decided"), what="the leader's verdict")
    return found[0]


def reports(it: Job) -> list[str]:
    """The last block of each node."""
    for node in it.nodes:
        assert node.wait() == 1, it.said()
    return [node.stderr.partition("Root Cause (first observed failure):")[2] for node in it.nodes]


def fell(report: str) -> str:
    return report.partition("Fell because of it:")[2]


@pytest.mark.timeout(200)
def test_a_worker_raises_and_every_node_says_so_and_who_fell_because_of_it(tmp_path):
    with linked(tmp_path, "--nnodes=3 --max-restarts=0") as it:
        for _ in range(3):
            it.start()
        it.world(0, 3)
        it.order("raise out of luck", generation=0, rank=1)
        for report in reports(it):
            cause = report.partition("-----")[0]
            assert "  rank      : 1 (local_rank: 0)\n" in cause
            assert "  error     : ValueError: out of luck\n" in cause
            assert "linked.py" in cause
            assert cause.endswith("  last lines:\n    linking\n    linked\n")
            assert [f"rank {rank} on" in fell(report) for rank in range(3)] == [True, False, True]
            assert fell(report).count(BROKEN) == 2
        failure = shown()
        assert failure["cause"]["rank"] == 1
        assert failure["cause"]["log_lines"] == ["linking", "linked"]
        assert sorted(one["rank"] for one in failure["consequences"]) == [0, 2]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_worker_is_the_cause_whatever_its_peers_say(tmp_path):
    with linked(tmp_path, "--nnodes=2 --max-restarts=0") as it:
        it.start(), it.start()
        workers = it.world(0, 2)
        os.kill(workers[1]["pid"], signal.SIGKILL)
        for report in reports(it):
            assert "  exitcode  : -9 " in report
            assert "  error     : killed by SIGKILL\n" in report
            assert "  hint      : out of memory" not in report
            assert "rank 0 on" in fell(report)
            assert BROKEN in fell(report)


@pytest.mark.timeout(200)
def test_a_killed_node_is_the_cause_and_its_peers_workers_fell_because_of_it(tmp_path):
    with linked(tmp_path, "--nnodes=2:3 --settle=60 --max-restarts=0") as it:
        first, _, third = it.start(), it.start(), it.start()
        it.world(0, 3)
        name = third.events("joined")[0]["name"]
        started = poll_for(lambda: third.events("workers-started"), what="its worker's rank")
        others = sorted({0, 1, 2} - set(started[0]["ranks"]))
        third.kill()
        found = verdict(first)
        assert found["kind"] == "node-failure", it.said()
        assert (found["cause"]["node"], found["cause"]["rank"]) == (name, -1)
        assert sorted(one["rank"] for one in found["consequences"]) == others
        assert all(BROKEN in one["message"] for one in found["consequences"])
        it.world(1, 2)
        failure = shown()
        assert failure["sentence"].startswith(f"{name} failed: ")
        assert sorted(one["rank"] for one in failure["consequences"]) == others
        it.order("finish", generation=1)
        assert it.nodes[0].wait() == 0, it.said()
        assert it.nodes[1].wait() == 0, it.said()


@pytest.mark.timeout(200)
def test_peers_that_tell_first_are_not_the_cause(tmp_path):
    """The failing worker has raised, and its connections are closed, but its process is not gone
    before its peers have told of that and the leader has ended the generation."""
    with linked(tmp_path, "--nnodes=2 --max-restarts=0") as it:
        first, second = it.start(), it.start()
        it.world(0, 2)
        it.order("raise-slowly out of luck", generation=0, rank=1)
        over = poll_for(lambda: first.events("generation-over"), what="the end of the generation")
        assert over[0]["cause"]["rank"] == 0, "its peer was heard first"
        poll_for(lambda: "generation 0 is over" in second.stderr, what="its own agent knows it")
        assert not second.events("worker-failed")
        it._orders.joinpath("release").touch()
        for report in reports(it):
            assert "  error     : ValueError: out of luck\n" in report
            assert "rank 0 on" in fell(report)
        assert shown()["cause"]["rank"] == 1


# --- training, with real collectives -------------------------------------------------------------


def resident(tmp_path: Path, flags: str, monkeypatch, faults: str = ""):
    if faults:
        monkeypatch.setenv("TORCHELASTIC_FAULTS", faults)
    return job(tmp_path / "job", f"--redirects=3 {flags}", script=RESIDENT)


def train(it: Job, *keys: str) -> Node:
    return it.start(script=[str(it.script), str(it._lines), str(it._orders), *keys])


def trained(it: Job) -> None:
    for node in it.nodes:
        assert node.wait(100) == 0, it.said()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("kill", "failure", "killed by SIGKILL"),
        ("raise", "error", "FaultInjected: A fault was planned at collective.launched"),
    ],
)
def test_a_worker_fails_while_the_others_are_in_the_all_reduce(
    tmp_path, monkeypatch, fault, kind, message
):
    faults = f"{fault}@rank=1,step=2,place=collective.launched"
    with resident(tmp_path, "--nnodes=3", monkeypatch, faults) as it:
        # A model without buffers: what its step launches first is an all-reduce.
        first, _, _ = (train(it, "model=plain") for _ in range(3))
        trained(it)
        found = verdict(first)
        assert (found["kind"], found["cause"]["rank"]) == (kind, 1), it.said()
        assert found["cause"]["message"].startswith(message)
        assert found["cause"]["step"] == 2
        assert re.match(r"all_reduce #\d+$", found["cause"]["collective"])
        # Others may have heard that the generation is over before they noticed anything.
        assert {one["rank"] for one in found["consequences"]} <= {0, 2}
        assert all(one["alive"] for one in found["consequences"])
        assert shown()["cause"]["message"].startswith(message)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_is_killed_while_the_others_train(tmp_path, monkeypatch):
    with resident(tmp_path, "--nnodes=2:3 --settle=60", monkeypatch) as it:
        keys = ("steps=60", "slow=0.05")
        first, _, third = train(it, *keys), train(it, *keys), train(it, *keys)
        poll_for(lambda: it.lines(event="step", size=3), what="steps of three", timeout=100)
        name = third.events("joined")[0]["name"]
        third.kill()
        it.nodes.remove(third)
        trained(it)
        found = verdict(first)
        assert (found["kind"], found["cause"]["node"]) == ("node-failure", name), it.said()
        assert shown()["sentence"].startswith(f"{name} failed: ")


# --- out of memory -------------------------------------------------------------------------------

MEMORY = Path("/sys/fs/cgroup/memory")
#: More than the agent needs, and the processes that have torch.
LIMIT = 1 << 30


@pytest.fixture
def small():
    """A memory cgroup with a low limit."""
    group = MEMORY / f"torchelastic-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    yield group
    poll_for(lambda: not (group / "cgroup.procs").read_text(), what="an empty group")
    group.rmdir()


def start_in(group: Path, it: Job, *keys: str) -> Node:
    """A node all of whose processes are in the group."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    run = [sys.executable, "-m", "torchelastic", "run", f"--log-dir={it.directory}/node0/logs"]
    script = [str(it.script), str(it._lines), str(it._orders), *keys]
    command = ["sh", "-c", enter, "sh", *run, *it.flags, *script]
    it.nodes.append(Node(command, it.directory / "node0", dict(os.environ)))
    return it.nodes[0]


@pytest.mark.timeout(200)
@pytest.mark.needs("memory cgroup")
def test_a_worker_that_the_kernel_kills_for_want_of_memory(tmp_path, small):
    flags = "--standalone --nproc-per-node=2 --max-restarts=0 --rdzv-id=job"
    with linked(tmp_path, flags) as it:
        node = start_in(small, it)
        it.world(0, 2)
        it.order("eat", generation=0, rank=1)
        (report,) = reports(it)
        assert "  rank      : 1 (local_rank: 1)\n" in report, it.said()
        assert "  error     : killed by SIGKILL: out of memory\n" in report
        assert "  hint      : out of memory: the kernel killed it (limit 1.0 GiB; " in report
        failed = {one["failure"]["rank"]: one["failure"] for one in node.events("worker-failed")}
        assert failed[1]["hint"].startswith("out of memory: ")
        assert failed[0]["hint"] == ""
        assert shown()["cause"]["hint"] == failed[1]["hint"]


@pytest.mark.slow
@pytest.mark.needs("memory cgroup")
@pytest.mark.timeout(300)
def test_a_worker_that_trains_and_starves_is_replaced_and_the_job_says_why(
    tmp_path, monkeypatch, small
):
    flags = "--standalone --nproc-per-node=2 --rdzv-id=job"
    with resident(tmp_path, flags, monkeypatch) as it:
        it.order("eat", generation=3, rank=1)  # at step 3
        node = start_in(small, it, "steps=6", "model=plain")
        trained(it)
        (failed,) = [
            one["failure"] for one in node.events("worker-failed") if not one["failure"]["alive"]
        ]
        assert (failed["rank"], failed["step"]) == (1, 3)
        assert failed["message"] == "killed by SIGKILL: out of memory"
        found = verdict(node)
        assert (found["kind"], found["cause"]["rank"]) == ("failure", 1)
        assert shown()["cause"]["hint"] == failed["hint"]
