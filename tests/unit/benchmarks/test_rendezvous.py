"""The parts of `rendezvous.py` that need no agents."""

from __future__ import annotations

import socket

import pytest

from benchmarks.crowds import traffic
from benchmarks.harness import rendezvous_report
from benchmarks.harness.crowd import EMBEDDED, ETCD, TORCHRUN, shares
from benchmarks.harness.host_faults import NOBODY_LEFT
from benchmarks.harness.rendezvous_report import FAIL, JOIN, constant, key, member_bytes, render
from benchmarks.harness.results import Results
from benchmarks.harness.scenarios import Repetition
from benchmarks.harness.summary import growth_exponent
from benchmarks.rendezvous import fail_counts, join_counts, join_sizes
from tests.support import poll_for

ABOUT = {"date": "today", "commit": "c", "torch": "2", "python": "3", "cores": 2, "cpu": "x"}


def results(**rows):
    """Repetitions by row: `join_128=(EMBEDDED, [0.1, None])`."""
    made = Results(dict(ABOUT, processes=2, descriptors=1024))
    for name, (system, times) in rows.items():
        for each in times:
            made.add(name.rsplit("__")[0].replace("_", " "), system.name, Repetition(each))
    return made


def line(text, beginning):
    return next(each for each in text.splitlines() if each.startswith(f"| {beginning}"))


@pytest.mark.parametrize(
    ("system", "agents", "victims", "sizes"),
    [
        (EMBEDDED, 8, 0, [1, 4, 3]),
        (TORCHRUN, 8, 0, [1, 4, 3]),
        (ETCD, 8, 0, [4, 4]),
        (EMBEDDED, 8, 2, [1, 3, 2, 1, 1]),
        (EMBEDDED, 2, 0, [1, 1]),
    ],
)
def test_the_host_and_those_to_fail_are_alone(system, agents, victims, sizes):
    made = shares(system, "127.0.0.1:1", agents, 2, least=1, victims=victims)
    assert [share.agents for share in made] == sizes
    assert sum(share.agents for share in made) == made[0].most == agents
    assert [share.hosts for share in made] == [system.has_host] + [False] * (len(sizes) - 1)


def test_the_exponent_of_a_power_law():
    assert growth_exponent([(n, 3.0 * n**1.5) for n in (8, 64, 512)]) == pytest.approx(1.5)


def test_bytes_are_counted_by_the_kernel():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as peer,
    ):
        before = traffic.by_connection()
        client.sendall(b"x" * 1000)
        peer.recv(1000, socket.MSG_WAITALL)
        poll_for(lambda: traffic.since(before) == traffic.Bytes(1000, 1000), what="all counted")


@pytest.mark.parametrize(("ours", "met"), [(0.1, "met"), (1.0, "**missed**")])
def test_128_agents_are_compared(ours, met):
    found = results(join_128=(EMBEDDED, [ours]), join_128__=(TORCHRUN, [5.0]))
    row = line(render(found), "128 agents join, embedded")
    assert f"at least 20 times faster: {met}" in row


def test_growth_is_judged_over_the_whole_range_only():
    some = results(join_8=(EMBEDDED, [0.1]), join_128=(EMBEDDED, [0.2]))
    assert "at most 1.15 |" in line(render(some), "time to join grows")
    whole = results(join_8=(EMBEDDED, [0.1]), join_4096=(EMBEDDED, [9.0]))
    text = render(whole)
    assert "at most 1.15: met" in line(text, "time to join grows")
    assert "under 5 s: **missed**" in line(text, "4,096 agents join")


def test_unfinished_run_shows_when_it_was_given_up():
    found = results(join_8=(TORCHRUN, [1.0]))
    found.add(key(JOIN, 256), TORCHRUN.name, Repetition(None, "not finished after 300 s"))
    assert "not finished after 300 s" in line(render(found), "256")
    assert rendezvous_report.medians(found, JOIN, TORCHRUN) == [(8.0, 1.0)]


@pytest.mark.parametrize(("limit", "met"), [(60.0, "met"), (15.0, "**missed**")])
def test_unfinished_run_counts_as_slower_than_its_limit(limit, met):
    found = results(join_128=(EMBEDDED, [1.0]))
    late = Repetition(None, f"not finished after {limit:g} s", details={"limit": limit})
    found.add(key(JOIN, 128), TORCHRUN.name, late)
    row = line(render(found), "128 agents join, embedded")
    assert f"not finished after {limit:g} s" in row
    assert f"at least 20 times faster: {met}" in row


def test_bytes_per_member_are_to_be_constant():
    found = Results(dict(ABOUT, processes=2, descriptors=1024))
    for agents, received in ((64, 1000), (1024, 1600)):
        details = {"sent": 500, "received": received}
        found.add(key(FAIL, agents), EMBEDDED.name, Repetition(0.1, details=details))
    assert member_bytes(found, EMBEDDED) == {64: (500, 1000), 1024: (500, 1600)}
    assert "times the least: **missed**" in line(render(found), "bytes per member")
    assert constant([1000, 1100])


def test_a_job_that_ends_with_its_host_is_reported_as_that():
    found = Results(dict(ABOUT))
    found.add("host-kill", EMBEDDED.name, Repetition(None, NOBODY_LEFT))
    assert "not available" in line(render(found), "host of the store killed")


def test_two_worlds_at_once_are_no_recovery():
    found = Results(dict(ABOUT))
    found.add("host-cut", EMBEDDED.name, Repetition(3.5, overlaps=1))
    assert "**missed**" in line(render(found), "host cut off")


def test_the_sizes_that_are_wanted_are_measured():
    assert (join_sizes(quick=False)[0], join_sizes(quick=False)[-1]) == (8, 4096)
    most = {
        system: max(n for n in join_sizes(quick=False) if system in dict(join_counts(n, False)))
        for system in (EMBEDDED, ETCD)
    }
    assert most == {EMBEDDED: 4096, ETCD: 1024}
    embedded = [agents for system, agents, _ in fail_counts(quick=False) if system is EMBEDDED]
    assert (min(embedded), max(embedded)) == (64, 1024)
