"""Jobs on a real Ray cluster: several raylets on this machine.

Each test starts a cluster, which takes 10 s, in a process of its own (`ray_scenario.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchelastic.data import checker
from torchelastic.data.verdict import check

ROOT = Path(__file__).parents[2]

# One after the other: each has a dozen processes, and times out beside another.
pytestmark = [
    pytest.mark.needs("ray"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ray"),
]


def perform(name: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.process.ray_scenario", name, str(directory)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{(error.stdout or b'').decode()}\n{(error.stderr or b'').decode()}")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def test_training_goes_on_while_the_cluster_changes(tmp_path):
    """Three nodes; one is killed, then the controller; two are added; one is drained."""
    told = perform("changes", tmp_path)
    assert told["exitcode"] == 0
    assert told["killed"] is None
    assert told["drained"] == 143
    assert told["others"] == [0, 0, 0]
    assert told["controllers"][0] != told["controllers"][1]
    assert told["secret"] == []
    found = checker.read([tmp_path / "ledger"])
    expected = set(range(4000))
    verdict = check(found.lines, expected=expected, epochs=1, lost=found.lost)
    assert verdict.ok, str(verdict)


def test_how_a_job_ends(tmp_path):
    """Results, failures, refusals, too few resources, a driver that is killed or asked to end."""
    told = perform("ends", tmp_path)
    assert told["results"] == {"0": 0, "1": 7}
    exitcode, codes, first = told["failed"]
    assert (exitcode, codes) == (1, [1])
    assert "boom on" in first
    assert "boom on 0" in told["raised"]
    assert told["missing"][0] == 64
    assert "nowhere.py does not exist" in told["missing"][1]
    assert told["greedy"] == [170, "Fewer than 1 Ray nodes with {GPU: 1} for 1 s."]
    assert told["drivers"] == [-9, 143]


def test_the_examples_of_the_page(tmp_path):
    """Also by Ray's job server, where a job succeeds only if the training is complete."""
    told = perform("page", tmp_path)
    assert told["codes"] == [0, 1], told["said"]
    right, wrong = told["said"]
    assert "rank 0 of 1: 1 workers" in right
    assert "succeeded" in right
    assert "RuntimeError: boom" in wrong
    assert "failed" in wrong
