"""Elastic jobs on a real Kubernetes control plane: what each event costs those who stay.

    KUBEBUILDER_ASSETS=DIRECTORY python benchmarks/kubernetes_jobs.py [--repetitions 3] [--down 60]

Pods are deleted, drained and killed, the job is scaled from 2 to 4 to 1, and the API server is down
for a minute, in which a worker is killed. The record that the workers keep of themselves says for
how many steps the others stood still, how many were done again, and if each sample was used once.
Needs root and the programs of Kubernetes; see tests/kubernetes.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.report import median_range, table
from tests.kubelet import Kubelet
from tests.kubernetes import ControlPlane
from tests.process.gated_training import NO_GATE
from tests.process.kubernetes_jobs import Cluster, KubernetesTraining, kill_worker

#: Seconds of a step.
PACE = 0.2


class Report:
    """What the events cost, in steps."""

    def __init__(self) -> None:
        self.pauses: dict[str, list[float]] = {}
        self.redone = 0
        self.wrong: list[str] = []

    def add(self, event: str, training: KubernetesTraining, before: int, after: int) -> None:
        self.pauses.setdefault(event, []).append(training.pause(before, after))

    def judge(self, training: KubernetesTraining) -> None:
        training.finish()
        self.redone += sum(training.redone().values())
        self.wrong += training.proven("train")

    def show(self) -> None:
        head = ("event", "steps that the others stood still, median (range)")
        rows = [(event, median_range(steps, digits=1)) for event, steps in self.pauses.items()]
        print("\n" + table(head, rows))
        print(f"\nfinished steps done again: {self.redone}")
        print("\n".join(self.wrong) or "each sample was used once in every job")


def start(cluster: Cluster, directory: Path, nnodes: str, size: int) -> KubernetesTraining:
    flags = (f"--nnodes={nnodes}", "--settle=1")
    training = KubernetesTraining(cluster, directory, *flags, pace=PACE)
    training.reach(2, size)
    training.open(NO_GATE)
    training.goes_on(-1, steps=5)
    return training


def lose_pods(cluster: Cluster, directory: Path, report: Report) -> None:
    """A pod that does not host the rendezvous is lost in each way, and comes back."""
    training = start(cluster, directory, "2:4", 4)
    losses = {
        "pod deleted with grace": ("delete", "pod", "{pod}", "--wait=false"),
        "pod drained": ("drain", "{node}", "--delete-emptydir-data", "--force"),
        "pod killed": ("delete", "pod", "{pod}", "--grace-period=0", "--force"),
    }
    for event, command in losses.items():
        index = next(i for i in range(4) if not cluster.hosts(i))
        pod, pids, before = cluster.pod(index), training.pids(index), training.generation()
        cluster.kubectl(*(word.format(pod=pod.full_name, node=pod.node) for word in command))
        report.add(event, training, before, training.goes_on(before, without=pids))
        training.wait_for(lambda i=index, old=pids: training.pids(i) - old, "a new pod")
        training.goes_on(training.generation() - 1, steps=5)
    report.judge(training)


def scale(cluster: Cluster, directory: Path, report: Report) -> None:
    training = start(cluster, directory, "1:4", 4)
    generation = training.generation()
    for size in (2, 4, 1):
        before = training.generation()
        cluster.output("scale", training.handle, str(size))
        generation = training.resized(size, generation)
        training.goes_on(generation - 1, steps=5)
        report.add(f"scaled to {size}", training, before, generation)
    report.judge(training)


def api_server_down(cluster: Cluster, directory: Path, report: Report, seconds: float) -> None:
    """Training goes on, and a worker that is killed meanwhile is replaced."""
    training = start(cluster, directory, "2:3", 3)
    before = training.generation()
    cluster.plane.stop("kube-apiserver")
    began = time.monotonic()
    kill_worker(training, 1)
    after = training.goes_on(before, steps=3)
    report.add("worker killed while the API server is down", training, before, after)
    world = training.resized(3, before)
    while time.monotonic() < began + seconds:
        training.goes_on(world - 1, steps=10)
    assert training.generation() == world, "the world was disturbed"
    cluster.plane.start_api_server()
    report.judge(training)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--down", type=float, default=60.0, help="seconds without the API server")
    given = parser.parse_args()
    report = Report()
    for _ in range(given.repetitions):
        for number, run in enumerate((lose_pods, scale, api_server_down)):
            more = (given.down,) if run is api_server_down else ()
            with (
                tempfile.TemporaryDirectory() as directory,
                ControlPlane() as plane,
                Kubelet(plane, nodes=5) as kubelet,
            ):
                cluster = Cluster(plane, kubelet, plane.new_namespace())
                run(cluster, Path(directory, str(number)), report, *more)
            print(f"{run.__name__}: done", flush=True)
    report.show()
    return 1 if report.wrong or report.redone else 0


if __name__ == "__main__":
    sys.exit(main())
