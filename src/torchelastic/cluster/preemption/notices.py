"""Read preemption notices of AWS, GCP, Azure and Kubernetes, and notice files. Pure.

A function here gets the answer of a platform and returns a `Notice`, or None if nothing is planned.
It raises `ValueError` if the answer is not what the platform documents.

The time of a notice is computed with this machine's wall clock, which may be wrong. It is therefore
never longer than the platform promises, and never shorter than `SHORTEST`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

#: The shortest notice assumed, whatever a platform's clock says; the agent itself needs 2 s of it.
SHORTEST = 5.0
#: Seconds that each platform promises between a notice and the end.
AWS_NOTICE = 120.0
GCP_NOTICE, GCP_MAINTENANCE_NOTICE = 30.0, 60.0
AZURE_NOTICES = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0}

#: Taints that announce the end of a node.
_TAINTS = frozenset(
    {
        "node.kubernetes.io/out-of-service",
        "node.cloudprovider.kubernetes.io/shutdown",
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "cloud.google.com/impending-node-termination",
    }
)


@dataclass(frozen=True)
class Notice:
    """This machine or pod will be taken away, or may be."""

    reason: str
    #: Seconds until then; None if unknown.
    seconds: float | None = None
    #: False: only a warning; the node stays.
    leave: bool = True


def aws_spot_action(body: bytes, now: datetime) -> Notice | None:
    """`/latest/meta-data/spot/instance-action`."""
    answer = _object(body)
    action, time = _text(answer, "action"), _text(answer, "time")
    seconds = _until(_iso(time), now, AWS_NOTICE)
    return Notice(f"AWS will {action} this spot instance at {time}", seconds)


def aws_rebalance(body: bytes) -> Notice | None:
    """`/latest/meta-data/events/recommendations/rebalance`: a risk, without a time."""
    time = _text(_object(body), "noticeTime")
    return Notice(f"AWS recommended to replace this spot instance at {time}", leave=False)


def gcp_preempted(body: bytes) -> Notice | None:
    """`/computeMetadata/v1/instance/preempted`."""
    match body.strip():
        case b"TRUE":
            return Notice("Google Cloud preempts this instance", GCP_NOTICE)
        case b"FALSE":
            return None
    raise ValueError(f"expected TRUE or FALSE, not {_start(body)}")


def gcp_maintenance(body: bytes) -> Notice | None:
    """`/computeMetadata/v1/instance/maintenance-event`. A migration is not an end."""
    if body.strip() == b"TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("Google Cloud stops this instance for maintenance", GCP_MAINTENANCE_NOTICE)
    return None


def azure_events(body: bytes, machine: str, now: datetime) -> Notice | None:
    """`/metadata/scheduledevents`: the first event that ends this machine."""
    answer = _object(body)
    if "Events" not in answer:
        raise ValueError("Events is missing")
    for event in _objects(answer, "Events"):
        kind, start = _text(event, "EventType"), event.get("NotBefore") or ""
        if kind not in AZURE_NOTICES or machine not in _list(event, "Resources"):
            continue
        if not isinstance(start, str):
            raise ValueError("NotBefore is not a time")
        longest = AZURE_NOTICES[kind]
        seconds = _until(_rfc1123(start), now, longest) if start else SHORTEST
        return Notice(f"Azure: {kind} of {machine}", seconds)
    return None


def kubernetes_pod(body: bytes) -> Notice | None:
    """The pod as the API server has it: its deletion, or the condition `DisruptionTarget`."""
    pod = _object(body)
    metadata, usual = (
        _part(pod, "metadata"),
        _part(pod, "spec").get("terminationGracePeriodSeconds"),
    )
    # An eviction may set another one.
    grace = _seconds(metadata.get("deletionGracePeriodSeconds", usual))
    for condition in _objects(_part(pod, "status"), "conditions"):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = condition.get("reason") or "DisruptionTarget"
            return Notice(f"Kubernetes disrupts this pod ({reason})", grace)
    if metadata.get("deletionTimestamp"):
        return Notice("Kubernetes deletes this pod", grace)
    return None


def kubernetes_node(body: bytes, grace: float | None) -> Notice | None:
    """The node of the pod: a taint that announces its end."""
    for taint in _objects(_part(_object(body), "spec"), "taints"):
        if taint.get("key") in _TAINTS:
            return Notice(f"Kubernetes removes this node (taint {taint['key']})", grace)
    return None


def pod_node(body: bytes) -> tuple[str, float | None]:
    """The name of a pod's node, empty before it is scheduled, and the pod's grace period."""
    spec = _part(_object(body), "spec")
    return str(spec.get("nodeName", "")), _seconds(spec.get("terminationGracePeriodSeconds"))


def notice_file(text: str, path: str) -> Notice:
    """A file whose existence is the notice: `[SECONDS] [REASON]`, or empty."""
    first, _, rest = text.strip().partition(" ")
    try:
        seconds, reason = float(first), rest.strip()
    except ValueError:
        seconds, reason = float("nan"), text.strip()
    if not 0 <= seconds < float("inf"):  # whatever it says, its existence is the notice
        return Notice(reason or f"{path} exists")
    return Notice(reason or f"{path} exists", max(seconds, SHORTEST))


def _until(time: datetime, now: datetime, longest: float) -> float:
    return min(max((time - now).total_seconds(), SHORTEST), longest)


def _iso(text: str) -> datetime:
    time = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def _rfc1123(text: str) -> datetime:
    time = parsedate_to_datetime(text)
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def _object(body: bytes) -> Mapping[str, Any]:
    answer = json.loads(body)
    if not isinstance(answer, dict):
        raise ValueError(f"expected an object, not {_start(body)}")
    return answer


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name) or {}
    if not isinstance(part, dict):
        raise ValueError(f"{name} is not an object")
    return part


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    part = data.get(name) or []
    if not isinstance(part, list):
        raise ValueError(f"{name} is not a list")
    return part


def _objects(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = _list(data, name)
    if not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{name} is not a list of objects")
    return found


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is missing")
    return value


def _seconds(value: Any) -> float | None:
    return max(float(value), SHORTEST) if isinstance(value, int) else None


def _start(body: bytes) -> str:
    return repr(body[:40].decode("ascii", "replace"))
