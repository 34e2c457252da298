"""`torchelastic run` with real agents and workers: what a user sees when things break."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process.jobs import Node, alive, job
from tests.support import poll_for


def test_crashes_of_every_kind_restart_the_world_and_are_explained(tmp_path):
    """By exception, by SIGKILL, by exit code; every generation keeps its logs, unasked, and its
    store. One node collects no events of others."""
    with job(tmp_path, "--standalone --nproc-per-node=2") as it:
        node = it.start()
        check_environment(it.world(0, 2)[1]["env"])
        it.order("raise out of luck", generation=0, rank=1)
        second = it.world(1, 2)
        os.kill(second[0]["pid"], signal.SIGKILL)
        it.world(2, 2)
        it.order("exit 3", generation=2, rank=0)
        workers = it.world(3, 2)
        it.order("finish")
        assert node.wait() == 0, node.stderr

        failures = [record["failure"] for record in node.events("worker-failed")]
        assert [(f["rank"], f["exitcode"]) for f in failures] == [(1, 1), (0, -9), (0, 3)]
        assert failures[0]["message"] == "ValueError: out of luck"
        assert "obedient.py" in failures[0]["traceback"]
        assert "out of luck" in node.stderr
        assert "3 of 100 restarts used" in node.stderr
        attempts = sorted(path.name for path in (node.directory / "logs").glob("*/attempt_*"))
        assert attempts == ["attempt_0", "attempt_1", "attempt_2", "attempt_3"]
        log = next((node.directory / "logs").glob("*/attempt_0/1/stderr.log"))
        assert "ValueError: out of luck" in log.read_text()
        ports = {line["env"]["MASTER_PORT"] for line in it.lines(event="start")}
        assert len(ports) == 4
        assert len({line["pid"] for line in it.lines(event="start")}) == 8
        assert not any(alive(worker["pid"]) for worker in workers)
        assert node.events()[-1]["type"] == "job-ended"
        assert not list((node.directory / "logs").rglob("job.jsonl"))


def check_environment(env: dict[str, str]) -> None:
    """Of rank 1 in the first generation."""
    run_id = env.pop("TORCHELASTIC_RUN_ID")
    assert run_id not in ("", "none")
    assert env.pop("MASTER_PORT").isdigit()
    assert env.pop("TORCHELASTIC_ERROR_FILE").endswith("/attempt_0/1/error.json")
    assert env.pop("TORCHELASTIC_LEAVING_FILE").endswith("/leaving.json")
    assert env.pop("TORCHELASTIC_CHANNEL_FD").isdigit()
    assert env.pop("TORCHELASTIC_START") != ""
    assert env == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "100",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_without_log_files_a_failure_is_explained_anyway(tmp_path):
    with job(tmp_path, "--standalone --no-zygote --max-restarts=0") as it:
        it.order("raise out of luck")
        node = it.start("--log-dir=/dev/null")
        assert node.wait() == 1
        assert "error     : ValueError: out of luck" in node.stderr, node.stderr
        assert "--max-restarts 0" in node.stderr


def test_an_error_of_all_ranks_that_comes_back_before_the_first_step_ends_the_job(tmp_path):
    """Its text differs each time, its type and its place do not; all ranks have it. Two starts."""
    with job(tmp_path, "--standalone --no-zygote --nproc-per-node=2") as it:
        node = it.start()
        for generation in (0, 1):
            it.order("ignore-term", generation=generation)  # none is stopped before it has failed
            it.wait_for(
                lambda g=generation: len(it.lines(event="ignoring", generation=g)) == 2, "both"
            )
            for rank in (0, 1):
                it.order("raise no such file: /tmp/PID", generation=generation, rank=rank)
        assert node.wait(60) == 64
        assert len(it.lines(event="start")) == 4
        last = node.stderr.partition("obedient.py FAILED in generation 1: ")[2]
        title, _, block = last.partition("\n")
        assert title.startswith("same error 2 times without progress (obedient.py:")
        assert title.endswith(" in <module>); giving up")
        assert "error     : ValueError: no such file" in block


def test_a_node_whose_preflight_check_fails_joins_when_it_succeeds(tmp_path):
    """It hosts the rendezvous meanwhile. The next check is five seconds after the first."""
    mended = tmp_path / "mended"
    check = tmp_path / "check"
    check.write_text(f"#!/bin/sh\ntest -e {mended} || {{ echo GPU 3 is gone; exit 3; }}")
    check.chmod(0o755)
    with job(tmp_path / "job", "--nnodes=1:2") as it:
        host = it.start(f"--preflight={check}")
        it.start()
        assert len(it.world(0, 1)) == 1
        failed = "The --preflight check failed (exit code 3): this node stays out of training"
        assert failed in host.stderr, it.said()
        assert "Last lines of its output:\n  GPU 3 is gone" in host.stderr
        mended.touch()
        it.world(1, 2)
        it.order("finish")
        assert [node.wait() for node in it.nodes] == [0, 0]


def test_node_kill_then_scale_up_then_leave(tmp_path):
    """The life of an elastic job; ranks of survivors keep their order. Four agents."""
    with job(tmp_path, "--nnodes=1:3 --nproc-per-node=2") as it:
        first = it.start()
        it.world(0, 2)
        second = it.start()
        workers = it.world(1, 4)

        second.kill()
        third_generation = it.world(2, 2)
        assert [worker["node_rank"] for worker in third_generation] == [0, 0]
        for worker in workers:
            poll_for(lambda pid=worker["pid"]: not alive(pid), what=f"{worker} gone")

        # Both come into one world: the leader waits for a node that it knows and that warms up.
        go, warm_up = tmp_path / "go", tmp_path / "warm-up"
        warm_up.write_text(f"#!/bin/sh\nuntil test -e {go}; do sleep 0.05; done")
        warm_up.chmod(0o755)
        third = it.start(f"--preflight={warm_up}")
        poll_for(lambda: first.events("node-joined")[2:], what="the leader knows the third")
        fourth = it.start()
        poll_for(lambda: first.events("node-joined")[3:], what="the leader knows the fourth")
        go.touch()
        it.world(3, 6)
        third.process.terminate()
        assert third.wait() == 143
        it.world(4, 4)
        it.order("finish")
        assert [first.wait(), fourth.wait()] == [0, 0], it.said()
        overs = [
            (record["kind"], record["generation"]) for record in first.events("generation-over")
        ]
        assert overs == [("resize", 0), ("node-failure", 1), ("resize", 2), ("leave", 3)]
        assert "0 of 100" not in first.stderr


def test_bad_settings_are_refused_in_one_sentence_before_anything_starts(tmp_path):
    (tmp_path / "short").write_text("short")
    refused = {
        f"--rdzv-secret-file={tmp_path}/short": f"--rdzv-secret-file {tmp_path}/short",
        "--metrics-address=0.0.0.0:0": "give --metrics-token-file",
        "--dashboard --dashboard-token-file=/no/file": "Cannot read --dashboard-token-file /no/fi",
        "--preemption=kubernetes": "--preemption kubernetes needs a pod with a service account",
    }
    with job(tmp_path / "job", "--nnodes=1 --no-zygote") as it:
        for flags in refused:
            it.nodes.clear()  # each is a job of its own
            it.directory = tmp_path / flags[2:9]
            node = it.start(flags)
            assert node.wait() == 64, node.stderr
            (line,) = node.stderr.splitlines()
            assert refused[flags] in line
        assert it.lines() == []


@pytest.mark.slow
def test_a_joiner_waits_for_a_late_host_and_places_are_kept_in_static_mode(tmp_path):
    flags = "--nnodes=2 --rdzv-backend=static --no-zygote"
    with job(tmp_path, flags) as it:
        joiner = it.start("--node-rank=1 --rdzv-conf=is_host=false")
        poll_for(lambda: joiner.events("agent-started"), what="the joiner is there")
        host = it.start("--node-rank=0")
        workers = it.world(0, 2)
        assert [worker["node_rank"] for worker in workers] == [0, 1]
        it.order("finish")
        assert [joiner.wait(), host.wait()] == [0, 0], it.said()


def test_a_frozen_agent_is_given_up_and_stops_its_workers_when_it_wakes(tmp_path):
    # Both begin together, however long the second takes to come: that is what --settle is for.
    with job(tmp_path, "--nnodes=1:2 --settle=60 --lease=2 --no-zygote") as it:
        first, second = it.start(), it.start()
        workers = it.world(0, 2)
        os.kill(second.agent_pid, signal.SIGSTOP)
        try:
            it.world(1, 1)
        finally:
            os.kill(second.agent_pid, signal.SIGCONT)
        theirs = next(w for w in workers if w["node_rank"] == 1)
        poll_for(lambda: not alive(theirs["pid"]), what="its old worker is stopped")
        it.world(2, 2)
        assert second.events("lease-lost")
        it.order("finish")
        assert [first.wait(), second.wait()] == [0, 0], it.said()


def test_a_stubborn_worker_is_killed_after_the_shutdown_timeout_on_restarts_too(tmp_path):
    """Before that, signals of the user's reach all workers."""
    with job(tmp_path, "--standalone --nproc-per-node=2 --shutdown-timeout=0.5") as it:
        node = it.start()
        workers = it.world(0, 2)
        poll_for(lambda: node.events("workers-started"), what="the agent knows them")
        os.kill(node.pid, signal.SIGUSR1)
        poll_for(lambda: it.lines(event="signal", signal=10)[1:], what="both were told")
        it.order("ignore-term", generation=0, rank=0)
        poll_for(lambda: it.lines(event="ignoring"), what="SIGTERM is ignored")
        it.order("exit 1", generation=0, rank=1)
        it.world(1, 2)
        assert not alive(workers[0]["pid"])
        stopped = node.events("workers-stopped")[0]["seconds"]
        assert 0.5 <= stopped < 25.0, "it has 30 seconds where nothing is said"
        node.process.send_signal(signal.SIGINT)
        assert node.wait() == 130


def test_the_end_of_the_host_and_a_wrong_job_id_are_reported_in_a_sentence(tmp_path):
    """Waits for the end of a lease and for nodes that do not come."""
    flags = "--nnodes=1:2 --settle=60 --lease=2 --wait-for-nodes=4 --no-zygote"
    with job(tmp_path, flags) as it:
        host, other = it.start(), it.start()
        it.world(0, 2)
        stranger = it.start("--rdzv-id=another")
        assert stranger.wait() == 64
        assert f"belongs to job 'job{it.port}', not to 'another'" in stranger.stderr
        assert "its own port" in stranger.stderr
        assert "Traceback" not in stranger.stderr
        differs = it.start("--nnodes=2")
        assert differs.wait() == 64
        assert "disagree about --nnodes (2 on this node, 1:2 in the job)" in differs.stderr
        assert "Traceback" not in differs.stderr
        host.kill()
        assert other.wait() == 171
        assert "1 of 2 nodes are not a majority" in other.stderr
        assert "--two-node-takeover lets the other node continue" in other.stderr
        assert not any(alive(line["pid"]) for line in it.lines(event="start"))


@pytest.mark.slow
def test_newcomers_wait_for_a_checkpoint_where_they_are_told_to(tmp_path):
    """A file that has changed just now is no checkpoint yet, which takes seconds."""
    checkpoint = tmp_path / "last.pt"
    with job(tmp_path, f"--nnodes=1:2 --no-zygote --grow=after-checkpoint:{checkpoint}") as it:
        first = it.start()
        it.world(0, 1)
        second = it.start()
        poll_for(lambda: second.events("world-formed"), what="the newcomer has seen the world")

        saved = [0.0]

        def save_and_look() -> bool:
            """A checkpoint every few seconds: one that is just being written does not count."""
            if time.monotonic() > saved[0] + 3:
                saved[0] = time.monotonic()
                checkpoint.write_text("weights")
            return not it.world_is(0)

        poll_for(save_and_look, what="a resize after a checkpoint")
        it.world(1, 2)
        it.order("finish")
        assert [first.wait(), second.wait()] == [0, 0], it.said()


@pytest.mark.parametrize("flags", ["", "--no-zygote"])
def test_a_job_that_nohup_starts_in_the_background(tmp_path, flags):
    """It survives the end of its terminal, and its workers can be interrupted all the same."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    with job(tmp_path, f"--standalone {flags}") as it:
        before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
        node = it.start()
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
        (worker,) = it.world(0, 1)
        assert not signals_ignored_by(worker["pid"]) & set(ignored)
        os.kill(node.pid, signal.SIGHUP)
        it.order("exit 3", generation=0)
        it.world(1, 1)
        os.kill(node.pid, signal.SIGINT)
        assert node.wait() == 128 + signal.SIGINT, node.stderr


def signals_ignored_by(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_program_is_restarted_without_python(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", with_light_torch()["PYTHONPATH"])
    with job(tmp_path, "--standalone --no-python") as it:
        node = it.start(script=[sys.executable, *it.command()])
        it.world(0, 1)
        it.order("exit 4", generation=0)
        it.world(1, 1)
        it.order("finish")
        assert node.wait() == 0, node.stderr


@pytest.mark.slow
def test_twenty_generations_leak_nothing(tmp_path):
    with job(tmp_path, "--standalone --nproc-per-node=2") as it:
        node = it.start()
        it.world(0, 2)
        agent = node.agent_pid

        def held() -> tuple[int, int, int]:
            children = f"/proc/{agent}/task/{agent}/children"
            with open(children) as file:
                return (
                    len(file.read().split()),
                    len(os.listdir(f"/proc/{agent}/task")),
                    len(os.listdir(f"/proc/{agent}/fd")),
                )

        before = None
        for generation in range(20):
            workers = it.world(generation, 2)
            poll_for(lambda g=generation: len(node.events("workers-started")) == g + 1, what="up")
            if generation == 1:
                # With the preforks, which are made once nobody asks the zygote for workers: zygote,
                # store host, two workers and two preforks.
                poll_for(lambda: held()[0] == 6, what="preforks")
                before = held()
            os.kill(workers[generation % 2]["pid"], signal.SIGKILL)
        it.world(20, 2)
        poll_for(lambda: held() == before, what=f"{held()} to be {before} again")
        it.order("finish")
        assert node.wait() == 0, node.stderr


def test_a_join_and_a_leave_while_scripts_are_ending_repeat_nothing(tmp_path):
    """All work is done, and the interpreters are about to exit."""
    with job(tmp_path, "--nnodes=2:3 --settle=0.05") as it:
        host, leaver = it.start(), it.start()
        it.world(0, 2)
        it.order("finish slowly")
        poll_for(lambda: len(it.lines(event="finish")) == 2, what="both scripts return")
        joiner = it.start()
        poll_for(lambda: joiner.events("zygote-ready"), what="a node that could start workers")
        leaver.process.terminate()
        poll_for(lambda: host.events("node-leaving"), what="the leader sees the leave")
        it.give("end")
        assert leaver.wait() == 143, it.said()
        assert (host.wait(), joiner.wait()) == (0, 0), it.said()
        assert len(it.lines(event="start")) == 2, it.said()


def test_the_same_command_runs_the_job_again(tmp_path):
    """After a failure, and after success."""
    with job(tmp_path, "--nnodes=1:2 --settle=0.1 --lease=1 --no-zygote --max-restarts=0") as it:
        it.order("exit 3")
        assert it.start().wait() == 1
        it.order("finish")
        for _ in range(2):
            assert it.start().wait() == 0, it.said()
    assert len(it.lines(event="finish")) == 2


def test_the_same_commands_run_a_job_of_three_nodes_again(tmp_path, monkeypatch):
    """Each node has its own runtime directory, as if on its own machine. The host was killed before
    the end, and its voter file is left; the next nodes start while the last host still answers."""
    flags = "--nnodes=2:3 --settle=0.3 --lease=1.5 --no-zygote"
    with job(tmp_path / "job", flags) as it:

        def start(machine: str) -> Node:
            (tmp_path / machine).mkdir(mode=0o700, exist_ok=True)
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / machine))
            return it.start("--settle=60")

        machines = ["endpoint", "another", "other"]
        nodes = {name: start(name) for name in machines}
        it.world(0, 3)
        nodes.pop("endpoint").kill()
        poll_for(lambda: it.lines(event="start", world_size=2), what="the others continue")
        it.order("finish")
        poll_for(
            lambda: any(node.process.poll() is not None for node in nodes.values()),
            what="the first node ends",
        )
        again = [start(name) for name in machines]
        assert {node.wait() for node in (*nodes.values(), *again)} == {0}, it.said()
        assert len(it.lines(event="finish")) == len(nodes) + len(again)


# --- a script that asks `torchelastic.leaving()` -------------------------------------------------

SCRIPT = """
import signal, sys, time, torchelastic
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("trains", flush=True)
deadline = time.monotonic() + 60
while (notice := torchelastic.leaving()) is None:
    assert time.monotonic() < deadline
    time.sleep(0.01)
print(f"saved: {notice.reason}, {notice.seconds:.0f} s left", flush=True)
sys.exit(1)
"""


def test_a_script_saves_and_exits_when_its_node_leaves(tmp_path):
    script, notice = tmp_path / "train.py", tmp_path / "notice"
    script.write_text(SCRIPT)
    with job(tmp_path / "job", f"--nnodes=1 --preemption=file={notice}") as made:
        node = made.start(script=[str(script)])
        poll_for(lambda: "trains" in node.stdout, what="the script")
        notice.write_text("60 spot reclaim")
        assert node.wait() == 143
        assert re.search(r"saved: spot reclaim, 5[0-8] s left", node.stdout), node.stdout
        assert "left the job (spot reclaim)" in node.stderr


def test_a_sigterm_after_a_notice_shortens_the_time(tmp_path):
    """A script that saves until the notice's deadline would be killed with its agent."""
    script, notice = tmp_path / "train.py", tmp_path / "notice"
    script.write_text(SCRIPT.replace("sys.exit(1)", "time.sleep(60)"))
    flags = f"--nnodes=1 --preemption=file={notice} --shutdown-timeout=0.5"
    with job(tmp_path / "job", flags) as made:
        node = made.start(script=[str(script)])
        poll_for(lambda: "trains" in node.stdout, what="the script")
        notice.write_text("60 spot reclaim")
        poll_for(lambda: "saved" in node.stdout, what="the script has seen the notice")
        os.kill(node.pid, signal.SIGTERM)
        assert node.wait(30) == 143
