"""examples/trackers.py: after a kill of rank 0, a tracker has one run with each step once.

Several workers import torch and a tracker: 10 to 30 s each. Each tracker is used in another mode.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from tests.process.jobs import Node, job
from tests.support import poll_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "trackers.py"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "trackers.md"
STEPS = 120
PATIENCE = 180.0

pytestmark = pytest.mark.timeout(400)


def run_and_kill(directory: Path, tracker: str, mode: str) -> str:
    """Run the example, kill the process of rank 0 in the middle of it; return the run's id."""
    with job(directory / "job", "--nproc-per-node=2") as one:
        script = [str(EXAMPLE), f"--tracker={tracker}", f"--mode={mode}", f"--steps={STEPS}"]
        node = one.start("--nnodes=1", script=script)
        poll_for(lambda: steps_of(node) > 25, what="25 steps", timeout=PATIENCE)
        ranks, pids = (node.events("workers-started")[0][name] for name in ("ranks", "pids"))
        os.kill(pids[ranks.index(0)], signal.SIGKILL)
        assert node.wait(PATIENCE) == 0, one.said()
    assert node.events("worker-failed")
    return node.events("agent-started")[0]["job"]


def steps_of(node: Node) -> int:
    return max((max(seen["steps"]) for seen in node.events("progress")), default=0)


def test_the_snippets_on_the_page_are_in_the_example():
    example = EXAMPLE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    missing = [
        block for block in blocks if block not in example and indent(block, "    ") not in example
    ]
    assert missing == []


@pytest.mark.slow
@pytest.mark.needs("tensorboard")
def test_tensorboard_shows_each_step_once_after_restart(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    run_id = run_and_kill(tmp_path, "tensorboard", "run")
    assert [path.name for path in Path("runs").iterdir()] == [run_id]
    assert len(list(Path("runs", run_id).iterdir())) >= 2  # one file of each rank 0
    shown = EventAccumulator(f"runs/{run_id}", size_guidance={"scalars": 0}).Reload()
    assert [value.step for value in shown.Scalars("loss")] == list(range(STEPS))


@pytest.mark.slow
@pytest.mark.needs("mlflow")
def test_mlflow_has_each_step_once_after_restart(tmp_path, monkeypatch):
    """Its files are read: one line for each value."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_id = run_and_kill(tmp_path, "mlflow", "keep")
    [metric] = Path("mlruns").glob("*/*/metrics/loss")
    assert (metric.parents[1] / "tags" / "torchelastic_run_id").read_text() == run_id
    steps = [int(line.split()[2]) for line in metric.read_text().splitlines()]
    assert steps == list(range(STEPS))
    assert "status: 3" in (metric.parents[1] / "meta.yaml").read_text()  # finished


@pytest.mark.slow
@pytest.mark.needs("wandb")
def test_wandb_offline_has_each_step_once_after_restart(tmp_path, monkeypatch):
    """One directory for each process that was rank 0, all of one run.

    `wandb sync` uploads them in this order, and W&B ignores a step that is not after the last.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = run_and_kill(tmp_path, "wandb", "train")
    files = sorted(Path("wandb").glob("offline-run-*/*.wandb"))
    assert len(files) >= 2
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    seen: dict[int, float] = {}
    for path in files:
        for step, loss in history_of(path):
            seen.setdefault(step, loss)
    assert sorted(seen) == list(range(STEPS))
    # No step is redone: what is written again is from the state.
    assert all(seen[step] == loss for path in files for step, loss in history_of(path))


def history_of(path: Path) -> Iterator[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {(item.key or item.nested_key[0]): item for item in record.history.item}
            yield record.history.step.num, json.loads(values["loss"].value_json)


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a log in blocks of 32 KiB, as LevelDB's, up to its end or a torn one."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if place > len(data) or kind == 0:
            return
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
