"""The preemption watcher against local servers that speak each platform's protocol."""

import asyncio
import contextlib
import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from torchelastic.cluster import preemption
from torchelastic.cluster.preemption import (
    SHORTEST,
    Aws,
    Azure,
    Gcp,
    Kubernetes,
    Notice,
    NoticeFile,
    choose,
    watch,
)
from torchelastic.errors import ConfigError


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(preemption, "pause", lambda failures: 0.0)
    monkeypatch.setattr(preemption, "TIMEOUT", 0.3)
    monkeypatch.setattr(preemption, "AZURE_FIRST_TIMEOUT", 0.3)
    for source in (Aws, Azure, Gcp, Kubernetes, NoticeFile):
        monkeypatch.setattr(source, "interval", 0.0)


class Server:
    """Answers each `METHOD /path` with its page; a page is (status, body), or None for silence."""

    def __init__(self, pages):
        self.pages = pages
        self.asked = []
        self.silent = []

    async def serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request = head.partition(" HTTP/")[0]
            self.asked.append((request, head.lower()))
            page = self.pages.get(request, (404, ""))
            page = page.pop(0) if isinstance(page, list) and len(page) > 1 else page
            page = page[0] if isinstance(page, list) else page
            if page is None:
                self.silent.append(writer)
                return
            status, body = page
            data = body.encode()
            writer.write(
                b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data
            )
        writer.close()


@contextlib.asynccontextmanager
async def serving(pages):
    server = Server(pages)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield server, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for writer in server.silent:
            writer.close()


def watched(pages, make, *, until=lambda said: False):
    """Watch a server with these pages; return notices, sentences and the server."""

    async def story():
        async with serving(pages) as (server, url):
            task = asyncio.ensure_future(watch(make(url), notify=found.append, say=said.append))
            while not task.done() and not until(said):
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return server

    found, said = [], []
    server = asyncio.run(asyncio.wait_for(story(), 10))
    return found, said, server


def in_a_minute():
    return (datetime.now(timezone.utc) + timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")


TOKEN = "PUT /latest/api/token"
META = "GET /latest/meta-data/"
REBALANCE = META + "events/recommendations/rebalance"
SPOT = META + "spot/instance-action"
LIFE = META + "instance-life-cycle"


def test_aws_spot_interruption():
    action = json.dumps({"action": "terminate", "time": in_a_minute()})
    pages = {TOKEN: (200, "t0"), LIFE: (200, "spot"), SPOT: [(404, ""), (404, ""), (200, action)]}
    found, said, server = watched(pages, Aws)
    assert [notice.reason.partition(" at ")[0] for notice in found] == [
        "AWS will terminate this spot instance"
    ]
    assert 50 < found[0].seconds <= 60
    assert not said
    heads = dict(server.asked)
    assert "x-aws-ec2-metadata-token-ttl-seconds: 21600" in heads[TOKEN]
    assert "x-aws-ec2-metadata-token: t0" in heads[SPOT]


def test_an_expired_aws_token_is_renewed():
    action = json.dumps({"action": "stop", "time": in_a_minute()})
    pages = {
        TOKEN: [(200, "t0"), (200, "t1")],
        LIFE: (200, "spot"),
        SPOT: [(401, ""), (200, action)],
    }
    found, _, server = watched(pages, Aws)
    assert len(found) == 1
    assert "x-aws-ec2-metadata-token: t1" in server.asked[-1][1]


def test_an_aws_rebalance_recommendation_is_reported_once():
    action = json.dumps({"action": "terminate", "time": in_a_minute()})
    pages = {
        TOKEN: (200, "t"),
        LIFE: (200, "spot"),
        REBALANCE: (200, '{"noticeTime": "2026-11-17T11:00:00Z"}'),
        SPOT: [(404, ""), (404, ""), (404, ""), (200, action)],
    }
    found, said, _ = watched(pages, Aws)
    assert len(found) == 1
    assert said == [
        "AWS recommended to replace this spot instance at 2026-11-17T11:00:00Z. This node stays "
        "until it is told to go."
    ]


def test_an_on_demand_instance_is_not_watched():
    found, said, _ = watched({TOKEN: (200, "t"), LIFE: (200, "on-demand")}, Aws)
    assert not found
    assert said == ["No preemption notices from AWS: this instance is not a spot instance."]


GCE = "GET /computeMetadata/v1/instance/"


def test_gcp_preemption():
    pages = {
        GCE + "preempted": [(200, "FALSE"), (200, "FALSE"), (200, "TRUE")],
        GCE + "maintenance-event": (200, "NONE"),
    }
    found, _, server = watched(pages, Gcp)
    assert [(notice.reason, notice.seconds) for notice in found] == [
        ("Google Cloud preempts this instance", 30)
    ]
    assert "metadata-flavor: google" in server.asked[0][1]


def test_azure_preemption_is_not_acknowledged():
    event = {"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": ""}
    pages = {
        "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text": (200, "vm-1"),
        "GET /metadata/scheduledevents?api-version=2020-07-01": [
            (200, '{"Events": []}'),
            (200, json.dumps({"Events": [event]})),
        ],
    }
    found, _, server = watched(pages, Azure)
    assert [notice.reason for notice in found] == ["Azure: Preempt of vm-1"]
    assert {request.partition(" ")[0] for request, _ in server.asked} == {"GET"}


POD = "GET /api/v1/namespaces/team/pods/job-0"
QUIET = {"spec": {"nodeName": "n1", "terminationGracePeriodSeconds": 45}}


@pytest.fixture
def pod(tmp_path):
    (tmp_path / "namespace").write_text("team")
    (tmp_path / "token").write_text("abc")
    return lambda url: Kubernetes(url, "job-0", tmp_path)


def test_a_disrupted_pod(pod):
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    ending = {**QUIET, "status": {"conditions": [condition]}}
    pages = {
        POD: [(200, json.dumps(QUIET)), (200, json.dumps(ending))],
        "GET /api/v1/nodes/n1": (403, ""),
    }
    found, said, server = watched(pages, pod)
    assert [(notice.reason, notice.seconds) for notice in found] == [
        ("Kubernetes disrupts this pod (PreemptionByScheduler)", 45)
    ]
    assert not said
    assert "authorization: bearer abc" in server.asked[0][1]


def test_a_tainted_node(pod):
    taints = {"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]}}
    pages = {POD: (200, json.dumps(QUIET)), "GET /api/v1/nodes/n1": (200, json.dumps(taints))}
    found, _, _ = watched(pages, pod)
    assert [notice.seconds for notice in found] == [45]


def test_a_pod_that_may_not_read_itself(pod):
    found, said, _ = watched({POD: (403, "")}, pod)
    assert not found
    assert said == [
        "No preemption notices from Kubernetes: the service account may not get pod job-0 in "
        "namespace team: allow it the verb get on pods, or rely on SIGTERM."
    ]


@pytest.mark.parametrize("page", [(500, ""), (200, "<html>"), None], ids=["500", "wrong", "slow"])
def test_a_source_that_fails_is_asked_again_and_reported_once(page):
    pages = {
        GCE + "preempted": [page, page, page, page, (200, "TRUE")],
    }
    found, said, _ = watched(pages, Gcp)
    assert len(found) == 1
    assert len(said) == 1
    assert said[0].startswith("Cannot read preemption notices from Google Cloud: ")


@pytest.mark.parametrize("answered", [True, False])
def test_a_source_that_fails_for_long_is_still_asked(answered, monkeypatch):
    """At the start of a machine, its metadata service may take longer than the agent."""
    monkeypatch.setattr(preemption, "pause", lambda failures: 3600.0)
    monkeypatch.setattr(preemption, "LONGEST_PAUSE", 0.0 if answered else 3600.0)
    monkeypatch.setattr(preemption, "UNKNOWN_PAUSE", 0.0)
    first = [(200, "FALSE")] if answered else []
    pages = {
        GCE + "preempted": [*first, *[(500, "")] * 10, (200, "TRUE")],
        GCE + "maintenance-event": (200, "NONE"),
    }
    found, said, _ = watched(pages, Gcp)
    assert (len(found), len(said)) == (1, 1)


def test_source_that_refuses_connections_is_asked_again():
    _, said, _ = watched({}, lambda url: Gcp("http://127.0.0.1:1"), until=len)
    assert said[0].startswith("Cannot read preemption notices from Google Cloud: ")


def test_a_pod_whose_host_name_is_not_its_own(pod):
    _, said, _ = watched({}, pod)
    assert "there is no pod job-0 in namespace team: set POD_NAME" in said[0]


def test_a_notice_file(tmp_path):
    path = tmp_path / "leave"
    path.write_text("30 maintenance")
    found, _, _ = watched({}, lambda url: NoticeFile(str(path)))
    assert [(notice.reason, notice.seconds) for notice in found] == [("maintenance", 30)]


# --- which sources -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("sys_vendor", "Amazon EC2\n", Aws),
        ("product_name", "Google Compute Engine\n", Gcp),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n", Azure),
    ],
)
def test_auto_reads_the_firmware(tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    assert [type(source) for source in choose("auto", {}, tmp_path)] == [kind]


def test_auto_watches_the_pod(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "SERVICE_ACCOUNT", tmp_path)
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "HOSTNAME": "job-0"}
    assert choose("auto", environ, tmp_path) == []
    (tmp_path / "token").write_text("t")
    (found,) = choose("auto", environ, tmp_path)
    assert isinstance(found, Kubernetes)


def test_named_sources(tmp_path):
    kinds = {
        "none": [],
        "aws": [Aws],
        "gcp=http://127.0.0.1:5/": [Gcp],
        "azure": [Azure],
        "file=/run/leave": [NoticeFile],
        "kubernetes=http://127.0.0.1:5": [Kubernetes],
    }
    got = {text: [type(one) for one in choose(text, {}, Path(tmp_path))] for text in kinds}
    assert got == kinds


@pytest.mark.parametrize("text", ["spot", "auto=x", "file", "aws=169.254.169.254", ""])
def test_a_wrong_flag_is_refused(text):
    with pytest.raises(ConfigError, match=r"write"):
        choose(text, {})


def test_kubernetes_outside_a_pod_is_refused():
    with pytest.raises(ConfigError, match="run in a pod"):
        choose("kubernetes", {})


# --- answers -------------------------------------------------------------------------------------

#: As in the documentation of the platforms: AWS EC2 user guide (spot instance interruption notices,
#: rebalance recommendations), Google Compute Engine (preemptible and spot VMs, maintenance events),
#: Azure scheduled events 2020-07-01, and Kubernetes 1.31 (pod disruption conditions).
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
    notice = preemption.aws_spot_action(body, NOW)
    assert notice == Notice(f"AWS will terminate this spot instance at {time}", seconds)


@pytest.mark.parametrize(
    ("body", "leaves"),
    [
        (b"NONE", False),
        (b"MIGRATE_ON_HOST_MAINTENANCE", False),
        (b"TERMINATE_ON_HOST_MAINTENANCE", True),
    ],
)
def test_gcp_maintenance(body, leaves):
    assert (preemption.gcp_maintenance(body) is not None) == leaves


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
    assert preemption.azure_events(body, "vm-1", NOW) == notice


def pod_answer(*, conditions=(), **metadata):
    spec = {"nodeName": "n1", "terminationGracePeriodSeconds": 60}
    return json.dumps(
        {"metadata": metadata, "spec": spec, "status": {"conditions": list(conditions)}}
    ).encode()


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


@pytest.mark.parametrize(
    ("body", "notice"),
    [
        (pod_answer(), None),
        (pod_answer(conditions=[{"type": "Ready", "status": "True"}]), None),
        (pod_answer(conditions=[{**DISRUPTED, "status": "False"}]), None),
        (
            pod_answer(conditions=[DISRUPTED]),
            Notice("Kubernetes disrupts this pod (EvictionByEvictionAPI)", 60),
        ),
        (
            pod_answer(deletionTimestamp="2026-11-17T12:00:00Z", deletionGracePeriodSeconds=30),
            Notice("Kubernetes deletes this pod", 30),
        ),
    ],
)
def test_a_pod_that_ends(body, notice):
    assert preemption.kubernetes_pod(body) == notice


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
def test_kubernetes_taints_that_announce_the_end(key, leaves):
    body = json.dumps({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}).encode()
    assert (preemption.kubernetes_node(body, 30) is not None) == leaves


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
def test_notice_file_is_a_notice_whatever_its_text(text, notice):
    assert preemption.notice_file(text, "/run/leave") == notice


@pytest.mark.parametrize(
    "read",
    [
        lambda: preemption.aws_spot_action(b"<html>", NOW),
        lambda: preemption.aws_spot_action(b"[]", NOW),
        lambda: preemption.aws_spot_action(b'{"action": "stop"}', NOW),
        lambda: preemption.aws_spot_action(b'{"action": "stop", "time": "soon"}', NOW),
        lambda: preemption.gcp_preempted(b"<html>"),
        lambda: preemption.azure_events(b'{"Events": 3}', "vm-1", NOW),
        lambda: preemption.azure_events(b'{"Events": [3]}', "vm-1", NOW),
        lambda: preemption.azure_events(azure("Preempt", not_before="soon"), "vm-1", NOW),
        lambda: preemption.azure_events(b"{}", "vm-1", NOW),
        lambda: preemption.azure_events(azure("Preempt").replace(b'["vm-1"]', b"3"), "vm-1", NOW),
        lambda: preemption.azure_events(azure("Preempt", not_before=3), "vm-1", NOW),
        lambda: preemption.kubernetes_pod(b'{"spec": 3}'),
        lambda: preemption.kubernetes_pod(b'{"status": {"conditions": [3]}}'),
        lambda: preemption.kubernetes_node(b'{"spec": {"taints": ["gone"]}}', None),
    ],
)
def test_a_wrong_answer_is_a_value_error(read):
    with pytest.raises(ValueError, match=r".+"):
        read()
