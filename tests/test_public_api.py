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
COMMANDS = [[], ["run"], ["status"], ["rendezvous"], ["rendezvous", "serve"]]
MODULES = ["torchelastic.distributed.run", "torchelastic.distributed.launch"]
CPU_SECONDS = 0.150


def test_public_names():
    assert torchelastic.__all__ == [
        "Coordinator",
        "Guard",
        "LaunchConfig",
        "NonRetryableException",
        "SimpleWorkerStats",
        "State",
        "StopException",
        "TorchState",
        "WorkerStats",
        "__version__",
        "elastic_launch",
        "leaving",
        "mesh",
        "run_train",
        "train",
    ]
    assert [name for name in torchelastic.__all__ if getattr(torchelastic, name) is None] == []
    assert set(torchelastic.__all__) <= set(dir(torchelastic))
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


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        ("import torchelastic, torchelastic.config; dir(torchelastic)", []),
        ("import torchelastic.agent.agent", ["asyncio"]),
        *[
            (f"from {module} import main; sys.exit(main({[*argv, '--help']}))", [])
            for module, argv in [
                *(("torchelastic.cli", argv) for argv in COMMANDS),
                *((module, []) for module in MODULES),
            ]
        ],
    ],
)
def test_only_what_is_needed_is_imported(code, slow):
    ended = subprocess.run(
        [sys.executable, "-c", REPORT + code], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr.split()) == (0, slow)


def cpu_seconds(argv):
    """CPU time of the quickest of three runs: the others were disturbed."""
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(costs)


@pytest.mark.alone
def test_help_is_quick():
    costs = {" ".join(argv): cpu_seconds([PROGRAM, *argv, "--help"]) for argv in COMMANDS}
    assert {argv: cost for argv, cost in costs.items() if cost >= CPU_SECONDS} == {}


@pytest.mark.parametrize(
    "argv",
    [[PROGRAM, "run"], *([sys.executable, "-m", module] for module in (*MODULES, "torchelastic"))],
    ids=["torchelastic run", *MODULES, "torchelastic"],
)
def test_bad_input_ends_with_exit_code_64(argv):
    ended = subprocess.run([*argv, "--bogus"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 64
    assert ended.stdout == ""
    assert ": error: Unknown " in ended.stderr
    assert ended.stderr.count("\n") == 1
