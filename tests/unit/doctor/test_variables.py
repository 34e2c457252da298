import pytest

from torchelastic.config import LaunchConfig
from torchelastic.doctor.finding import Severity
from torchelastic.doctor.variables import variables

ONE = LaunchConfig()
TWO = LaunchConfig(2, 2, rdzv_endpoint="node1:29400")
KNOWN = ("PET_NNODES", "PET_RDZV_ENDPOINT")


def judged(environ, config=ONE, used=(), overridden=()):
    found = variables(environ, config, used, overridden, KNOWN)
    return [(finding.verdict, finding.found) for finding in found]


def test_variables_that_are_used_are_named():
    ((verdict, found),) = judged({"PET_NNODES": "2"}, TWO, used=["PET_NNODES"])
    assert (verdict, found) == (Severity.OK, "Flags are set by PET_NNODES.")
    assert judged({"HOME": "/"})[0][0] is Severity.OK


@pytest.mark.parametrize(
    ("environ", "config", "words"),
    [
        ({"PET_NNODE": "2"}, TWO, "No flag reads PET_NNODE"),
        ({"MASTER_ADDR": "a", "WORLD_SIZE": "8"}, ONE, "MASTER_ADDR, WORLD_SIZE will be ignored"),
        ({"TORCHELASTIC_FAULTS": "kill@place=step.end"}, ONE, "fail on purpose"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, ONE, "a worker hangs without an error"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, ONE, "a worker hangs without an error"),
        # Scripts write the place to meet down so, and pass it on.
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}, TWO, None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ONE, None),
        ({"MASTER_ADDR": ""}, ONE, None),
    ],
)
def test_what_was_forgotten_or_does_harm_is_a_warning(environ, config, words):
    ((verdict, found),) = judged(environ, config)
    assert verdict is (Severity.WARNING if words else Severity.OK)
    assert (words or "") in found


def test_a_variable_that_the_command_line_contradicts():
    ((verdict, found),) = judged({"PET_NNODES": "3"}, TWO, overridden=["PET_NNODES"])
    assert (verdict, "overrides PET_NNODES" in found) == (Severity.WARNING, True)
