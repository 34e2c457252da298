"""Every option of the installed torchrun means the same here."""

import argparse

import pytest
from torch.distributed import run

from tests.unit.cli.test_parser import EXAMPLES
from torchelastic.cli.command_table import Command
from torchelastic.cli.flags import FLAGS
from torchelastic.cli.parser import parse
from torchelastic.cli.planned_job import launch_config

#: Our parser with torchrun's defaults.
TORCHRUN = Command(
    prog="torchrun",
    about="",
    launches=True,
    defaults={"rdzv_backend": "static", "max_restarts": "0"},
)

BY_DEST = {flag.dest: flag for flag in FLAGS}
VALUES = EXAMPLES | {"duplicate_stdout_filters": "a,,b,c", "redirects": "0:1,1:3", "nnodes": "2:3"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for flag in FLAGS:
        for name in flag.variables:
            monkeypatch.delenv(name, raising=False)


ACTIONS = [
    action
    for action in run.get_args_parser()._actions
    if action.option_strings and not isinstance(action, argparse._HelpAction)
]


#: Options of the newest torchrun that the installed one may lack.
NEWEST = {"log_line_prefix_template", "print_completion"}


def as_ours(dest, value):
    """Return torch's value, converted by our flag if torch leaves it as text."""
    if isinstance(value, str):
        return BY_DEST[dest].convert(value)
    return tuple(value) if isinstance(value, list) else value


def test_every_option_of_torchrun_is_understood():
    assert {dest for dest in NEWEST if not BY_DEST[dest].torchrun} == set()
    for dest, option, nargs in [
        (action.dest, option, action.nargs)
        for action in ACTIONS
        for option in action.option_strings
        if action.dest != "print_completion"  # prints and exits
    ]:
        argv = [option, *([VALUES.get(dest, "77")] if nargs != 0 else []), "train.py", "-x"]
        theirs = vars(run.parse_args(argv))
        ours = parse(argv, TORCHRUN, {})
        assert ours.given(dest), option
        assert ours[dest] == as_ours(dest, theirs[dest]), option
        assert list(ours.command) == ["train.py", "-x"], option
        assert BY_DEST[dest].torchrun, option


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--standalone --nproc-per-node=2 train.py --lr 0.1",
        "--nnodes=2 --nproc_per_node=8 --rdzv_id=j --rdzv_backend=c10d --rdzv_endpoint=a:1 a.py",
        "--nnodes 1:4 --max-restarts 3 --rdzv-conf last_call_timeout=5 -m pkg.train -m x",
        "--nnodes=2 --node_rank=1 --master_addr=a --master_port=1 train.py",
        "train.py -- --flag -- -x",
        "train.py a -- --flag",
        "-- train.py -- --flag",
        "--redirect=3 --log-dir /tmp/x train.py",
        "-r 0:1 -t3 --local-ranks-filter 0 train.py",
        "-mr3 pkg.train",
        "--no-python bash -c true",
        # before Python 3.12.3, argparse understands no other abbreviations
        "--stand --redir 1 --te 2 --rol x --mod --nn 2 pkg.train",
    ],
)
def test_command_lines_mean_the_same(line):
    argv = line.split()
    theirs = vars(run.parse_args(argv))
    ours = parse(argv, TORCHRUN, {})
    for dest in BY_DEST.keys() & theirs.keys() - {"shutdown_timeout"}:  # torch has None for 30
        assert ours[dest] == as_ours(dest, theirs[dest]), dest
    assert list(ours.command) == [theirs["training_script"], *theirs["training_script_args"]]


def test_the_same_flags_have_variables(monkeypatch):
    for action in ACTIONS:
        if action.dest == "print_completion":
            continue
        name = f"PET_{action.dest.upper()}"
        text = "1" if action.nargs == 0 else VALUES.get(action.dest, "77")
        monkeypatch.setenv(name, text)
        theirs = vars(run.parse_args(["train.py"]))[action.dest]
        monkeypatch.delenv(name)
        without = vars(run.parse_args(["train.py"]))[action.dest]
        ours = parse(["train.py"], TORCHRUN, {name: text})
        assert ours.given(action.dest) == (theirs != without), name
        if ours.given(action.dest):
            assert ours[action.dest] == as_ours(action.dest, theirs), name


def test_torchruns_rule_for_a_single_node():
    theirs, _, _ = run.config_from_args(run.parse_args(["--master-port", "29500", "train.py"]))
    ours = launch_config(parse(["--master-port", "29500"], TORCHRUN, {}), {})
    names = (
        "min_nodes max_nodes nproc_per_node role rdzv_backend rdzv_endpoint max_restarts "
        "monitor_interval start_method local_addr event_log_handler virtual_local_rank"
    )
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ",".join(ours.signals_to_handle) == theirs.signals_to_handle
