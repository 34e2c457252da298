"""The CI run repeats failed tests alone; those that pass then are flaky."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Each test of this project fails when run for the first time.
FAILS_ONCE = """
import os, pathlib, time
import pytest

def is_first(name):
    first = not pathlib.Path(name).exists()
    pathlib.Path(name).touch()
    return first

# In a group: pytest-xdist 3.8 waits for ever with one test left for a new process.
@pytest.mark.xdist_group("together")
def test_crashes_its_process():
    if is_first("crashes"):
        os._exit(3)

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("value", ["a@b"])
def test_in_a_group(value):
    assert not is_first("in-a-group")

@pytest.fixture
def teardown():
    yield
    assert not is_first("teardown")

def test_fails_in_teardown(teardown):
    pass

@pytest.mark.timeout(0.2)
def test_hangs():
    if is_first("hangs"):
        time.sleep(60)

def test_passes():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --dist=loadgroup -p no:randomly\n")
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.repeat_failed", "flaky", "-q", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def flaky(project: Path) -> list[str]:
    return sorted((project / "flaky").read_text().splitlines())


def test_repeat_failed_passing_the_second_time_is_flaky_and_more_than_three_fail_the_run(project):
    (project / "test_it.py").write_text(FAILS_ONCE)
    few = run(project, "-n2", "-k", "not hangs")
    expected = [
        "FLAKY test_it.py::test_crashes_its_process",
        "FLAKY test_it.py::test_fails_in_teardown",
        "FLAKY test_it.py::test_in_a_group[a@b]",
    ]
    assert (few.returncode, flaky(project)) == (0, expected), few.stdout + few.stderr
    assert all(line in few.stdout.splitlines() for line in expected)

    one_more = run(project, "-n0")  # a run that adds to the same file
    assert one_more.returncode == 1, one_more.stdout
    assert "FLAKY test_it.py::test_hangs" in flaky(project)
    assert one_more.stdout.endswith("4 flaky tests, more than 3: the run fails.\n")


def test_repeat_failed_failing_the_second_time_fails_the_run(project):
    (project / "test_it.py").write_text("def test_it():\n    assert False\n")
    done = run(project, "-n0")
    assert done.returncode == 1
    assert done.stdout.endswith("FAILED twice test_it.py::test_it\n")
    assert not (project / "flaky").exists()


def test_repeat_failed_with_a_collection_error_repeats_nothing(project):
    (project / "test_it.py").write_text(FAILS_ONCE)
    (project / "test_not_importable.py").write_text("import missing_module\n")
    done = run(project, "-n2", "--continue-on-collection-errors", "-k", "teardown")
    assert done.returncode == 1
    assert "test_it.py::test_fails_in_teardown" in done.stdout
    assert "Repeating" not in done.stdout


def test_repeat_failed_after_many_failures_repeats_nothing(project):
    (project / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', range(11))\ndef test_it(n):\n    assert 0\n"
    )
    done = run(project, "-n0")
    assert done.returncode == 1
    assert done.stdout.endswith("11 tests failed, more than 10: not repeated.\n")
