"""Sharded state saved by two ranks and loaded by three, and by one: FSDP2 over gloo."""

from __future__ import annotations

import pytest

from tests.process import forked, reshard
from torchelastic.checkpoint import CheckpointStore


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_two_ranks_save_and_others_load(tmp_path, writer):
    """A writer that is a process imports torch."""
    with forked.ranks(reshard.save, [0, 1], 2, tmp_path / "checkpoints", writer) as answers:
        assert answers == {0: "saved", 1: "saved"}
    found = CheckpointStore(tmp_path / "checkpoints").list_checkpoints()
    for one in found:
        files = {path.name for path in (tmp_path / "checkpoints" / one.directory).iterdir()}
        assert files == {"__0_0.distcp", "__1_0.distcp", ".metadata", "commit.json"}
    for size in (3, 1):
        ranks = list(range(size))
        with forked.ranks(reshard.load, ranks, size, tmp_path / "checkpoints") as answers:
            own = [[0], [1], None][:size]
            assert answers == {rank: (found[0].step, own[rank]) for rank in ranks}
