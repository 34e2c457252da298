"""The resources that a job on Kubernetes can be submitted as."""

import pytest

from torchelastic.cli.options.command_table import KUBERNETES_KINDS
from torchelastic.cluster.kubernetes.job_summary import nnodes_of
from torchelastic.cluster.submit.job_kinds import JOB_KINDS
from torchelastic.cluster.submit.kubernetes_manifests import KubernetesJob
from torchelastic.errors import ConfigError

GPUS = {"resources": {"limits": {"nvidia.com/gpu": 8}}}


def job(**changes):
    given = {
        "name": "train",
        "image": "registry/train:1",
        "min_nodes": 2,
        "max_nodes": 4,
        "arguments": ["--nnodes=2:4", "--", "train.py", "--lr=1"],
        "secret": "s" * 64,
    }
    return KubernetesJob(**(given | changes))


def rendered(kind, **changes):
    """The job itself, which is the last object."""
    return JOB_KINDS[kind].manifests(job(**changes))[-1]


def container_of(template):
    return template["spec"]["containers"][0]


def variables(container):
    return {each["name"]: each for each in container["env"]}


def test_every_kind_of_the_command_line_is_rendered():
    assert tuple(JOB_KINDS) == KUBERNETES_KINDS


@pytest.mark.parametrize("kind", KUBERNETES_KINDS)
def test_what_all_have(kind):
    """The user's command, a secret that is not in the job, and the namespace."""
    objects = JOB_KINDS[kind].manifests(job(namespace="team"))
    assert {each["metadata"]["namespace"] for each in objects} == {"team"}
    text = str(objects[-1])
    assert "'--nnodes=2:4', '--', 'train.py', '--lr=1'" in text
    assert "'torchelastic', 'run'" in text
    assert "s" * 64 not in text
    secrets = [each for each in objects if each["kind"] == "Secret"]
    assert len(secrets) == (kind != "elasticjob")  # its controller makes one


@pytest.mark.parametrize("kind", sorted(set(KUBERNETES_KINDS) - {"trainjob"}))
def test_a_pod_template_is_merged_in(kind):
    template = {
        "spec": {"containers": [{"name": "torchelastic", **GPUS}], "nodeSelector": {"a": "b"}}
    }
    text = str(rendered(kind, pod_template=template))
    assert str(GPUS["resources"]) in text
    assert "'nodeSelector': {'a': 'b'}" in text


def test_a_jobset_has_an_indexed_job_whose_pods_keep_the_run_id():
    spec = rendered("jobset")["spec"]
    indexed = spec["replicatedJobs"][0]["template"]["spec"]
    assert (indexed["parallelism"], indexed["maxFailedIndexes"]) == (4, 2)
    source = variables(container_of(indexed["template"]))["JOB_UID"]["valueFrom"]
    assert source["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    assert spec["network"]["subdomain"] == indexed["template"]["spec"]["subdomain"]


def test_a_pytorchjob_has_an_elastic_policy_and_the_container_that_its_operator_looks_for():
    spec = rendered("pytorchjob")["spec"]
    assert spec["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 4, "rdzvBackend": "c10d"}
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "ExitCode")
    container = container_of(worker["template"])
    assert container["name"] == "pytorch"
    assert "readinessProbe" not in container, "nodes find each other only when they are ready"


@pytest.mark.parametrize("kind", ["pytorchjob", "volcano"])
def test_a_job_that_reuses_a_name_is_another_run(kind):
    ids = {
        str(rendered(kind, secret=secret)).partition("'value': 'train-")[2][:8] for secret in "ab"
    }
    assert len(ids) == 2


def test_a_trainjob_refers_to_the_runtime_and_takes_resources_only():
    template = {"spec": {"containers": [{"name": "torchelastic", **GPUS}]}}
    spec = rendered("trainjob", pod_template=template)["spec"]
    assert spec["runtimeRef"] == {"name": "torchelastic"}
    assert spec["trainer"]["numNodes"] == 4
    assert spec["trainer"]["resourcesPerNode"] == GPUS["resources"]
    with pytest.raises(ConfigError, match="put the rest into the ClusterTrainingRuntime"):
        rendered("trainjob", pod_template={"spec": {**template["spec"], "nodeSelector": {}}})


def test_a_volcano_job_is_a_gang_of_min_and_ends_with_the_first_success():
    spec = rendered("volcano")["spec"]
    assert (spec["minAvailable"], spec["minSuccess"]) == (2, 1)
    (task,) = spec["tasks"]
    assert task["replicas"] == 4
    assert task["policies"][0] == {"exitCode": 64, "action": "TerminateJob"}
    assert spec["plugins"]["svc"] == ["--publish-not-ready-addresses"]


def test_an_elasticjob_leaves_secret_and_names_to_its_controller():
    spec = rendered("elasticjob")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    template = spec["replicaSpecs"]["Worker"]["template"]
    assert "subdomain" not in template["spec"]
    assert [each["name"] for each in template["spec"]["volumes"]] == ["shm"]
    assert not any("secret" in word for word in container_of(template)["args"])


@pytest.mark.parametrize("kind", ["job", "jobset", "pytorchjob", "trainjob"])
def test_kueue_admits_the_whole_job(kind):
    made = rendered(kind, queue="team-queue")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    elastic = made["metadata"].get("annotations", {}).get("kueue.x-k8s.io/elastic-job")
    assert (elastic == "true") == (kind == "job")


def test_kueue_admits_the_pods_of_an_elasticjob_and_volcano_has_queues_of_its_own():
    made = rendered("elasticjob", queue="team-queue")
    pods = made["spec"]["replicaSpecs"]["Worker"]["template"]["metadata"]["labels"]
    assert pods == {"kueue.x-k8s.io/queue-name": "team-queue"}
    made = rendered("volcano", queue="team-queue")
    assert made["spec"]["queue"] == "team-queue"
    assert "kueue.x-k8s.io/queue-name" not in made["metadata"]["labels"]


@pytest.mark.parametrize(
    ("kind", "longest"),
    [
        ("job", 56),
        ("jobset", 49),
        ("trainjob", 49),
        ("pytorchjob", 49),
        ("elasticjob", 49),
        ("volcano", 51),
    ],
)
def test_a_name_too_long_for_its_pods_is_refused(kind, longest):
    rendered(kind, name="n" * longest)
    with pytest.raises(ConfigError, match=f"at most {longest} lower-case"):
        rendered(kind, name="n" * (longest + 1))


@pytest.mark.parametrize("kind", KUBERNETES_KINDS)
def test_the_commands_about_a_job_find_what_was_rendered(kind):
    """Its shape, its number of nodes, its pods, and the objects beside it."""
    *others, made = JOB_KINDS[kind].manifests(job(queue="team"))
    known = JOB_KINDS[kind]
    assert (made["apiVersion"], made["kind"]) == (known.api_version, known.kind)
    assert nnodes_of(made) == (2, 4)
    assert known.nodes_of(made) == 4
    assert tuple(each["kind"] for each in others) == known.others
    assert f"'matchLabels': {{'{known.pod_label}': 'train'}}" in str(made) or kind == "trainjob"


def test_pods_of_an_elasticjob_are_not_taken_for_those_of_a_job():
    selector = JOB_KINDS["elasticjob"].pods_of("train")
    assert selector == "job-name=train,group-name=elastic.pytorch.org"
