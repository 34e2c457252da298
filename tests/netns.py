"""Several hosts on one machine: network namespaces joined by veth pairs and a bridge.

    with Network(3) as network:
        first, second, third = network.hosts
        process = first.popen(["python", "-m", "http.server"])
        network.cut([first], [second, third])       # packets vanish
        network.heal()

Everything is made with iproute2 and lives in namespaces of its own, the bridge as well, so nothing
of this machine's network is touched. Hosts know each other's hardware addresses from the start:
a cut is another hardware address for a neighbour, nobody's, or that of a host that answers for
it with resets. What a test run that was killed has left behind, the next one removes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

#: Of a namespace: the test run that made it, its network, and what it is for.
_NAME = re.compile(r"tens(\d+)-\d+-\w+")
_NETWORKS = itertools.count(1)

_ETC = Path("/etc/netns")
#: Nobody has this address: frames sent to it arrive everywhere and are dropped, no answer comes.
_NOBODY = "02:00:00:00:ff:ff"
#: What answers for others with resets.
_WALL = "02:00:00:00:ff:01"


class Host:
    """One machine of a network. A process started here sees its addresses, names and no others."""

    def __init__(self, network: Network, number: int, namespace: str) -> None:
        self.name = f"host{number}"
        self.namespace = namespace
        self.port = f"port{number}"
        self.hardware = f"02:00:00:00:00:{number:02x}"
        self.ipv4 = f"10.77.0.{number}" if network.ipv4 else None
        self.ipv6 = f"fd77::{number:x}" if network.ipv6 else None
        self.hosts_file = _ETC / namespace / "hosts"

    def __repr__(self) -> str:
        return self.name

    @property
    def addresses(self) -> list[str]:
        return [address for address in (self.ipv4, self.ipv6) if address]

    @property
    def address(self) -> str:
        return self.addresses[0]

    def command(self, command: Sequence[str]) -> list[str]:
        """The words that run a command on this host: in its namespace, under its name.

        It ends with the thread that starts it, whatever that ends with.
        """
        rename = 'echo "$0" > /proc/sys/kernel/hostname; exec setpriv --pdeathsig KILL "$@"'
        here = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*here, "sh", "-c", rename, self.name, *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(command), **options)

    def run(self, command: Sequence[str]) -> str:
        """The output of a command that succeeds."""
        done = subprocess.run(self.command(command), check=True, capture_output=True, text=True)
        return done.stdout

    def pids(self) -> list[int]:
        return _pids(self.namespace)

    def kill(self) -> None:
        """End every process here at once; the kernel of this host says so to its peers."""
        _signal(self.pids(), signal.SIGKILL)

    def freeze(self) -> None:
        """Stop every process here; the kernel goes on taking what they are sent."""
        _signal(self.pids(), signal.SIGSTOP)

    def wake(self) -> None:
        _signal(self.pids(), signal.SIGCONT)

    def reset_connections(self, port: int) -> int:
        """Reset, once, every connection of this host to or from a port; how many there were.

        Both ends are told, as by a firewall that has lost its table.
        """
        found = self.run(["ss", "-HKtn", f"( sport = :{port} or dport = :{port} )"])
        return len(found.splitlines())

    def names(self, known: dict[str, Sequence[str]]) -> None:
        """Let these names, and no others, mean these addresses here, from now on."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {name}" for name, found in known.items() for address in found]
        # The same file as before: processes that run have it mounted.
        self.hosts_file.write_text("\n".join(lines) + "\n")


class Network:
    """Hosts that reach each other, until they are cut off from each other."""

    def __init__(self, hosts: int, *, ipv4: bool = True, ipv6: bool = True) -> None:
        self.ipv4, self.ipv6 = ipv4, ipv6
        self._name = f"tens{os.getpid()}-{next(_NETWORKS)}"
        self._switch = f"{self._name}-switch"
        self._wall: str | None = None
        self._slow_bridge: subprocess.Popen[bytes] | None = None
        self.hosts = [Host(self, n, f"{self._name}-host{n}") for n in range(1, hosts + 1)]

    def __enter__(self) -> Network:
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything, and what still runs in it."""
        self._end_slow_bridge()
        for name in [name for name in _namespaces() if name.startswith(f"{self._name}-")]:
            _remove(name)

    def _build(self) -> None:
        _add(self._switch)
        _ip(self._switch, "link add bridge type bridge", "link set bridge up")
        known = {host.name: host.addresses for host in self.hosts}
        for host in self.hosts:
            (_ETC / host.namespace).mkdir(parents=True)
            host.names(known)
            (_ETC / host.namespace / "resolv.conf").touch()
            _add(host.namespace)
            self._connect(host.namespace, host.port, host.hardware)
            addresses = [f"addr add {address} dev eth0" for address in self._subnets(host)]
            _ip(host.namespace, *addresses)
        self.heal()

    def _subnets(self, host: Host) -> list[str]:
        ipv6 = [f"{host.ipv6}/64 nodad"] if host.ipv6 else []
        return ([f"{host.ipv4}/24"] if host.ipv4 else []) + ipv6

    def _connect(self, namespace: str, port: str, hardware: str) -> None:
        _ip(
            self._switch,
            f"link add {port} type veth peer name eth0 address {hardware} netns {namespace}",
            f"link set {port} master bridge up",
        )
        _ip(namespace, "link set eth0 up")

    # --- cutting and healing ----------------------------------------------------------------------

    def cut(
        self,
        *groups: Sequence[Host],
        how: Literal["drop", "reset"] = "drop",
        one_way: bool = False,
    ) -> None:
        """Hosts of different groups do not reach each other any more; it is not announced.

        `drop`: what they send vanishes. `reset`: every packet of a connection, the first one as
        well, is answered with a reset in the other's name, as firewalls do. `one_way`: this happens
        only to what earlier groups send to later ones.
        """
        answers = _NOBODY if how == "drop" else self._build_wall()
        pairs = itertools.combinations if one_way else itertools.permutations
        for group, other in pairs(groups, 2):
            self._point(group, other, answers)

    def heal(self) -> None:
        """Every host reaches every other one."""
        for host in self.hosts:
            self._point([one for one in self.hosts if one is not host], [host], host.hardware)

    def _point(self, senders: Sequence[Host], receivers: Sequence[Host], hardware: str) -> None:
        addresses = [address for host in receivers for address in host.addresses]
        for sender in senders:
            _ip(sender.namespace, *_neighbours(addresses, hardware))

    def _families(self) -> list[tuple[str, str]]:
        ipv4, ipv6 = ("-4", "10.77.0.0/24"), ("-6", "fd77::/64")
        return [ipv4] * self.ipv4 + [ipv6] * self.ipv6

    def _build_wall(self) -> str:
        """A host that has everybody's addresses and no listener: its kernel answers with resets."""
        if self._wall is not None:
            return _WALL
        self._wall = f"{self._name}-wall"
        _add(self._wall)
        self._connect(self._wall, "wall", _WALL)
        for host in self.hosts:
            lines = [f"addr add {address} dev lo noprefixroute" for address in host.addresses]
            _ip(self._wall, *lines, *_neighbours(host.addresses, host.hardware))
        for family, subnet in self._families():
            _ip(
                self._wall,
                f"route add {subnet} dev eth0",
                # An address is its own where it is asked for, the host's where it answers.
                "rule add pref 10 iif eth0 lookup local",
                "rule add pref 20 lookup main",
                "rule del pref 0",
                family=[family],
            )
        return _WALL

    # --- a worse network --------------------------------------------------------------------------

    def delay(self, ms: float) -> None:
        """Every packet takes this much longer, in each direction."""
        self.worsen(delay_ms=ms)

    def lose(self, percent: float) -> None:
        """So many packets are lost, by chance."""
        self.worsen(loss_percent=percent)

    def worsen(self, *, delay_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Delay and lose packets from now on, with tc's netem or, where the kernel has none, by a
        bridge of our own."""
        rule = [
            "netem",
            "delay",
            f"{delay_ms:g}ms",
            "loss",
            f"{loss_percent:g}%",
            "limit",
            "100000",
        ]
        for host in self.hosts:
            tc = ["tc", "-n", self._switch, "qdisc", "replace", "dev", host.port, "root", *rule]
            done = subprocess.run(tc, capture_output=True, text=True)
            if done.returncode:
                break
        else:
            return
        if "kind is unknown" not in done.stderr:
            raise AssertionError(f"{' '.join(tc)}: {done.stderr}")
        self._end_slow_bridge()
        self._start_slow_bridge(delay_ms / 1000, loss_percent / 100)

    def _start_slow_bridge(self, delay: float, loss: float) -> None:
        self._build_wall()
        ports = [*(host.port for host in self.hosts), "wall"]
        _ip(self._switch, *(f"link set {port} nomaster promisc on" for port in ports))
        program = [sys.executable, "-m", "tests.slow_bridge", str(delay), str(loss), *ports]
        here = ["ip", "netns", "exec", self._switch, "setpriv", "--pdeathsig", "KILL"]
        self._slow_bridge = subprocess.Popen([*here, *program], stdout=subprocess.PIPE)
        assert self._slow_bridge.stdout is not None
        assert self._slow_bridge.stdout.readline() == b"ready\n"

    def _end_slow_bridge(self) -> None:
        if self._slow_bridge is not None:
            self._slow_bridge.kill()
            self._slow_bridge.communicate()
            self._slow_bridge = None


def sweep() -> None:
    """Remove what test runs that were killed have left behind."""
    names = [*_namespaces(), *(path.name for path in _ETC.glob("tens*"))]
    for name in names:
        match = _NAME.fullmatch(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(name)


def _namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listing.stdout.splitlines() if line.strip()]


def _add(namespace: str) -> None:
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    _ip(namespace, "link set lo up")


def _remove(namespace: str) -> None:
    try:
        if namespace in _namespaces():
            _signal(_pids(namespace), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], check=True)
    except subprocess.CalledProcessError:
        if namespace in _namespaces():
            raise  # otherwise another process of tests, which sweeps too, was faster
    shutil.rmtree(_ETC / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):  # there was none, or others use it
        _ETC.rmdir()


def _pids(namespace: str) -> list[int]:
    listing = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listing.stdout.split()]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended by itself


def _neighbours(addresses: Sequence[str], hardware: str) -> list[str]:
    return [
        f"neigh replace {address} lladdr {hardware} dev eth0 nud permanent" for address in addresses
    ]


def _ip(namespace: str, *lines: str, family: Sequence[str] = ()) -> None:
    """Run the lines in one `ip`: a cut takes milliseconds."""
    command = ["ip", *family, "-n", namespace, "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
