"""The Dockerfile, without Docker: what it says, and its entry point as PID 1 of a pid namespace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.light import PLACE
from tests.support import poll_for

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def argument_of(word: str) -> str:
    """The argument of the last instruction of this kind, which is the one that counts."""
    return [rest for found, rest in instructions() if found == word][-1]


def variables() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in argument_of("ENV").split())


def test_image_copies_only_files_of_the_checkout():
    sources = [
        word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]
    ]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    kept = [line[1:] for line in ignored if line.startswith("!")]
    assert [source for source in sources if not any(fnmatch(source, one) for one in kept)] == []


def test_image_copies_all_that_a_build_reads():
    """Each file that pyproject.toml names is in the image before `pip install`."""
    copied = " ".join(rest for name, rest in instructions() if name == "COPY").split()
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= set(copied)


def test_image_does_not_run_as_root_and_passes_signals_on():
    assert argument_of("USER").split(":")[0] not in ("0", "root")
    assert argument_of("USER").split(":")[0].isdigit()  # Kubernetes' runAsNonRoot asks for that
    assert json.loads(argument_of("ENTRYPOINT")) == ["torchelastic", "run"]
    json.loads(argument_of("CMD"))


# --- as PID 1 ------------------------------------------------------------------------------------

#: In no /etc/passwd.
UID = 54321

#: Leaves two orphans in sessions of their own: one has ended, one stays.
WORKER = """
import os, signal, time
def leave_orphan(stays):
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            while stays:
                signal.pause()
        os._exit(0)
    os.waitpid(child, 0)
leave_orphan(False)
leave_orphan(True)
open("started", "w").close()
while not os.path.exists("finish"):
    time.sleep(0.02)
"""


class Container:
    """`torchelastic run train.py` as the image starts it, by a user who can write only here."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stderr = directory / "stderr"
        (directory / "train.py").write_text(WORKER)
        os.chown(directory, UID, UID)
        # Python itself may be in a directory that only root can read.
        readable = "dac_read_search"
        identity = [f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        identity += [f"--inh-caps=-all,+{readable}", f"--ambient-caps=-all,+{readable}"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = variables() | {"PATH": path, "PYTHONPATH": str(PLACE), "HOME": "/nonexistent"}
        # Of another user, as `docker run --user` may leave it; the check for leaks knows it.
        settings |= {"TMPDIR": str(directory), "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    *("unshare", "--pid", "--fork", "--mount-proc"),
                    *("setpriv", *identity, "env", "-i"),
                    *(f"{name}={value}" for name, value in settings.items()),
                    *(*json.loads(argument_of("ENTRYPOINT")), "train.py"),
                ],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        #: What is PID 1 in there.
        self.init = int(poll_for(children.read_text, what="PID 1"))

    def processes(self) -> dict[int, tuple[str, str, int]]:
        """Name, state and parent of all below PID 1."""
        every = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = path.read_text().partition("(")[2].rpartition(") ")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            state, parent, *_ = rest.split()
            every[int(path.parent.name)] = name, state, int(parent)
        inside = {self.init}
        while more := {pid for pid, of in every.items() if of[2] in inside} - inside:
            inside |= more
        return {pid: every[pid] for pid in inside - {self.init}}

    def orphan(self) -> int | None:
        """A `sleep` that PID 1 has as its child."""
        wanted = "sleep", self.init
        found = self.processes().items()
        return next((pid for pid, (name, _, of) in found if (name, of) == wanted), None)

    def has_no_zombie(self) -> bool:
        return all(state != "Z" for _, state, _ in self.processes().values())

    def wait(self) -> tuple[int, str]:
        return self.process.wait(60), self._stderr.read_text()


@contextmanager
def container(directory: Path) -> Iterator[Container]:
    directory.mkdir()
    made = Container(directory)
    try:
        poll_for((directory / "started").exists, what="the worker")
        yield made
    finally:
        if made.process.poll() is None:
            os.kill(made.init, signal.SIGKILL)  # and with it all in there
            made.process.wait(60)


@pytest.mark.needs("pid namespace")
def test_orphans_are_reaped_and_success_is_0(tmp_path):
    with container(tmp_path / "box") as box:
        assert os.stat(f"/proc/{box.init}").st_uid == UID
        poll_for(box.has_no_zombie, what="the orphan that has ended is reaped")
        # As by `docker exec`: what it leaves becomes a child of PID 1.
        enter = ["nsenter", f"--target={box.init}", "--pid", "sh", "-c", "(sleep 60 &)"]
        subprocess.run(enter, check=True, timeout=60)
        pid = poll_for(box.orphan, what="PID 1 has it")
        os.kill(pid, signal.SIGKILL)
        poll_for(lambda: pid not in box.processes(), what="PID 1 has reaped it")
        (box.directory / "finish").touch()
        code, said = box.wait()
    assert code == 0, said


@pytest.mark.needs("pid namespace")
def test_sigterm_to_pid_1_makes_the_node_leave(tmp_path):
    with container(tmp_path / "box") as box:
        os.kill(box.init, signal.SIGTERM)
        code, said = box.wait()
    assert code == 143, said
