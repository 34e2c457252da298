"""Replicas that span nodes: a lost node takes its partner out of the world until it has another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import HERE, Job, Node, job
from tests.support import poll_for

SHARDED = HERE / "sharded.py"
KEYS = {"steps": 100_000, "slow": 0.05}
PATIENCE = 120.0

#: Five agents import torch at the same time, on however few cores.
pytestmark = pytest.mark.timeout(400)


def node_of(made: Job, generation: int, rank: int) -> Node:
    """The node whose agent has this worker."""
    pid = made.lines(event="step", generation=generation, rank=rank)[0]["pid"]
    (parent,) = re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    living = (node for node in made.nodes if node.process.poll() is None)
    return next(node for node in living if node.agent_pid == int(parent))


def by_coordinate(lines: list[dict[str, Any]]) -> dict[tuple[int, int, int], set[str]]:
    """The bits of the shards after each step, by generation, step and coordinate."""
    found: dict[tuple[int, int, int], set[str]] = {}
    for line in lines:
        key = (line["generation"], line["step"], line["rank"] % 2)
        found.setdefault(key, set()).add(line["hash"])
    return found


@pytest.mark.slow
def test_a_spare_completes_a_replica_and_broken_ones_are_combined(tmp_path):
    flags = "--nnodes=1:4 --nproc-per-node=1 --replica-size=2 --settle=60 --lease=10"
    with job(tmp_path / "job", flags, SHARDED, ledger=tmp_path / "ledger", **KEYS) as made:
        for _ in range(5):
            made.start()
        first = made.wait_steps(3, size=4, timeout=PATIENCE)
        node_of(made, first, rank=1).kill()
        again = made.wait_steps(3, size=4, after=first, timeout=PATIENCE)
        host = made.nodes[0]
        others = (node_of(made, again, rank) for rank in (0, 2))
        next(node for node in others if node is not host).kill()
        last = made.wait_steps(3, size=2, after=again, timeout=PATIENCE)
        formed = {one["generation"]: one["replica"] for one in host.events("world-formed")}
        assert [formed[generation] for generation in (first, again, last)] == [2, 2, 2]
        lines = made.lines(event="step")
    coordinates: dict[int, set[int]] = {}
    for line in lines:
        coordinates.setdefault(line["pid"], set()).add(line["rank"] % 2)
    assert all(len(found) == 1 for found in coordinates.values()), coordinates
    assert all(len(bits) == 1 for bits in by_coordinate(lines).values()), "replicas are equal"


@pytest.mark.slow
def test_a_part_of_a_lost_node_comes_from_the_memory_of_another(tmp_path):
    flags = "--nnodes=2 --nproc-per-node=1 --replica-size=2 --lease=10"
    keys = {**KEYS, "ledger": tmp_path / "ledger", "dropout": ""}
    with job(tmp_path / "job", flags, SHARDED, **keys) as made:
        host, _ = made.start(), made.start()

        def kept(generation: int) -> int:
            lines = made.lines(event="kept", generation=generation)
            last = {line["rank"]: line["step"] for line in lines}
            return min(last.values()) if len(last) == 2 else -1

        first = made.wait_steps(3, size=2, timeout=PATIENCE)
        poll_for(lambda: kept(first) > 2, what="snapshots on both nodes", timeout=PATIENCE)
        newest = kept(first)
        lost = node_of(made, first, rank=1)
        assert lost is not host
        lost.kill()
        made.start()
        last = made.wait_steps(3, size=2, after=first, timeout=PATIENCE)
        poll_for(lambda: kept(last) > 0, what="snapshots in the next world", timeout=PATIENCE)
        lines = made.lines(event="step")
    again = min(line["step"] for line in lines if line["generation"] == last)
    assert again >= newest
    assert f"continues from step {again}, from snapshots in memory: no worker" in host.stderr
    before, redone = (
        {(one["step"], one["rank"]): one["hash"] for one in lines if one["generation"] == number}
        for number in (first, last)
    )
    assert all(before[key] == redone[key] for key in before.keys() & redone.keys())
