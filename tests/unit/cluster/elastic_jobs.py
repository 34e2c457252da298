"""ElasticJobs and their pods, as an API server has them."""

from torchelastic.cluster.operator import worker_pods
from torchelastic.cluster.operator.elastic_job import parse, stamp

NOW = 1_800_000_000.0
UID = "0c5a1f6e-1111-2222-3333-444444444444"


def elastic_job(*, replicas=2, least=1, most=4, status=None, template=None, worker=(), **spec):
    """A job with the fields of 0.2's sample."""
    container = {"name": "elasticjob-worker", "image": "train:1", "args": ["train.py"]}
    return {
        "apiVersion": "elastic.pytorch.org/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "imagenet", "namespace": "default", "uid": UID, "generation": 1},
        "spec": {
            "rdzvEndpoint": "etcd-service:2379",
            "minReplicas": least,
            "maxReplicas": most,
            "replicaSpecs": {
                "Worker": {
                    "replicas": replicas,
                    "restartPolicy": "ExitCode",
                    "template": template
                    or {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}},
                    **dict(worker),
                }
            },
            **spec,
        },
        "status": status or {},
    }


def pod_of(job, index, *, phase="Running", code=None, uid="", deleted=None, **terminated):
    """A pod of a job; with a `code` its container has ended."""
    made = worker_pods.pod(parse(job), index)
    made["metadata"]["uid"] = uid or f"pod-{index}"
    if deleted is not None:
        made["metadata"]["deletionTimestamp"] = stamp(deleted)
    made["status"] = {"phase": phase}
    if code is not None:
        made["status"]["phase"] = "Failed" if code else "Succeeded"
        end = {"exitCode": code, "reason": "Error" if code else "Completed", **terminated}
        name = made["spec"]["containers"][0]["name"]
        made["status"]["containerStatuses"] = [{"name": name, "state": {"terminated": end}}]
    return made
