"""Copies of the zygote, and the helper processes of a node: what is done when they end."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from textwrap import dedent
from types import SimpleNamespace

import pytest

from tests.support import FakeClock
from tests.unit.agent.cast import Workers, in_loop
from torchelastic.agent.lifecycle.in_process import InProcessState, Status, Worker
from torchelastic.agent.lifecycle.script import ScriptState
from torchelastic.agent.spawn import helper_processes as module
from torchelastic.agent.spawn import startup, zygote_server
from torchelastic.agent.spawn.helper_processes import (
    STEADY,
    STORE_LOST,
    HelperRestarts,
    ProcessFactory,
    StoreHost,
)
from torchelastic.agent.spawn.processes import WorkerSpawn, command_line, spawn_plain
from torchelastic.agent.spawn.zygote_client import unlike
from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import SpawnError
from torchelastic.rendezvous.world import World


def helper_restarts(workers, *, helpers=None, state=None, clock=None, said=None):
    """The keeper of the helpers of a node whose stores are at 10.0.0.1."""
    member = SimpleNamespace(store="")
    session = SimpleNamespace(
        member=member,
        backend=SimpleNamespace(addr="10.0.0.1"),
        update=lambda **changes: vars(member).update(changes),
    )
    reporter = SimpleNamespace(
        say=[].append if said is None else said.append, warmed_up=lambda *_: None
    )
    return HelperRestarts(helpers, session, workers, reporter, clock, state=lambda: state)


def of_residents():
    workers = {rank: Worker(status=Status.TRAINING, generation=1) for rank in range(3)}
    workers[0] = Worker(status=Status.STARTING)
    return InProcessState(node="n", name="n", workers=workers)


@pytest.mark.parametrize(
    ("state", "entering", "failed"),
    [
        pytest.param(ScriptState(node="n", nproc=3), (), [(0, False)], id="a script"),
        pytest.param(of_residents(), (), [], id="the group stands"),
        pytest.param(of_residents(), (0,), [], id="nobody of it"),
        pytest.param(of_residents(), (1, 2), [(1, True)], id="two on the way"),
        pytest.param(of_residents(), (2,), [(2, True)], id="one on the way"),
    ],
)
def test_a_lost_store_host_ends_a_generation_only_where_it_is_needed(state, entering, failed):
    workers = Workers(entering_since=lambda rank: 1.0 if rank in entering else None)
    helper_restarts(workers, state=state).store_host_lost()
    assert workers.failed == [(rank, STORE_LOST, alive) for rank, alive in failed]


# --- the store host ------------------------------------------------------------------------------

SERVES = "port=4000; while read -r verb; do port=$((port + 1)); echo $port; done"


def store_host_of(script):
    """A store host whose process is a shell that runs `script`."""

    async def spawn(wanted):
        shell = replace(wanted, entry=Entry("program", "/bin/sh", ("-c", script)))
        return spawn_plain(shell, python="")

    return StoreHost(spawn, dict(os.environ))


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("read -r verb; printf 40; kill -9 $$", "has ended"),
        ("read -r verb; exec >&-; exec <&-; sleep 60", "has ended"),
        ("echo Welcome to torch; sleep 60", "invalid answer: 'Welcome to torch'"),
        ("sleep 60", "has not answered for 0.2 s and is killed"),
    ],
    ids=["half a number", "it lives and is deaf", "garbage", "frozen"],
)
@in_loop
async def test_a_store_host_that_does_not_answer_with_a_port_is_ended(monkeypatch, script, told):
    monkeypatch.setattr(module, "FIRST_ANSWER_TIMEOUT", 0.2 if script == "sleep 60" else 20.0)
    host = store_host_of(script)
    await host.start()
    with pytest.raises(SpawnError, match=told):
        await host.open()
    await host.ended.wait()
    assert host.end == "killed by SIGKILL"
    await host.close()


@in_loop
async def test_the_stores_of_a_process_that_ended_are_known_to_be_lost():
    """Also where the leader has sent workers there before it knew: they fail at once."""
    host, workers = store_host_of(SERVES), Workers()
    await host.start()
    assert await host.open() == 4001
    kept = helper_restarts(workers, helpers=SimpleNamespace(stores=host))
    kept.check_store("10.0.0.1:4001", 0, alive=False)
    assert workers.failed == []
    os.kill(host.pid, signal.SIGKILL)
    await host.ended.wait()
    for store in ("10.0.0.1:4001", "10.0.0.1:4002", "10.0.0.2:4001"):
        kept.check_store(store, 3, alive=True)
    assert workers.failed == [(3, STORE_LOST, True)]
    await host.close()
    await host.start()
    assert await host.open() == 4001  # the port is in use again
    kept.check_store("10.0.0.1:4001", 0, alive=False)
    assert workers.failed == [(3, STORE_LOST, True)]
    await host.close()


@pytest.mark.parametrize(
    ("lived", "raises"), [(STEADY / 2, True), (STEADY, False)], ids=["early", "steady"]
)
@in_loop
async def test_a_store_host_that_ends_early_counts_as_a_failure(lived, raises):
    """A steady one is replaced at once; the workers of a script need the store they met at."""
    helpers = ProcessFactory(LaunchConfig(zygote=False), Entry("program", "/bin/true"), {})
    helpers.stores = store_host_of(SERVES)
    workers, clock, said = Workers(), FakeClock(), []
    state = replace(ScriptState(node="n", nproc=1), generation=3)
    kept = helper_restarts(workers, helpers=helpers, state=state, clock=clock, said=said)
    task = asyncio.create_task(kept.keep_store_host())
    while not kept.session.member.store:
        await asyncio.sleep(0.01)
    assert kept.session.member.ready
    await kept.renew_store(World(generation=3, phase="running", store="10.0.0.1:4001"))
    assert kept.session.member.store == "10.0.0.1:4002"
    first = helpers.stores.pid
    clock.advance(lived)
    os.kill(first, signal.SIGKILL)
    if raises:
        with pytest.raises(SpawnError, match=r"exited \(killed by SIGKILL\)"):
            await task
        assert kept.session.member.store == ""
    else:
        while helpers.stores.pid == first or not kept.session.member.store:
            await asyncio.sleep(0.01)
        assert said == [f"{STORE_LOST} (killed by SIGKILL): starting another one"]
        task.cancel()
    assert workers.failed == [(0, STORE_LOST, False)]
    await helpers.close()


# --- the zygote ----------------------------------------------------------------------------------


@in_loop
async def test_a_killed_zygote_is_replaced_a_few_times_with_growing_pauses(monkeypatch, caplog):
    waited, said, made = [], [], []

    class Zygote:
        def __init__(self):
            self.pid, self.warnings = 100 + len(made), []
            made.append(self)

        async def wait_ready(self):
            return 1.0

        async def killed(self):
            return "killed by SIGKILL" if len(made) < 9 else ""

        async def close(self):
            self.closed = True

    monkeypatch.setattr(module.Zygote, "start", lambda **_: Zygote())
    monkeypatch.setattr(module.asyncio, "sleep", _noting(waited))
    helpers, used = ProcessFactory(LaunchConfig(), Entry("script", "train.py"), {}), []
    helpers.serve(SimpleNamespace(use_zygote=used.append))
    await helper_restarts(None, helpers=helpers, said=said).keep_zygote()
    assert waited == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert used == made[1:]
    assert helpers.pids == {made[-1].pid}
    assert all(one.closed for one in made[:-1])
    assert said[0] == (
        "The zygote was killed by SIGKILL. Another one starts in 1 s; until it is ready, workers "
        "start as plain processes. Training is not affected."
    )
    assert "The zygote was killed 6 times (the last: killed by SIGKILL)" in caplog.text


def _noting(waited):
    async def sleep(seconds):
        waited.append(seconds)

    return sleep


# --- What decides whether a worker may be a copy, and what the zygote finds out about itself ------


SCRIPT = Entry("script", "train.py")
BASE = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/lib"}

PLAIN = {name: BASE[name] for name in BASE if name != "OMP_NUM_THREADS"}
PRELOAD = {"LD_PRELOAD": "x.so"}
SOME = frozenset({0})


@pytest.mark.parametrize(
    ("env", "zygotes", "cpus", "named"),
    [
        (BASE, BASE, None, ""),
        (BASE | {"RANK": "3", "MASTER_ADDR": "a", "CUDA_VISIBLE_DEVICES": "2"}, BASE, None, ""),
        (BASE | {"TORCHELASTIC_RESTART_COUNT": "3"}, BASE, None, ""),
        (BASE | {"MINE": "1"}, BASE, None, ""),
        (BASE | {"OMP_NUM_THREADS": "2"}, BASE, None, "OMP_NUM_THREADS"),
        (BASE | {"PYTHONPATH": "/other"}, BASE, None, "PYTHONPATH"),
        (BASE | PRELOAD, BASE, None, "LD_PRELOAD"),
        (BASE, BASE | PRELOAD, None, "LD_PRELOAD"),
        (BASE | {"MKL_DEBUG": "1"}, BASE, None, "MKL_DEBUG"),
        (BASE | {"TORCH_LOGS": "dynamo"}, BASE, None, "TORCH_LOGS"),
        (BASE | {"PYTORCH_JIT": "0"}, BASE, None, "PYTORCH_JIT"),
        # CPUs decide on threads unless the environment does.
        (BASE, BASE, SOME, ""),
        (PLAIN, PLAIN, SOME, "OMP_NUM_THREADS"),
    ],
)
def test_variables_that_act_at_import_must_be_the_zygotes(env, zygotes, cpus, named):
    reason = unlike(WorkerSpawn(local_rank=0, entry=SCRIPT, env=env, cpus=cpus), zygotes)
    assert named in reason
    assert bool(reason) == bool(named)


def test_a_program_is_no_copy():
    program = WorkerSpawn(local_rank=0, entry=Entry("program", "./train"), env=BASE, cpus=None)
    assert "not a Python" in unlike(program, BASE)


COMMANDS = {
    Entry("script", "train.py", ("--lr", "1")): ["py", "-u", "train.py", "--lr", "1"],
    Entry("module", "pkg.train", ("x",)): ["py", "-u", "-m", "pkg.train", "x"],
    Entry("program", "./train", ("x",)): ["./train", "x"],
    Entry("function", "/tmp/call"): ["py", "-u", "-m", "torchelastic.worker", "/tmp/call"],
}


def test_a_worker_shows_the_command_a_user_would_have_typed():
    assert {entry: command_line(entry, "py") for entry in COMMANDS} == COMMANDS


def test_zygote_predicts_path_of_python(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "train.py")
    monkeypatch.chdir(tmp_path)
    for program, expected in {
        "-m": tmp_path,
        "real/train.py": tmp_path / "real",
        "link.py": tmp_path / "real",
        "real": tmp_path / "real",
    }.items():
        monkeypatch.setattr(sys, "argv", [program])
        assert zygote_server.path_of_main() == str(expected)


def test_a_python_without_torchelastic_borrows_the_agents():
    """As a PYTHON_EXEC may be; -S: without the packages of this environment."""
    source = """
        try:
            import sitecustomize
        except ImportError as error:  # as Python has it without ours
            print(error)
        import sys
        print("torchelastic.worker.bootstrap" in sys.modules)
    """
    command = [sys.executable, "-S", "-c", dedent(source)]
    env = startup.environment({}, "worker")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert ended.stdout == "No module named 'sitecustomize'\nTrue\n", ended.stderr


def test_a_copy_that_comes_after_its_agents_end_ends():
    """Whoever adopts it then: with this process as its parent it must not wait for the agent."""
    source = """
        import os
        from torchelastic.agent.spawn import startup, zygote_server
        from torchelastic.system import linux

        linux.become_subreaper()
        agent = os.fork()
        if agent == 0:
            os._exit(0)
        os.waitpid(agent, 0)
        parent = os.getpid()
        pid = zygote_server.fork_orphan()
        if pid == 0:
            if os.getppid() == parent:
                zygote_server.become([], agent, {})
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    command = [sys.executable, "-c", dedent(source)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "137\n", ended.stderr
