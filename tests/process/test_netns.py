"""The networks that other tests are made on do what they say."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import netns
from tests.netns import Host, Network
from tests.support import poll_for

pytestmark = pytest.mark.needs("namespaces")

PORT = 5000

ECHO = f"""
import socket, threading
def echo(connection):
    while True:
        connection.sendall(connection.recv(65536) or exit())
server = socket.create_server(("::", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    threading.Thread(target=echo, args=server.accept()[:1], daemon=True).start()
"""

#: Connects, then sends a line of what it is told to and says how that went.
ASK = f"""
import socket, sys, time
try:
    connection = socket.create_connection((sys.argv[1], {PORT}), float(sys.argv[2]))
    print("connected", flush=True)
    for line in sys.stdin:
        began, data = time.monotonic(), b"x" * int(line)
        connection.sendall(data)
        while data:
            data = data[len(connection.recv(65536)):]
        print(f"{{time.monotonic() - began:.3f}}", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


#: Says the first that it is sent.
HEAR = f"""
import socket
listening = socket.socket(type=socket.SOCK_DGRAM)
listening.bind(("", {PORT}))
print("ready", flush=True)
print(listening.recv(100).decode())
"""
SAY = f"""
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], {PORT}))
"""


class Asking:
    """A process on one host with a connection to another."""

    def __init__(self, host: Host, address: str, *, timeout: float = 0.5) -> None:
        command = [sys.executable, "-c", ASK, address, str(timeout)]
        self.process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def ask(self, size: int = 1) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{size}\n".encode())
        self.process.stdin.flush()
        return self.hear()


@pytest.fixture
def network():
    with Network(3) as made:
        echo = made.hosts[1].popen([sys.executable, "-c", ECHO], stderr=subprocess.DEVNULL)
        try:
            poll_for(lambda: _connects(made), what="the second host listens")
            yield made
        finally:
            echo.kill()
            echo.wait()


def _connects(network: Network) -> bool:
    with Asking(network.hosts[0], "host2") as asking:
        return asking.hear() == "connected"


@pytest.mark.parametrize(
    ("how", "to_the_old", "to_a_new"),
    [
        ("drop", "TimeoutError", "TimeoutError"),
        ("reset", "ConnectionResetError", "ConnectionRefusedError"),
    ],
)
def test_hosts_that_are_cut_off_do_not_reach_each_other(network, how, to_the_old, to_a_new):
    first, second, third = network.hosts
    for address in second.addresses:
        with Asking(first, address) as before, Asking(third, address, timeout=60) as beside:
            assert (before.hear(), beside.hear()) == ("connected", "connected")
            network.cut([first], [second, third], how=how)
            assert before.ask() == to_the_old
            assert float(beside.ask()) >= 0  # and no error
            with Asking(first, address) as new:
                assert new.hear() == to_a_new
            network.heal()
            with Asking(first, address) as healed:
                assert healed.hear() == "connected"


@pytest.mark.parametrize(("sender", "heard"), [(0, "healed"), (1, "cut")])
def test_a_cut_may_be_of_one_direction(network, sender, heard):
    """By datagrams, which need no answer: the first to arrive says when it was sent."""
    hosts = network.hosts[:2]
    network.cut(*([host] for host in hosts), one_way=True)
    receiver = hosts[1 - sender]
    hearing = receiver.popen([sys.executable, "-c", HEAR], stdout=subprocess.PIPE)
    with hearing:
        assert hearing.stdout.readline() == b"ready\n"
        hosts[sender].run([sys.executable, "-c", SAY, receiver.ipv4, "cut"])
        network.heal()
        hosts[sender].run([sys.executable, "-c", SAY, receiver.ipv4, "healed"])
        assert hearing.stdout.readline().decode().strip() == heard


def test_packets_are_delayed_and_lost(network):
    first, second, _ = network.hosts
    network.delay(50)
    with Asking(first, second.address, timeout=10) as asking:
        assert asking.hear() == "connected"
        assert float(asking.ask()) >= 0.1
    network.lose(10)
    with Asking(first, second.address, timeout=60) as asking:
        assert asking.hear() == "connected"
        # TCP sends again after 200 ms.
        assert any(float(asking.ask()) > 0.2 for _ in range(200))


CRASH = """
import os, signal
from pathlib import Path
from tests.netns import Network
network = Network(1).__enter__()
process = network.hosts[0].popen(["sleep", "600"])
while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\\n":
    pass
print(network.hosts[0].namespace, process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_test_run_that_is_killed_leaves_nothing_for_long():
    crashed = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True)
    assert crashed.returncode == -signal.SIGKILL, crashed.stderr
    name, pid = crashed.stdout.split()
    poll_for(lambda: not Path(f"/proc/{pid}").exists(), what="its processes end with it")
    netns.sweep()
    assert not Path(f"/run/netns/{name}").exists()
    assert not Path(f"/etc/netns/{name}").exists()
