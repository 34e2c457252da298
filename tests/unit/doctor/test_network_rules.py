from tests.unit.cli.tables import wrong
from torchelastic.config import LaunchConfig
from torchelastic.doctor import network_rules
from torchelastic.doctor.finding import Severity
from torchelastic.doctor.network_rules import Name, nccl_matches

OK, WARNING, FAULT = Severity.OK, Severity.WARNING, Severity.FAULT
ONE = LaunchConfig()
TWO = LaunchConfig(2, 2, rdzv_endpoint="node1:29400")
THERE = ["lo", "eth0", "eth1", "docker0"]


TOLD = LaunchConfig(2, 2, rdzv_endpoint="node1:29400", local_addr="node2.cluster")
NAMES = [
    (Name("a", ["10.0.0.1"], ["10.0.0.1"], 0.0, "10.0.0.1"), TWO, OK, "'a' is 10.0.0.1"),
    # What Debian writes into /etc/hosts does no harm: another address is told.
    (Name("a", ["127.0.1.1"], [], 0.0, "10.0.0.1"), TWO, OK, "other nodes use 10.0.0.1 instead"),
    (Name("a", None, [], 0.0, "10.0.0.1"), TWO, OK, "does not resolve here"),
    (Name("a", ["127.0.1.1"], [], 0.0, None), TWO, FAULT, "no address"),
    (Name("a", ["127.0.1.1"], [], 0.0, None), ONE, OK, "a single node needs no more"),
    (Name("a", ["10.0.0.1"], ["10.0.0.1"], 5.0, "10.0.0.1"), ONE, WARNING, "took 5.0 s"),
    (Name("a", ["127.0.1.1"], [], 0.0, None), TOLD, OK, "node2.cluster"),
]


def test_names():
    for known, config, verdict, words in NAMES:
        found = network_rules.name(known, config)
        assert (found.verdict, words in found.found) == (verdict, True), words


INTERFACES = [
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
]


def test_interfaces():
    def judged(variables, config, gpus):
        found = network_rules.interfaces(variables, THERE, config, gpus=gpus)
        return [finding.verdict for finding in found]

    assert wrong(judged, INTERFACES) == []


def test_the_notation_of_nccl():
    cases = [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^lo,docker", ["eth0", "eth1"]),
        ("^=eth0", ["lo", "eth1", "docker0"]),
    ]
    assert wrong(lambda value: nccl_matches(value, THERE), cases) == []
