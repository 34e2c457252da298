"""The state of a job on Kubernetes, from its objects as the API server has them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchelastic.cluster.operator.worker_pods import TRAINER, error_line
from torchelastic.cluster.submit.job_kinds import JobKind
from torchelastic.cluster.submit.kubernetes_manifests import CONTAINER, NNODES_ANNOTATION
from torchelastic.errors import EXIT_OK, EXIT_SIGNAL_BASE, ConfigError

Json = dict[str, Any]

PREFIX = "kubernetes:"
#: The node of a pod that has none yet.
UNSCHEDULED = "-"
_UNDER_WAY = ("pending", "running")
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class JobHandle:
    """Names one job, as users write it: `kubernetes:[NAMESPACE/]NAME`."""

    name: str
    #: Empty: that of the current context.
    namespace: str = ""

    def __str__(self) -> str:
        return f"{PREFIX}{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str | None) -> JobHandle | None:
        """Return None if this is not meant to be a job on Kubernetes.

        >>> JobHandle.parse("kubernetes:team/train"), JobHandle.parse("train")
        (JobHandle(name='train', namespace='team'), None)
        """
        if text is None or not text.startswith(PREFIX):
            return None
        found = re.fullmatch(r"(?:([-a-z0-9]+)/)?([-a-z0-9]+)", text.removeprefix(PREFIX))
        if found is None:
            raise ConfigError(
                f"'{text}' is not a job: write {PREFIX}NAME or {PREFIX}NAMESPACE/NAME."
            )
        return cls(found[2], found[1] or "")


@dataclass(frozen=True, kw_only=True)
class PodSummary:
    """One pod."""

    name: str
    index: int | None
    node: str
    #: Its phase, `Terminating`, or why it cannot be scheduled or started.
    state: str
    ready: bool
    #: Whether it has a readiness probe: then `ready` says that the node is in the world.
    probed: bool
    exit_code: int | None
    #: The error that its output names, if it has failed.
    error: str = ""
    #: Why it was disrupted, as its condition says.
    disrupted: str = ""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job and its pods."""

    job: str
    #: `pending` (no pod is running), `running`, `complete`, `failed` or `suspended`, and why.
    state: str
    reason: str
    min_nodes: int
    max_nodes: int
    #: Wanted now.
    nodes: int
    ready: int
    #: Indexes that are given up.
    failed_indexes: str
    #: The last warning about the Job, if it has fewer pods than it should.
    warning: str
    pods: tuple[PodSummary, ...]

    def to_json(self) -> Json:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it for people."""
        reason = f": {self.reason}" if self.reason else ""
        known = "in the world" if all(pod.probed for pod in self.pods) else "running"
        lines = [
            f"{self.job}  {self.state}{reason}",
            f"  {self.ready} of {self.nodes} nodes are {known} "
            f"(--nnodes {self.min_nodes}:{self.max_nodes})",
        ]
        if self.failed_indexes:
            lines.append(f"  given up after repeated failures: index {self.failed_indexes}")
        if self.warning:
            lines.append(f"  warning: {self.warning}")
        wide = max((len(pod.name) for pod in self.pods), default=0)
        where = max((len(pod.node) for pod in self.pods), default=0)
        for pod in self.pods:
            state = "in the world" if pod.ready and pod.probed else pod.state
            code = f", exit code {pod.exit_code}" if pod.exit_code is not None else ""
            why = f", {pod.disrupted}" if pod.disrupted else ""
            error = f": {pod.error}" if pod.error else ""
            lines.append(f"    {pod.name:{wide}}  {pod.node:{where}}  {state}{code}{why}{error}")
        return lines


def nnodes_of(job: Mapping[str, Any]) -> tuple[int, int]:
    """Return MIN and MAX of a job. Raises `ConfigError` if it is not one of ours."""
    text = (job["metadata"].get("annotations") or {}).get(NNODES_ANNOTATION, "")
    # The controller of ElasticJobs writes it, whoever made them.
    text = text or str((job.get("status") or {}).get("nnodes", ""))
    if not re.fullmatch(r"[0-9]+:[0-9]+", text):
        raise ConfigError(
            f"{job['kind']} {job['metadata']['name']} was not made by `torchelastic submit "
            f"kubernetes`: it has no annotation {NNODES_ANNOTATION}."
        )
    least, most = map(int, text.split(":"))
    return least, most


def summary(
    kind: JobKind,
    job: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]],
    warnings: Sequence[Mapping[str, Any]] = (),
) -> JobSummary:
    """Return the state of a job; `warnings` are the events about it."""
    least, most = nnodes_of(job)
    metadata, status = job["metadata"], job.get("status") or {}
    nodes = kind.nodes_of(job)
    shown = sorted(map(_pod, pods), key=lambda pod: (pod.index is None, pod.index, pod.name))
    state, reason = _end_of(job) or _progress(shown, nodes)
    return JobSummary(
        job=str(JobHandle(metadata["name"], metadata["namespace"])),
        state=state,
        reason=reason,
        min_nodes=least,
        max_nodes=most,
        nodes=nodes,
        ready=sum(pod.ready for pod in shown),
        failed_indexes=str(status.get("failedIndexes") or ""),
        warning=_last(warnings) if state in _UNDER_WAY and len(pods) < nodes else "",
        pods=tuple(shown),
    )


def _last(events: Sequence[Mapping[str, Any]]) -> str:
    last = max(events, key=lambda event: event.get("lastTimestamp") or "", default={})
    return str(last.get("message", ""))


#: By the condition, or phase, that names the end of a job. All kinds are here: none uses a word of
#: another for something else.
_ENDS = {
    "Complete": "complete",
    "Completed": "complete",
    "Succeeded": "complete",
    "Failed": "failed",
    "Terminated": "failed",
}
_STATES = {
    **_ENDS,
    # Pods may still be ending.
    "SuccessCriteriaMet": "complete",
    "FailureTarget": "failed",
    "Suspended": "suspended",
    "Aborted": "suspended",
}


def _conditions(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the conditions of a job that hold; Volcano has one phase instead."""
    status = job.get("status") or {}
    state = status.get("state") or {}
    phase = [{**state, "type": state["phase"]}] if state.get("phase") else []
    return [one for one in status.get("conditions") or () if one.get("status") == "True"] + phase


def _end_of(job: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return how a job ended or was suspended, and why; None: it is under way."""
    for condition in _conditions(job):
        if (state := _STATES.get(condition["type"])) is not None:
            why = condition.get("message") or condition.get("reason") or ""
            return state, "" if state == "complete" else str(why)
    return None


def _progress(pods: Sequence[PodSummary], nodes: int) -> tuple[str, str]:
    """Return the state of a job that is under way, and why it does not run."""
    if any(pod.state in ("Running", "Terminating", "Succeeded") for pod in pods):
        return "running", ""
    waiting = sum(pod.node == UNSCHEDULED for pod in pods)
    unscheduled = f", {waiting} not scheduled" if waiting else ""
    return "pending", f"0 of {nodes} pods are running{unscheduled}"


def is_over(job: Mapping[str, Any]) -> bool:
    """Return whether a job has completed or failed, and its pods have ended."""
    return any(one["type"] in _ENDS for one in _conditions(job))


def container_of(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the container of the agent: by its name, or else the first one."""
    found: list[Mapping[str, Any]] = pod["spec"]["containers"]
    name = (pod["metadata"].get("annotations") or {}).get(TRAINER, CONTAINER)
    return next((one for one in found if one["name"] == name), found[0])


def _pod(pod: Mapping[str, Any]) -> PodSummary:
    metadata, status = pod["metadata"], pod.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    index = (metadata.get("annotations") or {}).get(INDEX_ANNOTATION, "")
    named = {one["name"]: one for one in status.get("containerStatuses") or ()}
    container = container_of(pod)
    own: Mapping[str, Any] = named.get(container["name"], {})
    disruption = conditions.get("DisruptionTarget", {})
    end = own.get("state", {}).get("terminated", {})
    code = end.get("exitCode", EXIT_OK)
    return PodSummary(
        name=metadata["name"],
        index=int(index) if index.isdigit() else None,
        node=pod["spec"].get("nodeName", UNSCHEDULED),
        state=_pod_state(metadata, status, conditions, own),
        ready=conditions.get("Ready", {}).get("status") == "True",
        probed="readinessProbe" in container,
        exit_code=end.get("exitCode"),
        error=error_line(end.get("message", "")) if 0 < code < EXIT_SIGNAL_BASE else "",
        disrupted=str(disruption.get("reason", "")) if disruption.get("status") == "True" else "",
    )


def _pod_state(
    metadata: Mapping[str, Any],
    status: Mapping[str, Any],
    conditions: Mapping[str, Any],
    own: Mapping[str, Any],
) -> str:
    """Return the phase, or the reason that holds the pod up."""
    phase = str(status.get("phase", "Pending"))
    if "deletionTimestamp" in metadata and phase not in ("Succeeded", "Failed"):
        return "Terminating"
    if phase != "Pending":
        return phase
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"Pending: {scheduled.get('message') or scheduled.get('reason')}"
    waiting = own.get("state", {}).get("waiting", {})
    return f"Pending: {waiting['reason']}" if waiting.get("reason") else phase
