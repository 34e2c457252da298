"""What nodes of one job must have in common, by table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.config import Grow, LaunchConfig
from torchelastic.rendezvous.job_settings import JobSettings

CONFIG = LaunchConfig(1, 4, 8, run_id="job", rdzv_endpoint="node1:29400")
OURS = JobSettings.from_config(CONFIG)


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"nproc_per_node": 2, "role": "actor", "settle": 9.0, "max_restarts": 1}, ()),
        ({"min_nodes": 2}, ("--nnodes (1:4 on this node, 2:4 in the job)",)),
        (
            {"min_nodes": 4, "quorum": "none"},
            (
                "--nnodes (1:4 on this node, 4 in the job)",
                "--quorum (majority on this node, none in the job)",
            ),
        ),
        (
            {"two_node_takeover": True},
            ("--two-node-takeover (no on this node, yes in the job)",),
        ),
        ({"witness": "/shared"}, ("--witness (none on this node, /shared in the job)",)),
        ({"replica_size": 4}, ("--replica-size (not given on this node, 4 in the job)",)),
        ({"grow": Grow("every", 30.0)}, ("--grow (any on this node, every:30 in the job)",)),
    ],
)
def test_flags_of_the_job_are_alike_and_those_of_a_node_are_its_own(changes, differing):
    theirs = JobSettings.from_config(replace(CONFIG, **changes))
    objection = OURS.objection(theirs.to_json())
    assert bool(objection) == bool(differing) == (OURS.digest != theirs.digest)
    for words in differing:
        assert words in objection


@pytest.mark.parametrize(
    ("ours", "theirs", "may_mix"),
    [
        ("1.2.0", "1.2.3", True),
        ("1.2.0.dev0", "1.2.0", True),
        ("1.3.0", "1.2.0", False),
        ("2.2.0", "1.2.0", False),
    ],
)
def test_releases_mix_within_a_series(ours, theirs, may_mix):
    here, there = JobSettings({}, ours), JobSettings({}, theirs)
    objection = here.objection(there.to_json())
    assert (here.digest == there.digest) == may_mix == (not objection)
    if objection:
        assert f"This node runs torchelastic {ours}, but the job runs {theirs}: " in objection


def test_a_leader_that_shows_nothing_is_taken_as_it_is():
    assert OURS.objection({"node": "a"}) == ""


@pytest.mark.parametrize(
    ("nproc", "differing"),
    [
        (2, ""),
        (8, "--nproc-per-node (2 on this node, a multiple of 4 in the job)"),
        (1, "--nproc-per-node (2 on this node, 1 in the job)"),
    ],
)
def test_nodes_that_share_a_replica_have_as_many_workers(nproc, differing):
    ours, theirs = (
        JobSettings.from_config(replace(CONFIG, replica_size=4, nproc_per_node=workers))
        for workers in (2, nproc)
    )
    assert differing in ours.objection(theirs.to_json())
    assert bool(differing) == (ours.digest != theirs.digest)
