"""The kinds of resources that a job can be submitted as: how each is written, and what the commands
about it need. Pure.

Each renders the pods of `kubernetes_manifests` for a controller that the cluster must have: JobSet
v1alpha2, Kubeflow's Training Operator 1.9 (PyTorchJob) and Trainer 2.3 (TrainJob), Volcano 1.16,
and our own (ElasticJob). What each of them can do: docs/guides/kubernetes-kinds.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic.cluster.operator import worker_pods
from torchelastic.cluster.operator.elastic_job import API_VERSION as ELASTIC_JOB_API
from torchelastic.cluster.submit import kubernetes_manifests
from torchelastic.cluster.submit.kubernetes_manifests import (
    CONTAINER,
    JOB_LABEL,
    KUEUE_QUEUE,
    Json,
    KubernetesJob,
    arguments,
    check_name,
    from_pod,
    job_metadata,
    job_spec,
    merged,
    pod,
    secret,
    secret_variable,
)
from torchelastic.errors import EXIT_USAGE, ConfigError

#: Of the ClusterTrainingRuntime in deploy/trainer.
RUNTIME = "torchelastic"
#: Name of the replicated job, or of the task: Trainer asks for this one.
_NODE = "node"
#: Training Operator looks for the container of this name.
_PYTORCH_CONTAINER = "pytorch"
#: A JobSet names pods NAME-node-0-INDEX, Volcano NAME-node-INDEX, the others NAME-worker-INDEX.
_LONGEST_JOBSET = kubernetes_manifests.LONGEST_NAME - len("-node-0")
_LONGEST_VOLCANO = kubernetes_manifests.LONGEST_NAME - len("-node")
_LONGEST_WORKER = kubernetes_manifests.LONGEST_NAME - len("-worker")
#: The UID of a JobSet stays when it starts its Job again.
_JOBSET_UID = from_pod("JOB_UID", "metadata.labels['jobset.sigs.k8s.io/jobset-uid']")


#: The label that a JobSet gives to its pods; a TrainJob makes a JobSet of its own name.
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """One kind of resource."""

    api_version: str
    kind: str
    #: The label of its pods that has the job's name.
    pod_label: str
    #: The objects of a job. The last one is the job; it owns the others.
    manifests: Callable[[KubernetesJob], list[Json]]
    #: JSON pointer to the number of nodes.
    nodes: str
    #: Whether that number may change while the job runs.
    scales: bool = False
    #: A label that its pods have as well, as NAME=VALUE: other pods may have the first one.
    also: str = ""
    #: Kinds of the objects of the same name that are submitted with it.
    others: tuple[str, ...] = ("Secret",)

    def pods_of(self, job: str) -> str:
        """Return the label selector of a job's pods."""
        return ",".join(filter(None, (f"{self.pod_label}={job}", self.also)))

    def nodes_of(self, manifest: Mapping[str, Any]) -> int:
        """Return the number of nodes that are wanted; 0: it does not say."""
        found: Any = manifest
        for part in self.nodes.split("/")[1:]:
            if not found:
                return 0
            found = found[int(part)] if isinstance(found, list) else found.get(part)
        return int(found or 0)


def _jobset(job: KubernetesJob) -> list[Json]:
    check_name(job.name, _LONGEST_JOBSET)
    template = pod(job, JOB_KINDS["jobset"].pod_label, _JOBSET_UID)
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        # The Job replaces pods by itself; when it gives up, so does the JobSet.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {"name": _NODE, "replicas": 1, "template": {"spec": job_spec(job, template)}}
        ],
    }
    return [secret(job), _resource("jobset", job, spec)]


def _pytorchjob(job: KubernetesJob) -> list[Json]:
    check_name(job.name, _LONGEST_WORKER)
    template = pod(job, JOB_KINDS["pytorchjob"].pod_label, _run_id(job))
    del template["spec"]["subdomain"]
    for container in template["spec"]["containers"]:
        if container["name"] == CONTAINER:
            container["name"] = _PYTORCH_CONTAINER
            # The Services of a PyTorchJob have no names for pods that are not ready, and nodes need
            # them to become ready.
            container.pop("readinessProbe", None)
    spec = {
        "elasticPolicy": {
            "minReplicas": job.min_nodes,
            "maxReplicas": job.max_nodes,
            "rdzvBackend": "c10d",
        },
        "runPolicy": {"cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {
            # Codes from 128 on are interruptions, others are final: as ours.
            "Worker": {
                "replicas": job.max_nodes,
                "restartPolicy": "ExitCode",
                "template": template,
            }
        },
    }
    return [secret(job), _resource("pytorchjob", job, spec)]


def _trainjob(job: KubernetesJob) -> list[Json]:
    check_name(job.name, _LONGEST_JOBSET)
    trainer = {
        "image": job.image,
        "command": ["torchelastic", "run"],
        "args": arguments(job),
        "env": [
            _JOBSET_UID,
            from_pod("POD_UID", "metadata.uid"),
            secret_variable(job),
        ],
        "numNodes": job.max_nodes,
        **_resources(job.pod_template),
    }
    spec = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    return [secret(job), _resource("trainjob", job, spec)]


def _resources(template: Mapping[str, Any]) -> Json:
    """Return the one part of a pod template that a TrainJob has a field for."""
    if not template:
        return {}
    container = (template.get("spec", {}).get("containers") or [{}])[0]
    found = container.get("resources", {})
    if template != {"spec": {"containers": [{"name": CONTAINER, "resources": found}]}}:
        raise ConfigError(
            "A TrainJob takes its pods from its runtime, and of --pod-template only the resources "
            f"of the container {CONTAINER}: put the rest into the ClusterTrainingRuntime {RUNTIME}."
        )
    return {"resourcesPerNode": found}


def _volcano(job: KubernetesJob) -> list[Json]:
    check_name(job.name, _LONGEST_VOLCANO)
    template = pod(job, JOB_KINDS["volcano"].pod_label, _run_id(job))
    del template["spec"]["subdomain"]  # the plug-in svc sets it
    task = {
        "name": _NODE,
        "replicas": job.max_nodes,
        "template": template,
        # The first that fits is used.
        "policies": [
            {"exitCode": EXIT_USAGE, "action": "TerminateJob"},
            {"events": ["PodFailed", "PodEvicted"], "action": "RestartPod"},
        ],
    }
    spec = {
        "schedulerName": "volcano",
        "minAvailable": job.min_nodes,
        "minSuccess": 1,
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses"]},
        "tasks": [task],
    }
    if job.queue:
        spec["queue"] = job.queue
    return [secret(job), _resource("volcano", job, spec, kueue=False)]


def _elasticjob(job: KubernetesJob) -> list[Json]:
    check_name(job.name, _LONGEST_WORKER)
    template = pod(job, JOB_KINDS["elasticjob"].pod_label, with_secret=False)
    del template["spec"]["subdomain"]  # the controller sets it, and makes the secret
    if job.queue:
        # Kueue does not know ElasticJobs, and admits their pods one by one.
        template = merged(template, {"metadata": {"labels": {KUEUE_QUEUE: job.queue}}})
    worker = {"replicas": job.max_nodes, "restartPolicy": "ExitCode", "template": template}
    spec = {
        "minReplicas": job.min_nodes,
        "maxReplicas": job.max_nodes,
        "replicaSpecs": {"Worker": worker},
    }
    return [_resource("elasticjob", job, spec, kueue=False)]


def _resource(word: str, job: KubernetesJob, spec: Json, *, kueue: bool = True) -> Json:
    """Return the job; `kueue`: a queue is one of Kueue, which admits the job as a whole."""
    kind = JOB_KINDS[word]
    about = job_metadata(job, queue=job.queue if kueue else "")
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": about, "spec": spec}


def _run_id(job: KubernetesJob) -> Json:
    """Return the variable that tells this job from others of its name.

    The pods are not told a UID, and a secret is new for each job.
    """
    digest = hashlib.sha256(job.secret.encode()).hexdigest()[:8]
    return {"name": "JOB_UID", "value": f"{job.name}-{digest}"}


#: By the word of `--as`.
JOB_KINDS = {
    "job": JobKind(
        api_version="batch/v1",
        kind="Job",
        pod_label=JOB_LABEL,
        manifests=kubernetes_manifests.manifests,
        nodes="/spec/parallelism",
        scales=True,
        others=("Secret", "Service"),
    ),
    "jobset": JobKind(
        api_version="jobset.x-k8s.io/v1alpha2",
        kind="JobSet",
        pod_label=JOBSET_LABEL,
        manifests=_jobset,
        nodes="/spec/replicatedJobs/0/template/spec/parallelism",
    ),
    "pytorchjob": JobKind(
        api_version="kubeflow.org/v1",
        kind="PyTorchJob",
        pod_label="training.kubeflow.org/job-name",
        manifests=_pytorchjob,
        nodes="/spec/pytorchReplicaSpecs/Worker/replicas",
        scales=True,
    ),
    "trainjob": JobKind(
        api_version="trainer.kubeflow.org/v1alpha1",
        kind="TrainJob",
        pod_label=JOBSET_LABEL,
        manifests=_trainjob,
        nodes="/spec/trainer/numNodes",
    ),
    "volcano": JobKind(
        api_version="batch.volcano.sh/v1alpha1",
        kind="Job",
        pod_label="volcano.sh/job-name",
        manifests=_volcano,
        nodes="/spec/tasks/0/replicas",
        scales=True,
    ),
    "elasticjob": JobKind(
        api_version=ELASTIC_JOB_API,
        kind="ElasticJob",
        pod_label=worker_pods.JOB_LABEL,
        manifests=_elasticjob,
        nodes="/spec/replicaSpecs/Worker/replicas",
        scales=True,
        also=worker_pods.SELECTOR,
        others=(),
    ),
}
