"""The names of the 0.2 agent, without running it."""

import pytest

from tests.unit.agent.support import place
from torchelastic.agent.server import LocalElasticAgent, RunResult, WorkerSpec, WorkerState
from torchelastic.compat.rendezvous_api import get_rendezvous_handler
from torchelastic.config import Std
from torchelastic.errors import ConfigError
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.world import World

HANDLER = get_rendezvous_handler(
    RendezvousParameters("c10d", "localhost:1234", "job-1", 1, 2, last_call_timeout=3)
)


def spec(**changes):
    facts = {"role": "trainer", "local_world_size": 2, "rdzv_handler": HANDLER}
    return WorkerSpec(**{**facts, "entrypoint": "echo", **changes})


def test_a_spec_has_the_defaults_and_names_of_0_2():
    made = spec()
    assert (made.args, made.max_restarts, made.monitor_interval) == ((), 3, 30.0)
    assert (made.redirects, made.tee, made.master_port) == (Std.NONE, Std.NONE, None)
    assert made.get_entrypoint_name() == "echo"
    assert spec(entrypoint=spec).get_entrypoint_name() == "spec"
    with pytest.warns(DeprecationWarning, match="fn is deprecated"):
        assert spec(entrypoint=None, fn=print).entrypoint is print


@pytest.mark.parametrize("wrong", [{"entrypoint": None}, {"local_world_size": 0}])
def test_a_spec_that_cannot_run_is_refused(wrong):
    with pytest.raises(ConfigError):
        spec(**wrong)


def test_workers_have_no_place_until_a_world_gives_them_one():
    group = LocalElasticAgent(spec()).get_worker_group()
    assert group.state is WorkerState.INIT
    assert [(one.local_rank, one.global_rank) for one in group.workers] == [(0, -1), (1, -1)]
    ours = place("b", 1, role="trainer", first_rank=3, first_role_rank=3)
    world = World(generation=0, phase="running")
    group.place(world.with_nodes([place("a", nproc=3, role="trainer"), ours]), ours)
    assert (group.group_rank, group.group_world_size) == (1, 2)
    assert [(worker.global_rank, worker.role_rank) for worker in group.workers] == [(3, 3), (4, 4)]
    assert {(worker.world_size, worker.role_world_size) for worker in group.workers} == {(5, 5)}


def test_a_rendezvous_of_another_job_is_refused_with_a_reason():
    with pytest.raises(ConfigError, match="object is not a rendezvous handler of torchelastic"):
        LocalElasticAgent(spec(rdzv_handler=object()))


def test_states_say_whether_workers_are_there_and_whether_they_failed():
    running = {state for state in WorkerState if WorkerState.is_running(state)}
    assert running == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}
    failed = {state for state in WorkerState if RunResult(state).is_failed()}
    assert failed == {WorkerState.FAILED}
