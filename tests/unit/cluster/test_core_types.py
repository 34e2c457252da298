"""Core objects have only fields that the lowest release of Kubernetes knows; no server is asked."""

from pathlib import Path

import pytest

from tests.unit.cluster.elastic_jobs import elastic_job
from torchelastic.cluster.operator import worker_pods
from torchelastic.cluster.operator.elastic_job import parse
from torchelastic.cluster.submit.job_kinds import JOB_KINDS
from torchelastic.cluster.submit.kubernetes_manifests import LOWEST_RELEASE, KubernetesJob

pytestmark = pytest.mark.needs("kubernetes", "kubernetes-validate")

DEPLOY = Path(__file__).parents[3] / "deploy" / "kubernetes"
RELEASE = ".".join(map(str, LOWEST_RELEASE))


def check(manifest):
    import kubernetes_validate

    kubernetes_validate.validate(manifest, RELEASE, strict=True)


def job():
    shape = {"min_nodes": 2, "max_nodes": 4, "arguments": ["--", "train.py"]}
    return KubernetesJob(name="train", image="i:1", secret="s", queue="team", **shape)


def test_an_unknown_field_is_found():
    import kubernetes_validate

    *_, made = JOB_KINDS["job"].manifests(job())
    made["spec"]["template"]["spec"]["containers"][0]["imagee"] = "i"
    with pytest.raises(kubernetes_validate.ValidationError, match="'imagee' was unexpected"):
        check(made)


def test_an_indexed_job_and_what_is_beside_it():
    for made in JOB_KINDS["job"].manifests(job()):
        check(made)


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "volcano", "elasticjob"])
def test_the_pods_of_other_kinds(kind):
    spec = JOB_KINDS[kind].manifests(job())[-1]["spec"]
    if kind == "jobset":
        indexed = spec["replicatedJobs"][0]["template"]
        check({"apiVersion": "batch/v1", "kind": "Job", **indexed})
        return
    if kind == "volcano":
        worker = spec["tasks"][0]
    else:
        worker = (spec.get("replicaSpecs") or spec["pytorchReplicaSpecs"])["Worker"]
    check({"apiVersion": "v1", "kind": "Pod", **worker["template"]})


def test_objects_of_the_controller_are_valid():
    made = parse(elastic_job())
    secret = worker_pods.with_secret(worker_pods.secret(made), "sesame")
    for one in (worker_pods.pod(made, 0), worker_pods.service(made), secret):
        check(one)


def test_manifests_that_install_the_controller_are_valid():
    import yaml

    files = ("namespace.yaml", "rbac.yaml", "controller.yaml")
    objects = [one for file in files for one in yaml.safe_load_all((DEPLOY / file).read_text())]
    assert len(objects) == 9
    for one in objects:
        check(one)
