"""Decisions of the launcher before and after the agent runs."""

import pickle
import sys

import pytest
from torch.distributed.elastic.multiprocessing import errors as of_torch

from torchelastic.config import Entry, LaunchConfig
from torchelastic.errors import (
    ConfigError,
    JobInterrupted,
    NotEnoughNodes,
    RendezvousLost,
    TorchElasticError,
)
from torchelastic.events.failure import Failure
from torchelastic.launcher.child_failed import process_failure
from torchelastic.launcher.launch_job import Ended, completed, entrypoint_name, make_entry
from torchelastic.multiprocessing.errors import ChildFailedError, ErrorHandler, record
from torchelastic.rendezvous.world import World
from torchelastic.worker import error_file


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
def test_entry_of_a_script_for_this_python_is_a_script_else_a_program(
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
def test_entry_that_cannot_be_pickled_is_refused(entrypoint, args, tmp_path):
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


TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 1\nRuntimeError: boom\n'


def failure(rank, **changes):
    facts = {
        "generation": 1,
        "node": "node-a",
        "rank": rank,
        "local_rank": rank,
        "pid": 42,
        "exitcode": 1,
        "message": "RuntimeError: boom",
        "traceback": TRACEBACK,
        "error_file": "/on/another/machine/error.json",
        "wall_time": 1.5,
    }
    return Failure(**{**facts, **changes})


def error_of(cause, *others):
    reason = f"{cause.sentence()}; no restarts left"
    world = World(generation=1, phase="closed", cause=cause, consequences=others, reason=reason)
    return Ended(1, reason, world, None, {}).error("train")


def test_failed_workers_are_torchs_error_with_the_first_failure_that_the_nodes_agreed_on():
    other = failure(0, message="killed by SIGABRT", exitcode=-6, wall_time=1.0)
    error = error_of(failure(1, wall_time=9.0), other)

    assert isinstance(error, ChildFailedError)
    assert isinstance(error, of_torch.ChildFailedError)
    assert isinstance(error, TorchElasticError)
    assert set(error.failures) == {0, 1}
    for known in (error, pickle.loads(pickle.dumps(error))):
        assert known.get_first_failure()[0] == 1
        text = str(known)
        assert "train FAILED: no restarts left\n" in text
        root = text.index("Root Cause (first observed failure):")
        assert root < text.index("rank      : 1 (local_rank: 1)") < text.index("RuntimeError: boom")
        assert text.index("rank 0 on") > text.index("rank      : 1")
        assert "SIGABRT" in text


def test_first_failure_of_a_lost_node_is_the_earliest_worker():
    lost = failure(-1, local_rank=-1, wall_time=0.0)
    error = error_of(lost, failure(0, wall_time=9.0), failure(1, wall_time=8.0))
    assert set(error.failures) == {0, 1}
    assert error.get_first_failure()[0] == 1


def test_process_failure_has_all_that_the_agents_know(tmp_path):
    here = tmp_path / "error.json"
    here.touch()
    mine = process_failure(failure(3, local_rank=1, error_file=str(here)))
    assert isinstance(mine, of_torch.ProcessFailure)
    assert (mine.local_rank, mine.pid, mine.exitcode, mine.timestamp) == (1, 42, 1, 1)
    assert mine.message["message"] == "RuntimeError: boom"
    assert mine.message["extraInfo"] == {"py_callstack": TRACEBACK, "timestamp": "1"}
    assert mine.error_file_data == {"message": mine.message}
    assert mine.error_file == str(here)
    killed = process_failure(failure(0, exitcode=-9, message="killed by SIGKILL", traceback=""))
    assert (killed.message, killed.signal_name()) == ("killed by SIGKILL", "SIGKILL")
    assert killed.error_file == "<N/A>"


def test_error_without_an_agent_is_worded_by_torch():
    early, late = (process_failure(failure(rank, wall_time=9.0 - rank)) for rank in (1, 0))
    error = ChildFailedError("train", {0: late, 1: early})
    assert error.get_first_failure() == (1, early)
    assert str(error) == str(of_torch.ChildFailedError("train", {0: late, 1: early}))


@pytest.mark.parametrize("is_here", [True, False])
def test_record_copies_the_error_file_of_the_first_failure_if_it_is_here(
    is_here, monkeypatch, tmp_path
):
    own, child = tmp_path / "error.json", tmp_path / "child.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own))
    error_file.write(str(child), "ValueError: the cause", TRACEBACK)
    error = error_of(failure(0, error_file=str(child if is_here else "/elsewhere")))
    handler = ErrorHandler()
    monkeypatch.setattr(handler, "initialize", lambda: None)  # pytest has a fault handler

    def main():
        raise error

    with pytest.raises(ChildFailedError) as caught:
        record(main, error_handler=handler)()
    assert caught.value is error
    assert own.exists() == is_here
    assert not is_here or error_file.read(str(own)).message == "ValueError: the cause"


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
