"""The kinds of resources that a job can be submitted as, and what the commands about it need. Pure.

`front_doors` renders them; their names and fields are those of the projects' releases there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchelastic.cluster.operator import worker_pods
from torchelastic.cluster.operator.elastic_job import API_VERSION as ELASTIC_JOB_API
from torchelastic.cluster.submit.kubernetes_manifests import JOB_LABEL

#: The label that a JobSet gives to its pods; a TrainJob makes a JobSet of its own name.
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """One kind of resource."""

    api_version: str
    kind: str
    #: The label of its pods that has the job's name.
    pod_label: str
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


#: By the word of `--as`.
JOB_KINDS = {
    "job": JobKind(
        api_version="batch/v1",
        kind="Job",
        pod_label=JOB_LABEL,
        nodes="/spec/parallelism",
        scales=True,
        others=("Secret", "Service"),
    ),
    "jobset": JobKind(
        api_version="jobset.x-k8s.io/v1alpha2",
        kind="JobSet",
        pod_label=JOBSET_LABEL,
        nodes="/spec/replicatedJobs/0/template/spec/parallelism",
    ),
    "pytorchjob": JobKind(
        api_version="kubeflow.org/v1",
        kind="PyTorchJob",
        pod_label="training.kubeflow.org/job-name",
        nodes="/spec/pytorchReplicaSpecs/Worker/replicas",
        scales=True,
    ),
    "trainjob": JobKind(
        api_version="trainer.kubeflow.org/v1alpha1",
        kind="TrainJob",
        pod_label=JOBSET_LABEL,
        nodes="/spec/trainer/numNodes",
    ),
    "volcano": JobKind(
        api_version="batch.volcano.sh/v1alpha1",
        kind="Job",
        pod_label="volcano.sh/job-name",
        nodes="/spec/tasks/0/replicas",
        scales=True,
    ),
    "elasticjob": JobKind(
        api_version=ELASTIC_JOB_API,
        kind="ElasticJob",
        pod_label=worker_pods.JOB_LABEL,
        nodes="/spec/replicaSpecs/Worker/replicas",
        scales=True,
        also=worker_pods.SELECTOR,
        others=(),
    ),
}
