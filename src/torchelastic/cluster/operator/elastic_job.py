"""An ElasticJob: its spec, checked, and the conditions in its status. Pure.

The fields are those of torchelastic 0.2's `elastic.pytorch.org/v1alpha1`; deploy/kubernetes has the
schema. `schedulingPolicy` is accepted and has no effect, as in 0.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from torchelastic.cluster.submit.kubernetes_manifests import endpoints
from torchelastic.config import DEFAULT_PORT, format_endpoint
from torchelastic.errors import ConfigError

Json = dict[str, Any]

GROUP = "elastic.pytorch.org"
API_VERSION = f"{GROUP}/v1alpha1"
#: How often a worker is started again after failures of its own, unless `backoffLimit` says so.
BACKOFF_LIMIT = 3

#: Conditions of a job. The first five are those of 0.2.
Condition = Literal["Created", "Running", "Restarting", "Succeeded", "Failed", "Stalled"]

#: A Service and the hostname of a pod have names of this form.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 63


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """A job, with its defaults filled in."""

    name: str
    namespace: str
    uid: str
    generation: int
    min_nodes: int
    max_nodes: int
    #: As many nodes as the user asks for, also beyond `min_nodes` and `max_nodes`.
    replicas: int
    #: host:port of etcd; empty: the pods meet at each other.
    endpoint: str
    restart_policy: str
    #: The PodTemplateSpec of the workers.
    template: Json
    backoff_limit: int
    clean_pods: str
    #: Seconds; None: no limit.
    active_deadline: int | None
    ttl: int | None
    status: Json

    @property
    def wanted(self) -> int:
        """How many nodes it is to have."""
        return min(max(self.replicas, self.min_nodes), self.max_nodes)

    @property
    def run_id(self) -> str:
        """The name, and the identity of this object: a later job of that name is another run."""
        return f"{self.name}-{self.uid[:8]}"

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the nodes meet if there is no etcd."""
        count = endpoints(self.min_nodes, self.max_nodes)
        hosts = (f"{pod_name(self.name, index)}.{self.run_id}" for index in range(count))
        return tuple(format_endpoint(host, DEFAULT_PORT) for host in hosts)


def parse(manifest: Mapping[str, Any]) -> ElasticJob:
    """Return a job as the API server has it; raise ConfigError if its spec cannot be run."""
    metadata, spec = manifest["metadata"], manifest.get("spec", {})
    status = manifest.get("status") or {}
    worker = (spec.get("replicaSpecs") or {}).get("Worker") or {}
    template = worker.get("template") or {}
    if not (template.get("spec") or {}).get("containers"):
        raise ConfigError(
            "spec.replicaSpecs.Worker.template has no container: name one with an image."
        )
    replicas = int(worker.get("replicas", 1))
    least, most = _range(spec, status, replicas)
    name = metadata["name"]
    _check_name(name, metadata["uid"], most)
    return ElasticJob(
        name=name,
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 1)),
        min_nodes=least,
        max_nodes=most,
        replicas=replicas,
        endpoint=spec.get("rdzvEndpoint", ""),
        restart_policy=worker.get("restartPolicy", "ExitCode"),
        template=template,
        backoff_limit=int(spec.get("backoffLimit", BACKOFF_LIMIT)),
        clean_pods=spec.get("cleanPodPolicy", "Running"),
        active_deadline=spec.get("activeDeadlineSeconds"),
        ttl=spec.get("ttlSecondsAfterFinished"),
        status=status,
    )


def _range(spec: Mapping[str, Any], status: Json, replicas: int) -> tuple[int, int]:
    """Return the least and most nodes: those that the running agents were started with."""
    if recorded := status.get("nnodes"):
        least, _, most = recorded.partition(":")
        return int(least), int(most)
    least = int(spec.get("minReplicas", replicas))
    most = int(spec.get("maxReplicas", max(replicas, least)))
    if "minReplicas" not in spec:
        least = min(least, most)
    if least < 1 or most < least:
        raise ConfigError(
            f"minReplicas {least} and maxReplicas {most} allow no number of nodes: choose "
            "1 <= minReplicas <= maxReplicas."
        )
    return least, most


def _check_name(name: str, uid: str, most: int) -> None:
    # A pod on a lost node keeps its name; the number of the next one is larger.
    longest = max(len(pod_name(name, 2 * most - 1)), len(f"{name}-{uid[:8]}"))
    if not _LABEL.fullmatch(name) or longest > _LONGEST_LABEL:
        raise ConfigError(
            f"The name {name} is not usable for pods and their Service: choose one of at most "
            f"{_LONGEST_LABEL - longest + len(name)} lower-case letters, digits and dashes that "
            "begins with a letter."
        )


def pod_name(job: str, index: int) -> str:
    """Return the name of a pod, as in 0.2."""
    return f"{job}-worker-{index}"


def condition(status: Mapping[str, Any], kind: Condition) -> Json:
    """Return a condition of a job; empty if it has never been set."""
    found = (each for each in status.get("conditions", ()) if each["type"] == kind)
    return next(found, {})


def holds(status: Mapping[str, Any], kind: Condition) -> bool:
    """Return whether a condition is true."""
    return bool(condition(status, kind).get("status") == "True")


def set_condition(
    status: Json, kind: Condition, value: bool, reason: str, message: str, now: float
) -> bool:
    """Set a condition in place; return whether it says something new."""
    old = condition(status, kind)
    text = "True" if value else "False"
    new = {"type": kind, "status": text, "reason": reason, "message": message}
    if old and all(old.get(key) == new[key] for key in new):
        return False
    since = old["lastTransitionTime"] if old.get("status") == text else stamp(now)
    new |= {"lastTransitionTime": since, "lastUpdateTime": stamp(now)}
    others = [each for each in status.get("conditions", ()) if each["type"] != kind]
    # The last one is what `kubectl get` shows.
    status["conditions"] = [*others, new] if value else [new, *others]
    return True


def stamp(seconds: float) -> str:
    """Return a time as the API writes it.

    >>> stamp(1.5)
    '1970-01-01T00:00:01Z'
    """
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float:
    """Return the seconds of a time in the API.

    >>> seconds_of("1970-01-01T00:00:01Z")
    1.0
    """
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
