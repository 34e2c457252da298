"""The pods of an ElasticJob: their manifests, and how one has ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from torchelastic.cluster.operator.elastic_job import (
    API_VERSION,
    GROUP,
    ElasticJob,
    Json,
    pod_name,
    seconds_of,
)
from torchelastic.cluster.platform import POD_GRACE
from torchelastic.config import DEFAULT_PORT
from torchelastic.errors import EXIT_OK, EXIT_SIGNAL_BASE, EXIT_USAGE

#: Labels of 0.2's pods.
GROUP_LABEL, JOB_LABEL, INDEX_LABEL = "group-name", "job-name", "replica-index"
#: Selects the pods of all ElasticJobs.
SELECTOR = f"{GROUP_LABEL}={GROUP}"

#: Annotation with the name of the container that trains: others may be injected before it. `kubectl
#: logs` and `kubectl exec` look there, too.
TRAINER = "kubectl.kubernetes.io/default-container"

_SECRET_KEY = "secret"
_SHM_VOLUME, _SHM_PATH = "torchelastic-shm", "/dev/shm"
_INDEX = re.compile(r"-worker-(0|[1-9]\d*)$")
#: As in `error     : ValueError: ...` of a report, and `torchelastic run: error: ...`.
_ERROR = re.compile(r"\berror\s*: (.+)")
_LONGEST_ERROR = 300
#: Seconds of the pod's grace that are the agent's own, after its workers have been stopped.
_MARGIN = 2


#: complete: the training is done. fatal: no other start can fix it. failure: counts against
#: `backoffLimit`. interruption: does not.
Verdict = Literal["complete", "fatal", "failure", "interruption"]


@dataclass(frozen=True, kw_only=True)
class PodEnd:
    """How the container of a pod that trains has ended."""

    #: None: it was not started, or its node did not report.
    code: int | None
    verdict: Verdict
    #: A part of a sentence, such as `exit code 1 (Error)`.
    cause: str
    #: How long it ran.
    seconds: float


def ended(pod: Mapping[str, Any]) -> PodEnd | None:
    """Return how a worker has ended; None if it has not."""
    status = pod.get("status", {})
    phase = status.get("phase", "Pending")
    name = (pod["metadata"].get("annotations") or {}).get(TRAINER)
    name = name or pod["spec"]["containers"][0]["name"]
    statuses = (each for each in status.get("containerStatuses", ()) if each["name"] == name)
    container: Json = next(statuses, {})
    end = container.get("state", {}).get("terminated")
    last = container.get("lastState", {}).get("terminated") or {}
    if end is None and last.get("exitCode") == EXIT_USAGE:
        end = last  # the kubelet starts it again, in vain
    if end is not None and (phase in ("Succeeded", "Failed") or _is_final(pod, end)):
        code = int(end["exitCode"])
        cause = _cause(f"exit code {code}", end.get("reason", ""), end.get("message", ""))
        verdict = _verdict(code, end.get("reason", ""), is_disrupted(pod))
        return PodEnd(code=code, verdict=verdict, cause=cause, seconds=_lived(end))
    if phase == "Succeeded":
        return PodEnd(code=EXIT_OK, verdict="complete", cause="exit code 0", seconds=0.0)
    if phase == "Failed":
        cause = _cause("the pod failed", status.get("reason", ""), status.get("message", ""))
        return PodEnd(code=None, verdict="interruption", cause=cause, seconds=0.0)
    return None


def _is_final(pod: Mapping[str, Any], end: Mapping[str, Any]) -> bool:
    """Return whether a container that has ended stays so, though others of its pod still run."""
    policy = pod["spec"].get("restartPolicy", "Always")
    return bool(policy == "Never" or end["exitCode"] in (EXIT_OK, EXIT_USAGE))


def _verdict(code: int, reason: str, disrupted: bool) -> Verdict:
    if code == EXIT_OK:
        return "complete"
    if code == EXIT_USAGE:
        return "fatal"
    if disrupted:
        return "interruption"
    if reason == "OOMKilled":
        return "failure"
    return "interruption" if code >= EXIT_SIGNAL_BASE else "failure"


def is_disrupted(pod: Mapping[str, Any]) -> bool:
    """Return whether the cluster took the pod away: preemption, eviction, a drained node."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(
        each["type"] == "DisruptionTarget" and each["status"] == "True" for each in conditions
    )


def _cause(first: str, reason: str, message: str) -> str:
    """Return the part of a sentence that says why, with a line of the container's output."""
    named = f"{first} ({reason})" if reason and reason != "Error" else first
    line = error_line(message)
    return f"{named}: {line}" if line else named


def error_line(message: str) -> str:
    """Return the error that our report or command line names last, or else the last line."""
    lines = [line.strip() for line in message.splitlines()]
    named = [str(found[1]) for line in lines if (found := _ERROR.search(line))]
    others = [line for line in lines if any(map(str.isalpha, line))]
    return (named or others or [""])[-1][:_LONGEST_ERROR].rstrip(".")


def _lived(end: Mapping[str, Any]) -> float:
    began, until = end.get("startedAt"), end.get("finishedAt")
    return seconds_of(until) - seconds_of(began) if began and until else 0.0


def index_of(pod: Mapping[str, Any]) -> int:
    """Return the number of a worker: from its name, since labels can be edited; -1: it has none."""
    found = _INDEX.search(pod["metadata"]["name"])
    return int(found[1]) if found else -1


def owner_of(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and UID of the ElasticJob that a pod belongs to; empty: to none."""
    owners = pod["metadata"].get("ownerReferences") or ()
    found = (each for each in owners if each.get("controller") and each["kind"] == "ElasticJob")
    return next(((each["name"], each["uid"]) for each in found), ("", ""))


def labels(job: ElasticJob) -> dict[str, str]:
    """Return the labels that all pods of a job have."""
    return {GROUP_LABEL: GROUP, JOB_LABEL: job.name, "replica-type": "worker"}


def service(job: ElasticJob) -> Json:
    """Return the headless Service that gives the pods their names, before they are ready, too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(job, job.run_id),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(job),
            "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
        },
    }


def secret(job: ElasticJob) -> Json:
    """Return the Secret of a job without its content, see `with_secret`."""
    metadata = _owned(job, job.run_id)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "immutable": True}


def with_secret(manifest: Json, text: str) -> Json:
    return manifest | {"stringData": {_SECRET_KEY: text}}


def pod(job: ElasticJob, index: int) -> Json:
    """Return a pod: the template with the flags of the launcher before its arguments, as in 0.2."""
    metadata, spec = job.template.get("metadata", {}), deepcopy(job.template["spec"])
    own = _owned(job, pod_name(job.name, index))
    own["labels"] = {
        **metadata.get("labels", {}),
        **own["labels"],
        INDEX_LABEL: str(index),
    }
    trainer = {TRAINER: spec["containers"][0]["name"]}
    own["annotations"] = {**metadata.get("annotations", {}), **trainer}
    # If we look at exit codes, the kubelet starts nothing again.
    spec["restartPolicy"] = "Never" if job.restart_policy in ("ExitCode", "Never") else "OnFailure"
    # The subdomain gives the pod its name in DNS.
    spec |= {"hostname": own["name"], "subdomain": job.run_id}
    container = spec["containers"][0]
    container["args"] = [*_flags(job), *container.get("args", ())]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    grace = float(spec.get("terminationGracePeriodSeconds", POD_GRACE))
    _add_variables(container, job.run_id, grace)
    _add_shared_memory(spec, container)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": spec}


def _flags(job: ElasticJob) -> list[str]:
    return [
        f"--rdzv_backend={'etcd' if job.endpoint else 'c10d'}",
        f"--rdzv_endpoint={job.endpoint or ','.join(job.endpoints)}",
        f"--rdzv_id={job.run_id}",
        f"--nnodes={job.min_nodes}:{job.max_nodes}",
    ]


def _add_variables(container: Json, secret_name: str, grace: float) -> None:
    """Add variables that launchers of 0.2 ignore, unless the template sets them."""
    given = {each["name"] for each in container.get("env", ())}
    key = {"name": secret_name, "key": _SECRET_KEY}
    added: list[Json] = [
        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "TORCHELASTIC_SECRET", "valueFrom": {"secretKeyRef": key}},
        {"name": "PET_SHUTDOWN_TIMEOUT", "value": f"{max(grace - _MARGIN, 1):g}"},
    ]
    mine = [each for each in added if each["name"] not in given]
    container["env"] = [*container.get("env", ()), *mine]


def _add_shared_memory(spec: Json, container: Json) -> None:
    """Mount more than the usual 64 MB of /dev/shm, unless the template mounts something there."""
    mounts = container.get("volumeMounts", [])
    if all(mount["mountPath"] != _SHM_PATH for mount in mounts):
        container["volumeMounts"] = [*mounts, {"name": _SHM_VOLUME, "mountPath": _SHM_PATH}]
        volume = {"name": _SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
        spec["volumes"] = [*spec.get("volumes", ()), volume]


def _owned(job: ElasticJob, name: str) -> Json:
    """Return the metadata of an object that is deleted with the job."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": "ElasticJob",
        "name": job.name,
        "uid": job.uid,
        "controller": True,
    }
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": labels(job),
        "ownerReferences": [owner],
    }
