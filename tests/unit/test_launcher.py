"""What the launcher decides before and after the agent runs."""

import sys

import pytest

from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import (
    ConfigError,
    JobInterrupted,
    NotEnoughNodes,
    RendezvousLost,
    TorchElasticError,
)
from torchelastic.events.failure import Failure
from torchelastic.launcher.launch_job import Ended, completed, entrypoint_name, make_entry
from torchelastic.multiprocessing.errors import ChildFailedError
from torchelastic.rendezvous.world import World


def function(word):
    return word


@pytest.mark.parametrize(
    ("program", "args", "entry"),
    [
        ("echo", ("-u", 1), Entry("program", "echo", ("-u", "1"))),
        ("python", ("train.py",), Entry("program", "python", ("train.py",))),
        (sys.executable, ("train.py", "-x"), Entry("script", "train.py", ("-x",))),
        (sys.executable, ("-u", "train.py", 3), Entry("script", "train.py", ("3",))),
        (sys.executable, ("-u", "-m", "train", "-u"), Entry("module", "train", ("-u",))),
        (sys.executable, ("-c", "pass"), Entry("program", sys.executable, ("-c", "pass"))),
        (sys.executable, ("-m",), Entry("program", sys.executable, ("-m",))),
        (sys.executable, (), Entry("program", sys.executable)),
    ],
)
def test_a_script_of_this_python_starts_warm_and_anything_else_is_a_program(
    program, args, entry, tmp_path
):
    assert make_entry(program, args, tmp_path) == entry


def test_a_function_is_pickled_for_the_workers(tmp_path):
    entry = make_entry(function, ("hello",), tmp_path)

    assert entry.kind == "function"
    assert (tmp_path / "call.pickle").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("entrypoint", "args"), [(lambda: 0, ()), (function, (lambda: 0,)), (function, (sys,))]
)
def test_what_cannot_be_pickled_is_refused_with_a_reason(entrypoint, args, tmp_path):
    with pytest.raises(ConfigError, match="Could not pickle"):
        make_entry(entrypoint, args, tmp_path)


def test_workers_are_named_after_what_they_run():
    assert entrypoint_name(function, ()) == "function"
    assert entrypoint_name(sys.executable, ("-u", "train.py", "-x")) == "train.py"
    assert entrypoint_name("echo", ("x",)) == "echo"


def test_torchruns_keys_fill_fields_that_were_left_alone():
    conf = {"last_call_timeout": 7, "join_timeout": 60, "rank": 1, "store_type": "tcp"}
    config = LaunchConfig(
        max_nodes=2,
        rdzv_backend="static",
        rdzv_endpoint="node1:1",
        rdzv_configs=conf,
        wait_for_nodes=5,
    )

    made = completed(config)

    assert (made.settle, made.wait_for_nodes, made.node_rank) == (7.0, 5, 1)
    assert made.notes == ("Ignored unknown rdzv_configs: store_type.",)


def test_a_job_without_an_id_gets_one_its_other_nodes_would_get():
    alone = completed(LaunchConfig())
    together = LaunchConfig(max_nodes=2, rdzv_endpoint="node1:1234")

    assert alone.run_id != completed(LaunchConfig()).run_id
    assert completed(together).run_id == "job-1234"
    assert completed(LaunchConfig(run_id="mine")).run_id == "mine"


def test_a_rendezvous_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="Unknown rendezvous backend 'zookeeper'"):
        completed(LaunchConfig(rdzv_backend="zookeeper"))


def test_a_foreign_config_is_refused():
    with pytest.raises(ConfigError, match="object is not torchelastic"):
        completed(object())


def failure(rank, wall_time):
    return Failure(
        generation=1,
        node="node-a",
        rank=rank,
        local_rank=rank,
        pid=42,
        exitcode=1,
        message="RuntimeError: boom",
        wall_time=wall_time,
    )


def test_failed_workers_become_one_error_that_knows_the_first():
    cause, other = failure(1, wall_time=9.0), failure(0, wall_time=1.0)
    world = World(
        generation=1,
        phase="closed",
        cause=cause,
        consequences=(other,),
        reason=f"{cause.sentence()}; no restarts left",
    )

    error = Ended(1, world.reason, world, None, {}).error("train")

    assert isinstance(error, ChildFailedError)
    assert set(error.failures) == {0, 1}
    assert error.get_first_failure()[0] == 1
    assert "train FAILED: no restarts left\n" in str(error)


@pytest.mark.parametrize(
    ("exitcode", "error"),
    [
        (170, NotEnoughNodes),
        (171, RendezvousLost),
        (143, JobInterrupted),
        (137, JobInterrupted),
        (1, TorchElasticError),
        (2, TorchElasticError),
    ],
)
def test_every_other_end_has_its_error(exitcode, error):
    made = Ended(exitcode, "this is why", None, None, {}).error("train")

    assert type(made) is error
    assert str(made) == "this is why"
