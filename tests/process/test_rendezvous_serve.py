"""`torchelastic rendezvous serve` with real jobs, killed and started again under them."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.certificates import Authority
from tests.ports import free_port
from tests.process.jobs import Job, alive, torchelastic
from tests.support import poll_for
from torchelastic.errors import EXIT_RENDEZVOUS_LOST, EXIT_USAGE


class Server:
    """The serving process; started again it has the same port and flags."""

    def __init__(self, directory, port=0, *flags):
        self.state = directory / "state"
        self._log = directory / "served"
        self._flags = [f"--endpoint=127.0.0.1:{port or free_port()}", *flags]
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "torchelastic", "rendezvous", "serve", *self._flags]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            poll_for(lambda: "Serving the rendezvous" in self.said, what="it serves", timeout=30.0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.said}") from None
        return self

    @property
    def said(self):
        return self._log.read_text()

    @property
    def port(self):
        return int(re.search(r"Serving the rendezvous of .* at .*:(\d+)\.", self.said)[1])

    def stop(self, signum=signal.SIGTERM):
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signum)
            self.process.wait(30)
        return self.process.returncode

    def worlds(self):
        """The generation of each job's world, as the state file has it."""
        found = {}
        for line in self.state.read_text().splitlines()[1:]:
            match json.loads(line.partition(" ")[2]):
                case ["job", job, _, table]:
                    rows = {row[0]: row[1] for row in table["rows"]}
                    found[job] = json.loads(rows["world"])["generation"]
                case ["put", job, "world", text, *_]:
                    found[job] = json.loads(text)["generation"]
        return found


@pytest.fixture
def served(tmp_path):
    servers = []

    def make(*flags, port=0):
        servers.append(Server(tmp_path, port, *flags))
        return servers[-1].start()

    yield make
    for server in servers:
        server.stop(signal.SIGKILL)


@pytest.fixture
def jobs(tmp_path):
    made = []

    def make(port, flags):
        made.append(Job(tmp_path / f"job{len(made)}", f"--no-zygote {flags}"))
        made[-1].port = port
        return made[-1]

    yield make
    for job in made:
        job.close()


def start_two(job):
    """Nobody of them hosts."""
    job.start()
    job.start()
    return job.world(0, 2)


def test_a_restart_within_the_lease_is_not_noticed(served, jobs, tmp_path):
    server = served(f"--state-file={tmp_path}/state")
    job = jobs(server.port, "--nnodes=1:2 --settle=60 --lease=20")
    before = start_two(job)

    for _ in range(2):
        server.stop(signal.SIGKILL)
        server.start()
    assert all(alive(line["pid"]) for line in before)
    job.order("raise", rank=0, generation=0)
    after = job.world(1, 2)

    assert [line["pid"] for line in before] != [line["pid"] for line in after]
    assert server.worlds() == {f"job{job.port}": 1}
    job.order("finish")
    assert [node.wait() for node in job.nodes] == [0, 0]
    for node in job.nodes:
        assert node.events("lease-lost") == []


@pytest.mark.slow
def test_the_generation_outlives_all_nodes(served, jobs, tmp_path):
    server = served(f"--state-file={tmp_path}/state")
    first = jobs(server.port, "--nnodes=1:2 --settle=60")
    start_two(first)
    for node in first.nodes:
        node.kill()
    server.stop(signal.SIGKILL)
    server.start()

    second = jobs(server.port, "--nnodes=1:2 --settle=0.2")
    second.start()

    second.begun(1, after=0)
    second.order("finish")
    assert second.nodes[0].wait() == 0


@pytest.mark.slow
def test_a_job_that_is_over_leaves_its_id_to_the_next(served, jobs, tmp_path):
    server = served(f"--state-file={tmp_path}/state")
    for _ in range(2):
        job = jobs(server.port, "--nnodes=1:2 --settle=0.2")
        job.order("finish")
        assert job.start().wait(60) == 0
        assert [line["generation"] for line in job.lines(event="finish")] == [0]


@pytest.mark.slow
def test_jobs_at_one_server_do_not_meet_and_without_a_state_file_end_with_it(served, jobs):
    server = served()
    ends, stays = (
        jobs(server.port, f"--nnodes=1:2 --settle=0.2 --rdzv-id={name}") for name in "ab"
    )
    for job in (ends, stays):
        job.start()
        assert job.world(0, 1)[0]["rank"] == 0
    ends.order("finish")
    assert ends.nodes[0].wait() == 0

    assert server.stop() == 0
    assert stays.nodes[0].wait() == EXIT_RENDEZVOUS_LOST
    assert "The rendezvous server was stopped." in stays.nodes[0].stderr


@pytest.mark.slow
@pytest.mark.needs("openssl")
def test_rendezvous_serve_takes_a_secret_and_tls(served, jobs, tmp_path):
    authority = Authority(tmp_path, "ca")
    own = authority.issue("server")
    (tmp_path / "secret").write_text("the secret of these jobs\n")
    (tmp_path / "secret").chmod(0o600)
    flags = [
        f"--rdzv-secret-file={tmp_path}/secret",
        f"--rdzv-tls-cert={own.cert}",
        f"--rdzv-tls-key={own.key}",
        f"--rdzv-tls-ca={authority.cert}",
    ]
    server = served(*flags)

    job = jobs(server.port, " ".join(["--nnodes=1:2", "--settle=0.2", *flags]))
    job.start()
    job.world(0, 1)
    job.order("finish")
    assert job.nodes[0].wait() == 0

    stranger = jobs(server.port, "--nnodes=1:2 --settle=0.2 --wait-for-nodes=1")
    assert stranger.start().wait() != 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("import torch\n", "is not a rendezvous state file"), (None, "cannot be used")],
)
def test_a_state_file_that_is_none_is_refused_with_a_reason(tmp_path, content, sentence):
    path = tmp_path / "state"
    path.write_text(content) if content else path.mkdir()

    refused = torchelastic("rendezvous", "serve", "--endpoint=127.0.0.1:0", f"--state-file={path}")

    assert refused.returncode == EXIT_USAGE
    assert sentence in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not os.path.exists(f"{path}.new")


def test_a_port_that_is_taken_is_named(served):
    server = served()

    refused = torchelastic("rendezvous", "serve", f"--endpoint=127.0.0.1:{server.port}")

    assert refused.returncode == EXIT_USAGE
    assert f"Cannot serve at 127.0.0.1:{server.port}: another process" in refused.stderr
