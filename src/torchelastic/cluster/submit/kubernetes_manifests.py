"""The objects of an elastic job on Kubernetes: a Secret, a headless Service, an Indexed Job. Pure.

Fields: Kubernetes 1.33 and later, batch/v1 (docs/concepts/workloads/controllers/job.md). Why each
of them is set: docs/guides/kubernetes.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchelastic.config import DEFAULT_PORT
from torchelastic.errors import EXIT_SIGNAL_BASE, EXIT_USAGE, ConfigError

Json = dict[str, Any]

#: The lowest release that has every field as it is used here.
LOWEST_RELEASE = (1, 33)
#: Of the job: `MIN:MAX`, for `torchelastic scale`. Only jobs that we have submitted have it.
NNODES_ANNOTATION = "torchelastic/nnodes"
#: The label that the Job controller gives to its pods.
JOB_LABEL = "batch.kubernetes.io/job-name"

#: Of Kueue: the queue of a workload, and whether its number of pods may change.
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_ELASTIC = "kueue.x-k8s.io/elastic-job"

CONTAINER = "torchelastic"
HEALTH_PORT = DEFAULT_PORT + 1
SECRET_KEY = "secret"
#: Data loaders share memory there; a container has 64 MiB otherwise.
SHARED_MEMORY: Json = {"name": "shm", "emptyDir": {"medium": "Memory"}}
#: Failures of a pod by itself before its index is given up. Disruptions do not count.
POD_FAILURES = 3
#: Kubernetes' own, stated so that it can be told to the agent.
GRACE = 30
#: Seconds after which the pods of a node that does not report are deleted, instead of 300.
LOST_NODE = 30
#: More endpoints than this are not needed.
MOST_ENDPOINTS = 3
#: A Job names pods NAME-INDEX, and a name in DNS has at most 63 characters.
LONGEST_NAME = 56


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A job for Kubernetes."""

    name: str
    image: str
    min_nodes: int
    max_nodes: int
    #: Flags of `torchelastic run`, the script and its arguments.
    arguments: Sequence[str]
    secret: str
    namespace: str = ""
    #: The queue that admits the job; empty: none.
    queue: str = ""
    #: Metadata and spec of a pod, which are merged into the one made here.
    pod_template: Mapping[str, Any] = field(default_factory=dict)


def manifests(job: KubernetesJob) -> list[Json]:
    """Return the objects, in the order in which they are created."""
    check_name(job.name)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": "None",
            # Nodes are ready once they are in a world, and need each other's names before that.
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: job.name},
            "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
        },
    }
    about = job_metadata(job, queue=job.queue)
    if job.queue:
        about["annotations"][KUEUE_ELASTIC] = "true"
    uid = from_pod("JOB_UID", "metadata.labels['batch.kubernetes.io/controller-uid']")
    indexed_job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": about,
        "spec": job_spec(job, pod(job, JOB_LABEL, uid)),
    }
    return [secret(job), service, indexed_job]


def metadata(job: KubernetesJob) -> Json:
    """Return the metadata of an object of the job."""
    named = {"name": job.name, "labels": {"app.kubernetes.io/managed-by": "torchelastic"}}
    return {**named, "namespace": job.namespace} if job.namespace else named


def job_metadata(job: KubernetesJob, queue: str) -> Json:
    """Return the metadata of the job itself; `queue` is one of Kueue, empty for none."""
    about = metadata(job)
    if queue:
        about["labels"][KUEUE_QUEUE] = queue
    return {**about, "annotations": {NNODES_ANNOTATION: f"{job.min_nodes}:{job.max_nodes}"}}


def secret(job: KubernetesJob) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job),
        "stringData": {SECRET_KEY: job.secret},
    }


def job_spec(job: KubernetesJob, template: Json) -> Json:
    """Return the spec of an Indexed Job of these pods."""
    spare = job.max_nodes - job.min_nodes
    return {
        "completionMode": "Indexed",
        "parallelism": job.max_nodes,
        # An index that is given up is replaced by a new one. The Job must never run out of them: a
        # Job whose indexes have all succeeded or failed has failed, even if its success policy is
        # met at the same time.
        "completions": job.max_nodes + spare + 1,
        "maxFailedIndexes": spare,
        "backoffLimitPerIndex": POD_FAILURES,
        "podFailurePolicy": {
            "rules": [
                _on_exit("FailJob", EXIT_USAGE),
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                # A node that was told to leave, by whomever.
                _on_exit("Ignore", EXIT_SIGNAL_BASE + 15),
            ]
        },
        # A node exits with 0 only when the training is complete.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        # With a pod failure policy there is no other: no two pods of one index at a time, as long
        # as their kubelets report.
        "podReplacementPolicy": "Failed",
        "template": template,
    }


def _on_exit(action: str, code: int) -> Json:
    when = {"containerName": CONTAINER, "operator": "In", "values": [code]}
    return {"action": action, "onExitCodes": when}


def pod(job: KubernetesJob, label: str, *variables: Json, with_secret: bool = True) -> Json:
    """Return the template of the pods, with the user's merged in.

    `label` is the one that has the job's name, and `variables` are those that name the job.
    """
    if with_secret:
        variables = (*variables, secret_variable(job))
    return dict(merged(_pod(job, label, _container(job, variables)), job.pod_template))


def secret_variable(job: KubernetesJob) -> Json:
    """Return the variable with the job's secret, which workers do not inherit.

    A file would have to be readable for any user id.
    """
    key = {"name": job.name, "key": SECRET_KEY}
    return {"name": "TORCHELASTIC_SECRET", "valueFrom": {"secretKeyRef": key}}


def _pod(job: KubernetesJob, label: str, container: Json) -> Json:
    lost = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute"}
        for why in ("not-ready", "unreachable")
    ]
    own_pods = {"matchLabels": {label: job.name}}
    return {
        "spec": {
            "subdomain": job.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _grace(job),
            # The agent asks the API server nothing.
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{**one, "tolerationSeconds": LOST_NODE} for one in lost],
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": own_pods,
                }
            ],
            "containers": [container],
            "volumes": [SHARED_MEMORY],
        },
    }


def _container(job: KubernetesJob, variables: Sequence[Json]) -> Json:
    return {
        "name": CONTAINER,
        "image": job.image,
        "command": ["torchelastic", "run"],
        "args": arguments(job),
        "env": [
            *variables,
            from_pod("POD_UID", "metadata.uid"),
            from_pod("POD_NAME", "metadata.name"),
            {"name": "POD_GRACE_SECONDS", "value": str(_grace(job))},
            {"name": "JOB_ENDPOINTS", "value": str(endpoints(job.min_nodes, job.max_nodes))},
        ],
        "ports": [
            {"name": "rendezvous", "containerPort": DEFAULT_PORT},
            {"name": "health", "containerPort": HEALTH_PORT},
        ],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 2},
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": "health"},
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "volumeMounts": [{"name": SHARED_MEMORY["name"], "mountPath": "/dev/shm"}],
        # The end of the output of a container that failed, for `torchelastic status`.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def arguments(job: KubernetesJob) -> list[str]:
    """Return the arguments of `torchelastic run` in a pod."""
    # Kubernetes would replace $(NAME) by a variable, and $$ by $.
    words = (word.replace("$", "$$") for word in job.arguments)
    return [f"--health-port={HEALTH_PORT}", *words]


def from_pod(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def endpoints(min_nodes: int, max_nodes: int) -> int:
    """Return how many of the first pods are endpoints.

    A job starts when a majority of its endpoints is there, so that must be possible with MIN nodes;
    a Job starts its lowest indexes first. Two endpoints would both have to be there.

    >>> [endpoints(*shape) for shape in ((1, 8), (2, 2), (2, 3), (4, 8))]
    [1, 1, 3, 3]
    """
    return MOST_ENDPOINTS if min_nodes >= 2 and max_nodes >= MOST_ENDPOINTS else 1


def _grace(job: KubernetesJob) -> int:
    """Return the pod's grace period: the template's, if it has one."""
    given = job.pod_template.get("spec", {}).get("terminationGracePeriodSeconds")
    return given if isinstance(given, int) else GRACE


def check_name(name: str, longest: int = LONGEST_NAME) -> None:
    """Raise `ConfigError` unless Kubernetes accepts a name for a Job, its pods and its Service."""
    if len(name) > longest or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ConfigError(
            f"'{name}' is not a name for a Kubernetes job: give a --name of at most {longest} "
            "lower-case letters, digits and dashes that begins with a letter."
        )


# --- pod templates -------------------------------------------------------------------------------

#: Fields whose entries are told apart by one of their own fields; other lists are replaced.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}


def merged(base: Any, template: Any, key: str = "") -> Any:
    """Return `base` with a template merged in, as `kubectl patch` would.

    Objects are merged field by field, and null removes a field. Entries of a list with a key
    (`_MERGE_KEYS`) are merged with the entry of the same key, or added. Anything else is replaced.

    >>> merged({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}, "a": None})
    {'b': {'c': 2, 'd': 3}}
    """
    if isinstance(base, Mapping) and isinstance(template, Mapping):
        both = {
            name: merged(base.get(name), value, name)
            for name, value in template.items()
            if value is not None
        }
        kept = {name: value for name, value in base.items() if name not in template}
        return kept | both
    merge_key = _MERGE_KEYS.get(key)
    if merge_key is None or not isinstance(base, list) or not isinstance(template, list):
        return template
    made = {entry[merge_key]: entry for entry in base}
    unnamed = []  # the API server says what they lack
    for entry in template:
        if isinstance(entry, Mapping) and isinstance(entry.get(merge_key), str | int):
            made[entry[merge_key]] = merged(made.get(entry[merge_key], {}), entry)
        else:
            unnamed.append(entry)
    return [*made.values(), *unnamed]


def pod_template(data: Any, path: str) -> Json:
    """Return metadata and spec of a pod from a file's content: a Pod, a PodTemplate, or only them.

    Raises `ConfigError` if it is something else.
    """
    if isinstance(data, dict) and isinstance(data.get("template"), dict):
        data = data["template"]
    if not isinstance(data, dict) or not isinstance(data.get("spec"), dict):
        raise ConfigError(
            f"--pod-template {path} is not a pod: write its spec, as in "
            "'spec: {containers: [{name: torchelastic, resources: ...}]}'."
        )
    containers = data["spec"].get("containers") or []
    if not isinstance(containers, list) or not all(isinstance(one, dict) for one in containers):
        raise ConfigError(
            f"--pod-template {path}: spec.containers is a list, of which each entry is an object, "
            "as in '[{name: torchelastic, resources: ...}]'."
        )
    for one in containers:
        if one.get("name") != CONTAINER and "image" not in one:
            raise ConfigError(
                f"--pod-template {path}: container '{one.get('name', '')}' has no image. The "
                f"container of the job is named {CONTAINER}: use that name, or give a sidecar an "
                "image."
            )
    unknown = set(data) - {"apiVersion", "kind", "metadata", "spec"}
    if unknown:
        raise ConfigError(
            f"--pod-template {path} has the unknown field '{min(unknown)}': a pod has metadata "
            "and spec."
        )
    given = data.get("metadata") or {}
    if not isinstance(given, dict):
        raise ConfigError(
            f"--pod-template {path}: metadata is an object, as in '{{labels: {{team: vision}}}}'."
        )
    metadata = {name: given[name] for name in ("labels", "annotations") if name in given}
    return {"spec": data["spec"], **({"metadata": metadata} if metadata else {})}
