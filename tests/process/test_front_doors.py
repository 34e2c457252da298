"""`torchelastic submit kubernetes --as` at a real API server with other projects' definitions.

They are other projects' files, and not in this one: KUBERNETES_CRDS names an archive of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes import ControlPlane
from tests.needs import KUBERNETES_CRDS
from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.cluster.kubernetes.job_summary import JobHandle
from torchelastic.cluster.submit.job_kinds import JOB_KINDS, JobKind
from torchelastic.errors import EXIT_OK, EXIT_USAGE, ConfigError, KubernetesError

pytestmark = [
    pytest.mark.needs("CRDs", "kubectl"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.xdist_group("front doors"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
#: The definition of each kind's resource, as kubectl names it.
RESOURCES = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "volcano": "jobs.batch.volcano.sh",
    "elasticjob": "elasticjobs.elastic.pytorch.org",
}


def submit(plane: ControlPlane, namespace: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchelastic", "submit", "kubernetes", *words]
    command += [f"--namespace={namespace}", "--name=train", "--image=registry/train:1"]
    return subprocess.run(
        [*command, "--nnodes=2:4", "--nproc-per-node=2", "--", "train.py", "--lr=0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "KUBECONFIG": plane.kubeconfig},
    )


@pytest.fixture(scope="module")
def definitions(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("crds")
    with tarfile.open(os.environ[KUBERNETES_CRDS]) as archive:
        archive.extractall(directory, filter="data")
    files = ["-f", str(directory), "-f", str(DEPLOY / "kubernetes" / "elasticjobs.yaml")]
    # Not all of them fit into the annotation of an apply by the client.
    done = control_plane.kubectl("apply", "--server-side", *files)
    assert done.returncode == 0, done.stderr
    wanted = [f"crd/{name}" for name in RESOURCES.values()]
    done = control_plane.kubectl("wait", "--for=condition=Established", *wanted)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def place(control_plane: ControlPlane, namespace: str) -> Iterator[str]:
    yield namespace
    control_plane.api.close()


def test_a_cluster_without_the_resource_refuses_and_nothing_is_left(control_plane, place):
    done = submit(control_plane, place, "--as=jobset")
    assert done.returncode == EXIT_USAGE
    assert "The cluster has no JobSet of jobset.x-k8s.io/v1alpha2: install" in done.stderr
    assert control_plane.items(f"/api/v1/namespaces/{place}/secrets") == []


@pytest.mark.parametrize("kind", RESOURCES)
def test_every_kind_is_accepted_as_it_is(control_plane, definitions, place, tmp_path, kind):
    """With all fields known to the definition: `fieldValidation=Strict`."""
    template = tmp_path / "gpus.yaml"
    resources = "resources: {limits: {nvidia.com/gpu: 2}}"
    template.write_text(f"spec: {{containers: [{{name: torchelastic, {resources}}}]}}")
    flags = (f"--as={kind}", "--queue=team", f"--pod-template={template}")
    done = submit(control_plane, place, *flags)
    assert done.returncode == EXIT_OK, done.stderr
    assert f"See it with: torchelastic status kubernetes:{place}/train\n" in done.stdout
    version, _, name = RESOURCES[kind].partition(".")
    stored = control_plane.kubectl("-n", place, "get", f"{version}.{name}", "train", "-o", "json")
    assert stored.returncode == 0, stored.stderr
    assert '"nvidia.com/gpu": 2' in stored.stdout
    owned = control_plane.items(f"/api/v1/namespaces/{place}/secrets")
    owners = [each["metadata"]["ownerReferences"][0]["name"] for each in owned]
    assert owners == ([] if kind == "elasticjob" else ["train"])
    check_commands(control_plane, JobHandle("train", place), JOB_KINDS[kind])


def check_commands(plane: ControlPlane, handle: JobHandle, kind: JobKind) -> None:
    """`status`, `scale`, `logs` and `delete` of a job whose controller does not run."""
    control, pods = JobControl(plane.api), f"/api/v1/namespaces/{handle.namespace}/pods"
    labels = dict(pair.split("=") for pair in kind.pods_of(handle.name).split(","))
    container = {"name": "torchelastic", "image": "none"}
    plane.api.create(
        pods,
        {"metadata": {"name": "mine", "labels": labels}, "spec": {"containers": [container]}},
    )
    found = control.summary(handle)
    assert (found.state, found.nodes, found.min_nodes, found.max_nodes) == ("running", 4, 2, 4)
    assert [pod.name for pod in found.pods] == ["mine"]
    with pytest.raises(ConfigError, match=f"{handle} has no output: see `torchelastic status"):
        control.logs(handle, lambda *line: None, follow=False, lines=None)  # it is not scheduled
    if kind.scales:
        assert control.scale(handle, 3) == 4
        assert control.summary(handle).nodes == 3
    else:
        with pytest.raises(ConfigError, match=f"is a {kind.kind}, whose number of nodes cannot"):
            control.scale(handle, 3)
    control.delete(handle)
    with pytest.raises(KubernetesError, match=f"There is no job {handle}: list"):
        control.summary(handle)
    assert plane.items(f"/api/v1/namespaces/{handle.namespace}/secrets") == []


def test_the_runtime_of_trainjobs_is_accepted_as_it_is(control_plane, definitions):
    file = str(DEPLOY / "trainer" / "runtime.yaml")
    done = control_plane.kubectl("create", "--validate=strict", "-f", file)
    assert done.returncode == 0, done.stderr
    control_plane.kubectl("delete", "-f", file)
