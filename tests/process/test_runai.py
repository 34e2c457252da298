"""A container of Run:ai, as far as one machine goes: process 1 of a pid namespace, any user id.

The seed's command line is rendered and compared, not run: there is no Run:ai here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.light import with_light_torch
from tests.process.jobs import SCRIPT, Job, Node, job
from tests.support import poll_for

LAUNCH = Path(__file__).parents[2] / "examples" / "runai" / "launch.sh"

SEED_003_LINE_36 = r"""
runai training pytorch submit adobe-workflow \
  --image vivekkolasani1996/adobe-elastic-pytorch-satya:v2 \
  --workers 2 \
  --port service-type=NodePort,container=8080 \
  --run-as-user \
  --command -- bash -c "/app/launch.sh && sleep infinity"
"""

#: Of Run:ai's containers: no passwd entry has it.
UID = 54321


def rendered(*flags: str) -> list[str]:
    command = [sys.executable, "-m", "torchelastic", "submit", "runai", "--dry-run", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return shlex.split(done.stdout)


def test_seed_003_line_36_is_what_submit_renders():
    """Every word of the seed's command line is there, but for the command in the container."""
    seed = shlex.split(SEED_003_LINE_36.replace("\\\n", ""))
    image = seed[seed.index("--image") + 1]
    ours = rendered(
        *("--name", "adobe-workflow", "--image", image, "--nnodes", "1:2", "--run-as-user"),
        *("--port", "service-type=NodePort,container=8080", "--dashboard", "0.0.0.0:8080"),
        "/app/train.py",
    )
    workers, command = seed.index("--workers"), seed.index("--command")
    assert ours == [
        *seed[:workers],
        *("--no-master", "--workers", "2", "--min-replicas", "1", "--max-replicas", "2"),
        *seed[workers + 2 : command + 2],
        *("torchelastic", "run", "--nnodes=1:2", "--dashboard=0.0.0.0:8080", "--", "/app/train.py"),
    ]


def test_the_page_shows_what_is_rendered():
    page = (LAUNCH.parents[2] / "docs" / "guides" / "runai.md").read_text()
    typed, shown, *_ = re.findall(r"```bash\n(.*?)```", page.replace("\\\n", ""), re.S)
    assert rendered(*shlex.split(typed)[3:]) == shlex.split(shown)


# --- process 1 of the container ------------------------------------------------------------------


@contextmanager
def container(it: Job, command: str) -> Iterator[tuple[Node, int]]:
    """Start one more node of a job as process 1 of a pid namespace; yield it and that process.

    The container has its own directories: nothing on this machine may be taken for its own.
    """
    directory = it.directory / "container"
    environ = with_light_torch() | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(directory / "run"),
    }
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", command]
    node = Node(inside, directory, environ)
    (directory / "run").mkdir(mode=0o700)
    it.nodes.append(node)
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    try:
        yield node, int(poll_for(children.read_text, what="process 1").split()[0])
    finally:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()


def arguments(it: Job) -> str:
    """Return what the containers' `torchelastic run` is given, as words of a shell."""
    words = [f"--log-dir={it.directory}/container/logs", f"--rdzv-id=job{it.port}", "--nnodes=1:2"]
    words += [f"--rdzv-endpoint=127.0.0.1:{it.port}", str(SCRIPT)]
    return shlex.join([*words, str(it.directory / "lines"), str(it.directory / "orders")])


def has_signal(pid: int, field: str, signum: int) -> bool:
    """Return whether a signal is in one of the sets of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(rf"^{field}:\s*(\w+)$", status, re.M)[0], 16) >> (signum - 1) & 1)


@pytest.mark.needs("pid namespace")
def test_seed_003_line_41_its_wrapper_hides_sigterm_and_the_others_go_on(tmp_path):
    """Two agents start. Process 1 without a handler gets no SIGTERM: Run:ai kills it in the end."""
    with job(tmp_path, "--nnodes=1:2") as it:
        first = it.start()
        it.world(0, 1)
        launch = tmp_path / "launch.sh"
        launch.write_text(f"#!/bin/bash\ntorchelastic run {arguments(it)}\n")
        launch.chmod(0o755)
        seed = shlex.split(SEED_003_LINE_36)[-1].replace("/app/launch.sh", str(launch))
        with container(it, seed) as (node, pid):
            it.world(1, 2)
            assert not has_signal(pid, "SigCgt", signal.SIGTERM)
            os.kill(pid, signal.SIGTERM)
            assert not has_signal(pid, "ShdPnd", signal.SIGTERM), "it was dropped"
            assert node.process.poll() is None
            os.kill(pid, signal.SIGKILL)  # the grace time is over
            node.wait()
            it.world(2, 1)
        it.order("finish")
        assert first.wait() == 0, it.said()
        overs = [record["kind"] for record in first.events("generation-over")]
        assert overs == ["resize", "node-failure"]


@pytest.mark.needs("pid namespace")
def test_with_exec_a_reclaimed_node_leaves(tmp_path):
    """Two agents start. The example's launch script is process 1, and then torchelastic is."""
    with job(tmp_path, "--nnodes=1:2") as it:
        first = it.start()
        it.world(0, 1)
        with container(it, f"exec {LAUNCH} {arguments(it)}") as (node, pid):
            it.world(1, 2)
            os.kill(pid, signal.SIGTERM)
            assert node.wait() == 143
            it.world(2, 1)
        it.order("finish")
        assert first.wait() == 0, it.said()
        overs = [record["kind"] for record in first.events("generation-over")]
        assert overs == ["resize", "leave"]


# --- --run-as-user -------------------------------------------------------------------------------

#: A user without an entry in passwd and without a home. The capability is for this machine, whose
#: Python may lie in a directory of root's; it does not allow to write.
AS_USER = [
    *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
#: In one write: two workers share the output.
SAY = r'os.write(1, b"trained as %d\n" % os.getuid())'
DDP = f"""\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
{SAY}
dist.destroy_process_group()
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users can enter, as pytest's own cannot be."""
    path = Path(tempfile.mkdtemp(prefix="torchelastic-test-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.needs("root")
@pytest.mark.parametrize("light", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_any_user_id_without_a_home_can_run_a_job(public, light):
    """With and without torch, which has caches of its own."""
    train = public / "train.py"
    train.write_text(f"import os\n{SAY}" if light else DDP)
    temporary = public / "tmp"
    temporary.mkdir()
    shutil.chown(temporary, UID, UID)
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environ = (with_light_torch(kept) if light else kept) | {"HOME": "/", "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "torchelastic", "run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*AS_USER, *command, str(train)],
        cwd="/",
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"trained as {UID}\n") == 2
