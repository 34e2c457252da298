"""The secret of a job: who gets it, and who never sees it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.certificates import Authority
from tests.light import with_light_torch
from tests.process.bench import bench
from tests.process.jobs import Job, job, tree
from torchelastic.config import Entry
from torchelastic.errors import EXIT_USAGE
from torchelastic.transport.auth import Secret

KEY = "the secret of this job"
SECRET = Secret(KEY.encode())

#: Prints whether it has the secret, and what it can see of it in the ordinary way.
LOOK = f"""
import os, subprocess
from pathlib import Path
from torchelastic.worker import handed_secret
secret = handed_secret.secret()
print(secret is not None and secret.reveal().decode() == {KEY!r})
print([name for name, value in os.environ.items() if "SECRET" in name or {KEY!r} in value])
print({KEY!r}.encode() in Path("/proc/self/environ").read_bytes())
print(sorted(os.readlink(f"/proc/self/fd/{{fd}}")[:4] for fd in os.listdir("/proc/self/fd")
      if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{{fd}}")).count("pipe"))
"""


@pytest.fixture
def environ() -> dict[str, str]:
    return with_light_torch()


@pytest.fixture
def made(tmp_path: Path):
    with bench(tmp_path) as made:
        yield made


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "plain"])
def test_a_worker_has_the_secret_and_nothing_shows_it(made, environ, tmp_path, warm):
    script = tmp_path / "train.py"
    script.write_text(LOOK)
    entry = Entry("script", str(script))
    if warm:
        made.start_zygote(entry, environ)
    made.secret = SECRET
    ran = made.run(entry, environ)
    assert (ran.stdout, ran.exitcode) == ("True\n[]\nFalse\n0\n", 0), ran.stderr


def test_another_program_can_read_it_from_its_descriptor(made, environ, tmp_path):
    made.secret = SECRET
    program = dedent("""
        import os
        print(os.read(int(os.environ["TORCHELASTIC_SECRET_FD"]), 100).decode())
    """)
    ran = made.run(Entry("program", sys.executable, ("-c", program)), environ)
    assert ran.stdout == KEY + "\n"


def test_no_descriptor_is_left_with_the_agent(made, environ):
    before = set(os.listdir("/proc/self/fd"))
    made.secret = SECRET
    made.run(Entry("program", "true"), environ)
    after = {fd for fd in os.listdir("/proc/self/fd") if fd not in before}
    assert not [fd for fd in after if _is_pipe(fd)]


def _is_pipe(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe")
    except FileNotFoundError:
        return False


# A whole job


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


def shown_by(pid: int, *names: str) -> bytes:
    try:
        return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in names)
    except (FileNotFoundError, ProcessLookupError):
        return b""


def written_by(made: Job) -> bytes:
    files = [path for path in made.directory.rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


def test_nodes_with_the_secret_meet_and_show_it_to_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_SECRET", KEY)
    with job(tmp_path / "job", "--nnodes=2 --nproc-per-node=1") as made:
        nodes = [made.start(), made.start()]
        made.world(0, 2)
        for node in nodes:
            first, *others = tree(node.agent_pid)
            assert others
            for pid in others:
                assert KEY.encode() not in shown_by(pid, "environ", "cmdline")
            for pid in (node.pid, first):
                assert KEY.encode() not in shown_by(pid, "cmdline")
        made.order("finish")
        assert [node.wait() for node in nodes] == [0, 0], made.said()
        assert KEY.encode() not in written_by(made)
        assert "has no secret" not in made.said()


def test_a_node_with_another_secret_is_rejected_with_a_reason_and_the_job_goes_on(
    tmp_path, secret_file
):
    with job(tmp_path / "job", "--nnodes=1:2 --no-zygote --settle=0.1") as made:
        node = made.start(f"--rdzv-secret-file={secret_file}")
        made.world(0, 1)
        (tmp_path / "theirs").write_text("another secret than theirs")
        stranger = made.start(f"--rdzv-secret-file={tmp_path / 'theirs'}")
        assert stranger.wait() == EXIT_USAGE
        told = [line for line in stranger.stderr.splitlines() if "different secret" in line]
        assert len(told) == 1, stranger.stderr
        assert "--rdzv-secret-file or TORCHELASTIC_SECRET" in told[0]
        assert made.world_is(0)
        made.order("finish")
        assert node.wait() == 0, made.said()
        assert b"another secret" not in written_by(made)


@pytest.mark.needs("openssl")
def test_nodes_with_certificates_of_one_authority_and_the_secret_meet(tmp_path, secret_file):
    authority, other = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    flags = f"--nnodes=2 --no-zygote --rdzv-secret-file={secret_file}"
    with job(tmp_path / "job", flags) as made:
        nodes = [made.start(tls_flags(authority, authority, "node0"))]
        stranger = made.start(tls_flags(other, authority, "stranger"))
        assert stranger.wait() == EXIT_USAGE
        assert "TLS handshake" in stranger.stderr
        nodes.append(made.start(tls_flags(authority, authority, "node1")))
        made.world(0, 2)
        made.order("finish")
        assert [node.wait() for node in nodes] == [0, 0], made.said()


def tls_flags(signed_by: Authority, trusted: Authority, name: str) -> str:
    issued = signed_by.issue(name)
    return f"--rdzv-tls-cert={issued.cert} --rdzv-tls-key={issued.key} --rdzv-tls-ca={trusted.cert}"
