"""Pods and requests on a real control plane, see `tests.kubernetes`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubelet import Kubelet
from tests.kubernetes import ControlPlane
from tests.light import PLACE
from tests.process.kubernetes_jobs import Cluster, condition
from tests.support import poll_for
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.preemption import Kubernetes, Notice, NotWatched
from torchelastic.errors import ConfigError, KubernetesError

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[2] / "docs/guides/kubernetes.md"


@pytest.fixture
def kubelet(control_plane: ControlPlane) -> Iterator[Kubelet]:
    with Kubelet(control_plane) as made:
        yield made


# --- the test kubelet ----------------------------------------------------------------------------


def pod_of(name: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "command": ["sh", "-c", script]}
    container |= spec.pop("container", {})
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [container], "restartPolicy": "Never", **spec},
    }


def test_a_pod_has_an_address_names_volumes_and_probes(control_plane, namespace, kubelet):
    """The kubelet that the other tests rely on."""
    plane, pods = control_plane, f"/api/v1/namespaces/{namespace}/pods"
    service = {"clusterIP": "None", "selector": {"app": "server"}}
    plane.api.create(
        f"/api/v1/namespaces/{namespace}/services",
        {"metadata": {"name": "servers"}, "spec": service},
    )
    plane.api.create(
        f"/api/v1/namespaces/{namespace}/secrets",
        {"metadata": {"name": "hidden"}, "stringData": {"word": "sesame"}},
    )
    server = pod_of(
        "server",
        'cp /run/hidden/word . && exec python -m http.server --bind "$IP" 8000',
        subdomain="servers",
        hostname="first",
        volumes=[{"name": "hidden", "secret": {"secretName": "hidden"}}],
        container={
            "env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "volumeMounts": [{"name": "hidden", "mountPath": "/run/hidden"}],
            "readinessProbe": {"httpGet": {"path": "/word", "port": 8000}, "periodSeconds": 1},
            "workingDir": str(kubelet.directory),
        },
    )
    client = pod_of(
        "client",
        "until python -c '"
        'import urllib.request as u; print(u.urlopen("http://first.servers:8000/word").read())'
        "'; do sleep 0.2; done; exit 7",
    )
    for pod in (server, client):
        plane.api.create(pods, pod)

    def ended() -> dict[str, Any]:
        status = plane.api.get(f"{pods}/client")["status"]
        return status if status["phase"] == "Failed" else {}

    code = poll_for(ended, what="the end of the client")["containerStatuses"][0]["state"]
    assert code["terminated"]["exitCode"] == 7
    assert "b'sesame'" in kubelet.pod("client").log()
    plane.api.delete(f"{pods}/server", gracePeriodSeconds=1)
    gone = poll_for(lambda: _status(plane.api, f"{pods}/server"), what="the end of the server")
    assert gone == 404
    assert kubelet.pod("server").pids() == []


def _status(api: ClusterApi, path: str) -> int:
    """The status with which a request is refused; 0: it is not."""
    try:
        api.get(path)
    except KubernetesError as error:
        return error.status
    return 0


# --- errors --------------------------------------------------------------------------------------


def test_an_error_is_one_sentence(control_plane, namespace, tmp_path):
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    with contextlib.closing(ClusterApi(control_plane.powerless_kubeconfig)) as powerless:
        with pytest.raises(
            KubernetesError, match=r"You are not allowed.*cannot list.*a Role"
        ) as no:
            powerless.get(jobs)
        assert (no.value.status, no.value.reason) == (403, "Forbidden")
    with pytest.raises(KubernetesError, match=r"namespace does not exist.*create it"):
        control_plane.api.create(
            "/api/v1/namespaces/nowhere/configmaps", {"metadata": {"name": "x"}}
        )
    nowhere = tmp_path / "config"
    text = (tmp_path / control_plane.kubeconfig).read_text()
    nowhere.write_text(text.replace(f":{control_plane.port}", ":1"))
    with (
        contextlib.closing(ClusterApi(str(nowhere))) as api,
        pytest.raises(KubernetesError, match=r"127\.0\.0\.1:1 cannot be reached .*refused"),
    ):
        api.get("/version")
    for file, text in (("missing", None), ("empty", ""), ("odd", "a: [")):
        if text is not None:
            (tmp_path / file).write_text(text)
        with pytest.raises(ConfigError, match=r"No Kubernetes cluster: .* does not name one"):
            ClusterApi(str(tmp_path / file))


def test_a_watch_yields_changes_until_its_time_is_over(control_plane, namespace):
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    since = control_plane.api.get(path)["metadata"]["resourceVersion"]
    control_plane.api.create(path, {"metadata": {"name": "made"}})
    events = control_plane.api.watch(path, since, 1, fieldSelector="metadata.name=made")
    assert [event["type"] for event in events if event["type"] != "BOOKMARK"] == ["ADDED"]


# --- jobs ----------------------------------------------------------------------------------------

#: Begins on all nodes, and ends when it is told to.
PATIENT = """\
import os, time
from pathlib import Path
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "user", os.getuid(), flush=True)
while not Path(__file__).with_name("end").exists():
    time.sleep(0.05)
"""


def anyone() -> str:
    """Any user id, of which no file of the machine knows, a home that cannot be written, and what
    the page says for namespaces that refuse anything that is not restricted."""
    template = on_the_page("yaml", "runAsNonRoot: true")
    template = template.replace("runAsNonRoot: true", "runAsNonRoot: true, runAsUser: 54321")
    return template + "    env: [{name: HOME, value: /proc/nowhere}]\n"


@pytest.fixture
def cluster(control_plane, namespace) -> Iterator[Cluster]:
    with Kubelet(control_plane, environ={"PYTHONPATH": str(PLACE)}) as kubelet:
        (kubelet.workdir / "train.py").write_text(PATIENT)
        yield Cluster(control_plane, kubelet, namespace)


def test_a_job_from_submit_to_its_end(cluster, tmp_path):
    """Three pods find each other by their names alone; then every command about the job."""
    (tmp_path / "pod.yaml").write_text(anyone())
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", cluster.namespace, restricted)
    said = cluster.output(
        *("submit", "kubernetes", "--image=none", "--nnodes=2:3", "--name=train"),
        *(f"--namespace={cluster.namespace}", f"--pod-template={tmp_path / 'pod.yaml'}"),
        *("--settle=30", "--", "train.py"),
    )
    handle = f"kubernetes:{cluster.namespace}/train"
    assert said == f"Submitted {handle}. See it with: torchelastic status {handle}\n"
    cluster.await_ready(3)
    await_workers(cluster, 3)
    shown = cluster.output("status", handle)
    assert f"{handle}  running\n  3 of 3 nodes are in the world (--nnodes 2:3)\n" in shown
    assert shown.count("in the world") == 4, shown
    secret = read_secret(cluster)
    printed = cluster.output("logs", handle)
    for rank in range(3):
        assert f"rank {rank} of 3 user 54321" in printed
    for index in range(3):
        pod = cluster.pod(index)
        assert f"{pod.full_name}: " in printed
        assert "run id" in pod.log(), "what Kubernetes told it"
        assert pod.uid[:8] not in pod.log()
        words = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pod.pids())
        assert secret not in words
    domain = f"train.{cluster.namespace}.svc.cluster.local:29400"
    assert f"endpoint train-0.{domain},train-1.{domain},train-2.{domain} (" in printed
    assert secret.decode() not in printed
    assert "no secret: anyone" not in printed
    with cluster.started("logs", handle, "--follow", "--lines=1", "--raw") as following:
        assert following.stdout is not None
        first = following.stdout.readline()
        assert b"of 3 user" in first or b"generation 0" in first
        (cluster.kubelet.workdir / "end").touch()
        rest = following.stdout.read()  # until the job has ended
        assert b"goodput" in rest, rest
    cluster.await_state(handle, "complete")
    assert cluster.output("delete", handle) == f"Deleted {handle}.\n"
    gone = cluster.run("status", handle)
    assert gone.returncode == 64
    assert f"There is no job {handle}: list the jobs" in gone.stderr
    cluster.wait_for(
        lambda: cluster.kubectl("get", "pods,services,secrets", "-o", "name") == "", "nothing left"
    )


def await_workers(cluster: Cluster, size: int) -> None:
    """Wait until the workers of a world have begun: a node is ready when it has a place in it."""
    lines = [f"rank {rank} of {size} user" for rank in range(size)]
    cluster.wait_for(lambda: all(line in cluster.kubelet.said() for line in lines), "the workers")


def read_secret(cluster: Cluster) -> bytes:
    path = f"/api/v1/namespaces/{cluster.namespace}/secrets/train"
    return base64.b64decode(cluster.plane.api.get(path)["data"]["secret"])


def test_a_wrong_script_fails_the_job_at_once(cluster):
    (cluster.kubelet.workdir / "train.py").write_text("import nothing_of_that_name\n")
    handle = cluster.submit("--nnodes=2", "--", "train.py")
    found = cluster.await_state(handle, "failed")
    assert "exit code 64" in found["reason"] or "PodFailurePolicy" in found["reason"], found
    cluster.wait_for(lambda: condition(cluster.job(), "Failed") == "True", "the end of the job")
    assert len(cluster.job()["status"].get("failedIndexes", "")) == 0
    why = "Failed, exit code 64: ModuleNotFoundError: No module named 'nothing_of_that_name'\n"
    assert why in cluster.output("status", handle)
    # It is not tried again.
    assert all(pod["spec"]["hostname"] in ("train-0", "train-1") for pod in cluster.pods())
    assert len(cluster.pods()) <= 2


@pytest.mark.slow
def test_a_pod_that_keeps_failing_is_done_without(cluster):
    """Rendered, changed and applied by hand. An index that is given up is replaced by another."""
    rendered = cluster.output(
        *("submit", "kubernetes", "--image=none", "--name=train", "--nnodes=2:3", "--settle=2"),
        *(f"--namespace={cluster.namespace}", "--dry-run", "-o", "json", "--", "train.py"),
    )
    objects = json.loads(rendered)
    objects["items"][2]["spec"]["backoffLimitPerIndex"] = 0
    file = cluster.kubelet.directory / "job.json"
    file.write_text(json.dumps(objects))
    cluster.kubectl("apply", "--filename", str(file))
    cluster.await_ready(3)
    cluster.pod(2).kill()
    handle = f"kubernetes:{cluster.namespace}/train"
    cluster.wait_for(lambda: cluster.job()["status"].get("failedIndexes") == "2", "a failed index")
    cluster.wait_for(lambda: "rank 2 of 3 user" in cluster.said_by("train-3-"), "another node")
    shown = cluster.output("status", handle)
    assert "given up after repeated failures: index 2\n" in shown
    assert "Failed, exit code 137\n" in shown
    (cluster.kubelet.workdir / "end").touch()
    cluster.await_state(handle, "complete")


#: The pods of a node that does not report are deleted at once, not after half a minute.
AT_ONCE = """\
spec:
  tolerations:
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 0}
"""


@pytest.mark.slow
def test_two_pods_of_one_index(cluster, tmp_path):
    """A node stops reporting, and its pod is replaced while it runs: the new one waits beside it.

    When the node reports again, the old pod is ended, and the new one steps in."""
    (tmp_path / "pod.yaml").write_text(AT_ONCE)
    template = f"--pod-template={tmp_path / 'pod.yaml'}"
    handle = cluster.submit(template, "--nnodes=2:3", "--settle=2", "--", "train.py")
    cluster.await_ready(3)
    await_workers(cluster, 3)
    old, worlds = cluster.pod(2), cluster.pod(0).log().count(" workers on ")
    cluster.kubelet.silence(old.node)
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{old.full_name}"

    def disrupted() -> bool:
        return condition(cluster.plane.api.get(path), "DisruptionTarget") == "True"

    cluster.wait_for(disrupted, "the taint manager")
    assert f"{old.node}  Terminating, DeletionByTaintManager" in cluster.output("status", handle)
    assert len(cluster.pods()) == 3, "there is no second pod of an index that may still run"
    # A minute after its Node is deleted the pod garbage collector does this.
    cluster.plane.api.patch(f"{path}/status", {"status": {"phase": "Failed"}})
    cluster.kubectl("delete", "pod", old.full_name, "--grace-period=0", "--force")
    cluster.wait_for(lambda: cluster.pod(2) is not old, "a new pod of the index")
    new = cluster.pod(2)
    cluster.wait_for(lambda: "joined job" in new.log(), "it joins")
    assert new.hostname == old.hostname
    assert old.is_alive()
    assert cluster.pod(0).log().count(" workers on ") == worlds, "nobody is disturbed"
    cluster.kubelet.speak(old.node)
    cluster.wait_for(lambda: not old.is_alive(), "the end of the old pod")
    cluster.wait_for(lambda: "rank 2 of 3 user" in new.log(), "its place is taken")
    (cluster.kubelet.workdir / "end").touch()
    cluster.await_state(handle, "complete")


def test_request_that_the_cluster_refuses_is_an_error(cluster, tmp_path):
    """A sentence each, and nothing is left."""
    flags = ("submit", "kubernetes", "--image=none", "--nnodes=2:3", "--name=train")
    here = f"--namespace={cluster.namespace}"

    def refusal(*words: str) -> str:
        done = cluster.run(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1), done.stderr
        assert cluster.kubectl("get", "jobs,services,secrets", "-o", "name") == ""
        return done.stderr

    elsewhere = refusal(*flags, "--namespace=nowhere", "--", "train.py")
    assert 'The namespace does not exist (namespaces "nowhere" not found)' in elsewhere
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
    path = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas"
    cluster.plane.api.create(path, quota)
    cluster.wait_for(
        lambda: cluster.plane.api.get(f"{path}/q").get("status", {}).get("hard"), "the quota"
    )
    assert "The quota of the namespace is exceeded (" in refusal(*flags, here, "--", "train.py")
    (tmp_path / "pod.yaml").write_text("spec: {containers: [{name: torchelastic, imagee: x}]}")
    template = f"--pod-template={tmp_path / 'pod.yaml'}"
    wrong = refusal(*flags, here, template, "--", "train.py")
    assert 'unknown field "spec.template.spec.containers[0].imagee"' in wrong
    cluster.kubeconfig = cluster.plane.powerless_kubeconfig
    denied = refusal(*flags, here, "--", "train.py")
    assert "You are not allowed to do this (secrets is forbidden: User" in denied
    cluster.plane.api.delete(f"{path}/q")
    allow_what_the_page_says(cluster, tmp_path)
    handle = cluster.submit("--nnodes=2:3", "--", "train.py")
    assert cluster.output("scale", handle, "2") == f"Scaled {handle} from 3 to 2 nodes.\n"
    cluster.wait_for(lambda: cluster.run("logs", handle).returncode == 0, "output")
    assert handle in cluster.output("status", handle)
    assert cluster.output("delete", handle) == f"Deleted {handle}.\n"
    assert f"There is no job {handle}" in refusal("status", handle)
    cluster.kubeconfig = str(tmp_path / "none")
    assert "No Kubernetes cluster: " in refusal(*flags, here, "--", "train.py")


def on_the_page(kind: str, part: str) -> str:
    """The one block of docs/guides/kubernetes.md that has this in it."""
    blocks = [block.partition("```")[0] for block in PAGE.read_text().split(f"```{kind}\n")[1:]]
    [found] = [block for block in blocks if part in block]
    return found


def allow_what_the_page_says(cluster: Cluster, directory: Path) -> None:
    """Bind the Role of docs/guides/kubernetes.md to the user who may do nothing."""
    (directory / "role.yaml").write_text(on_the_page("yaml", "torchelastic-user}"))
    cluster.kubectl("apply", "-f", str(directory / "role.yaml"))
    cluster.kubectl("create", "rolebinding", "u", "--role=torchelastic-user", "--user=powerless")
    nothing = f"kubernetes:{cluster.namespace}/nothing"
    cluster.wait_for(lambda: "no job" in cluster.run("status", nothing).stderr, "the Role")


def test_status_says_why_pods_are_missing(cluster):
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    path = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas"
    cluster.plane.api.create(path, quota)
    cluster.wait_for(
        lambda: cluster.plane.api.get(f"{path}/q").get("status", {}).get("hard"), "the quota"
    )
    handle = cluster.submit("--nnodes=1:3", "--settle=1", "--", "train.py")
    cluster.await_ready(1)
    cluster.wait_for(lambda: "exceeded quota" in cluster.output("status", handle), "why")


# --- preemption ----------------------------------------------------------------------------------


def test_an_agent_that_may_read_its_pod_sees_the_disruption_before_the_signal(
    control_plane, namespace, kubelet, tmp_path
):
    """As its service account, with no more than the two permissions of the page."""
    api, base = control_plane.api, f"/api/v1/namespaces/{namespace}"
    cluster = Cluster(control_plane, kubelet, namespace)
    (tmp_path / "trainer.yaml").write_text(on_the_page("yaml", "resources: [nodes]"))
    typed = on_the_page("bash", "-f trainer.yaml").replace(
        "trainer.yaml", f"{tmp_path}/trainer.yaml"
    )
    typed = typed.replace("default:", f"{namespace}:")
    apply, account, *commands = [line.split()[1:] for line in typed.splitlines()]
    cluster.kubectl(*apply)
    cluster.kubectl(*account)
    token = api.create(f"{base}/serviceaccounts/trainer/token", {"spec": {}})["status"]["token"]
    (tmp_path / "token").write_text(token)
    (tmp_path / "namespace").write_text(namespace)
    (tmp_path / "ca.crt").write_text(Path(control_plane.authority.cert).read_text())
    api.create(f"{base}/pods", pod_of("mine", "trap '' TERM; while :; do sleep 0.1; done"))
    stored = poll_for(lambda: on_a_node(api, f"{base}/pods/mine"), what="a scheduled pod")
    source = Kubernetes(f"https://127.0.0.1:{control_plane.port}", "mine", tmp_path)
    with pytest.raises(NotWatched, match=r"may not get pod mine.*allow it the verb get on pods"):
        asyncio.run(source.ask())
    for command in commands:
        cluster.kubectl(*command)
    # A source that is refused its node does not ask for it again.
    asked = ("auth", "can-i", "get", "nodes", f"--as=system:serviceaccount:{namespace}:trainer")
    poll_for(lambda: control_plane.kubectl(*asked).stdout == "yes\n", what="the second permission")
    poll_for(lambda: not refused(source), what="the permission")
    assert asyncio.run(source.ask()) is None
    node = f"/api/v1/nodes/{stored['spec']['nodeName']}"
    taint = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}
    api.patch(node, {"spec": {"taints": [taint]}})
    notice = asyncio.run(source.ask())
    assert notice == Notice(
        "Kubernetes removes this node (taint ToBeDeletedByClusterAutoscaler)", 30.0
    )
    api.patch(node, {"spec": {"taints": None}})
    eviction = {"metadata": {"name": "mine"}, "deleteOptions": {"gracePeriodSeconds": 20}}
    api.create(f"{base}/pods/mine/eviction", eviction)
    notice = asyncio.run(source.ask())
    assert notice == Notice("Kubernetes disrupts this pod (EvictionByEvictionAPI)", 20.0)


def on_a_node(api: ClusterApi, path: str) -> dict[str, Any]:
    stored = api.get(path)
    return stored if stored["spec"].get("nodeName") else {}


def refused(source: Kubernetes) -> bool:
    try:
        asyncio.run(source.ask())
    except NotWatched:
        return True
    return False
