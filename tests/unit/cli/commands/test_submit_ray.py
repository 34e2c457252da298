"""What `torchelastic submit ray` makes of its flags."""

import pytest

from torchelastic.cli.commands.submit import ray_config, ray_resources
from torchelastic.cli.options.command_table import SUBMIT_RAY
from torchelastic.cli.options.parser import parse
from torchelastic.errors import ConfigError


def parsed(flags: str):
    return parse([*flags.split(), "train.py"], SUBMIT_RAY, {})


@pytest.mark.parametrize(
    ("flags", "resources", "shape"),
    [
        ("", {}, (1, 1, 1)),
        ("--nnodes 2:4 --nproc-per-node 2", {}, (2, 4, 2)),
        ("-j 2:4x2 --num-gpus 4", {"GPU": 4}, (2, 4, 2)),
        ("--nnodes 2 --num-gpus 4 --num-cpus 8", {"CPU": 8, "GPU": 4}, (2, 2, 4)),
        ('--resources {"rack":0.5}', {"rack": 0.5}, (1, 1, 1)),
    ],
)
def test_resources_and_shape(flags, resources, shape):
    found = parsed(flags)
    assert ray_resources(found) == resources
    config = ray_config(found, resources)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == shape


def test_other_flags_and_the_name():
    config = ray_config(parsed("--nnodes 2 --max-restarts 3 --rdzv-id job-1"), {})
    assert (config.max_restarts, config.run_id) == (3, "job-1")
    assert ray_config(parsed("--nnodes 2"), {}).run_id == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rdzv-endpoint node1", "--rdzv-endpoint is chosen by torchelastic submit ray"),
        ("--standalone", "--standalone is chosen"),
        ("--nproc-per-node gpu", "counts the devices of this machine"),
    ],
)
def test_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        ray_config(parsed(flags), {})


@pytest.mark.parametrize("text", ["rack", "[1]", '{"rack": "many"}', '{"rack": -1}'])
def test_resources_that_are_none(text):
    with pytest.raises(ConfigError):
        parse(["--resources", text, "train.py"], SUBMIT_RAY, {})
