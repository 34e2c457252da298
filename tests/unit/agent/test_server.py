"""The names of the 0.2 agent, without running it."""

import pytest

from torchelastic.agent.server import (
    LocalElasticAgent,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torchelastic.config import Std
from torchelastic.errors import ConfigError
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.registry import get_rendezvous_handler
from torchelastic.rendezvous.world import World, WorldNode

HANDLER = get_rendezvous_handler(
    RendezvousParameters("c10d", "localhost:1234", "job-1", 1, 2, last_call_timeout=3)
)


def spec(**changes):
    facts = {"role": "trainer", "local_world_size": 2, "rdzv_handler": HANDLER}
    return WorkerSpec(**{**facts, "entrypoint": "echo", **changes})


def test_a_spec_has_the_defaults_of_0_2():
    made = spec()

    assert (made.args, made.max_restarts, made.monitor_interval) == ((), 3, 30.0)
    assert (made.redirects, made.tee, made.master_port) == (Std.NONE, Std.NONE, None)


def test_the_entrypoint_has_a_name():
    assert spec().get_entrypoint_name() == "echo"
    assert spec(entrypoint=spec).get_entrypoint_name() == "spec"


def test_fn_is_the_old_name_of_entrypoint():
    with pytest.warns(DeprecationWarning, match="old name"):
        made = spec(entrypoint=None, fn=print)

    assert made.entrypoint is print


@pytest.mark.parametrize("wrong", [{"entrypoint": None}, {"local_world_size": 0}])
def test_a_spec_that_cannot_run_is_refused(wrong):
    with pytest.raises(ConfigError):
        spec(**wrong)


def test_an_agent_begins_with_workers_that_have_no_place_yet():
    group = LocalElasticAgent(spec()).get_worker_group()

    assert group.state is WorkerState.INIT
    assert [(worker.local_rank, worker.global_rank) for worker in group.workers] == [
        (0, -1),
        (1, -1),
    ]


def test_a_world_gives_every_worker_its_place():
    facts = {"name": "n", "addr": "", "role": "trainer"}
    nodes = (
        WorldNode(
            node="a",
            node_rank=0,
            nproc=3,
            local_ranks=(0, 1, 2),
            first_rank=0,
            first_role_rank=0,
            **facts,
        ),
        WorldNode(
            node="b",
            node_rank=1,
            nproc=2,
            local_ranks=(0, 1),
            first_rank=3,
            first_role_rank=3,
            **facts,
        ),
    )
    group = WorkerGroup(spec())

    world = World(generation=0, phase="running").with_nodes(nodes)
    group.place(world, nodes[1])

    assert (group.group_rank, group.group_world_size) == (1, 2)
    assert [(worker.global_rank, worker.role_rank) for worker in group.workers] == [(3, 3), (4, 4)]
    assert {(worker.world_size, worker.role_world_size) for worker in group.workers} == {(5, 5)}


def test_a_rendezvous_of_somebody_else_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="object is no rendezvous handler of this package"):
        LocalElasticAgent(spec(rdzv_handler=object()))


@pytest.mark.parametrize("state", WorkerState)
def test_states_say_whether_workers_are_there_and_whether_they_failed(state):
    assert WorkerState.is_running(state) is (state.value in ("HEALTHY", "UNHEALTHY"))
    assert RunResult(state).is_failed() is (state.value == "FAILED")
