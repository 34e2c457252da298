"""Real agents, real ends of workers and nodes: who failed first, and who fell because of it."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.process.jobs import HERE, Job, Node, alive, job, status
from tests.support import poll_for

LINKED, RESIDENT = HERE / "linked.py", HERE / "resident.py"
BROKEN = "Connection closed by peer"


def linked(tmp_path: Path, flags: str):
    # They ignore SIGTERM: on a busy machine, too, they have the time to notice each other's end.
    patient = f"--no-zygote --redirects=3 --shutdown-timeout=100 {flags}"
    return job(tmp_path / "job", patient, LINKED)


def shown() -> dict:
    """The last failure, as `status` has it from the logs of all agents."""
    return status("job")["failure"]


def verdict(node: Node, number: int = 0) -> dict:
    """The leader's final verdict about the first generation or a later one."""
    return poll_for(lambda: node.events("restart-decided")[number:], what="the leader's verdict")[0]


def of_generation(node: Node, kind: str, generation: int) -> dict:
    def found() -> list[dict]:
        return [one for one in node.events(kind) if one["generation"] == generation]

    return poll_for(found, what=f"{kind} of generation {generation}")[0]


def ranks(failures: list[dict]) -> list[int]:
    return sorted(one["rank"] for one in failures)


def reports(it: Job) -> list[str]:
    """The last block of each node."""
    for node in it.nodes:
        assert node.wait() == 1, it.said()
    return [node.stderr.partition("Root Cause (first observed failure):")[2] for node in it.nodes]


def fell(report: str) -> str:
    return report.partition("Failed as a consequence:")[2]


@pytest.mark.timeout(300)
def test_first_failed_worker_is_the_cause_of_the_others(tmp_path):
    """In a row: a worker is killed, a node is killed, a worker fails slowly, a worker raises."""
    with linked(tmp_path, "--nnodes=2:3 --settle=60 --max-restarts=2") as it:
        first, second, third = it.start(), it.start(), it.start()
        killed_worker(it, first)
        killed_node(it, first, third)
        peers_that_tell_first_are_not_the_cause(it, first, second)
        it.nodes.remove(third)
        workers = it.world(3, 2)
        it.order("raise out of luck", generation=3, rank=1)
        for report in reports(it):
            cause = report.partition("-----")[0]
            assert "  rank      : 1 (local_rank: 0)\n" in cause
            assert "  error     : ValueError: out of luck\n" in cause
            assert "linked.py" in cause
            assert cause.endswith("  last lines:\n    linking\n    linked\n")
            assert [f"rank {rank} on" in fell(report) for rank in (0, 1)] == [True, False]
            assert fell(report).count(BROKEN) == 1
        for node in it.nodes:
            assert "all 2 restarts used (--max-restarts)" in node.stderr
        assert not any(alive(worker["pid"]) for worker in workers)
        failure = shown()
        assert failure["cause"]["rank"] == 1
        assert failure["cause"]["log_lines"] == ["linking", "linked"]
        assert ranks(failure["consequences"]) == [0]


def killed_worker(it: Job, leader: Node) -> None:
    """It cannot say anything itself, whatever its peers say."""
    workers = it.world(0, 3)
    os.kill(workers[1]["pid"], signal.SIGKILL)
    found = verdict(leader, 0)
    cause = found["cause"]
    assert (found["kind"], cause["rank"], cause["exitcode"]) == ("failure", 1, -9), it.said()
    assert cause["message"] == "killed by SIGKILL"
    assert not cause["hint"].startswith("out of memory")
    assert ranks(found["consequences"]) == [0, 2]
    assert all(BROKEN in one["message"] for one in found["consequences"])


def killed_node(it: Job, leader: Node, node: Node) -> None:
    it.world(1, 3)
    name = node.events("joined")[0]["name"]
    others = sorted({0, 1, 2} - set(of_generation(node, "workers-started", 1)["ranks"]))
    node.kill()
    found = verdict(leader, 1)
    assert found["kind"] == "node-failure", it.said()
    assert (found["cause"]["node"], found["cause"]["rank"]) == (name, -1)
    assert ranks(found["consequences"]) == others
    assert all(BROKEN in one["message"] for one in found["consequences"])
    it.world(2, 2)
    failure = shown()
    assert failure["sentence"].startswith(f"{name} failed: ")
    assert ranks(failure["consequences"]) == others


def peers_that_tell_first_are_not_the_cause(it: Job, leader: Node, other: Node) -> None:
    """The failing worker has raised, and its connections are closed, but its process is not gone
    before its peers have told of that and the leader has ended the generation."""
    it.order("raise-slowly out of luck", generation=2, rank=1)
    over = of_generation(leader, "generation-over", 2)
    assert over["cause"]["rank"] == 0, "its peer was heard first"
    poll_for(lambda: "generation 2 is over" in other.stderr, what="its own agent knows it")
    assert all(one["generation"] < 2 for one in other.events("worker-failed"))
    it.give("release")
    found = verdict(leader, 2)
    assert (found["cause"]["rank"], found["cause"]["message"]) == (1, "ValueError: out of luck")
    assert ranks(found["consequences"]) == [0]
    it.world(3, 2)
    assert shown()["cause"]["rank"] == 1


# --- training, with real collectives -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_and_a_node_fail_while_the_others_are_in_the_all_reduce(tmp_path, monkeypatch):
    """A worker raises there, one is killed, and then a node is killed. Two nodes import torch."""
    faults = ("raise@rank=1,step=2", "kill@rank=1,step=4,generation=1")
    monkeypatch.setenv(
        "TORCHELASTIC_FAULTS", ";".join(f"{one},place=collective.launched" for one in faults)
    )
    flags = "--redirects=3 --nnodes=1:2 --nproc-per-node=2 --settle=60"
    with job(tmp_path / "job", flags, RESIDENT, model="plain") as it:
        # A model without buffers: what its step launches first is an all-reduce.
        first, second = (it.start(steps=100_000, slow=0.02) for _ in range(2))
        poll_for(
            lambda: [one for one in it.lines(event="step", size=4) if one["step"] > 4],
            what="steps of four again",
            timeout=200,
        )
        name = second.events("joined")[0]["name"]
        second.kill()
        poll_for(lambda: it.lines(event="step", size=2), what="steps of two", timeout=100)
        it.order("finish", rank=0)
        assert first.wait(100) == 0, it.said()
        raised, killed, lost = [one for one in first.events("restart-decided") if one["cause"]]
        for found, kind, step, message in (
            (raised, "error", 2, "FaultInjected: Injected fault at collective.launched"),
            (killed, "failure", 4, "killed by SIGKILL"),
        ):
            cause = found["cause"]
            assert (found["kind"], cause["rank"], cause["step"]) == (kind, 1, step), it.said()
            assert cause["message"].startswith(message)
            assert re.match(r"all_reduce #\d+$", cause["collective"])
            # Others may have heard that the generation is over before they noticed anything.
            assert set(ranks(found["consequences"])) <= {0, 2, 3}
            assert all(one["alive"] for one in found["consequences"])
        assert (lost["kind"], lost["cause"]["node"]) == ("node-failure", name), it.said()
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


def start_in(group: Path, it: Job, **keys: object) -> Node:
    """A node all of whose processes are in the group."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    run = [sys.executable, "-m", "torchelastic", "run", f"--log-dir={it.directory}/node0/logs"]
    command = ["sh", "-c", enter, "sh", *run, *it.flags, *it.command(**keys)]
    it.nodes.append(Node(command, it.directory / "node0", it.environ))
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
