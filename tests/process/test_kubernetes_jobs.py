"""Elastic jobs live and die through the API of a real Kubernetes, and lose no step or sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubelet import Kubelet
from tests.kubernetes import ControlPlane
from tests.process.gated_training import NO_GATE
from tests.process.kubernetes_jobs import Cluster, KubernetesTraining, kill_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Seconds of a step.
PACE = 0.2


@pytest.fixture
def cluster(control_plane, namespace) -> Iterator[Cluster]:
    with Kubelet(control_plane, nodes=4) as kubelet:
        yield Cluster(control_plane, kubelet, namespace)


def assert_exact(training: KubernetesTraining) -> None:
    """Each sample was used once, and no finished step was done again."""
    wrong = training.proven("train")
    assert not wrong, training.told("\n".join(wrong))
    assert max(training.redone().values()) == 0, training.told(str(training.redone()))


def test_scale_from_two_to_four_to_one(cluster, tmp_path):
    """The bar. Four nodes import torch."""
    training = KubernetesTraining(cluster, tmp_path / "job", "--nnodes=1:4", "--settle=60")
    generation = training.reach(4, 4)
    for size in (2, 4, 1):
        said = cluster.output("scale", training.handle, str(size))
        assert said.endswith(f" to {size} nodes.\n")
        generation = training.resized(size, generation)
        training.reach(training.gate + 4, size, generation - 1)
    refused = cluster.run("scale", training.handle, "5")
    assert refused.returncode == 64
    assert "submitted with --nnodes 1:4: scale it to a number from 1 to 4." in refused.stderr
    training.finish()
    assert_exact(training)


@pytest.mark.alone
def test_pods_are_deleted_killed_evicted_and_drained(cluster, tmp_path):
    """Each is noticed by those who stay, and replaced by the Job. Seven nodes import torch."""
    training = KubernetesTraining(
        cluster, tmp_path / "job", "--nnodes=2:4", "--settle=60", pace=2 * PACE
    )
    training.reach(2, 4)
    training.open(NO_GATE)

    def lose(index: int, *command: str, replaced: bool = True) -> float:
        """Lose a pod by a command; return for how many steps the others stood still."""
        pod, pids = cluster.pod(index), training.pids(index)
        before = training.generation()
        cluster.kubectl(*(word.format(pod=pod.full_name, node=pod.node) for word in command))
        after = training.goes_on(before, without=pids)
        if replaced:
            training.wait_for(lambda: training.pids(index) - pids, f"a new pod {index}")
        return training.pause(before, after)

    assert lose(3, "delete", "pod", "{pod}", "--wait=false") < 3
    drained = cluster.pod(1).node
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{{pod}}/eviction"
    body = tmp_path / "eviction.json"
    name = cluster.pod(2).full_name
    body.write_text(json.dumps({**eviction, "metadata": {"name": name}}))
    assert lose(2, "create", "--raw", path, "-f", str(body)) < 3
    drain = ("--ignore-daemonsets", "--delete-emptydir-data", "--force")
    assert lose(1, "drain", "{node}", *drain) < 3
    assert cluster.pod(1).node != drained
    # Without a grace period the step in flight is lost: it is done again.
    lose(3, "delete", "pod", "{pod}", "--grace-period=0", "--force", replaced=False)
    training.finish()
    assert_exact(training)


@pytest.fixture
def own_plane() -> Iterator[ControlPlane]:
    """A control plane for one test, which may stop its parts."""
    with ControlPlane() as plane:
        yield plane


@pytest.mark.needs("control plane", "etcd", "kubectl", "kubernetes", "openssl")
def test_training_does_not_notice_that_the_control_plane_is_down(own_plane, tmp_path):
    """API server and etcd; a worker that dies meanwhile is replaced. Three nodes import torch."""
    with Kubelet(own_plane) as kubelet:
        _control_plane_is_down(Cluster(own_plane, kubelet, own_plane.new_namespace()), tmp_path)


def _control_plane_is_down(cluster: Cluster, tmp_path: Path) -> None:
    plane = cluster.plane
    training = KubernetesTraining(
        cluster, tmp_path / "job", "--nnodes=2:3", "--settle=60", pace=PACE
    )
    first = training.reach(2, 3)
    training.open(NO_GATE)
    plane.stop("kube-apiserver")
    try:
        training.goes_on(first - 1, steps=20)
        kill_worker(training, 1)
        second = training.resized(3, first)
        training.goes_on(second - 1, steps=20)
    finally:
        plane.start_api_server()
    plane.etcd.freeze()
    try:
        training.goes_on(second - 1, steps=50)
    finally:
        plane.etcd.thaw()
    assert training.generation() == second, training.told("the world was disturbed")
    training.wait_for(lambda: cluster.run("scale", training.handle, "2").returncode == 0, "scale")
    training.resized(2, second)
    training.finish()
    assert_exact(training)


PAGE = Path(__file__).parents[2] / "docs/guides/kubernetes.md"
KEEP = Path(__file__).parents[2] / "examples/keep.py"


def test_the_page_for_newcomers(cluster, tmp_path):
    """Its commands, in its order. Four nodes import torch."""
    (cluster.kubelet.workdir / "keep.py").write_text(KEEP.read_text())
    cluster.kubelet.environ["PET_SETTLE"] = "60"  # or two nodes may begin without a slow third
    cluster.use_namespace(tmp_path / "kubeconfig")
    blocks = "".join(PAGE.read_text().split("```console\n")[1:])
    commands = [line[2:].split() for line in blocks.splitlines() if line.startswith("$ ")]
    submit, status, delete_pod, logs, scale, delete = commands[1:]  # after `pip install`
    here = f"kubernetes:{cluster.namespace}/train"

    def said(*expected: str) -> None:
        printed = cluster.kubelet.said
        cluster.wait_for(lambda: all(text in printed() for text in expected), expected, 120)

    assert cluster.typed(submit).startswith(f"Submitted {here}. See it with")
    cluster.await_ready(3)
    assert cluster.typed(status).startswith(f"{here}  running\n  3 of 3 nodes are in the world")
    said("3 workers go on from step 0")
    cluster.typed(delete_pod)
    said("2 workers go on from step ", "train-2 joins; a resize uses no restart")
    cluster.await_ready(3)
    assert "2 workers go on from step 0\n" not in cluster.typed(logs)
    assert cluster.typed(scale) == f"Scaled {here} from 3 to 2 nodes.\n"
    cluster.await_ready(2)
    assert cluster.typed(delete) == f"Deleted {here}.\n"
    cluster.wait_for(lambda: cluster.pods() == [], "no pods")
