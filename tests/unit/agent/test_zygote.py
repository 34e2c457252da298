"""What decides whether a worker may be a copy, and what the zygote finds out about itself."""

import os
import sys

import pytest

from torchelastic.agent import zygote_main
from torchelastic.agent.processes import WorkerSpawn, command_line
from torchelastic.agent.zygote import unlike
from torchelastic.config import Entry

SCRIPT = Entry("script", "train.py")
BASE = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/lib"}

UNLIKE = [
    ({}, ""),
    ({"RANK": "3", "MASTER_ADDR": "node1", "CUDA_VISIBLE_DEVICES": "2"}, ""),
    ({"TORCHELASTIC_RESTART_COUNT": "3"}, ""),
    ({"MINE": "1"}, ""),
    ({"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS"),
    ({"PYTHONPATH": "/other"}, "PYTHONPATH"),
    ({"LD_PRELOAD": "x.so"}, "LD_PRELOAD"),
    ({"MKL_DEBUG": "1"}, "MKL_DEBUG"),
    ({"TORCH_LOGS": "dynamo"}, "TORCH_LOGS"),
    ({"PYTORCH_JIT": "0"}, "PYTORCH_JIT"),
]


def spawn(entry=SCRIPT, env=BASE, cpus=None):
    return WorkerSpawn(local_rank=0, entry=entry, env=env, cpus=cpus)


@pytest.mark.parametrize(("more", "named"), UNLIKE)
def test_variables_that_act_at_import_must_be_the_zygotes(more, named):
    reason = unlike(spawn(env={**BASE, **more}), BASE)
    assert reason.startswith(named)
    assert bool(reason) == bool(named)


def test_a_variable_that_the_worker_lacks_counts_too():
    assert "LD_PRELOAD" in unlike(spawn(), {**BASE, "LD_PRELOAD": "x.so"})


def test_a_program_is_no_copy():
    assert "no Python" in unlike(spawn(Entry("program", "./train")), BASE)


def test_cpus_decide_on_threads_unless_the_environment_does():
    some = frozenset({0})
    without = {name: BASE[name] for name in BASE if name != "OMP_NUM_THREADS"}
    assert unlike(spawn(cpus=some), BASE) == ""
    assert "OMP_NUM_THREADS" in unlike(spawn(env=without, cpus=some), without)


COMMANDS = {
    Entry("script", "train.py", ("--lr", "1")): ["py", "-u", "train.py", "--lr", "1"],
    Entry("module", "pkg.train", ("x",)): ["py", "-u", "-m", "pkg.train", "x"],
    Entry("program", "./train", ("x",)): ["./train", "x"],
    Entry("function", "/tmp/call"): ["py", "-u", "-m", "torchelastic.worker", "/tmp/call"],
}


@pytest.mark.parametrize("entry", COMMANDS)
def test_a_worker_shows_the_command_a_user_would_have_typed(entry):
    assert command_line(entry, "py") == COMMANDS[entry]


def test_what_python_will_put_on_its_path(monkeypatch, tmp_path):
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
        assert zygote_main.path_of_main() == str(expected)


def test_imports_that_fail_are_told():
    assert zygote_main.import_all(["json", "no.such"]) == [
        "no.such cannot be imported: ModuleNotFoundError: No module named 'no'"
    ]


def test_open_devices_are_found(monkeypatch):
    assert zygote_main._devices() == []
    links = {"/proc/self/fd/7": "/dev/nvidia0", "/proc/self/fd/8": "/dev/null"}
    monkeypatch.setattr(zygote_main.glob, "glob", lambda _: list(links))
    monkeypatch.setattr(os, "readlink", links.__getitem__)
    assert zygote_main._devices() == ["/dev/nvidia0"]
