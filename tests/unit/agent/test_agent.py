"""The agent and its workers, where no process is needed."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from tests.process.jobs import alive
from tests.support import poll_for
from tests.unit.agent.cast import Workers, in_loop, place
from torchelastic.agent import preflight
from torchelastic.agent.agent import Agent
from torchelastic.agent.server import LocalElasticAgent, WorkerSpec, WorkerState
from torchelastic.agent.spawn import run_program
from torchelastic.compat.rendezvous_api import get_rendezvous_handler
from torchelastic.config import Entry, LaunchConfig, Std
from torchelastic.errors import ConfigError
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.world import World
from torchelastic.side_tasks import SideTasks


def agent_with(started=None, **config):
    """An agent in a world, whose workers note what is started."""

    async def start_standby(local_rank, world, place):
        started.append(local_rank)
        return True

    made = Agent(LaunchConfig(**config), Entry("script", "train.py"))
    made.workers = Workers(start_standby=start_standby)
    made.machine.state = SimpleNamespace(world=object(), place=0)
    made.tasks = SideTasks(made.queue.put_nowait)
    return made


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("closing", "stopping", "expected"),
    [(False, False, [1]), (True, False, []), (False, True, [])],
    ids=["in time", "the agent closes", "the workers are stopped"],
)
@in_loop
async def test_no_worker_is_started_that_nobody_would_stop(closing, stopping, expected):
    made = agent_with(started := [])
    made._closing, made.workers.stopping = closing, stopping
    made.start_standby(1)
    await settled()
    assert started == expected


@in_loop
async def test_no_worker_is_started_before_the_preflight_check_has_succeeded():
    made = agent_with(started := [], preflight="true")
    made.start_standby(1)
    await settled()
    assert started == []
    made._fit.set()
    await settled()
    assert started == [1]


# --- `--preflight`: the command, its output, its end, and the next try ---------------------------


def checked(command: str) -> tuple[str, tuple[str, ...]] | None:
    helpers: set[int] = set()
    found = asyncio.run(preflight.check(command, dict(os.environ), helpers))
    assert helpers == set()
    return found


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("true", None),
        ("echo fine", None),
        ("echo no GPU; echo gpu 3 is gone >&2; exit 3", ("exit code 3", "no GPU|gpu 3 is gone")),
        ("kill -9 $$", ("killed by SIGKILL", "")),
        ("/no/such/check", ("exit code 127", None)),
    ],
)
def test_how_a_check_ends(command, found):
    result = checked(command)
    if found is None:
        assert result is None
        return
    how, lines = result
    assert found[0] in how
    assert found[1] in (None, "|".join(lines))


def test_children_of_preflight_command_are_killed():
    how, lines = checked("sleep 600 & echo $!; exit 1")
    assert how == "failed (exit code 1)"
    poll_for(lambda: not alive(int(lines[0])), what="the end of what it started")


def test_a_check_that_does_not_end_is_killed(tmp_path, monkeypatch):
    """Its time is up when it has said something, however long that took."""
    waited, wait = [], asyncio.wait

    async def no_time(futures, timeout):
        while not (tmp_path / "said").exists():
            await asyncio.sleep(0.002)
        waited.append(timeout)
        return await wait(futures, timeout=0 if len(waited) == 1 else timeout)

    monkeypatch.setattr(run_program.asyncio, "wait", no_time)
    assert checked(f"echo waiting for the driver; touch {tmp_path}/said; sleep 600") == (
        "took longer than 300 s",
        ("waiting for the driver",),
    )
    assert waited[0] == preflight.CHECK_TIMEOUT


def test_preflight_is_repeated_after_growing_pauses(tmp_path, monkeypatch):
    slept, said = [], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            (tmp_path / "mended").touch()

    monkeypatch.setattr(preflight.asyncio, "sleep", sleep)
    command = f"test -e {tmp_path}/mended || {{ echo no GPU; exit 3; }}"
    asyncio.run(
        preflight.until_passed(command, dict(os.environ), set(), lambda *told: said.append(told))
    )
    assert slept == [5.0, 10.0, 20.0]
    assert said[1] == (
        "failed (exit code 3)",
        "The --preflight check failed (exit code 3): this node stays out of training; the next "
        "check is in 10 s. Last lines of its output:\n  no GPU",
    )


# --- The names of the 0.2 agent, without running it ----------------------------------------------


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
