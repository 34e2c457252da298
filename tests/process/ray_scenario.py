"""A Ray cluster of several raylets on this machine, and a job on it: run in a process of its own.

    ray_scenario.py NAME DIRECTORY

Prints one line of JSON at the end. Everything that Ray starts has ended by then.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import torchelastic.ray
from tests.light import with_light_torch
from tests.ports import free_port
from tests.support import poll_for
from torchelastic.multiprocessing.errors import ChildFailedError
from torchelastic.ray.node_actor import NAMESPACE

HERE = Path(__file__).parent
SAMPLED = HERE / "sampled.py"
PAGE = HERE.parents[1] / "docs/guides/ray.md"
PATIENCE = 180.0


@contextmanager
def cluster(nodes: int, **head: Any) -> Iterator[Cluster]:
    """A head without CPUs, and nodes of one CPU each; this process is the driver."""
    # By default the agent of every head listens at one fixed port, and a second cluster of this
    # machine, which has it first, leaves the head without the agent that jobs are submitted to.
    own = {"dashboard_agent_listen_port": free_port()}
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, **own, **head},
    )
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=1)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


class Job:
    """`torchelastic.ray.run` in a thread, and what its workers wrote."""

    def __init__(self, directory: Path, **keys: int) -> None:
        self.lines_directory = directory / "lines"
        self.lines_directory.mkdir()
        words = [
            f"{key}={value}" for key, value in {**keys, "ledger": directory / "ledger"}.items()
        ]
        self._args = [str(directory / "lines"), str(directory / "orders"), *words]
        self._ended: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._ended.append(
            torchelastic.ray.run(
                str(SAMPLED), self._args, nnodes="2:3", name="job", check=False, settle=0.5
            )
        )

    def wait(self) -> Any:
        self._thread.join(PATIENCE)
        assert self._ended, "the job did not end"
        return self._ended[0]

    def lines(self) -> list[dict[str, Any]]:
        texts = [path.read_text() for path in self.lines_directory.iterdir()]
        return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]

    def trains(self, size: int, after: int = -1) -> int:
        """Wait for a finished step in a newer generation of this size; return the generation."""

        def found() -> list[int]:
            return [
                line["generation"]
                for line in self.lines()
                if line["event"] == "took" and line["size"] == size and line["generation"] > after
            ]

        return max(poll_for(found, what=f"a world of {size} after {after}", timeout=PATIENCE))


def actor(part: str) -> Any:
    """The state of the actor of the job whose name has this part."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return ray.get_actor(next(name for name in names if part in name), NAMESPACE)


def pid_of(part: str) -> int:
    handle = actor(part)
    return ray.get(handle.__ray_call__.remote(lambda self: os.getpid()))


def changes(directory: Path) -> dict[str, Any]:
    """A node is killed, the controller is killed, nodes are added, one is drained."""
    with cluster(3) as made:
        # The epoch has 572 steps: it does not end before all is done to the cluster.
        job = Job(directory, samples=4000, epochs=1, workers=0, held=1)
        generation = job.trains(3)
        secret = _secret()
        killed, drained = [node for node in made.worker_nodes][:2]
        made.remove_node(killed, allow_graceful=False)
        generation = job.trains(2, generation)

        first = pid_of("controller")
        os.kill(first, signal.SIGKILL)
        second = poll_for(lambda: _other_pid(first), what="another controller", timeout=PATIENCE)
        made.add_node(num_cpus=1)
        made.add_node(num_cpus=1)
        generation = job.trains(3, generation)

        _drain(made, drained.node_id, seconds=60)
        generation = job.trains(3, generation)
        (directory / "orders").mkdir()
        (directory / "orders" / "hurry").touch()
        result = job.wait()
        left = _with_text(secret, Path(os.environ["RAY_TMPDIR"]))
    return {
        "exitcode": result.exitcode,
        "killed": result.nodes.get(killed.node_id),  # a later controller may not know of it
        "drained": result.nodes[drained.node_id],
        "others": [
            code
            for node, code in result.nodes.items()
            if node not in (killed.node_id, drained.node_id)
        ],
        "controllers": [first, second],
        "generation": generation,
        "secret": left,
    }


def _other_pid(before: int) -> int:
    try:
        found = pid_of("controller")
    except (ray.exceptions.RayActorError, StopIteration):
        return 0
    return 0 if found == before else found


def _drain(made: Cluster, node: str, seconds: int) -> None:
    """Drain a node, as the autoscaler and readers of preemption notices do."""
    words = ["--address", made.address, "--node-id", node, "--reason-message", "test"]
    words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    words += ["--deadline-remaining-seconds", str(seconds)]
    program = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words]
    subprocess.run(program, check=True, capture_output=True)


def _secret() -> bytes:
    """The job's secret, from the environment of an agent."""
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            mine = f"XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}".encode() in text
        except OSError:
            continue
        if mine and b"TORCHELASTIC_SECRET=" in text:
            return text.partition(b"TORCHELASTIC_SECRET=")[2].partition(b"\0")[0]
    raise AssertionError("no agent has a secret")


def _with_text(secret: bytes, directory: Path) -> list[str]:
    """Files below a directory, and command lines, that show the secret."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    found += Path("/proc").glob("[0-9]*/cmdline")
    return [str(path) for path in found if _has(path, secret)]


def _has(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes()
    except OSError:
        return False


def ends(directory: Path) -> dict[str, Any]:
    """Functions: what they return, how they fail; and a driver that is killed."""
    with cluster(2) as made:
        both = torchelastic.ray.run(_product, [7], nnodes=2)
        failed = torchelastic.ray.run(_fail, nnodes=2, check=False, max_restarts=0)
        try:
            torchelastic.ray.run(_fail, nnodes=1, max_restarts=0)
            raised = ""
        except ChildFailedError as error:
            raised = error.get_first_failure()[1].message["message"]
        missing = torchelastic.ray.run("nowhere.py", nnodes=2, check=False)
        greedy = torchelastic.ray.run(
            _product, [1], resources_per_node={"GPU": 1}, check=False, wait_for_nodes=1
        )
        killed = _driver(made, directory / "killed", signal.SIGKILL)
        asked = _driver(made, directory / "asked", signal.SIGTERM)
    return {
        "results": both.results,
        "failed": [failed.exitcode, sorted(set(failed.nodes.values())), str(failed.first_failure)],
        "raised": raised,
        "missing": [missing.exitcode, str(missing.error)],
        "greedy": [greedy.exitcode, greedy.reason],
        "drivers": [killed, asked],
    }


def _product(factor: int) -> int:
    return factor * int(os.environ["RANK"])


def _fail() -> None:
    raise RuntimeError(f"boom on {os.environ['RANK']}")


SLEEPER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + ".left", "w").close(), sys.exit(0)))
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


def _driver(made: Cluster, mark: Path, signum: int) -> int:
    """End a driver by a signal: its agents leave, and nothing of the job stays; its exit code."""
    script = mark.with_suffix(".py")
    script.write_text(SLEEPER)
    words = ["submit", "ray", "--address", made.address, str(script), str(mark)]
    driver = subprocess.Popen([sys.executable, "-m", "torchelastic", *words], stdout=2)
    poll_for(lambda: mark.exists() and mark.read_text(), what="the worker", timeout=PATIENCE)
    worker = Path("/proc") / mark.read_text()
    driver.send_signal(signum)
    code = driver.wait(PATIENCE)
    poll_for(lambda: not worker.exists(), what="the end of the worker", timeout=PATIENCE)
    poll_for(
        lambda: not ray.util.list_named_actors(all_namespaces=True),
        what="the end of the actors",
        timeout=PATIENCE,
    )
    assert mark.with_suffix(".left").exists(), "the worker was not asked to leave"
    return code


def page(directory: Path) -> dict[str, Any]:
    """The examples of docs/guides/ray.md, and the same command with a script that fails."""
    text = PAGE.read_text()
    script, program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"^ray job submit .*", text, re.MULTILINE)
    place = directory / "place"
    place.mkdir()
    (place / "train.py").write_text(script)
    (place / "wrong.py").write_text("raise RuntimeError('boom')")
    port = free_port()
    with cluster(1, num_cpus=1, include_dashboard=True, dashboard_port=port) as made:
        exec(program, {"__name__": "__main__"})
        # Raylets of one machine overwrite each other's copy of the working directory.
        made.remove_node(*made.worker_nodes)
        environ = {**os.environ, "RAY_ADDRESS": f"http://127.0.0.1:{port}"}
        commands = [command, command.replace("train.py", "--max-restarts 0 wrong.py")]
        done = [
            poll_for(
                lambda each=each: _submitted(each, place, environ),
                what="a job agent",
                timeout=PATIENCE,
            )
            for each in commands
        ]
    return {
        "codes": [each.returncode for each in done],
        "said": [each.stdout + each.stderr for each in done],
    }


def _submitted(
    command: str, place: Path, environ: dict[str, str]
) -> subprocess.CompletedProcess[str] | None:
    """Run `ray job submit`; None if the dashboard has not found an agent for it yet."""
    done = subprocess.run(
        command, shell=True, cwd=place, env=environ, capture_output=True, text=True
    )
    return None if "No available agent to submit job" in done.stdout + done.stderr else done


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "changes": changes,
    "ends": ends,
    "page": page,
}


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    if name == "ends":
        os.environ.update(with_light_torch())
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Short: Ray has sockets there.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as temporary:
        os.environ["RAY_TMPDIR"] = temporary
        told = SCENARIOS[name](directory)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
