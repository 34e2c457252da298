"""The secret of a job: who gets it, and who never sees it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.process.bench import bench, fake_torch
from torchelastic.config import Entry
from torchelastic.rendezvous.secret import Secret

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
def environ(tmp_path: Path) -> dict[str, str]:
    return fake_torch(tmp_path)


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
