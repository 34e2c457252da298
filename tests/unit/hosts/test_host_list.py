"""The hosts of a job: flags, files and commands."""

import doctest

import pytest

from torchelastic.errors import ConfigError
from torchelastic.hosts import host_launcher, host_list
from torchelastic.hosts.host_list import HostSlots, parse_hosts, parse_lines, read_hosts


def test_doctests_hold():
    assert doctest.testmod(host_list).failed == 0
    assert doctest.testmod(host_launcher).failed == 0


@pytest.mark.parametrize(
    ("text", "target", "slots", "address"),
    [
        ("host1", "host1", 0, "host1"),
        ("host1:8", "host1", 8, "host1"),
        ("ada@host1.example:4", "ada@host1.example", 4, "host1.example"),
        ("10.0.0.7:2", "10.0.0.7", 2, "10.0.0.7"),
        ("[fd00::1]:2", "fd00::1", 2, "fd00::1"),
        ("ada@[fd00::1]", "ada@fd00::1", 0, "fd00::1"),
    ],
)
def test_a_host(text, target, slots, address):
    [host] = parse_hosts([text])
    assert (host, host.address) == (HostSlots(target, slots), address)


@pytest.mark.parametrize(
    "text",
    ["host:0", "host:x", "-oProxyCommand=x", "-oProxyCommand=x@host", "a b", "host:8:8", "@x"],
)
def test_what_is_not_a_host_is_refused(text):
    with pytest.raises(ConfigError, match="is not a host"):
        parse_hosts([text])


def test_a_host_is_listed_once():
    with pytest.raises(ConfigError, match="listed twice"):
        parse_hosts(["a:1", "b", "a:2"])


def test_localhost_is_not_mixed_with_other_machines():
    """The others would look for the job on themselves, and found a second one."""
    assert len(parse_hosts(["localhost:1", "127.0.0.1:1"])) == 2
    for local in ("localhost:2", "127.0.0.1", "[::1]:2"):
        with pytest.raises(ConfigError, match="is a different machine for each host"):
            parse_hosts([local, "host2:2"])


def test_a_file_has_a_host_on_each_line():
    assert parse_lines("# rack 7\na:8  # fast\n\nb\n") == (HostSlots("a", 8), HostSlots("b"))


def test_hosts_come_from_a_file_or_a_command(tmp_path):
    (tmp_path / "hosts").write_text("a:2\n")
    assert read_hosts(str(tmp_path / "hosts")) == (HostSlots("a", 2),)
    assert read_hosts("echo a:2; echo b") == (HostSlots("a", 2), HostSlots("b"))
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho c:1\n")
    program.chmod(0o755)
    assert read_hosts(str(program)) == (HostSlots("c", 1),)
    with pytest.raises(ConfigError, match=r"failed with exit code 3 \(sorry\): name a file"):
        read_hosts("echo sorry >&2; exit 3")
    assert read_hosts(f"echo a # {'long' * 100}") == (HostSlots("a"),)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    for source in (str(tmp_path / "binary"), "printf '\\377\\376'"):
        with pytest.raises(ConfigError, match="is not a host"):
            read_hosts(source)


def test_a_command_that_does_not_end_is_killed_with_what_it_started(monkeypatch):
    monkeypatch.setattr(host_list, "COMMAND_TIMEOUT", 0.2)
    with pytest.raises(ConfigError, match=r"did not end within 0\.2 s: make it faster"):
        read_hosts("sleep 600 | cat")
