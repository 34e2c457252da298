import pytest

from torchelastic.config import LaunchConfig
from torchelastic.doctor import network
from torchelastic.doctor.finding import Verdict
from torchelastic.doctor.network import Name, nccl_matches

OK, WARNING, FAULT = Verdict.OK, Verdict.WARNING, Verdict.FAULT
ONE = LaunchConfig()
TWO = LaunchConfig(2, 2, rdzv_endpoint="node1:29400")
THERE = ["lo", "eth0", "eth1", "docker0"]


@pytest.mark.parametrize(
    ("known", "config", "verdict", "words"),
    [
        (Name("a", ["10.0.0.1"], ["10.0.0.1"], 0.0, "10.0.0.1"), TWO, OK, "'a' is 10.0.0.1"),
        # What Debian writes into /etc/hosts does no harm: another address is told.
        (Name("a", ["127.0.1.1"], [], 0.0, "10.0.0.1"), TWO, OK, "told 10.0.0.1 instead"),
        (Name("a", None, [], 0.0, "10.0.0.1"), TWO, OK, "means nothing here"),
        (Name("a", ["127.0.1.1"], [], 0.0, None), TWO, FAULT, "no address"),
        (Name("a", ["127.0.1.1"], [], 0.0, None), ONE, OK, "one node needs no more"),
        (Name("a", ["10.0.0.1"], ["10.0.0.1"], 5.0, "10.0.0.1"), ONE, WARNING, "took 5.0 s"),
    ],
)
def test_names(known, config, verdict, words):
    found = network.name(known, config)
    assert found.verdict is verdict
    assert words in found.found


def test_a_local_address_that_is_given_is_what_the_others_are_told():
    config = LaunchConfig(2, 2, rdzv_endpoint="node1:29400", local_addr="node2.cluster")
    found = network.name(Name("a", ["127.0.1.1"], [], 0.0, None), config)
    assert (found.verdict, "node2.cluster" in found.found) == (OK, True)


@pytest.mark.parametrize(
    ("variables", "config", "gpus", "verdicts"),
    [
        ({}, TWO, True, []),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, TWO, False, [OK]),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, TWO, False, [OK]),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, TWO, False, [FAULT]),
        ({"GLOO_SOCKET_IFNAME": "eth"}, TWO, False, [FAULT]),  # gloo takes whole names only
        ({"GLOO_SOCKET_IFNAME": "lo"}, TWO, False, [FAULT]),
        ({"GLOO_SOCKET_IFNAME": "lo"}, ONE, False, [OK]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, TWO, True, [OK]),
        ({"NCCL_SOCKET_IFNAME": "ib"}, TWO, True, [FAULT]),
        ({"NCCL_SOCKET_IFNAME": "ib"}, TWO, False, [WARNING]),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, TWO, True, [FAULT]),
    ],
)
def test_interfaces(variables, config, gpus, verdicts):
    found = network.interfaces(variables, THERE, config, gpus=gpus)
    assert [finding.verdict for finding in found] == verdicts


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^lo,docker", ["eth0", "eth1"]),
        ("^=eth0", ["lo", "eth1", "docker0"]),
    ],
)
def test_the_notation_of_nccl(value, left):
    assert nccl_matches(value, THERE) == left
