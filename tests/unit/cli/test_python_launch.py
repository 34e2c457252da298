import pytest
import torch.distributed.run

from torchelastic.cli.command_table import DISTRIBUTED_LAUNCH, DISTRIBUTED_RUN
from torchelastic.cli.parser import parse
from torchelastic.cli.python_launch import arguments_parser, parsed_from
from torchelastic.errors import ConfigError

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
