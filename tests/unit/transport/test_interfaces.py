from __future__ import annotations

import socket

import pytest

from torchelastic.transport import addresses
from torchelastic.transport.addresses import Placed, can_be_told, interface_of, placed_addresses

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
