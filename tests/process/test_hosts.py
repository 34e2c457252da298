"""`run --hosts` over a real sshd: every machine is a network namespace with an sshd of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.netns import Host, Network
from tests.process.jobs import Job, Node, words_of
from tests.support import poll_for

pytestmark = [pytest.mark.needs("namespaces", "sshd"), pytest.mark.timeout(180)]

SECRET = "0123456789abcdef0123456789abcdef"


class Machines:
    """Hosts with an sshd each, and one from which jobs are started."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.here, *self.hosts = network.hosts
        self.directory = directory
        self._servers: list[subprocess.Popen[bytes]] = []
        directory.mkdir()
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)],
                check=True,
            )
        (directory / "sshd_config").write_text(
            f"HostKey {directory}/host_key\nAuthorizedKeysFile {directory}/user_key.pub\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
        )
        (directory / "ssh_config").write_text(
            f"Host *\nIdentityFile {directory}/user_key\nBatchMode yes\nConnectTimeout 5\n"
            "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        )
        for host in self.hosts:
            self.power_on(host)

    def power_on(self, host: Host) -> None:
        server = ["/usr/sbin/sshd", "-D", "-E", f"{self.directory}/sshd.log"]
        self._servers.append(host.popen([*server, "-f", f"{self.directory}/sshd_config"]))
        poll_for(lambda: ":22 " in host.run(["ss", "-Hltn"]), what=f"sshd on {host}")

    def close(self) -> None:
        for host in (self.here, *self.hosts):
            host.kill()
        for server in self._servers:
            server.wait(10)

    @property
    def environ(self) -> dict[str, str]:
        return with_light_torch() | {"TORCHELASTIC_SSH": f"ssh -F {self.directory}/ssh_config"}


@contextmanager
def machines(directory: Path, count: int) -> Iterator[Machines]:
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd wants to be able to change to
    with Network(count + 1, ipv6=False) as network:
        them = Machines(network, directory)
        try:
            yield them
        finally:
            them.close()


class HostsJob(Job):
    """A job that one command on one machine runs on all of them."""

    def launch(self, them: Machines, *flags: str) -> Node:
        logs = f"--log-dir={self.directory}/logs{len(self.nodes)}"
        command = [sys.executable, "-m", "torchelastic", "run", logs, *flags, *self.command()]
        directory = self.directory / f"launcher{len(self.nodes)}"
        self.nodes.append(Node(them.here.command(command), directory, them.environ))
        return self.nodes[-1]


def address(host: Host) -> str:
    return host.address


def write_hosts(path: Path, hosts: list[Host]) -> None:
    path.with_suffix(".new").write_text("".join(f"{address(host)}:1\n" for host in hosts))
    path.with_suffix(".new").rename(path)


@pytest.mark.slow
def test_a_job_grows_shrinks_and_heals_with_its_list_of_hosts(tmp_path):
    """Hosts are listed, killed, switched on again and removed, the first one too."""
    with machines(tmp_path / "ssh", 3) as them:
        first, second, third = them.hosts
        listed, secret = tmp_path / "hosts", tmp_path / "secret"
        secret.write_text(SECRET)
        write_hosts(listed, [first, second])
        made = HostsJob(tmp_path / "job")
        node = made.launch(them, f"--hosts-from={listed}", f"--rdzv-secret-file={secret}")
        try:
            generation = made.begun(2)
            hosts = f"[{first.address}] [torchelastic {first.name}] hosting job"
            poll_for(lambda: hosts in node.stderr, what="what the first host says")
            for pid in [*first.pids(), *them.here.pids()]:
                assert SECRET not in _command(pid)

            second.kill()
            generation = made.begun(1, after=generation)
            poll_for(
                lambda: f"{second.address}: ssh failed or lost its connection" in node.stderr,
                what="the loss is told",
            )
            them.power_on(second)
            generation = made.begun(2, after=generation)

            write_hosts(listed, [second, third])
            generation = made.begun(2, after=generation)
            left = f"{first.address} is not in the list of hosts any more"
            poll_for(lambda: left in node.stderr, what="the removed host leaves")
            poll_for(
                lambda: len([pid for pid in first.pids() if _runs_agent(pid)]) == 0,
                what="nothing of the job is left there",
            )
            made.order("finish")
            assert node.wait() == 0, made.said()
        finally:
            made.close()


@pytest.mark.slow
def test_the_launcher_may_be_lost_and_found_again(tmp_path):
    """Its machine loses power; the same command follows the job, and Ctrl-C ends it."""
    with machines(tmp_path / "ssh", 2) as them:
        hosts = ",".join(f"{address(host)}:1" for host in them.hosts)
        flags = ("--nnodes=2", f"--hosts={hosts}", "--rdzv-id=found-again")
        made = HostsJob(tmp_path / "job")
        node = made.launch(them, *flags)
        try:
            generation = made.begun(2)
            them.here.kill()
            assert node.wait() != 0
            made.order("exit 3", rank=1, generation=generation)
            made.begun(2, after=generation)  # it goes on, and heals by itself

            again = made.launch(them, *flags)
            told = [f"{host.address} runs an agent of this job already" for host in them.hosts]
            poll_for(lambda: all(one in again.stderr for one in told), what="the job is followed")
            [launcher] = [pid for pid in them.here.pids() if "--rdzv-id" in _command(pid)][:1]
            os.kill(launcher, signal.SIGINT)
            assert again.wait() == 130, again.stderr
            for host in them.hosts:
                poll_for(
                    lambda host=host: not any(_runs_agent(pid) for pid in host.pids()),
                    what="the agents have left",
                )
        finally:
            made.close()


def test_one_host_that_cannot_be_reached_does_not_stop_the_others(tmp_path):
    with machines(tmp_path / "ssh", 2) as them:
        them.hosts[0].kill()
        hosts = ",".join(f"{address(host)}:2" for host in them.hosts)
        made = HostsJob(tmp_path / "job")
        node = made.launch(them, f"--hosts={hosts}", "--max-restarts=0")
        try:
            made.begun(2)
            made.order("raise out of luck")
            assert node.wait() == 1, made.said()
            assert "ValueError: out of luck" in node.stderr
            assert "Root Cause (first observed failure)" in node.stderr
        finally:
            made.close()


def _command(pid: int) -> str:
    return shlex.join(words_of(pid))


def _runs_agent(pid: int) -> bool:
    return "torchelastic" in _command(pid)
