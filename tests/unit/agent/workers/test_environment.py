"""The worker's environment, by table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.agent.support import place
from torchelastic.agent.workers.environment import entry_for, node_env, standby_env, worker_env
from torchelastic.config import Entry, LaunchConfig
from torchelastic.rendezvous.world import World

NODES = (
    place("a", 0, 1, role="actor"),
    place("b", 1, 3, role="learner", first_rank=1),
    place("c", 2, 2, role="actor", first_rank=4, first_role_rank=1),
)
WHOLE = World(generation=7, start="a", phase="running", store="[fe80::1]:4321").with_nodes(NODES)
#: As node `c` may hold it: without the others.
WORLD = replace(WHOLE, nodes=NODES[2:])


def test_a_worker_of_an_unequal_world():
    config = LaunchConfig(run_id="job", max_restarts=5)
    env = worker_env({"HOME": "/h"}, config, WORLD, NODES[2], 1)
    assert env == {
        "HOME": "/h",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "NODE_RANK": "2",
        "GROUP_RANK": "2",
        "ROLE_RANK": "2",
        "ROLE_NAME": "actor",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "fe80::1",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RESTART_COUNT": "7",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_START": "a",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@pytest.mark.parametrize(
    ("size", "nproc", "shown", "standby"),
    [
        (0, 2, (None, None), (None, None)),
        (2, 2, ("2", None), ("2", None)),
        (4, 2, ("4", "1"), ("4", "0")),
    ],
)
def test_a_worker_knows_its_place_in_a_replica(size, nproc, shown, standby):
    nodes = [place(name, index, nproc) for index, name in enumerate("abcd")]
    world = World(generation=7, phase="running", store="a:1").with_nodes(nodes)
    config = LaunchConfig(1, 4, nproc, rdzv_endpoint="a", run_id="job", replica_size=size)
    names = ("TORCHELASTIC_REPLICA_SIZE", "TORCHELASTIC_REPLICA_PLACE")
    env = worker_env({}, config, world, nodes[3], 1)
    assert tuple(map(env.get, names)) == shown
    env = standby_env({}, config, world, 1, place=0)
    assert tuple(map(env.get, names)) == standby


@pytest.mark.parametrize(
    ("nodes", "backend", "host", "shown"),
    [
        (1, "static", "a", ("node0", "29511")),
        (1, "static", "", ("fe80::1", "4321")),  # at a server that is no agent
        (1, "c10d", "a", ("fe80::1", "4321")),
        (2, "static", "a", ("fe80::1", "4321")),  # whose host may be lost
    ],
)
def test_the_masters_address_of_one_node_is_the_one_that_was_given(nodes, backend, host, shown):
    config = LaunchConfig(1, nodes, run_id="job", rdzv_backend=backend, rdzv_endpoint="node0:29511")
    env = worker_env({}, config, replace(WHOLE, host=host), NODES[0], 0)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == shown


@pytest.mark.parametrize(
    ("environ", "nproc", "name", "value"),
    [
        ({}, 2, "OMP_NUM_THREADS", "1"),
        ({}, 1, "OMP_NUM_THREADS", None),
        ({"OMP_NUM_THREADS": "3"}, 2, "OMP_NUM_THREADS", "3"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, 1, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
    ],
)
def test_threads_are_limited_where_workers_share_a_node_and_what_the_user_set_stays(
    environ, nproc, name, value
):
    assert node_env(environ, LaunchConfig(nproc_per_node=nproc)).get(name) == value


@pytest.mark.parametrize(("visible", "device"), [("4,5,6", "5"), (None, "1")])
def test_a_virtual_local_rank_sees_one_device(visible, device):
    base = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    config = LaunchConfig(run_id="job", virtual_local_rank=True)
    env = worker_env(base, config, WORLD, NODES[2], 1)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env["RANK"]) == ("0", device, "5")


def test_local_rank_in_arguments():
    entry = Entry("script", "t.py", ("--gpu=${local_rank}", "x"))
    assert entry_for(entry, 3).args == ("--gpu=3", "x")
