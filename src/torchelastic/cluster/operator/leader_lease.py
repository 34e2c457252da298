"""Decide which of several controllers acts, by a Lease of coordination.k8s.io. Pure.

A candidate takes a Lease that nobody has renewed for its duration, as seen on its own clock: no
machine's wall clock is compared with another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

#: Seconds without renewal after which another may lead; the leader renews three times as often.
DURATION = 15.0
RENEW_EVERY = DURATION / 3
#: The leader stops to act this long after its last renewal: before another one begins.
ACT_FOR = DURATION * 2 / 3


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A Lease as a candidate saw it: the holder and its latest renewal, and when it saw that."""

    version: str
    since: float


def seen(lease: Mapping[str, Any], before: Seen | None, now: float) -> Seen:
    """Return when the Lease was last renewed; `now` is monotonic."""
    version = lease["metadata"]["resourceVersion"]
    return (
        before
        if before is not None and before.version == version
        else Seen(version=version, since=now)
    )


def may_take(lease: Mapping[str, Any], me: str, last: Seen, now: float) -> bool:
    """Return whether this candidate may write itself into the Lease, or renew it."""
    holder = lease["spec"].get("holderIdentity")
    duration = float(lease["spec"].get("leaseDurationSeconds") or DURATION)
    return not holder or holder == me or now >= last.since + duration


def taken(lease: Mapping[str, Any], me: str, wall: float) -> dict[str, Any]:
    """Return the Lease with this candidate as its holder, renewed."""
    old = lease.get("spec", {})
    text = datetime.fromtimestamp(wall, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    is_new = old.get("holderIdentity") != me
    spec = {
        **old,
        "holderIdentity": me,
        "leaseDurationSeconds": round(DURATION),
        "renewTime": text,
        "acquireTime": text if is_new else old.get("acquireTime", text),
        "leaseTransitions": old.get("leaseTransitions", 0) + (is_new and bool(old)),
    }
    return {**lease, "spec": spec}


def given_up(lease: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Lease without a holder: another may take it at once."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": ""}}
