"""Stock torchrun with our rendezvous: real agents, real workers that meet by gloo."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.etcd import Etcd
from tests.ports import free_port
from tests.support import poll_for

# Every torchrun, and every worker, imports torch: minutes, on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKER = Path(__file__).with_name("torchrun_worker.py")
TIMEOUT = 120.0


class Up(NamedTuple):
    """A worker that has met the others."""

    rank: int
    size: int
    store: int
    pid: int
    agent: int


class Torchruns:
    """The torchrun processes of one job."""

    def __init__(self, directory, endpoint=""):
        self.directory = directory
        self.endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self.id = f"torchruns-{free_port()}"  # the etcd is everybody's
        self.processes = []

    def start(self, flags=""):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3"]
        command += ["--rdzv-backend=torchelastic", f"--rdzv-endpoint={self.endpoint}"]
        command += [f"--rdzv-id={self.id}", "--max-restarts=3", "--shutdown-timeout=5"]
        command += flags.split()
        log = (self.directory / f"log-{len(self.processes)}").open("wb")
        with log:
            process = subprocess.Popen(
                [*command, str(WORKER), str(self.directory)], stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def log(self, process):
        number = self.processes.index(process)
        return (self.directory / f"log-{number}").read_text(errors="replace")

    def ups(self):
        return [Up(*map(int, path.read_text().split())) for path in self.directory.glob("up-*")]

    def world(self, size, besides=()):
        """The workers of a whole world of `size` at a store that is none of `besides`."""

        def found():
            for store in {up.store for up in self.ups()} - set(besides):
                ups = [up for up in self.ups() if up.store == store]
                if len(ups) == size and {up.size for up in ups} == {size}:
                    return sorted(ups)
            return None

        try:
            return poll_for(found, what=f"a world of {size}", timeout=TIMEOUT)
        except AssertionError as error:
            logs = "\n".join(self.log(process) for process in self.processes)
            raise AssertionError(f"{error}: {self.ups()}\n{logs}") from None

    def finish(self):
        """Let the workers succeed, and those torchruns that are there with them."""
        (self.directory / "finish").touch()
        for process in self.processes:
            if process.returncode is None:
                assert process.wait(TIMEOUT) == 0, self.log(process)

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for up in self.ups():  # torchrun does not take its workers with it when it is killed
            try:
                os.kill(up.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def test_workers_and_agents_come_and_go(tmp_path):
    """One job: a worker dies, and all are restarted; an agent comes; the one that hosts the
    rendezvous is killed; one is asked to go. Three agents and ten workers import torch."""
    with Torchruns(tmp_path) as torchruns:
        host = torchruns.start("--rdzv-conf=is_host=1")
        stays = torchruns.start("--rdzv-conf=is_host=0")
        first = torchruns.world(2)
        stores = {first[0].store}

        (tmp_path / f"die-{first[1].pid}").touch()
        second = torchruns.world(2, besides=stores)
        assert {up.pid for up in first}.isdisjoint(up.pid for up in second)
        stores.add(second[0].store)

        goes = torchruns.start("--rdzv-conf=is_host=0")
        third = torchruns.world(3, besides=stores)
        assert [up.agent for up in third[:2]] == [up.agent for up in second]
        stores.add(third[0].store)

        host.kill()
        host.wait()
        fourth = torchruns.world(2, besides=stores)
        assert {up.agent for up in fourth} == {stays.pid, goes.pid}
        stores.add(fourth[0].store)

        goes.send_signal(signal.SIGTERM)
        assert goes.wait(TIMEOUT) != 0
        torchruns.world(1, besides=stores)
        assert stays.poll() is None
        torchruns.finish()


def test_workers_that_fail_too_often_end_the_job_on_every_node(tmp_path):
    with Torchruns(tmp_path) as torchruns:
        first = torchruns.start("--max-restarts=0")
        second = torchruns.start("--max-restarts=3")
        before = torchruns.world(2)

        (failing,) = (up for up in before if up.agent == first.pid)
        (tmp_path / f"die-{failing.pid}").touch()

        assert (first.wait(TIMEOUT), second.wait(TIMEOUT)) == (1, 1)
        assert "RendezvousClosedError" in torchruns.log(second)
        assert "torchrun gave up restarting its workers" in torchruns.log(second)


def test_torchrun_agents_at_etcd_survive_a_killed_one(tmp_path, some_etcd: Etcd):
    with Torchruns(tmp_path, f"etcd://{some_etcd.endpoint}") as torchruns:
        torchruns.start()
        torchruns.start()
        before = torchruns.world(2)
        torchruns.processes[0].kill()
        torchruns.processes[0].wait()
        torchruns.world(1, besides={before[0].store})
        torchruns.finish()
