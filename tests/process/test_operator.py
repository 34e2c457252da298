"""The controller of ElasticJobs on a real control plane, with the permissions that it is given.

The tests need the controllers, the scheduler and pods that run, so each takes some seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubelet import Kubelet
from tests.kubernetes import ControlPlane
from tests.light import with_light_torch
from tests.process.jobs import SCRIPT, Job
from tests.process.operator_process import HOME, install, operator
from tests.support import poll_for
from torchelastic.errors import KubernetesError

pytestmark = [
    pytest.mark.needs("control plane", "etcd", "kubectl", "kubernetes", "openssl"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.xdist_group("operator"),
]

ROOT = Path(__file__).parents[2]

Json = dict[str, Any]


@pytest.fixture(scope="module")
def account(control_plane: ControlPlane) -> Path:
    return install(control_plane)


class Jobs:
    """ElasticJobs of one namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = plane, namespace
        self.path = f"/apis/elastic.pytorch.org/v1alpha1/namespaces/{namespace}/elasticjobs"

    def create(self, name: str, *command: str, replicas: int = 1, **spec: Any) -> Json:
        """A job without etcd, of containers that run this instead of an agent."""
        container = {"name": "main", "image": "none", "command": ["sh", "-c", *command]}
        worker = {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
        body = {"minReplicas": 1, "maxReplicas": 3, "replicaSpecs": {"Worker": worker}, **spec}
        kind = {"apiVersion": "elastic.pytorch.org/v1alpha1", "kind": "ElasticJob"}
        job = {**kind, "metadata": {"name": name}, "spec": body}
        return self.plane.api.create(self.path, job, fieldValidation="Strict")

    def pods(self, name: str) -> dict[str, Json]:
        """Those that are not about to go."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found = self.plane.items(path, labelSelector=f"job-name={name}")
        return {
            pod["metadata"]["name"]: pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
        }

    def condition(self, name: str, kind: str) -> Json:
        """A condition that is true; empty: it is not."""
        status = self.plane.api.get(f"{self.path}/{name}").get("status", {})
        found = [each for each in status.get("conditions", ()) if each["type"] == kind]
        return found[0] if found and found[0]["status"] == "True" else {}

    def wait_for(self, name: str, kind: str) -> Json:
        return poll_for(lambda: self.condition(name, kind), what=f"{name} is {kind}")

    def events(self, name: str) -> list[tuple[str, str]]:
        path = f"/api/v1/namespaces/{self.namespace}/events"
        found = self.plane.items(path, fieldSelector=f"involvedObject.name={name}")
        return [(each["reason"], each["message"]) for each in found]

    def report(self, pod: Json, code: int) -> None:
        """The report of a kubelet about a container that has ended."""
        end = {"exitCode": code, "reason": "Error" if code else "Completed"}
        state = {"name": "main", "state": {"terminated": end}, "ready": False}
        state |= {"restartCount": 0, "image": "", "imageID": ""}
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}/status"
        self.plane.api.patch(path, {"status": status})


@pytest.fixture
def jobs(control_plane: ControlPlane, namespace: str) -> Iterator[Jobs]:
    yield Jobs(control_plane, namespace)
    control_plane.api.close()


def status_of(plane: ControlPlane, path: str) -> int:
    try:
        plane.api.get(path)
    except KubernetesError as error:
        return error.status
    return 200


# --- decisions that need no pod to run -----------------------------------------------------------


def test_exit_code_of_a_pod_decides_what_happens_to_it(control_plane, account, jobs, tmp_path):
    with operator(account, tmp_path / "log"):
        jobs.create("wrong", "exit 64", replicas=2)
        jobs.create("taken", "exit 143")
        jobs.create("done", "exit 0", replicas=2, ttlSecondsAfterFinished=0)
        for name, count in (("wrong", 2), ("taken", 1), ("done", 2)):
            poll_for(lambda: len(jobs.pods(name)) == count, what=f"pods of {name}")  # noqa: B023
        pods = {name: jobs.pods(name)[f"{name}-worker-0"] for name in ("wrong", "taken", "done")}
        for name, code in (("wrong", 64), ("taken", 143), ("done", 0)):
            jobs.report(pods[name], code)
        failed = jobs.wait_for("wrong", "Failed")
        assert failed["reason"] == "UserError"
        assert "wrong-worker-0 ended with exit code 64. No other start" in failed["message"]

        def replaced() -> bool:
            new = jobs.pods("taken").get("taken-worker-0", {"metadata": {"uid": None}})
            return new["metadata"]["uid"] not in (None, pods["taken"]["metadata"]["uid"])

        poll_for(replaced, what="a new pod")
        assert not jobs.condition("taken", "Failed")
        path = f"{jobs.path}/done"
        poll_for(lambda: status_of(control_plane, path) == 404, what="the job is deleted")
        assert "ElasticJobSucceeded" in dict(jobs.events("done"))


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"spec": {"containers": []}},
        {"spec": {"containers": "main"}},
        {"spec": {"containers": [{"name": "main", "args": "train.py"}]}},
        {"spec": {"containers": [{"name": "main", "env": [{}]}]}},
        {"spec": {"containers": [{"name": "main"}]}, "metadata": {"labels": {"a": 1}}},
    ],
)
def test_a_template_that_the_controller_cannot_read_is_refused(jobs, account, template):
    worker = {"replicas": 1, "template": template}
    with pytest.raises(KubernetesError) as refused:
        jobs.create("odd", replicaSpecs={"Worker": worker})
    assert refused.value.reason == "Invalid"


def test_a_job_that_cannot_be_handled_does_not_stop_others(jobs, account, tmp_path):
    with operator(account, tmp_path / "log") as running:
        jobs.create("odd", "sleep 1000")
        jobs.wait_for("odd", "Created")
        odd = {"status": {"nnodes": "many"}}
        poll_for(lambda: jobs.pods("odd"), what="a pod")
        jobs.plane.api.patch(f"{jobs.path}/odd/status", odd)
        jobs.create("even", "sleep 1000")
        poll_for(lambda: jobs.pods("even"), what="the pod of the other job")
        # Of jobs that have changed at the same time it may look at the other one first.
        told = "/odd cannot be handled: ValueError: invalid literal"
        poll_for(lambda: told in running.said(), what="the reason")


def test_one_of_two_controllers_leads(control_plane, account, jobs, tmp_path):
    with operator(account, tmp_path / "first") as first:
        poll_for(first.leads, what="the first leads")
        with operator(account, tmp_path / "second") as second:
            jobs.create("one", "sleep 1000", replicas=2)
            poll_for(lambda: len(jobs.pods("one")) == 2, what="pods")
            assert first.end() == 0
            poll_for(second.leads, what="the second leads, because the first gave up the Lease")
            jobs.create("two", "sleep 1000")
            poll_for(lambda: len(jobs.pods("two")) == 1, what="the pod of the second job")
            assert "one-worker" not in second.said(), "it was there already"
    lease = control_plane.api.get(
        f"/apis/coordination.k8s.io/v1/namespaces/{HOME}/leases/elastic-job-controller"
    )
    assert lease["spec"]["leaseTransitions"] >= 1
    assert lease["spec"]["holderIdentity"] == ""


def test_an_api_server_that_restarts(tmp_path):
    """On a control plane of its own, whose parts may be stopped."""
    with ControlPlane() as plane, operator(install(plane), tmp_path / "log") as running:
        jobs = Jobs(plane, "default")
        jobs.create("before", "sleep 1000")
        poll_for(lambda: jobs.pods("before"), what="a pod")
        plane.stop("kube-apiserver")
        poll_for(lambda: "cannot be reached" in running.said(), what="the controller notices")
        plane.start_api_server()
        jobs.create("after", "sleep 1000")
        poll_for(lambda: jobs.pods("after"), what="a pod")
        assert len(jobs.pods("before")) == 1


def test_a_refusal_is_a_sentence_in_the_status_and_an_event(control_plane, account, jobs, tmp_path):
    """An exceeded quota, and a missing permission."""
    plane = control_plane
    quotas = f"/api/v1/namespaces/{jobs.namespace}/resourcequotas"
    plane.api.create(quotas, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}})
    poll_for(
        lambda: plane.api.get(f"{quotas}/few").get("status", {}).get("used"),
        what="the quota counts",
    )
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/elastic-job-controller"
    rules = plane.api.get(role)["rules"]
    try:
        with operator(account, tmp_path / "log"):
            jobs.create("big", "sleep 1000", replicas=2)
            stalled = jobs.wait_for("big", "Stalled")
            assert stalled["reason"] == "QuotaExceeded"
            assert "The quota of the namespace is exceeded" in stalled["message"]
            poll_for(lambda: "QuotaExceeded" in dict(jobs.events("big")), what="an event")
            assert len(jobs.pods("big")) == 1, "those that fit run"
            plane.api.delete(f"{quotas}/few")
            plane.api.patch(role, {"rules": without_creating_pods(rules)})
            jobs.create("denied", "sleep 1000")
            stalled = jobs.wait_for("denied", "Stalled")
            assert stalled["reason"] == "Forbidden"
            assert 'elastic-job-controller" cannot create resource "pods"' in stalled["message"]
            poll_for(lambda: "Forbidden" in dict(jobs.events("denied")), what="an event")
            plane.api.patch(role, {"rules": rules})
            poll_for(lambda: len(jobs.pods("big")) == 2, what="the other pod")
            poll_for(lambda: jobs.pods("denied"), what="the pod")
            for name in ("big", "denied"):
                poll_for(lambda: not jobs.condition(name, "Stalled"), what=f"{name} goes on")  # noqa: B023
    finally:
        plane.api.patch(role, {"rules": rules})


def without_creating_pods(rules: list[Json]) -> list[Json]:
    return [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "create"]}
        if rule["resources"] == ["pods"]
        else rule
        for rule in rules
    ]


# --- training ------------------------------------------------------------------------------------


@pytest.fixture
def kubelet(control_plane: ControlPlane) -> Iterator[Kubelet]:
    environ = with_light_torch({"PYTHONPATH": str(ROOT / "src")})
    gpus = {"nvidia.com/gpu": "8"}
    with Kubelet(control_plane, environ=environ, capacity=gpus) as made:
        place = Path(made.workdir) / "tests" / "process"
        place.mkdir(parents=True)
        (place / "obedient.py").symlink_to(SCRIPT)
        yield made
    control_plane.api.close()


@pytest.fixture
def etcd_service(control_plane: ControlPlane, kubelet: Kubelet) -> Iterator[None]:
    """etcd in a pod, behind a Service of the name that 0.2's sample has."""
    path, name = f"/api/v1/namespaces/{HOME}", "etcd-service"
    address = "http://0.0.0.0:2379"
    command = ["etcd", "--data-dir", "/run/etcd", "--listen-client-urls", address]
    command += ["--advertise-client-urls", address, "--listen-peer-urls", "http://127.0.0.1:2380"]
    container = {"name": "etcd", "image": "etcd", "command": command}
    pod = {"metadata": {"name": name, "labels": {"app": name}}, "spec": {"containers": [container]}}
    service = {"clusterIP": "None", "selector": {"app": name}, "ports": [{"port": 2379}]}
    control_plane.api.create(f"{path}/pods", pod)
    control_plane.api.create(f"{path}/services", {"metadata": {"name": name}, "spec": service})
    yield
    control_plane.api.delete(f"{path}/pods/{name}", gracePeriodSeconds=0)
    control_plane.api.delete(f"{path}/services/{name}")
    control_plane.api.close()


class Training:
    """The lines of a job's workers in pods."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._job, self._kubelet = Job(Path(kubelet.workdir)), kubelet

    def of(self, size: int) -> int:
        """Wait for a world of so many workers; return how many generations there were."""

        def complete() -> int:
            newest = max((line["generation"] for line in self._job.lines()), default=0)
            lines = self._job.lines(generation=newest, event="start", world_size=size)
            return newest + 1 if len(lines) == size else 0

        try:
            return poll_for(complete, what=f"a world of {size}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._kubelet.said()}") from None

    def finish(self) -> None:
        self._job.order("finish")


def test_a_job_of_0_2_trains_and_outlives_its_controller(
    control_plane, account, kubelet, etcd_service, tmp_path
):
    """Applied unchanged, scaled, a pod deleted, the controller killed in the middle, to the end."""
    plane, jobs = control_plane, Jobs(control_plane, HOME)
    training = Training(kubelet)
    kubectl = ("-n", HOME)
    with operator(account, tmp_path / "first.log") as first:
        done = plane.kubectl("apply", "-f", str(Path(__file__).with_name("elasticjob-0.2.yaml")))
        assert done.returncode == 0, done.stderr
        training.of(2)
        jobs.wait_for("imagenet", "Running")
        assert sorted(jobs.pods("imagenet")) == ["imagenet-worker-0", "imagenet-worker-1"]
        # The scale subresource.
        scaled = plane.kubectl(*kubectl, "scale", "elasticjob/imagenet", "--replicas=3")
        assert scaled.returncode == 0, scaled.stderr
        training.of(3)
        old = jobs.pods("imagenet")["imagenet-worker-1"]["metadata"]["uid"]
        before = training.of(3)
        plane.kubectl(*kubectl, "delete", "pod", "imagenet-worker-1", "--wait=false")
        training.of(2)
        assert training.of(3) > before
        assert jobs.pods("imagenet")["imagenet-worker-1"]["metadata"]["uid"] != old
        plane.kubectl(*kubectl, "scale", "elasticjob/imagenet", "--replicas=4")
        poll_for(lambda: "imagenet-worker-3" in jobs.pods("imagenet"), what="a fourth pod")
        first.end(signal.SIGKILL)
    # Nobody controls the job: a failed pod is not replaced, and training goes on.
    training.of(4)
    generation = training.of(4)
    kubelet.pod("imagenet-worker-2").kill()
    assert training.of(3) > generation
    plane.kubectl(*kubectl, "scale", "elasticjob/imagenet", "--replicas=3")
    with operator(account, tmp_path / "second.log") as second:
        # Its predecessor's Lease must run out first.
        poll_for(second.leads, what="the second controller leads")
        poll_for(
            lambda: phases(jobs, "imagenet") == ["Running"] * 3, what="three pods, and all run"
        )
        training.of(3)
        training.finish()
        done = jobs.wait_for("imagenet", "Succeeded")
        assert "ended with exit code 0" in done["message"]
        created = [
            text for text in (first.said() + second.said()).splitlines() if "created" in text
        ]
        assert len(created) == len(set(created)) + 1, "one pod was replaced"
        described = plane.kubectl(*kubectl, "describe", "elasticjob", "imagenet").stdout
        for reason in ("ElasticJobCreated", "ElasticJobRunning", "ElasticJobSucceeded"):
            assert reason in described
        # The garbage collector takes what the job owns, once it knows of the resource: that is why
        # this test is the last one.
        plane.kubectl(*kubectl, "delete", "elasticjob", "imagenet")
        poll_for(lambda: not jobs.pods("imagenet"), what="the pods are gone")
        for kind in ("services", "secrets"):
            path = f"/api/v1/namespaces/{HOME}/{kind}"
            owned = {"labelSelector": "job-name=imagenet"}
            poll_for(lambda: not plane.items(path, **owned), what=f"the {kind} are gone")  # noqa: B023


def test_workers_meet_without_etcd_and_the_first_is_replaced(
    control_plane, account, kubelet, jobs, tmp_path
):
    plane, training = control_plane, Training(kubelet)
    command = ["submit", "kubernetes", "--as=elasticjob", "--name=train", "--image=none"]
    command += [f"--namespace={jobs.namespace}", "--nnodes=2:3", "--nproc-per-node=1", "--"]
    command += ["tests/process/obedient.py", "lines", "orders"]
    with operator(account, tmp_path / "log"):
        submitted = subprocess.run(
            [sys.executable, "-m", "torchelastic", *command],
            env={**os.environ, "KUBECONFIG": plane.kubeconfig},
            capture_output=True,
            text=True,
        )
        assert submitted.returncode == 0, submitted.stderr
        generation = training.of(3)
        plane.kubectl("-n", jobs.namespace, "delete", "pod", "train-worker-0", "--wait=false")
        training.of(2)
        assert training.of(3) > generation
        training.finish()
        jobs.wait_for("train", "Succeeded")


def phases(jobs: Jobs, name: str) -> list[str]:
    return [pod["status"]["phase"] for pod in jobs.pods(name).values()]
