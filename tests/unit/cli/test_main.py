"""The commands from outside: exit codes, one line on stderr, the jobs passed to the agent."""

import io
import signal
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest

from torchelastic import __version__, cli
from torchelastic.cli import commands
from torchelastic.cli.command_table import BY_NAME
from torchelastic.cli.terminal import show
from torchelastic.cluster.platform import PlatformFacts
from torchelastic.config import Entry
from torchelastic.events import job_registry

distributed_run = partial(cli.run_program, "DISTRIBUTED_RUN")
distributed_launch = partial(cli.run_program, "DISTRIBUTED_LAUNCH")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The jobs passed to the agent, which is not started."""
    found = []

    def run_job(config, entry):
        found.append((config, entry))
        return 7

    agent = types.SimpleNamespace(run_job=run_job)
    monkeypatch.setitem(sys.modules, "torchelastic.agent.guard", agent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return found


@pytest.mark.parametrize(
    ("main", "argv", "restarts"),
    [
        (cli.main, ["run", "-j", "1x2", "train.py", "--lr", "1"], 100),
        (distributed_run, ["--nproc_per_node=2", "train.py", "--lr", "1"], 3),
        (distributed_launch, ["--use_env", "--nproc_per_node=2", "train.py", "--lr", "1"], 3),
    ],
    ids=["torchelastic run", "distributed.run", "distributed.launch"],
)
def test_a_job_reaches_the_agent_whose_code_comes_back(started, main, argv, restarts):
    assert main(argv) == 7
    ((config, entry),) = started
    assert (config.nproc_per_node, config.max_restarts) == (2, restarts)
    assert entry == Entry("script", "train.py", ("--lr", "1"))


def test_a_node_that_comes_too_late_starts_nothing_if_a_scheduler_gave_the_id(
    started, capsys, monkeypatch
):
    command = ["run", "--nnodes=1:2", "--rdzv-endpoint=n1:1", "--rdzv-id=job-1", "train.py", "7"]
    scheduler = PlatformFacts(platform="test", run_id="job-1")
    monkeypatch.setattr(commands.run, "detect", lambda environ, read: scheduler)
    directory = job_registry.directory_for("job-1", "node")
    job_registry.register(
        "job-1",
        "node",
        pid=1,
        name="n1",
        endpoint="n1:1",
        command=["train.py", "7"],
        events=directory / "events.jsonl",
    ).note_closed(50, finished=True)
    assert cli.main(command) == 0
    assert "torchelastic run: Job 'job-1' finished at step 50, " in capsys.readouterr().err
    assert started == []
    for other in (
        [*command[:-1], "8"],  # another job
        ["run", "--nnodes=1", *command[2:]],  # of one node: there is nothing to come late for
        [*command[:3], "--rdzv-id=job-2", "train.py", "7"],  # not the scheduler's id
    ):
        assert cli.main(other) == 7, other
    monkeypatch.setattr(commands.run, "detect", lambda environ, read: None)
    assert cli.main(command) == 7, "started by hand: the job runs again"


@pytest.mark.parametrize("main", [cli.main, distributed_run, distributed_launch])
def test_ctrl_c_while_a_job_is_starting_prints_no_traceback(started, monkeypatch, capsys, main):
    handlers = []
    monkeypatch.setattr(sys.modules["torchelastic.agent.guard"], "run_job", interrupt)
    monkeypatch.setattr(cli.signal, "signal", lambda *handler: handlers.append(handler))
    assert main(["run", "train.py"] if main is cli.main else ["train.py"]) == 130
    assert capsys.readouterr() == ("", "")
    assert handlers == [(signal.SIGINT, signal.SIG_IGN)], "it may come twice"


def interrupt(*_):
    raise KeyboardInterrupt


def test_bad_input_is_refused_in_one_sentence_before_anything_starts(started, capsys):
    for line in (
        "--bogus train.py",
        "--nnodes 4:1 train.py",
        "gone.py",
        "--log-dir train.py train.py",
        "-m --no-python json",
        "--preload gone train.py",
        "--rdzv-backend etcd train.py",
        "",
    ):
        assert cli.main(["run", *line.split()]) == 64, line
        out, err = capsys.readouterr()
        assert out == "", line
        assert err.startswith("torchelastic run: error: "), line
        assert err.count("\n") == 1, line
        assert err.rstrip()[-1] in ".?", line
    assert started == []


def test_the_other_commands_name_themselves(started, capsys):
    assert distributed_run(["gone.py"]) == 64
    assert distributed_launch(["gone.py"]) == 64
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": error: ")[0] for line in lines] == [
        "python -m torchelastic.distributed.run",
        "python -m torchelastic.distributed.launch",
    ]


def test_help_lists_the_commands_and_every_command_has_help(capsys):
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(argv) == 0, argv
        text = capsys.readouterr().out
        assert all(f"\n  {command} " in text for command in cli.COMMANDS), argv
    for command in cli.COMMANDS:
        for flag in ("--help", "-h"):
            assert cli.main([*command.split(), flag]) == 0, command
            assert capsys.readouterr().out.startswith(f"usage: torchelastic {command} "), command


def test_every_command_has_flags_and_a_module_that_help_does_not_import():
    assert list(BY_NAME) == list(cli.COMMANDS)
    modules = {path.stem for path in Path(commands.__path__[0]).glob("*.py")} - {"__init__"}
    assert modules == {command.code.partition(".")[0] for command in BY_NAME.values()}
    asked = "; ".join(f"main({[*name.split(), '--help']})" for name in cli.COMMANDS)
    heavy = "[name for name in sys.modules if 'cli.commands.' in name or name == 'asyncio']"
    program = f"import sys; from torchelastic.cli import main; {asked}; print({heavy})"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.splitlines()[-1:] == ["[]"], said.stderr


def test_a_command_of_two_words(capsys):
    for argv, code, sentence in (
        (["rendezvous", "--help"], 0, "  rendezvous serve   host the rendezvous"),
        (["rendezvous"], 64, "'rendezvous' is incomplete: write torchelastic rendezvous serve."),
        (["rendezvous", "x"], 64, "Unknown command 'rendezvous x': write torchelastic rendezvous"),
    ):
        assert cli.main(argv) == code, argv
        assert sentence in "".join(capsys.readouterr()), argv


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchelastic {__version__}\n"


XYZ = (
    "Unknown command 'xyz': write run, status, top, dashboard, events, logs, stacks, skipped, "
    "trace, doctor, submit, scale, delete, operator or rendezvous."
)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train.py", "Unknown command 'train.py': write torchelastic run train.py."),
        ("--gpu", "Unknown flag --gpu: flags follow a command, as in torchelastic run --gpu."),
        ("xyz", XYZ),
        ("runn", "Unknown command 'runn': did you mean run?"),
        ("rnu", "Unknown command 'rnu': did you mean run?"),
        ("rendevous", "Unknown command 'rendevous': did you mean rendezvous?"),
    ],
)
def test_an_unknown_command_is_refused(capsys, command, sentence):
    assert cli.main([command]) == 64
    assert capsys.readouterr().err == f"torchelastic: error: {sentence}\n"


def test_characters_the_terminal_lacks_are_written_out():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show("naïve \x1b", stream=stream)
    assert raw.getvalue() == b"na\\xefve \\x1b\n"
