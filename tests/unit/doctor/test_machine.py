"""Verdicts on made-up machines and their networks."""

from dataclasses import replace

from tests.unit.cli.tables import wrong
from torchelastic.config import LaunchConfig
from torchelastic.doctor import network, this_machine
from torchelastic.doctor.finding import Severity
from torchelastic.doctor.network import Name, nccl_matches
from torchelastic.doctor.this_machine import (
    GIB,
    MIB,
    Clocks,
    EphemeralPorts,
    Limits,
    MachineFacts,
    Space,
)
from torchelastic.system.memory_limit import Limit

OK, WARNING, FAULT = Severity.OK, Severity.WARNING, Severity.FAULT

GOOD = MachineFacts(
    kernel="6.1",
    features={"pidfd": True, "memfd": True},
    cgroup=True,
    cpus=8,
    memory=[Limit("this machine", 64 * GIB, 4 * GIB)],
    shared_memory=Space("/dev/shm", 32 * GIB, 31 * GIB, 10**6),
    limits=Limits(65536, None, None, 0),
    ports=EphemeralPorts(32768, 60999, 100, 50),
    infiniband=False,
)
ONE = LaunchConfig()
MANY = LaunchConfig(4, 16, 8, rdzv_endpoint="node1:29400")


def test_a_good_machine_is_good_for_a_job_of_its_size():
    findings = [
        this_machine.kernel(GOOD),
        this_machine.cpus(GOOD, MANY, None),
        this_machine.memory(GOOD, MANY),
        this_machine.shared_memory(GOOD),
        this_machine.limits(GOOD, MANY),
        this_machine.ports(GOOD, MANY, True),
        this_machine.clock(Clocks(True, 0.0, 0.0), MANY),
        *this_machine.devices(8, MANY),
    ]
    assert {finding.verdict for finding in findings} == {OK}
    assert not any(finding.advice for finding in findings)


def test_a_kernel_without_something_is_a_fault_and_without_cgroups_none():
    lacking = replace(GOOD, features={"pidfd": False, "memfd": True, "/proc": False})
    found = this_machine.kernel(lacking)
    assert found.verdict is FAULT
    assert "pidfd, /proc" in found.found
    assert this_machine.kernel(replace(GOOD, cgroup=False)).verdict is OK


def test_the_tightest_limit_of_memory_decides():
    tight = [*GOOD.memory, Limit("its cgroup", 4 * GIB, GIB)]
    few = this_machine.memory(replace(GOOD, memory=tight), ONE)
    many = this_machine.memory(replace(GOOD, memory=tight), MANY)
    assert (few.verdict, many.verdict) == (OK, WARNING)
    assert "of 4.0 GiB available (its cgroup)" in many.found
    assert this_machine.memory(replace(GOOD, memory=[]), MANY).verdict is OK


def test_cpus_against_workers_and_threads():
    cases = [
        (1, None, OK),
        (8, None, OK),
        (9, None, WARNING),
        (2, 4, OK),
        (2, 5, WARNING),
        (1, 8, OK),
        (1, 9, WARNING),
    ]

    def judged(workers, threads):
        return this_machine.cpus(GOOD, LaunchConfig(nproc_per_node=workers), threads).verdict

    assert wrong(judged, cases) == []


def test_shared_memory():
    for space, verdict in (
        (Space("/dev/shm", 64 * MIB, 64 * MIB), WARNING),  # what docker gives
        (Space("/dev/shm", 8 * GIB, 100 * MIB), WARNING),
        (Space("/dev/shm", 8 * GIB, 2 * GIB), OK),
        (Space("/dev/shm", trouble="No such file or directory"), WARNING),
    ):
        found = this_machine.shared_memory(replace(GOOD, shared_memory=space))
        assert (found.verdict, bool(found.advice)) == (verdict, verdict is WARNING), space


def test_low_limits_that_matter_to_the_job_are_reported_with_what_to_do():
    for limits, infiniband, words in (
        (Limits(256, None, None, 0), False, "needs about 384"),
        (Limits(65536, 512, None, 0), False, "512 processes"),
        (Limits(65536, None, None, None), False, "writes its memory to disk"),
        (Limits(65536, None, 8 * MIB, 0), True, "8.0 MiB of memory may be locked"),
    ):
        found = this_machine.limits(replace(GOOD, limits=limits, infiniband=infiniband), MANY)
        assert found.verdict is WARNING, limits
        assert words in found.found
        assert "ulimit" in found.advice, limits
    low = replace(GOOD, limits=Limits(256, 4096, 8 * MIB, 0))
    assert this_machine.limits(low, ONE).verdict is OK


def test_ports():
    cases = [
        (EphemeralPorts(32768, 60999, 100, 100), True, OK),
        (EphemeralPorts(1024, 65535, 100, 100), True, WARNING),  # 29400 may be given away
        (EphemeralPorts(1024, 65535, 100, 100), False, OK),
        (EphemeralPorts(40000, 41000, 10, 10), True, WARNING),
        (EphemeralPorts(32768, 60999, 100, 20000), True, WARNING),
        (None, True, OK),  # a sandbox hides them
    ]

    def judged(ports, hosts):
        return this_machine.ports(replace(GOOD, ports=ports), MANY, hosts).verdict

    assert wrong(judged, cases) == []


def test_clocks_are_a_warning_at_most():
    cases = [
        (Clocks(True, 0.0, 0.0), MANY, OK),
        (Clocks(None, 0.0, 0.0), MANY, OK),
        (Clocks(False, 0.0, 0.0), MANY, WARNING),
        (Clocks(False, 0.0, 0.0), ONE, OK),
        (Clocks(True, -3.0, 0.0), ONE, WARNING),
        (Clocks(True, 0.0, 3600.0), ONE, WARNING),
    ]
    assert wrong(lambda clocks, config: this_machine.clock(clocks, config).verdict, cases) == []


def test_a_directory_for_logs():
    for space, verdict in (
        (Space("/logs", 100 * GIB, 50 * GIB, 10**6), OK),
        (Space("/logs"), OK),
        (Space("/logs", 100 * GIB, 500 * MIB, 10**6), WARNING),
        (Space("/logs", 100 * GIB, 50 * GIB, 10), WARNING),
        (Space("/logs", 100 * GIB, MIB, 10**6), FAULT),
        (Space("/logs", trouble="Read-only file system"), FAULT),
    ):
        found = this_machine.directory(space, "log")
        assert (found.verdict, "/logs" in found.found) == (verdict, True), space


def test_more_workers_than_gpus():
    assert this_machine.devices(0, MANY) == []
    (found,) = this_machine.devices(4, MANY)
    assert found.verdict is WARNING


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
        found = network.name(known, config)
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
        found = network.interfaces(variables, THERE, config, gpus=gpus)
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
