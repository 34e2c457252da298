"""The APIs of 0.2 and torch with real processes: `start_processes`, `LocalElasticAgent`, and the
functions of `distributed.run` and `distributed.launch`."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import signal
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from tests.light import with_light_torch
from tests.process import entrypoints
from tests.process.jobs import alive, job
from torchelastic.agent.server import LocalElasticAgent, WorkerSpec, WorkerState
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.distributed import launch, run
from torchelastic.multiprocessing import (
    MultiprocessContext,
    Std,
    start_processes,
)
from torchelastic.multiprocessing.errors import ChildFailedError
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.rendezvous.registry import get_rendezvous_handler
from torchelastic.utils.data import ElasticDistributedSampler

#: torch does not close the log files of programs that have ended.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def log_dir(tmp_path: Path) -> str:
    path = tmp_path / "logs"
    path.mkdir()
    return str(path)


@pytest.fixture(autouse=True)
def nothing_left():
    """torch's `start_processes` replaces signal handlers, and leaves a helper process running."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    gc.collect()  # pipes of a function that failed
    resource_tracker._resource_tracker._stop()


def start(entrypoint, args, log_dir, **options):
    args = dict(enumerate(args))
    envs = {rank: {"RANK": str(rank)} for rank in args}
    return start_processes("echo", entrypoint, args, envs, log_dir, **options)


def test_functions_return_by_local_rank_and_write_to_their_files(log_dir):
    context = start(entrypoints.echo, [("a",), ("b",)], log_dir, redirects=Std.ALL)

    result = context.wait(period=0.01)

    assert isinstance(context, MultiprocessContext)
    assert not result.is_failed()
    assert result.return_values == {0: ("a", "0"), 1: ("b", "1")}
    assert {rank: Path(path).read_text() for rank, path in result.stdouts.items()} == {
        0: "a out\n",
        1: "b out\n",
    }
    assert Path(result.stderrs[1]).read_text() == "b err\n"
    assert not any(alive(pid) for pid in context.pids().values())


def test_a_teed_stream_is_kept_and_shown_with_its_name(log_dir, capfd):
    result = start(entrypoints.echo, [("a",), ("b",)], log_dir, tee={0: Std.ALL, 1: Std.OUT}).wait(
        period=0.01
    )

    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[echo0]:a out", "[echo1]:b out"]
    assert sorted(shown.err.splitlines()) == ["[echo0]:a err", "b err"]
    assert Path(result.stdouts[0]).read_text() == "a out\n"


def test_processes_of_a_worker_get_neither_its_channel_nor_the_secret(log_dir, monkeypatch):
    for name in ("TORCHELASTIC_CHANNEL_FD", "TORCHELASTIC_SECRET_FD", "TORCHELASTIC_SECRET"):
        monkeypatch.setenv(name, "7")
    told = "echo [$TORCHELASTIC_CHANNEL_FD$TORCHELASTIC_SECRET_FD$TORCHELASTIC_SECRET]"

    result = start("sh", [("-c", told)], log_dir, redirects=Std.OUT).wait(period=0.01)

    assert Path(result.stdouts[0]).read_text() == "[]\n"


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


# --- a program written for release 0.1 -----------------------------------------------------------

USER = Path(__file__).with_name("user01.py")
STEPS = 60


def plainly_trained() -> float:
    """The sum of the parameters that one process has which takes the samples of both ranks."""
    dataset = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pairs: list[tuple[int, int]] = []
    for epoch in range(2):
        samplers = [
            ElasticDistributedSampler(dataset, num_replicas=2, rank=rank) for rank in (0, 1)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        pairs += zip(*samplers, strict=True)
    for pair in pairs[:STEPS]:
        optimizer.zero_grad()
        model(dataset[list(pair)]).square().mean().backward()
        optimizer.step()
    return sum(parameter.sum().item() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_of_01_comes_to_the_same_when_a_worker_is_killed(tmp_path, monkeypatch):
    fault = "kill@place=collective.launched,rank=1,step=30"
    monkeypatch.setenv("TORCHELASTIC_FAULTS", fault)
    with job(tmp_path / "job", "--nnodes=1 --nproc-per-node=2 --world-sizes=2") as one:
        node = one.start(script=[str(USER), str(tmp_path / "checkpoints"), str(STEPS)])
        assert node.wait(120) == 0, node.stderr
    assert [ended["exitcode"] for ended in node.events("worker-exited")] == [-9, 0, 0]
    first, second = re.findall(r"steps 60 epoch (\d+) index (\d+) sum (\S+)", node.stdout)
    assert first == second
    # An epoch has 48 samples for each of the two ranks.
    assert first[:2] == ("1", "24")
    assert float(first[2]) == pytest.approx(plainly_trained(), rel=1e-4)
    assert "][user]: __main__.train_step.success=1" in node.stdout
    manager = FileSystemCheckpointManager(tmp_path / "checkpoints")
    assert manager.get_latest_checkpoint() is not None
