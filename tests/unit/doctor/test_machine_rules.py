"""Verdicts on made-up machines."""

from dataclasses import replace

from tests.unit.cli.tables import wrong
from torchelastic.config import LaunchConfig
from torchelastic.doctor import machine_rules
from torchelastic.doctor.finding import Severity
from torchelastic.doctor.machine_rules import (
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
        machine_rules.kernel(GOOD),
        machine_rules.cpus(GOOD, MANY, None),
        machine_rules.memory(GOOD, MANY),
        machine_rules.shared_memory(GOOD),
        machine_rules.limits(GOOD, MANY),
        machine_rules.ports(GOOD, MANY, True),
        machine_rules.clock(Clocks(True, 0.0, 0.0), MANY),
        *machine_rules.devices(8, MANY),
    ]
    assert {finding.verdict for finding in findings} == {OK}
    assert not any(finding.advice for finding in findings)


def test_a_kernel_without_something_is_a_fault_and_without_cgroups_none():
    lacking = replace(GOOD, features={"pidfd": False, "memfd": True, "/proc": False})
    found = machine_rules.kernel(lacking)
    assert found.verdict is FAULT
    assert "pidfd, /proc" in found.found
    assert machine_rules.kernel(replace(GOOD, cgroup=False)).verdict is OK


def test_the_tightest_limit_of_memory_decides():
    tight = [*GOOD.memory, Limit("its cgroup", 4 * GIB, GIB)]
    few = machine_rules.memory(replace(GOOD, memory=tight), ONE)
    many = machine_rules.memory(replace(GOOD, memory=tight), MANY)
    assert (few.verdict, many.verdict) == (OK, WARNING)
    assert "of 4.0 GiB available (its cgroup)" in many.found
    assert machine_rules.memory(replace(GOOD, memory=[]), MANY).verdict is OK


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
        return machine_rules.cpus(GOOD, LaunchConfig(nproc_per_node=workers), threads).verdict

    assert wrong(judged, cases) == []


def test_shared_memory():
    for space, verdict in (
        (Space("/dev/shm", 64 * MIB, 64 * MIB), WARNING),  # what docker gives
        (Space("/dev/shm", 8 * GIB, 100 * MIB), WARNING),
        (Space("/dev/shm", 8 * GIB, 2 * GIB), OK),
        (Space("/dev/shm", trouble="No such file or directory"), WARNING),
    ):
        found = machine_rules.shared_memory(replace(GOOD, shared_memory=space))
        assert (found.verdict, bool(found.advice)) == (verdict, verdict is WARNING), space


def test_low_limits_that_matter_to_the_job_are_reported_with_what_to_do():
    for limits, infiniband, words in (
        (Limits(256, None, None, 0), False, "needs about 384"),
        (Limits(65536, 512, None, 0), False, "512 processes"),
        (Limits(65536, None, None, None), False, "writes its memory to disk"),
        (Limits(65536, None, 8 * MIB, 0), True, "8.0 MiB of memory may be locked"),
    ):
        found = machine_rules.limits(replace(GOOD, limits=limits, infiniband=infiniband), MANY)
        assert found.verdict is WARNING, limits
        assert words in found.found
        assert "ulimit" in found.advice, limits
    low = replace(GOOD, limits=Limits(256, 4096, 8 * MIB, 0))
    assert machine_rules.limits(low, ONE).verdict is OK


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
        return machine_rules.ports(replace(GOOD, ports=ports), MANY, hosts).verdict

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
    assert wrong(lambda clocks, config: machine_rules.clock(clocks, config).verdict, cases) == []


def test_a_directory_for_logs():
    for space, verdict in (
        (Space("/logs", 100 * GIB, 50 * GIB, 10**6), OK),
        (Space("/logs"), OK),
        (Space("/logs", 100 * GIB, 500 * MIB, 10**6), WARNING),
        (Space("/logs", 100 * GIB, 50 * GIB, 10), WARNING),
        (Space("/logs", 100 * GIB, MIB, 10**6), FAULT),
        (Space("/logs", trouble="Read-only file system"), FAULT),
    ):
        found = machine_rules.directory(space, "log")
        assert (found.verdict, "/logs" in found.found) == (verdict, True), space


def test_more_workers_than_gpus():
    assert machine_rules.devices(0, MANY) == []
    (found,) = machine_rules.devices(4, MANY)
    assert found.verdict is WARNING
