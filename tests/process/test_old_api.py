"""The APIs of 0.2 and torch with real processes: `start_processes`, `LocalElasticAgent`, and the
functions of `distributed.run` and `distributed.launch`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process import entrypoints
from tests.process.jobs import alive
from tests.support import poll_for
from torchelastic.agent.server import LocalElasticAgent, WorkerSpec, WorkerState
from torchelastic.distributed import launch, run
from torchelastic.errors import ConfigError
from torchelastic.multiprocessing import (
    MultiprocessContext,
    Std,
    SubprocessContext,
    start_processes,
)
from torchelastic.multiprocessing.errors import ChildFailedError
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.registry import get_rendezvous_handler


@pytest.fixture
def log_dir(tmp_path: Path) -> str:
    path = tmp_path / "logs"
    path.mkdir()
    return str(path)


def start(entrypoint, args, log_dir, **options):
    args = dict(enumerate(args))
    envs = {rank: {"RANK": str(rank)} for rank in args}
    return start_processes("echo", entrypoint, args, envs, log_dir, **options)


def test_functions_return_by_local_rank_and_write_to_their_files(log_dir):
    context = start(entrypoints.echo, [("a",), ("b",)], log_dir, redirects=Std.ALL)

    result = context.wait()

    assert isinstance(context, MultiprocessContext)
    assert not result.is_failed()
    assert result.return_values == {0: ("a", "0"), 1: ("b", "1")}
    assert {rank: Path(path).read_text() for rank, path in result.stdouts.items()} == {
        0: "a out\n",
        1: "b out\n",
    }
    assert Path(result.stderrs[1]).read_text() == "b err\n"
    assert not any(alive(pid) for pid in context.pids().values())
    assert context.wait() is result
    assert os.listdir(tempfile.gettempdir()) == []


def test_programs_run_with_their_arguments_as_text(log_dir):
    context = start("echo", [(1, "x"), ([2],)], log_dir, redirects={1: Std.OUT})

    result = context.wait()

    assert isinstance(context, SubprocessContext)
    assert result.return_values == {0: None, 1: None}
    assert Path(result.stdouts[1]).read_text() == "[2]\n"
    assert (result.stdouts[0], result.stderrs[1]) == ("", "")


def test_a_large_result_comes_through(log_dir):
    size = 20_000_000

    assert len(start(entrypoints.large, [(size,)], log_dir).wait().return_values[0]) == size


def test_a_teed_stream_is_kept_and_shown_with_its_name(log_dir, capfd):
    result = start(entrypoints.echo, [("a",), ("b",)], log_dir, tee={0: Std.ALL, 1: Std.OUT}).wait()

    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[echo0]:a out", "[echo1]:b out"]
    assert sorted(shown.err.splitlines()) == ["[echo0]:a err", "b err"]
    assert Path(result.stdouts[0]).read_text() == "a out\n"


def test_one_failure_stops_all(log_dir):
    context = start("sh", [("-c", "exec sleep 3600"), ("-c", "exit 3")], log_dir)

    result = context.wait()

    assert result.is_failed()
    assert result.return_values == {}
    failed = result.failures[1]
    assert set(result.failures) == {1}  # not the one that we have stopped
    assert (failed.exitcode, failed.pid, failed.message) == (3, context.pids()[1], "exit code 3")
    assert failed.error_file == "<N/A>"
    assert not alive(context.pids()[0])


def test_an_exception_is_told_without_a_decorator(log_dir):
    failed = start(entrypoints.fail, [("boom",)], log_dir, redirects=Std.ALL).wait().failures[0]

    assert failed.message["message"] == "RuntimeError: boom"
    assert "in fail" in failed.message["extraInfo"]["py_callstack"]
    assert failed.error_file == os.path.join(log_dir, "0", "error.json")


@pytest.mark.parametrize(
    ("entrypoint", "argument", "exitcode", "name"),
    [
        (entrypoints.leave, 138, 138, "<N/A>"),
        (entrypoints.die, signal.SIGKILL, -signal.SIGKILL, "SIGKILL"),
    ],
)
def test_an_exit_and_a_signal_are_failures(entrypoint, argument, exitcode, name, log_dir):
    failed = start(entrypoint, [(argument,)], log_dir).wait().failures[0]

    assert (failed.exitcode, failed.signal_name()) == (exitcode, name)


def test_exit_with_success_returns_nothing(log_dir):
    assert start(entrypoints.leave, [(0,)], log_dir).wait().return_values == {0: None}


def test_wait_gives_up_when_told_to(log_dir, tmp_path):
    context = start(entrypoints.sleep_for_ever, [(str(tmp_path / "ready"),)], log_dir)

    began = time.monotonic()
    assert context.wait(timeout=0) is None
    assert context.wait(timeout=0.05, period=60) is None
    assert time.monotonic() - began < 30
    context.close()


def test_close_ends_what_the_processes_have_started(log_dir, tmp_path):
    child = tmp_path / "child"
    script = f"sleep 3600 & echo $! > {child}.new; mv {child}.new {child}; wait"
    context = start("sh", [("-c", script)], log_dir)
    poll_for(child.exists, what="the child's pid")

    context.close()

    poll_for(lambda: not alive(int(child.read_text())), what="the end of the child")
    assert not alive(context.pids()[0])
    context.close()  # once more does no harm


def test_close_kills_who_does_not_listen(log_dir, tmp_path):
    ready = tmp_path / "ready"
    context = start(entrypoints.ignore_sigterm, [(str(ready),)], log_dir)
    poll_for(ready.exists, what="a process that ignores SIGTERM")

    context.close(timeout=0.05)

    assert not alive(context.pids()[0])
    assert context.wait().failures[0].signal_name() == "SIGKILL"


def test_close_passes_on_the_signal_it_is_given(log_dir):
    context = start("sleep", [(3600,)], log_dir)

    context.close(death_sig=signal.SIGUSR1)

    assert context.wait().failures[0].signal_name() == "SIGUSR1"


def test_if_one_cannot_start_none_is_left(log_dir):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        start("no-such-program", [(), ()], log_dir)


def test_a_function_that_cannot_be_pickled_is_refused(log_dir):
    with pytest.raises(ConfigError, match="Could not pickle"):
        start(lambda: 0, [()], log_dir, tee=Std.ALL)


def test_it_works_in_a_thread_that_waits(log_dir):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(start(entrypoints.echo, [("a",)], log_dir).wait())
    )
    thread.start()
    thread.join()

    assert results[0].return_values == {0: ("a", "0")}


@pytest.fixture
def light_torch(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", with_light_torch()["PYTHONPATH"])


def agent_for(entrypoint, *args, log_dir=None, **options):
    params = RendezvousParameters("c10d", "localhost:0", "job-1", 1, 1)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=2,
        rdzv_handler=get_rendezvous_handler(params),
        entrypoint=entrypoint,
        args=args,
        **options,
    )
    return LocalElasticAgent(spec, log_dir=log_dir)


@pytest.mark.usefixtures("light_torch")
def test_an_agent_runs_its_spec_to_success():
    agent = agent_for(entrypoints.fail_in_generation_0, "a", max_restarts=1)

    result = agent.run()

    assert (result.state, result.is_failed()) == (WorkerState.SUCCEEDED, False)
    assert result.return_values == {0: ("a", "0", "1"), 1: ("a", "1", "1")}
    group = agent.get_worker_group()
    assert group.state is WorkerState.SUCCEEDED
    assert [worker.global_rank for worker in group.workers] == [0, 1]
    assert (group.group_rank, group.group_world_size) == (0, 1)


@pytest.mark.usefixtures("light_torch")
def test_an_agent_returns_failures(log_dir):
    agent = agent_for(entrypoints.fail_on_rank_1, "boom", max_restarts=0, log_dir=log_dir)

    result = agent.run()

    assert result.is_failed()
    assert agent.get_worker_group().state is WorkerState.FAILED
    failed = result.failures[1]
    assert failed.message["message"] == "RuntimeError: boom"
    assert Path(failed.error_file).is_relative_to(log_dir)
    assert Path(failed.error_file).exists()


#: A worker that touches a file named by its rank.
TOUCH = ["--no-python", "--nproc-per-node=2", "sh", "-c", 'touch "$0/$RANK"']


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize("main", [run.main, launch.main])
def test_main_returns_after_success_and_raises_after_failure(main, log_dir):
    assert main([*TOUCH, log_dir]) is None
    assert sorted(os.listdir(log_dir)) == ["0", "1"]
    with pytest.raises(ChildFailedError, match=r"(?s)sh FAILED: .*exit code 3") as caught:
        main(["--no-python", "--nproc-per-node=1", "--max-restarts=0", "sh", "-c", "exit 3"])
    assert caught.value.failures[0].exitcode == 3
    with pytest.raises(ValueError, match="--module and --no-python exclude each other"):
        main(["--module", *TOUCH])


@pytest.mark.usefixtures("light_torch")
def test_a_namespace_is_run_and_its_output_goes_to_replaced_streams():
    args = run.parse_args(["--no-python", "--nproc-per-node=1", "sh", "-c", "echo $0; ls 0x >&2"])
    args.training_script_args += ["hello"]
    args.tee, args.max_restarts = "3", 0
    out, err = io.StringIO(), io.StringIO()

    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(ChildFailedError),
    ):
        run.run(args)

    assert out.getvalue() == "[default0]:hello\n"
    assert "[default0]:ls: " in err.getvalue()
