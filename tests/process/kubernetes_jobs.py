"""Jobs on a real Kubernetes control plane, submitted as a user does, and judged."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from tests.kubelet import Kubelet
from tests.kubernetes import ControlPlane
from tests.pods import Pod
from tests.process.gated_training import PATIENCE, GatedTraining
from tests.support import poll_for

#: What pods have, as the cluster shows it.
Json = dict[str, Any]


class Cluster:
    """One namespace of a control plane, with a kubelet."""

    def __init__(self, plane: ControlPlane, kubelet: Kubelet, namespace: str) -> None:
        self.plane, self.kubelet, self.namespace = plane, kubelet, namespace
        self.kubeconfig = plane.kubeconfig

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`torchelastic`, as a user types it."""
        return subprocess.run(
            [sys.executable, "-m", "torchelastic", *words],
            env={**os.environ, "KUBECONFIG": self.kubeconfig},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def started(self, *words: str) -> subprocess.Popen[bytes]:
        """`torchelastic` that goes on."""
        return subprocess.Popen(
            [sys.executable, "-m", "torchelastic", *words],
            env={**os.environ, "KUBECONFIG": self.kubeconfig},
            stdout=subprocess.PIPE,
        )

    def output(self, *words: str) -> str:
        """The output of a command that succeeds."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def kubectl(self, *words: str) -> str:
        done = self.plane.kubectl("--namespace", self.namespace, *words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def use_namespace(self, file: Path) -> None:
        """Make the namespace that of the current context."""
        text = Path(self.kubeconfig).read_text()
        file.write_text(
            text.replace("user: user}}", f"user: user, namespace: {self.namespace}}}}}")
        )
        self.kubeconfig = str(file)

    def typed(self, command: list[str]) -> str:
        """The output of a command line of `torchelastic` or `kubectl`."""
        program, *words = command
        return {"torchelastic": self.output, "kubectl": self.kubectl}[program](*words)

    def submit(self, *words: str, name: str = "train") -> str:
        """Submit a job; return it as it is named for other commands."""
        self.output(
            *("submit", "kubernetes", "--image=none", f"--namespace={self.namespace}"),
            *(f"--name={name}", *words),
        )
        return f"kubernetes:{self.namespace}/{name}"

    def job(self, name: str = "train") -> Json:
        return self.plane.api.get(f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}")

    def pods(self, **query: str) -> list[Json]:
        return self.plane.items(f"/api/v1/namespaces/{self.namespace}/pods", **query)

    def pod(self, index: int, name: str = "train") -> Pod:
        """The newest pod of an index, as the kubelet runs it."""
        return self.kubelet.pod(f"{name}-{index}-")

    def hosts(self, index: int) -> bool:
        """Whether the newest pod of an index hosts the rendezvous."""
        log = self.pod(index).log()
        return "hosting " in log and "no longer hosts" not in log

    def said_by(self, name: str) -> str:
        """The output of the pods whose names begin so."""
        pods = [*self.kubelet.past, *self.kubelet.pods.values()]
        return "".join(pod.log() for pod in pods if pod.full_name.startswith(name))

    def state(self, handle: str) -> Json:
        """The output of `torchelastic status`."""
        found: Json = json.loads(self.output("status", handle, "--json"))
        return found

    def await_state(self, handle: str, state: str, timeout: float = 60.0) -> Json:
        return self.wait_for(
            lambda: found if (found := self.state(handle))["state"] == state else {},
            f"{handle} {state}",
            timeout,
        )

    def await_ready(self, count: int, name: str = "train") -> None:
        def ready() -> bool:
            found = [
                pod
                for pod in self.pods(labelSelector=f"batch.kubernetes.io/job-name={name}")
                if condition(pod, "Ready") == "True"
            ]
            return len(found) == count

        self.wait_for(ready, f"{count} ready pods")

    def wait_for(self, probe: Any, what: str, timeout: float = 60.0) -> Any:
        try:
            return poll_for(probe, what=what, timeout=timeout)
        except AssertionError as error:
            shown = self.plane.kubectl("-n", self.namespace, "get", "pods,events").stdout
            raise AssertionError(f"{error}\n{shown}\n{self.kubelet.said()[-8000:]}") from None


class KubernetesTraining(GatedTraining):
    """A job of `torchelastic submit kubernetes`."""

    def __init__(self, cluster: Cluster, directory: Path, *flags: str, **keys: object) -> None:
        super().__init__(directory, "train", **keys)
        self.cluster = cluster
        self.handle = cluster.submit(*flags, "--", *self.command)

    def finish(self) -> None:
        """Let the job come to the end of the epoch it is in, and wait until the cluster knows."""
        self.last_epoch()
        ended = self.wait_for(
            lambda: (
                state
                if (state := self.cluster.state(self.handle)["state"]) not in ("pending", "running")
                else ""
            ),
            "the end of the job",
        )
        assert ended == "complete", self.told(f"the job is {ended}")

    def pids(self, index: int) -> set[int]:
        """The workers that the node of an index has had."""
        return {line["pid"] for line in self.lines("gate") if line["node"] == index}

    def generation(self) -> int:
        """The newest one."""
        return max(line["generation"] for line in self.lines("done"))

    def goes_on(self, after: int, *, steps: int = 1, without: Set[int] = frozenset()) -> int:
        """Wait for steps of generations later than `after`, from now on; the newest of them."""
        seen = len(self.lines("done"))

        def stepped() -> list[int]:
            done = [line for line in self.lines("done")[seen:] if line["generation"] > after]
            made = [line for line in done if line["pid"] not in without]
            found = {(line["generation"], line["step"]) for line in made}
            return [generation for generation, _ in found] if len(found) >= steps else []

        return max(self.wait_for(stepped, f"{steps} steps after generation {after}"))

    def pause(self, before: int, after: int) -> float:
        """For how many usual steps a worker stood still, at most, when one of these generations
        followed another."""
        done: dict[int, list[dict[str, Any]]] = {}
        for line in self.lines("done"):
            if before <= line["generation"] <= after:
                done.setdefault(line["pid"], []).append(line)
        usual, changes = [], []
        for lines in done.values():
            for one, other in itertools.pairwise(lines):
                same = one["generation"] == other["generation"]
                (usual if same else changes).append(other["at"] - one["at"])
        return max(changes) / statistics.median(usual) - 1

    def said(self) -> str:
        return self.cluster.kubectl("get", "pods,events") + self.cluster.kubelet.said()


def condition(stored: Mapping[str, Any], kind: str) -> str:
    """The status of a condition; empty: there is none."""
    found = stored.get("status", {}).get("conditions") or ()
    return next((one["status"] for one in found if one["type"] == kind), "")


def is_over(job: Mapping[str, Any]) -> str:
    """How a job has ended; empty: it has not."""
    kinds = ("Complete", "Failed")
    return next((kind for kind in kinds if condition(job, kind) == "True"), "")


def kill_worker(training: GatedTraining, index: int) -> None:
    """End the worker of a node, as a fault of its own would."""
    newest = [line for line in training.lines("gate") if line["node"] == index][-1]
    os.kill(newest["pid"], signal.SIGKILL)
