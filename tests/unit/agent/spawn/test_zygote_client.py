"""What decides whether a worker may be a copy, and what the zygote finds out about itself."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest

from torchelastic.agent.spawn import startup, zygote_server
from torchelastic.agent.spawn.processes import WorkerSpawn, command_line
from torchelastic.agent.spawn.zygote_client import unlike
from torchelastic.config import Entry

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


def test_imports_that_fail_are_reported():
    assert zygote_server.import_all(["json", "no.such"]) == [
        "no.such cannot be imported: ModuleNotFoundError: No module named 'no'"
    ]


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


def test_open_devices_are_found(monkeypatch):
    assert zygote_server._devices() == []
    links = {"/proc/self/fd/7": "/dev/nvidia0", "/proc/self/fd/8": "/dev/null"}
    monkeypatch.setattr(zygote_server.glob, "glob", lambda _: list(links))
    monkeypatch.setattr(os, "readlink", links.__getitem__)
    assert zygote_server._devices() == ["/dev/nvidia0"]


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
