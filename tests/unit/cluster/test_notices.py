"""Preemption notices: every answer that the platforms document, and some that they do not.

The answers follow the platforms' documentation: AWS EC2 user guide (spot instance interruption
notices, rebalance recommendations), Google Compute Engine (preemptible and spot VMs, maintenance
events), Azure scheduled events 2020-07-01, and Kubernetes 1.31 (pod disruption conditions).
"""

import json
from datetime import datetime, timezone

import pytest

from torchelastic.cluster.preemption import notices
from torchelastic.cluster.preemption.notices import SHORTEST, Notice

NOW = datetime(2026, 11, 17, 12, 0, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("2026-11-17T12:01:30Z", 90),
        ("2026-11-17T12:02:00Z", 120),
        ("2026-11-17T13:00:00Z", 120),  # a wrong clock: AWS never promises more
        ("2026-11-17T11:00:00Z", SHORTEST),  # a wrong clock must not cut the step short
        ("2026-11-17T12:01:30", 90),
    ],
)
def test_aws_names_the_action_and_the_time(time, seconds):
    body = json.dumps({"action": "terminate", "time": time}).encode()
    notice = notices.aws_spot_action(body, NOW)
    assert notice == Notice(f"AWS will terminate this spot instance at {time}", seconds)


def test_aws_rebalance_is_a_warning_only():
    notice = notices.aws_rebalance(b'{"noticeTime": "2026-11-17T11:59:00Z"}')
    assert notice is not None
    assert not notice.leave


@pytest.mark.parametrize(
    ("body", "notice"),
    [
        (b"FALSE", None),
        (b"TRUE\n", Notice("Google Cloud preempts this instance", 30)),
    ],
)
def test_gcp_preempted(body, notice):
    assert notices.gcp_preempted(body) == notice


@pytest.mark.parametrize(
    ("body", "leaves"),
    [
        (b"NONE", False),
        (b"MIGRATE_ON_HOST_MAINTENANCE", False),
        (b"TERMINATE_ON_HOST_MAINTENANCE", True),
    ],
)
def test_gcp_maintenance(body, leaves):
    assert (notices.gcp_maintenance(body) is not None) == leaves


def azure(kind, *, machine="vm-1", not_before="Tue, 17 Nov 2026 12:00:20 GMT"):
    event = {"EventId": "1", "EventType": kind, "Resources": [machine], "NotBefore": not_before}
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]}).encode()


@pytest.mark.parametrize(
    ("body", "notice"),
    [
        (b'{"DocumentIncarnation": 0, "Events": []}', None),
        (azure("Preempt"), Notice("Azure: Preempt of vm-1", 20)),
        (azure("Preempt", not_before=""), Notice("Azure: Preempt of vm-1", SHORTEST)),
        (azure("Terminate"), Notice("Azure: Terminate of vm-1", 20)),
        (azure("Redeploy"), Notice("Azure: Redeploy of vm-1", 20)),
        (azure("Reboot"), Notice("Azure: Reboot of vm-1", 20)),
        (azure("Freeze"), None),  # a pause of seconds
        (azure("Preempt", machine="vm-2"), None),
    ],
)
def test_azure_events_of_this_machine(body, notice):
    assert notices.azure_events(body, "vm-1", NOW) == notice


def pod(*, conditions=(), **metadata):
    spec = {"nodeName": "n1", "terminationGracePeriodSeconds": 60}
    return json.dumps(
        {"metadata": metadata, "spec": spec, "status": {"conditions": list(conditions)}}
    ).encode()


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


@pytest.mark.parametrize(
    ("body", "notice"),
    [
        (pod(), None),
        (pod(conditions=[{"type": "Ready", "status": "True"}]), None),
        (pod(conditions=[{**DISRUPTED, "status": "False"}]), None),
        (
            pod(conditions=[DISRUPTED]),
            Notice("Kubernetes disrupts this pod (EvictionByEvictionAPI)", 60),
        ),
        (
            pod(deletionTimestamp="2026-11-17T12:00:00Z", deletionGracePeriodSeconds=30),
            Notice("Kubernetes deletes this pod", 30),
        ),
    ],
)
def test_a_pod_that_ends(body, notice):
    assert notices.kubernetes_pod(body) == notice


@pytest.mark.parametrize(
    ("key", "leaves"),
    [
        ("node.kubernetes.io/not-ready", False),
        ("node.kubernetes.io/unschedulable", False),  # cordoned: running pods stay
        ("ToBeDeletedByClusterAutoscaler", True),
        # The autoscaler may change its mind for minutes, and a new pod may come to the same node.
        ("DeletionCandidateOfClusterAutoscaler", False),
        ("node.kubernetes.io/out-of-service", True),
    ],
)
def test_a_tainted_node(key, leaves):
    body = json.dumps({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}).encode()
    assert (notices.kubernetes_node(body, 30) is not None) == leaves


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("", Notice("/run/leave exists")),
        ("90\n", Notice("/run/leave exists", 90)),
        ("90 rack 7 is moved\n", Notice("rack 7 is moved", 90)),
        ("rack 7 is moved", Notice("rack 7 is moved")),
        ("0", Notice("/run/leave exists", SHORTEST)),
        ("-3", Notice("/run/leave exists")),
        ("inf maintenance", Notice("maintenance")),
    ],
)
def test_a_notice_file(text, notice):
    assert notices.notice_file(text, "/run/leave") == notice


@pytest.mark.parametrize(
    "read",
    [
        lambda: notices.aws_spot_action(b"<html>", NOW),
        lambda: notices.aws_spot_action(b"[]", NOW),
        lambda: notices.aws_spot_action(b'{"action": "stop"}', NOW),
        lambda: notices.aws_spot_action(b'{"action": "stop", "time": "soon"}', NOW),
        lambda: notices.gcp_preempted(b"<html>"),
        lambda: notices.azure_events(b'{"Events": 3}', "vm-1", NOW),
        lambda: notices.azure_events(b'{"Events": [3]}', "vm-1", NOW),
        lambda: notices.azure_events(azure("Preempt", not_before="soon"), "vm-1", NOW),
        lambda: notices.azure_events(b"{}", "vm-1", NOW),
        lambda: notices.azure_events(azure("Preempt").replace(b'["vm-1"]', b"3"), "vm-1", NOW),
        lambda: notices.azure_events(azure("Preempt", not_before=3), "vm-1", NOW),
        lambda: notices.kubernetes_pod(b'{"spec": 3}'),
        lambda: notices.kubernetes_pod(b'{"status": {"conditions": [3]}}'),
        lambda: notices.kubernetes_node(b'{"spec": {"taints": ["gone"]}}', None),
    ],
)
def test_a_wrong_answer_is_a_value_error(read):
    with pytest.raises(ValueError, match=r".+"):
        read()
