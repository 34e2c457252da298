from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

import pytest

from torchelastic.errors import ConfigError
from torchelastic.transport import addresses
from torchelastic.transport import addresses as endpoint
from torchelastic.transport.addresses import (
    Placed,
    bind_endpoint,
    can_be_told,
    interface_of,
    loopback_addresses,
    placed_addresses,
    reachable_address,
)

#: For documentation: no machine has it.
NOBODYS = "192.0.2.7"
real_getaddrinfo = socket.getaddrinfo


@contextlib.contextmanager
def bound(host: str, port: int = 0, **options) -> Iterator[list[socket.socket]]:
    sockets = bind_endpoint(host, port, **options)
    assert sockets is not None
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def names(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the name `node1` have these addresses."""

    def fake(host, *args, **kwargs):
        found = [real_getaddrinfo(address, *args, **kwargs)[0] for address in addresses]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return found

    monkeypatch.setattr(endpoint.socket, "getaddrinfo", fake)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("localhost", ("127.0.0.1", "::1")),
        ("127.0.0.1", ("127.0.0.1",)),
        ("127.1.2.3", ("127.1.2.3",)),
        ("::1", ("::1",)),
        ("0.0.0.0", ()),
        ("10.0.0.1", ()),
        ("node1", ()),
    ],
)
def test_hosts_that_mean_this_machine_only(host, addresses):
    assert loopback_addresses(host) == addresses


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_one_agent_of_a_machine_hosts_and_a_loopback_endpoint_is_not_open_to_the_network(host):
    with bound(host) as sockets:
        address, port = sockets[0].getsockname()[:2]
        assert address in (("::", "0.0.0.0") if host == "0.0.0.0" else ("127.0.0.1",))
        assert {sock.getsockname()[1] for sock in sockets} == {port} != {0}
        assert bind_endpoint(host, port) is None


def test_another_endpoint_listens_everywhere(monkeypatch):
    # As /etc/hosts of Debian has a machine's own name.
    names(monkeypatch, "127.0.1.1")
    with bound("node1") as sockets:
        assert sockets[0].getsockname()[0] in ("::", "0.0.0.0")
        port = sockets[0].getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_the_port_of_a_host_that_just_ended_is_free():
    with bound("127.0.0.1") as sockets:
        port = sockets[0].getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        accepted, _ = sockets[0].accept()
        accepted.close()
        client.close()
    with bound("127.0.0.1", port):
        pass


@pytest.mark.parametrize(
    ("addresses", "warned"),
    [((), False), ((NOBODYS,), False), (("127.0.1.1", NOBODYS), True)],
    ids=["unknown", "another machine", "several machines"],
)
def test_endpoints_that_others_host(monkeypatch, caplog, addresses, warned):
    names(monkeypatch, *addresses)
    assert bind_endpoint("node1", 0) is None
    assert ("resolves to this machine and others" in caplog.text) is warned


def test_the_user_knows_better(monkeypatch):
    names(monkeypatch, NOBODYS)
    with bound("node1", is_host=True):
        pass
    assert bind_endpoint("localhost", 0, is_host=False) is None


def test_own_endpoint_on_a_host_that_binds_any_address_follows_the_route(monkeypatch):
    names(monkeypatch, NOBODYS)
    monkeypatch.setattr(endpoint, "_can_bind", lambda family, address: True)
    assert bind_endpoint("node1", 0) is None
    names(monkeypatch, "127.0.0.1")
    with bound("node1"):
        pass


def test_a_port_that_may_not_be_bound_is_the_users_mistake(monkeypatch):
    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(endpoint, "_listen", refuse)
    with pytest.raises(ConfigError, match="may not listen on port 80"):
        bind_endpoint("localhost", 80)


def test_ipv4_alone_will_do(monkeypatch):
    real = endpoint._listen

    def without_ipv6(family, address, port):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported")
        return real(family, address, port)

    monkeypatch.setattr(endpoint, "_listen", without_ipv6)
    for host in ("0.0.0.0", "localhost"):
        with bound(host) as sockets:
            assert [sock.family for sock in sockets] == [socket.AF_INET]


@pytest.mark.parametrize(
    ("routed", "placed", "told"),
    [
        ({socket.AF_INET: "10.1.1.1", socket.AF_INET6: "fd00::1"}, ["10.2.2.2"], "10.1.1.1"),
        ({socket.AF_INET6: "fd00::1"}, ["10.2.2.2"], "fd00::1"),
        ({socket.AF_INET6: "fe80::1"}, ["10.2.2.2"], "10.2.2.2"),
        ({}, ["127.0.0.1", "169.254.3.3", "10.2.2.2", "10.3.3.3"], "10.2.2.2"),
        ({}, ["127.0.0.1", "::1", "fd00::2"], "fd00::2"),
        ({}, ["127.0.0.1", "::1"], "127.0.1.1"),
    ],
    ids=["way out", "IPv6 way out", "no real way out", "no way out", "IPv6 alone", "no network"],
)
def test_a_host_that_met_itself_by_name_tells_its_address_on_the_network(
    monkeypatch, routed, placed, told
):
    monkeypatch.setattr(endpoint, "_source_towards", lambda family, address: routed.get(family))
    found = [Placed(address, "eth0") for address in placed]
    monkeypatch.setattr(endpoint, "placed_addresses", lambda: found)
    assert reachable_address("127.0.1.1", "node1") == told
    assert reachable_address("127.0.1.1", "localhost") == "127.0.1.1"
    assert reachable_address("10.9.9.9", "node1") == "10.9.9.9"


# --- interfaces -----------------------------------------------------------------------------------

SOME = [
    Placed("127.0.0.1", "lo"),
    Placed("10.0.0.5", "eth0"),
    Placed("10.0.1.5", "ib0"),
    Placed("::1", "lo"),
    Placed("fd00::5", "eth0"),
]


def test_this_machine_has_a_loopback_interface():
    assert Placed("127.0.0.1", "lo") in placed_addresses()
    names = {name for _, name in socket.if_nameindex()}
    assert {placed.interface for placed in placed_addresses()} <= names


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.5", "eth0"),
        ("10.0.1.5", "ib0"),
        ("fd00::5", "eth0"),
        ("fd00:0::5", "eth0"),
        ("10.0.0.6", None),
        ("127.0.0.1", None),
        ("::1", None),
        ("node1", None),
    ],
)
def test_the_interface_of_an_address(monkeypatch, address, interface):
    monkeypatch.setattr(addresses, "placed_addresses", lambda: SOME)
    assert interface_of(address) == interface


def test_interfaces_without_netlink_are_unknown(monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(addresses.socket, "socket", refuse)
    assert placed_addresses() == []


@pytest.mark.parametrize(
    ("address", "can"),
    [
        ("10.0.0.5", True),
        ("fd00::5", True),
        ("127.0.1.1", False),
        ("::1", False),
        ("169.254.1.1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
    ],
)
def test_addresses_that_mean_this_machine_to_others(address, can):
    assert can_be_told(address) is can
