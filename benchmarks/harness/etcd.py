"""A real etcd of one member, for as long as one measurement takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.harness.contestants import MEMORY
from benchmarks.harness.job import free_port

START_PATIENCE = 30.0


class EtcdServer:
    """Started on free ports, its data in memory: what is measured is not a disk."""

    @staticmethod
    def program() -> str | None:
        return os.environ.get("TORCHELASTIC_ETCD_BINARY_PATH") or shutil.which("etcd")

    def __enter__(self) -> str:
        program = self.program()
        if program is None:
            raise FileNotFoundError("no etcd on the PATH")
        self._directory = Path(tempfile.mkdtemp(prefix="bench-etcd-", dir=MEMORY))
        endpoint, peers = (f"127.0.0.1:{free_port()}" for _ in range(2))
        command = [program, f"--data-dir={self._directory / 'data'}"]
        command += [f"--listen-client-urls=http://{endpoint}"]
        command += [f"--advertise-client-urls=http://{endpoint}"]
        command += [f"--listen-peer-urls=http://{peers}"]
        command += [f"--initial-advertise-peer-urls=http://{peers}"]
        command += [f"--initial-cluster=default=http://{peers}"]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._wait_healthy(endpoint)
        except BaseException:
            self.__exit__()
            raise
        return endpoint

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait_healthy(self, endpoint: str) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + START_PATIENCE
        while True:
            try:
                with opener.open(f"http://{endpoint}/health", timeout=1.0) as answer:
                    if b"true" in answer.read():
                        return
            except OSError:
                pass  # not there yet
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._directory / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)
