"""The public names, and what it costs to get at them."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import torchelastic

ROOT = Path(__file__).parents[1]
PROGRAM = str(Path(sys.executable).with_name("torchelastic"))
COMMANDS = {
    "torchelastic": [],
    "torchelastic run": ["run"],
    "torchelastic status": ["status"],
    "torchelastic rendezvous": ["rendezvous"],
    "torchelastic rendezvous serve": ["rendezvous", "serve"],
}
MODULES = ["torchelastic.distributed.run", "torchelastic.distributed.launch"]
CPU_SECONDS = 0.150


def test_public_names():
    assert torchelastic.__all__ == [
        "Coordinator",
        "LaunchConfig",
        "NonRetryableException",
        "SimpleWorkerStats",
        "State",
        "StopException",
        "TorchState",
        "WorkerStats",
        "__version__",
        "elastic_launch",
        "run_train",
        "train",
    ]


@pytest.mark.parametrize("name", torchelastic.__all__)
def test_public_names_are_there(name):
    assert getattr(torchelastic, name) is not None
    assert name in dir(torchelastic)


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="module 'torchelastic' has no attribute 'gone'"):
        _ = torchelastic.gone


def test_the_version_is_that_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1] == torchelastic.__version__


REPORT = """
import atexit, sys
slow = {"asyncio", "numpy", "torch"}
atexit.register(lambda: print(*sorted(slow & {*sys.modules}), file=sys.stderr))
"""


def imported_by(code):
    """Which of the slow modules a piece of code imports."""
    ended = subprocess.run(
        [sys.executable, "-c", REPORT + code], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.split()


def test_importing_the_package_imports_nothing_slow():
    assert imported_by("import torchelastic, torchelastic.config; dir(torchelastic)") == []


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_help_imports_nothing_slow(argv):
    assert imported_by(f"from torchelastic.cli import main; sys.exit(main({[*argv, '-h']}))") == []


def test_the_agent_imports_no_torch():
    assert imported_by("import torchelastic.agent.agent") == ["asyncio"]


@pytest.mark.parametrize("module", MODULES)
def test_help_of_the_modules_imports_nothing_slow(module):
    assert imported_by(f"from {module} import main; sys.exit(main(['--help']))") == []


def cpu_seconds(argv):
    """CPU time of the quickest of three runs: the others were disturbed."""
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(costs)


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_help_is_quick(argv):
    assert cpu_seconds([PROGRAM, *argv, "--help"]) < CPU_SECONDS


@pytest.mark.parametrize(
    "argv",
    [[PROGRAM, "run"], *([sys.executable, "-m", module] for module in (*MODULES, "torchelastic"))],
    ids=["torchelastic run", *MODULES, "torchelastic"],
)
def test_bad_input_ends_with_exit_code_2(argv):
    ended = subprocess.run([*argv, "--bogus"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ": error: There is no " in ended.stderr
    assert ended.stderr.count("\n") == 1
