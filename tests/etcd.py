"""A real etcd for tests: on free ports, with its data in a temporary directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.jobs import free_port
from tests.support import poll_for

#: Set by `scripts/test --install`: what was to be installed must be there.
MUST_BE_THERE = "TESTS_MUST_NOT_SKIP"
#: With these times etcd grants leases of one second; with its own, of two at least.
FAST = ("--heartbeat-interval=20", "--election-timeout=200")


def binary() -> str | None:
    return os.environ.get("TORCHELASTIC_ETCD_BINARY_PATH") or shutil.which("etcd")


class Etcd:
    """One etcd server."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.port = free_port()
        self._flags = flags
        self._peer_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, or start it again with the data it had."""
        url, peers = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        command = [binary() or "etcd", f"--data-dir={self.directory}/data", *self._flags]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        command += [f"--initial-cluster=default={peers}"]
        self.run(command)

    def run(self, command: list[str]) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        poll_for(self._answers, what="etcd answers")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.directory / "log").read_text())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), opener.open(f"http://{self.endpoint}/health") as answer:
            return b"true" in answer.read()
        return False

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


def need_etcd() -> None:
    """Skip the test where there is no etcd."""
    if binary() is None:
        sentence = (
            "no etcd here: install Debian's etcd-server (scripts/test --install does), or name "
            "the program in TORCHELASTIC_ETCD_BINARY_PATH"
        )
        (pytest.fail if os.environ.get(MUST_BE_THERE) else pytest.skip)(sentence)


@contextlib.contextmanager
def running(*flags: str) -> Iterator[Etcd]:
    need_etcd()
    with tempfile.TemporaryDirectory(prefix="etcd-") as directory:
        etcd = Etcd(Path(directory), *flags)
        try:
            etcd.start()
            yield etcd
        finally:
            etcd.stop()


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    """One for all tests: each uses ids of its own."""
    with running(*FAST) as server:
        yield server
