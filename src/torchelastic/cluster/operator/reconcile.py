"""Decide what to do for an ElasticJob, given its pods. Pure.

Everything that a later decision needs is in the job's status, so a controller that starts anew
continues where the last one ended. A pod has a fixed name per index, so that creating one twice
is refused by the API server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torchelastic.backoff import pause
from torchelastic.cluster.operator import worker_pods
from torchelastic.cluster.operator.elastic_job import (
    Condition,
    ElasticJob,
    Json,
    condition,
    holds,
    parse,
    seconds_of,
    set_condition,
    stamp,
)
from torchelastic.cluster.operator.worker_pods import PodEnd, ended, index_of, owner_of
from torchelastic.errors import ConfigError

#: After the job has ended, its other workers have this long to end by themselves.
LEAVE_ALONE = 30.0
#: A pod that still exists this long after its grace is over is on a lost node.
LOST_AFTER = 30.0
#: A run of this many seconds clears a worker's earlier failures.
LONG_RUN = 600.0
#: Pauses between starts of a worker that ends soon; none after the first end.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
#: What the API server refused is tried again after this.
RETRY_REFUSED = 10.0
#: Reason of the condition Stalled if a quota is exceeded: only what is created can be refused so.
QUOTA_EXCEEDED = "QuotaExceeded"


@dataclass(frozen=True)
class JobEvent:
    """An event about a job, as `kubectl describe` shows it."""

    reason: str
    message: str
    warning: bool = False


@dataclass(kw_only=True)
class JobPlan:
    """The actions to take, in the order of the fields."""

    #: To create with a content of its own, if it does not exist.
    secret: Json | None = None
    #: To store; None: as it is.
    status: Json | None = None
    events: list[JobEvent] = field(default_factory=list)
    #: Name and UID.
    delete: list[tuple[str, str]] = field(default_factory=list)
    #: To create: first the Service, then pods.
    create: list[Json] = field(default_factory=list)
    delete_job: bool = False
    #: When to decide again, even if nothing changes.
    again_at: float | None = None

    def again(self, at: float) -> None:
        self.again_at = at if self.again_at is None else min(self.again_at, at)


def reconcile(manifest: Mapping[str, Any], pods: Iterable[Json], now: float) -> JobPlan:
    """Return what to do for a job; `now` is in seconds since 1970."""
    plan = JobPlan()
    old = manifest.get("status") or {}
    status = deepcopy(old)
    if manifest["metadata"].get("deletionTimestamp"):
        return plan  # the garbage collector deletes what it owns
    try:
        job = parse(manifest)
    except ConfigError as error:
        _say(plan, status, "Stalled", True, "InvalidSpec", str(error), now, warning=True)
        status["observedGeneration"] = manifest["metadata"].get("generation", 1)
        plan.status = status if status != old else None
        return plan
    pods = list(pods)
    mine = [pod for pod in pods if owner_of(pod)[1] == job.uid and index_of(pod) >= 0]
    if holds(status, "Succeeded") or holds(status, "Failed"):
        _after_the_end(plan, status, job, mine, now)
    else:
        _while_it_runs(plan, status, job, mine, now)
    # An earlier job of the same name may still have pods: names can be used once they are gone.
    others = {pod["metadata"]["name"] for pod in pods if owner_of(pod)[1] != job.uid}
    plan.create = [made for made in plan.create if made["metadata"]["name"] not in others]
    _count(status, job, mine)
    plan.status = status if status != old else None
    return plan


def refused(status: Mapping[str, Any], reason: str, message: str, now: float) -> Json:
    """Return the status of a job for which the API server refused something."""
    changed = deepcopy(dict(status))
    if not set_condition(changed, "Stalled", True, reason, message, now):
        condition(changed, "Stalled")["lastUpdateTime"] = stamp(now)
    return changed


def _while_it_runs(
    plan: JobPlan, status: Json, job: ElasticJob, pods: list[Json], now: float
) -> None:
    if "startTime" not in status:
        if _waits_after_refusal(plan, status, now):
            return
        status |= {"startTime": stamp(now), "nnodes": f"{job.min_nodes}:{job.max_nodes}"}
        plan.secret = worker_pods.secret(job)
        _say(plan, status, "Created", True, "ElasticJobCreated", "The job was accepted.", now)
    _note_scale(plan, status, job)
    endings = {pod["metadata"]["name"]: end for pod in pods if (end := ended(pod))}
    if _has_ended(plan, status, job, endings, now):
        return
    _record(plan, status, job, pods, endings, now)
    records = {record["index"]: record for record in status.get("workers", ())}
    spent = {index for index, each in records.items() if each["failures"] > job.backoff_limit}
    wanted = min(job.wanted, job.max_nodes - len(spent))
    if wanted < job.min_nodes:
        last = max((records[index] for index in spent), key=lambda each: str(each["time"]))
        message = (
            f"Worker {last['index']} failed {last['failures']} times, last with {last['cause']}; "
            f"backoffLimit is {job.backoff_limit}, and minReplicas {job.min_nodes}."
        )
        _finish(plan, status, "Failed", "BackoffLimitExceeded", message, now)
        return
    waits = _waits_after_refusal(plan, status, now)
    if not waits or condition(status, "Stalled")["reason"] == QUOTA_EXCEEDED:
        holding = _replace_ended(plan, pods, endings, records, spent, now)
        _fit(plan, job, pods, holding, wanted, spent, now)
        if not plan.create and not plan.delete:
            _resolve(status, now)
        plan.create = [] if waits else plan.create
    _report(plan, status, job, pods, wanted, now)


def _note_scale(plan: JobPlan, status: Json, job: ElasticJob) -> None:
    """Say once per change of the spec that it asks for more or fewer nodes than allowed."""
    if status.get("observedGeneration") != job.generation and job.wanted != job.replicas:
        plan.events.append(
            JobEvent(
                "ReplicasOutOfRange",
                f"replicas {job.replicas} is outside {job.min_nodes}:{job.max_nodes} "
                f"(minReplicas:maxReplicas); running {job.wanted}.",
                warning=True,
            )
        )
    status["observedGeneration"] = job.generation


def _has_ended(
    plan: JobPlan, status: Json, job: ElasticJob, endings: Mapping[str, PodEnd], now: float
) -> bool:
    """Finish the job if a worker or its time limit says so; return whether it has ended."""
    for name, end in endings.items():
        if end.verdict == "complete":
            message = f"The training is complete: {name} ended with exit code 0."
            _finish(plan, status, "Succeeded", "ElasticJobSucceeded", message, now)
            return True
    for name, end in endings.items():
        if end.verdict == "fatal":
            message = f"{name} ended with {end.cause}. No other start can fix this error."
            _finish(plan, status, "Failed", "UserError", message, now)
            return True
    if job.active_deadline is not None:
        until = seconds_of(status["startTime"]) + job.active_deadline
        if now >= until:
            message = f"The job ran for activeDeadlineSeconds ({job.active_deadline} s)."
            _finish(plan, status, "Failed", "DeadlineExceeded", message, now)
            return True
        plan.again(until)
    return False


def _record(
    plan: JobPlan,
    status: Json,
    job: ElasticJob,
    pods: list[Json],
    endings: Mapping[str, PodEnd],
    now: float,
) -> None:
    """Add workers that have ended to the status, each pod once."""
    records = {record["index"]: record for record in status.get("workers", ())}
    for pod in pods:
        metadata = pod["metadata"]
        end, index = endings.get(metadata["name"]), index_of(pod)
        old = records.get(index, {})
        if end is None or metadata.get("deletionTimestamp") or old.get("uid") == metadata["uid"]:
            continue
        before = {} if end.seconds >= LONG_RUN else old
        records[index] = {
            "index": index,
            "uid": metadata["uid"],
            "failures": before.get("failures", 0) + (end.verdict == "failure"),
            "endings": before.get("endings", 0) + 1,
            "cause": end.cause,
            "time": stamp(now),
        }
        if records[index]["failures"] > job.backoff_limit:
            message = (
                f"Giving up {metadata['name']}, which ended with {end.cause}: backoffLimit is "
                f"{job.backoff_limit}."
            )
            plan.events.append(JobEvent("WorkerGivenUp", message, warning=True))
            continue
        message = f"Replacing {metadata['name']}, which ended with {end.cause}."
        plan.events.append(JobEvent("ElasticJobRestarting", message, warning=True))
        set_condition(status, "Restarting", True, "ElasticJobRestarting", message, now)
    if records:
        status["workers"] = [records[index] for index in sorted(records)]


def _replace_ended(
    plan: JobPlan,
    pods: list[Json],
    endings: Mapping[str, PodEnd],
    records: Mapping[int, Json],
    spent: set[int],
    now: float,
) -> list[Json]:
    """Delete pods that have ended when their pause is over; return those that hold a place.

    Until then a pod stays, so that its log can be read.
    """
    holding = []
    for pod in pods:
        index, metadata = index_of(pod), pod["metadata"]
        if _is_lost(pod, now):
            continue
        if deleted := metadata.get("deletionTimestamp"):
            plan.again(seconds_of(deleted) + LOST_AFTER)
        elif metadata["name"] in endings:
            if index in spent:
                continue
            again = pause(records[index]["endings"] - 1, FIRST_PAUSE, LONGEST_PAUSE)
            due = seconds_of(records[index]["time"]) + again
            if now >= due:
                plan.delete.append((metadata["name"], metadata["uid"]))
            else:
                plan.again(due)
        holding.append(pod)
    return holding


def _is_lost(pod: Mapping[str, Any], now: float) -> bool:
    """Return whether a pod should have ended long ago: its node is gone, or does not report."""
    deleted = pod["metadata"].get("deletionTimestamp")
    return bool(deleted) and now >= seconds_of(deleted) + LOST_AFTER


def _fit(
    plan: JobPlan,
    job: ElasticJob,
    pods: list[Json],
    holding: list[Json],
    wanted: int,
    spent: set[int],
    now: float,
) -> None:
    """Create or delete pods until there are as many as wanted."""
    if surplus := len(holding) - wanted:
        leaving = sorted(holding, key=_who_leaves_first)[: max(surplus, 0)]
        going = {name for name, _ in plan.delete}
        for pod in leaving:
            metadata = pod["metadata"]
            if not metadata.get("deletionTimestamp") and metadata["name"] not in going:
                plan.delete.append((metadata["name"], metadata["uid"]))
                message = f"Deleted pod {metadata['name']}: {wanted} are wanted."
                plan.events.append(JobEvent("SuccessfulDeletePod", message))
    taken = {index_of(pod) for pod in pods} | spent
    # The pod of a lost node keeps its name, and does not train.
    most = job.max_nodes + sum(_is_lost(pod, now) for pod in pods)
    free = [index for index in range(most) if index not in taken]
    if missing := free[: max(wanted - len(holding), 0)]:
        plan.create = [worker_pods.service(job), *(worker_pods.pod(job, each) for each in missing)]


def _resolve(status: Json, now: float) -> None:
    """Say that nothing is refused any more."""
    if holds(status, "Stalled"):
        set_condition(status, "Stalled", False, "Resolved", "Nothing is refused.", now)


def _waits_after_refusal(plan: JobPlan, status: Json, now: float) -> bool:
    """Return whether it is too early to try again what the API server refused."""
    stalled = condition(status, "Stalled")
    if stalled.get("status") != "True" or stalled["reason"] == "InvalidSpec":
        return False
    due = seconds_of(stalled["lastUpdateTime"]) + RETRY_REFUSED
    if now < due:
        plan.again(due)
    return now < due


def _who_leaves_first(pod: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """First pods that are being deleted, then pods that do not run, then the highest indexes."""
    staying = not pod["metadata"].get("deletionTimestamp")
    return staying, staying and pod.get("status", {}).get("phase") == "Running", -index_of(pod)


def _running(pods: Iterable[Json]) -> int:
    return sum(
        pod.get("status", {}).get("phase") == "Running"
        and not pod["metadata"].get("deletionTimestamp")
        and ended(pod) is None
        for pod in pods
    )


def _report(
    plan: JobPlan, status: Json, job: ElasticJob, pods: list[Json], wanted: int, now: float
) -> None:
    """Say how many workers run; `wanted` of them are to, without those that are given up."""
    running = _running(pods)
    enough = running >= job.min_nodes
    message = f"{running} of {job.wanted} workers are running; at least {job.min_nodes} must."
    reason = "ElasticJobRunning" if enough else "TooFewWorkers"
    if enough and not holds(status, "Running"):
        plan.events.append(JobEvent(reason, message))
    if enough or condition(status, "Running"):
        set_condition(status, "Running", enough, reason, message, now)
    if running >= wanted and holds(status, "Restarting"):
        message = f"All {wanted} workers are running."
        set_condition(status, "Restarting", False, "ElasticJobRunning", message, now)


def _finish(
    plan: JobPlan, status: Json, kind: Condition, reason: str, message: str, now: float
) -> None:
    status["completionTime"] = stamp(now)
    for other in ("Running", "Restarting", "Stalled"):
        if holds(status, other):
            set_condition(status, other, False, reason, message, now)
    _say(plan, status, kind, True, reason, message, now, warning=kind == "Failed")


def _say(
    plan: JobPlan,
    status: Json,
    kind: Condition,
    value: bool,
    reason: str,
    message: str,
    now: float,
    *,
    warning: bool = False,
) -> None:
    """Set a condition, and tell if it is new."""
    if set_condition(status, kind, value, reason, message, now):
        plan.events.append(JobEvent(reason, message, warning=warning))


def _after_the_end(
    plan: JobPlan, status: Json, job: ElasticJob, pods: list[Json], now: float
) -> None:
    """Delete pods as `cleanPodPolicy` says, and the job when its time to live is over."""
    if _waits_after_refusal(plan, status, now):
        return
    end = seconds_of(job.status["completionTime"])
    in_time = condition(job.status, "Failed").get("reason") != "DeadlineExceeded"
    due = end + LEAVE_ALONE if in_time else end
    left = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    if job.clean_pods != "All":
        left = [pod for pod in left if ended(pod) is None]
    if left and job.clean_pods != "None":
        if now >= due:
            plan.delete = [(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in left]
        else:
            plan.again(due)
    if job.ttl is not None:
        plan.delete_job = now >= end + job.ttl
        if not plan.delete_job:
            plan.again(end + job.ttl)
    if not plan.delete and not plan.delete_job:
        _resolve(status, now)


def _count(status: Json, job: ElasticJob, pods: list[Json]) -> None:
    """Count the pods, and tell `kubectl scale` how to find them."""
    endings = [end for pod in pods if (end := ended(pod))]
    complete = sum(end.verdict == "complete" for end in endings)
    status["replicaStatuses"] = {
        "Worker": {
            "active": _running(pods),
            "succeeded": complete,
            "failed": len(endings) - complete,
        }
    }
    selector = worker_pods.labels(job).items()
    status["selector"] = ",".join(f"{name}={value}" for name, value in selector)
