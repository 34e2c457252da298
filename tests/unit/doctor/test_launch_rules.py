"""Each rule alone, at its edge; and launches that contradict nothing."""

import pytest

from tests.unit.cli.tables import wrong
from torchelastic.config import LaunchConfig, WorldSizes
from torchelastic.doctor.finding import Severity
from torchelastic.doctor.launch_rules import ETCD_RECONNECT, RULES, contradictions, variables
from torchelastic.rendezvous.etcd.etcd_store import RECONNECT_TIMEOUT

KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
AT_NODE = {"rdzv_endpoint": "node1:29400"}
AT_ETCD = {"rdzv_backend": "etcd", "rdzv_endpoint": "etcd1:2379", "run_id": "job"}


def launch(low=2, high=4, workers=1, **more):
    return LaunchConfig(low, high, workers, **{**AT_NODE, **more})


def told(config, environ):
    return [item for item in contradictions(config, environ) if item.verdict is not Severity.OK]


FINE = [
    (LaunchConfig(), {}),
    (launch(), {}),
    (launch(**AT_ETCD), {}),
    (launch(1, 2, two_node_takeover=True), {}),
    (launch(1, 2, quorum="none"), {}),
    (launch(1, 2, witness="/shared"), {}),
    (launch(1, 2, **AT_ETCD), {}),
    (launch(2, 2), {}),
    (launch(), KUBERNETES),
    (launch(progress_timeout=0), {}),  # off
    (launch(progress_timeout=60.0), {}),
    (LaunchConfig(progress_timeout=1.0), {}),
    (launch(wait_for_nodes=0), {}),  # for ever
    (launch(rdzv_endpoint="a,b,c"), {}),
    (launch(workers=4, world_sizes=WorldSizes.parse("8,16")), {}),
    (LaunchConfig(shutdown_timeout=600), {}),
    (launch(), {"SLURM_JOB_NUM_NODES": "4"}),
    (LaunchConfig(), {"SLURM_JOB_NUM_NODES": "1"}),
    (LaunchConfig(), {"SLURM_JOB_NUM_NODES": "many"}),
]


def test_a_launch_without_contradiction():
    assert len(contradictions(LaunchConfig(), {})) == 1
    assert wrong(told, [(*case, []) for case in FINE]) == []


CONTRADICTIONS = [
    (launch(lease=0.5), {}, "--lease 0.5"),
    (launch(progress_timeout=3.0), {}, "--progress-timeout 3 is not longer than --lease 3"),
    (launch(wait_for_nodes=30), {}, "--wait-for-nodes 30"),
    (launch(**AT_ETCD, rdzv_configs={"etcd_outage": "90"}), {}, "etcd_outage"),
    (launch(shutdown_timeout=120), KUBERNETES, "have 120 s"),
    (launch(shutdown_timeout=31), {"SLURM_JOB_ID": "1"}, "have 31 s"),
    (launch(workers=3, world_sizes=WorldSizes.parse("8")), {}, "--world-sizes 8 allows no"),
    (launch(1, 2), {}, "only the rendezvous host"),
    (launch(rdzv_endpoint="a,b"), {}, "both must be up"),
    (launch(snapshot_replicas=4), {}, "--snapshot-replicas 4"),
    (LaunchConfig(), {"SLURM_JOB_NUM_NODES": "4"}, "allocated 4 nodes"),
]


def test_a_contradiction_is_one_warning_with_what_to_do():
    assert len(RULES) == 10, "each is seen to hold above"
    assert ETCD_RECONNECT == RECONNECT_TIMEOUT
    for config, environ, words in CONTRADICTIONS:
        (found,) = told(config, environ)
        assert (found.verdict, words in found.found) == (Severity.WARNING, True), words
        assert found.advice, words


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
def test_harmful_variable_is_a_warning(environ, config, words):
    ((verdict, found),) = judged(environ, config)
    assert verdict is (Severity.WARNING if words else Severity.OK)
    assert (words or "") in found


def test_a_variable_that_the_command_line_contradicts():
    ((verdict, found),) = judged({"PET_NNODES": "3"}, TWO, overridden=["PET_NNODES"])
    assert (verdict, "overrides PET_NNODES" in found) == (Severity.WARNING, True)
