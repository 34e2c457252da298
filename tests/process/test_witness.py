"""Two nodes and a witness: either may be lost, and a cut never makes two jobs of one."""

from __future__ import annotations

import json

import pytest

from tests.process.jobs import Job, Node, job
from tests.support import poll_for

FLAGS = "--nnodes=1:2 --settle=60 --lease=2 --no-zygote"


def goes_on_alone(it: Job, node: Node, before: int = 0) -> int:
    """Wait for a world of one; its generation."""
    found = poll_for(
        lambda: [
            line for line in it.lines(event="start", world_size=1) if line["generation"] > before
        ],
        what=f"a world of one: {node.stderr}",
        timeout=60.0,
    )
    return int(found[0]["generation"])


@pytest.mark.parametrize("lost", ["host", "other"])
def test_either_of_two_nodes_may_be_lost(tmp_path, lost):
    """Two agents start, and one is killed; what the witness has kept goes with the job."""
    with job(tmp_path / "job", f"{FLAGS} --witness={tmp_path}/witness") as it:
        nodes = {"host": it.start(), "other": it.start()}
        it.world(0, 2)
        nodes.pop(lost).kill()
        ((_, left),) = nodes.items()
        goes_on_alone(it, left)
        claimed = tmp_path / "witness" / f"job{it.port}" / "0" / "after-0"
        assert json.loads(claimed.read_text())["term"] == (1 if lost == "other" else 3)
        it.order("finish")
        assert left.wait() == 0, left.stderr
        assert not claimed.exists()
        marker = tmp_path / "witness" / f"job{it.port}" / "incarnation-0"
        assert json.loads(marker.read_text())["closed"]
