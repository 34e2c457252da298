"""Sharded state saved by two ranks and loaded by three, or by one: FSDP2 over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchelastic.checkpoint import CheckpointStore

SCRIPT = Path(__file__).with_name("reshard.py")
PATIENCE = 110.0


def world(size, what, directory, tmp_path, writer="thread"):
    """Run all ranks to their end; their output."""
    store = tmp_path / f"store-{what}-{size}"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), what, str(directory), writer]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "STORE": str(store)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=PATIENCE)
            assert rank.returncode == 0, err
            outputs.append(out.strip())
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_two_ranks_save_and_three_load(tmp_path, writer):
    directory = tmp_path / "checkpoints"
    world(2, "save", directory, tmp_path, writer)
    store = CheckpointStore(directory)
    names = [found.directory for found in store.list_checkpoints()]
    for name in names:
        files = {path.name for path in (directory / name).iterdir()}
        assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata", "commit.json"}
    step = store.list_checkpoints()[0].step
    assert world(3, "load", directory, tmp_path) == [
        f"rank 0 of 3 loaded step {step}, own [0]",
        f"rank 1 of 3 loaded step {step}, own [1]",
        f"rank 2 of 3 loaded step {step}, own None",
    ]


@pytest.mark.slow
def test_two_ranks_save_and_one_loads(tmp_path):
    directory = tmp_path / "checkpoints"
    world(2, "save", directory, tmp_path)
    assert world(1, "load", directory, tmp_path)[0].endswith("own [0]")
