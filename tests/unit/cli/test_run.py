"""Checks before anything starts: files, modules, programs, directories, platforms."""

import sys

import pytest
import torch.distributed.run

from tests.unit.cli.tables import not_refused, wrong
from torchelastic.cli import checks, main
from torchelastic.cli.command_table import DISTRIBUTED_LAUNCH, DISTRIBUTED_RUN
from torchelastic.cli.parser import parse
from torchelastic.cli.python_launch import arguments_parser, parsed_from
from torchelastic.config import Entry
from torchelastic.errors import ConfigError
from torchelastic.hosts import host_launcher


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with one file of each kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('a check must not run this')")
    for name in ("package/__init__.py", "runnable/__main__.py", "inner/beside.py", "inner/main.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "package/__init__.py").write_text("raise AssertionError('nor this')")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    return tmp_path


def test_entry_that_no_worker_can_run_is_refused(here):
    def check(kind, target, **environ):
        return checks.check_entry(Entry(kind, target), {"PATH": "/usr/bin:/bin", **environ})

    fine = [
        ("script", "train.py"),
        ("script", "runnable"),
        ("script", "shard-${local_rank}.py"),
        ("module", "package"),
        ("module", "package.sub"),
        ("module", "json.tool"),
        ("program", "./tool"),
        ("program", "sh"),
    ]
    assert wrong(check, [(*case, None) for case in fine]) == []
    check("module", "gone", PYTHON_EXEC="/opt/python")  # another Python's modules are not judged
    refused = [
        ("script", "gone.py", "Script 'gone.py' not found in "),
        ("script", "package", "'package' is a directory without __main__.py"),
        ("module", "gone.away", "Module 'gone.away' not found"),
        ("module", "train.py", "'train.py' is a file, not a module: remove -m."),
        ("module", "", "Module '' not found"),
        ("program", "gone", "Program 'gone' not found"),
        ("program", "./train.py", "make the file executable"),
    ]
    assert not_refused(check, refused) == []


def test_preloaded_modules_may_lie_beside_the_script(here):
    checks.check_preload(("beside", "json", "package"), Entry("script", "inner/main.py"))
    with pytest.raises(ConfigError, match="--preload: module 'beside' not found"):
        checks.check_preload(("beside",), Entry("script", "train.py"))


def test_a_log_directory_is_made_or_refused(here):
    for path in (None, "/dev/null", "a/b", "a/b"):
        checks.prepare_log_dir(path)
    assert (here / "a" / "b").is_dir()
    refused = [
        ("train.py", "--log-dir train.py is not a directory"),
        (
            "train.py/logs",
            "--log-dir train.py/logs cannot be created .Not a directory.: use another",
        ),
        ("/proc/logs", "--log-dir /proc/logs cannot be created"),
    ]
    assert not_refused(checks.prepare_log_dir, refused) == []


def test_a_log_directory_without_permissions_is_refused(monkeypatch, here):
    # The superuser may write anywhere: let the system call say what it says to others.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="is not readable and writable: change its permissions"):
        checks.prepare_log_dir("inner")


def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="runs on Linux only; this machine is darwin"):
        checks.check_platform()


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The jobs that were launched, from a directory with a script."""
    launched = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_launcher, "run_on_hosts", lambda job: launched.append(job) or 0)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "none").write_text("")
    return launched


@pytest.mark.parametrize(
    ("flags", "nodes", "workers"),
    [
        ("--hosts a,b", (1, 2), 1),
        ("--hosts a,b --nproc-per-node 8", (1, 2), 8),
        ("--hosts a,b -j 2x8", (2, 2), 8),
        # Counted on each host, whatever this machine has.
        ("--hosts a,b --nproc-per-node xpu", (1, 2), "xpu"),
        # A list that is empty at first may grow.
        ("--hosts-from none", (1, host_launcher.MOST_HOSTS), 1),
    ],
)
def test_nodes_and_workers(jobs, flags, nodes, workers):
    assert main(["run", *flags.split(), "train.py"]) == 0
    [job] = jobs
    assert (job.config.min_nodes, job.config.max_nodes) == nodes
    assert job.workers == workers
    assert job.config.rdzv_endpoint


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--hosts a,b --nnodes 9", 64),
        ("--hosts a,b --nnodes 3:9", 64),
        ("--hosts a,b --nnodes 1:9", 0),
        # Others may join there.
        ("--hosts a,b --nnodes 3 --rdzv-endpoint c:29400", 0),
        ("--hosts-from none --nnodes 3", 0),
    ],
)
def test_run_hosts_fewer_than_min_nodes_are_refused(jobs, capsys, flags, code):
    assert main(["run", *flags.split(), "train.py"]) == code
    refused = "(--nnodes), but --hosts lists 2: list more hosts, or lower --nnodes."
    assert (refused in capsys.readouterr().err) is bool(code)


# --- from Python ----------------------------------------------------------------------------------


LINES = {
    "nothing but a script": ["train.py"],
    "arguments of the script": ["train.py", "--lr", "0.1", "-m"],
    "numbers": ["--nnodes=1:4", "--nproc_per_node", "2", "--max-restarts=7", "t.py"],
    "switches": ["-m", "--standalone", "package.train"],
    "lists": ["--duplicate-stdout-filters=a,,b,c", "--rdzv-conf=timeout=5,x=1", "t.py"],
    "streams": ["-r", "3", "--tee=0:1,1:3", "--local-ranks-filter=0,2", "t.py"],
    "flags of ours": ["--settle=2", "--preload=a.b", "--dashboard=9000", "--lease=1.5", "t.py"],
}


@pytest.mark.parametrize(
    "command", [DISTRIBUTED_RUN, DISTRIBUTED_LAUNCH], ids=lambda it: it.prog[-6:]
)
@pytest.mark.parametrize("argv", LINES.values(), ids=LINES)
def test_a_namespace_means_the_same_as_its_command_line(argv, command):
    parsed = parsed_from(arguments_parser(command, {}).parse_args(argv), command)

    expected = parse(argv, command, {})
    assert parsed.values == expected.values
    assert parsed.command == expected.command
    assert parsed.strength == expected.strength


def test_variables_set_the_defaults_of_the_parser():
    parser = arguments_parser(DISTRIBUTED_RUN, {"PET_NNODES": "2:3", "PET_NO_PYTHON": "1"})

    args = parser.parse_args(["echo"])
    assert (args.nnodes, args.no_python) == ("2:3", True)
    assert parsed_from(args, DISTRIBUTED_RUN)["nnodes"] == (2, 3)
    assert parser.parse_args(["--nnodes=4", "echo"]).nnodes == "4"


def test_a_namespace_of_torch_is_accepted():
    argv = ["--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=1234", "t.py", "-x"]
    parsed = parsed_from(torch.distributed.run.parse_args(argv), DISTRIBUTED_RUN)

    expected = parse(argv, DISTRIBUTED_RUN, {})
    changed = {"nproc_per_node", "max_restarts", "monitor_interval", "rdzv_id"}
    assert {k: v for k, v in parsed.values.items() if k not in changed} == {
        k: v for k, v in expected.values.items() if k not in changed
    }
    assert (parsed["nproc_per_node"], parsed["max_restarts"]) == (1, 0), "torch's own defaults"
    assert parsed.command == ("t.py", "-x")


def test_the_namespace_has_the_types_of_torchs():
    ours = vars(arguments_parser(DISTRIBUTED_RUN, {}).parse_args(["t.py"]))
    theirs = vars(torch.distributed.run.parse_args(["t.py"]))

    assert set(theirs) <= set(ours)
    kinds = {name for name, value in theirs.items() if isinstance(value, int | float | bool)}
    assert {name for name in kinds if type(ours[name]) is not type(theirs[name])} == set()


def test_a_value_set_by_hand_is_checked_like_a_flag():
    args = arguments_parser(DISTRIBUTED_RUN, {}).parse_args(["t.py"])
    args.nproc_per_node = 0

    with pytest.raises(
        ConfigError, match=r"^--nproc-per-node '0' is not a valid number of workers"
    ):
        parsed_from(args, DISTRIBUTED_RUN)
