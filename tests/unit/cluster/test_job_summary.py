"""The state of a job on Kubernetes, from its objects, by table."""

import doctest

import pytest

from torchelastic.cluster.kubernetes import job_summary
from torchelastic.cluster.kubernetes.job_summary import JobHandle, is_over, nnodes_of
from torchelastic.cluster.submit.job_kinds import JOB_KINDS
from torchelastic.errors import ConfigError

#: The end of the output of a node that failed.
REPORT = "  exitcode  : 1 (pid: 7)\n  error     : KeyError: 'lr'\n  traceback : Traceback\n"


def summary(*objects):
    return job_summary.summary(JOB_KINDS["job"], *objects)


def job(*conditions, nodes=3, **status):
    return {
        "kind": "Job",
        "metadata": {
            "name": "train",
            "namespace": "team",
            "annotations": {"torchelastic/nnodes": "2:4"},
        },
        "spec": {"parallelism": nodes},
        "status": {"conditions": list(conditions), **status},
    }


def is_true(kind, **more):
    return {"type": kind, "status": "True", **more}


def pod(index, phase="Running", *conditions, node="n1", deleted=False, state=None):
    metadata = {
        "name": f"train-{index}-abcde",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
    }
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    statuses = [{"name": "torchelastic", "state": state}] if state else []
    status = {"phase": phase, "conditions": list(conditions), "containerStatuses": statuses}
    spec = {"containers": [{"name": "sidecar"}, {"name": "torchelastic", "readinessProbe": {}}]}
    spec |= {"nodeName": node} if node else {}
    return {"metadata": metadata, "spec": spec, "status": status}


def test_doctests_hold():
    assert doctest.testmod(job_summary).failed == 0


@pytest.mark.parametrize(
    ("conditions", "state", "reason", "over"),
    [
        ((), "running", "", False),
        (({"type": "Failed", "status": "False"},), "running", "", False),
        ((is_true("SuccessCriteriaMet"),), "complete", "", False),
        ((is_true("SuccessCriteriaMet"), is_true("Complete")), "complete", "", True),
        ((is_true("FailureTarget", message="exit code 64"),), "failed", "exit code 64", False),
        ((is_true("Failed", reason="MaxFailedIndexesExceeded"),), "failed", "MaxFailed", True),
        ((is_true("Suspended", message="Job suspended"),), "suspended", "Job suspended", False),
        # A JobSet, a PyTorchJob and an ElasticJob.
        ((is_true("StartupPolicyCompleted"), is_true("Completed")), "complete", "", True),
        ((is_true("Created"), is_true("Succeeded", message="x")), "complete", "", True),
        ((is_true("Running"), {"type": "Suspended", "status": "False"}), "running", "", False),
    ],
)
def test_the_state_of_a_job(conditions, state, reason, over):
    found = summary(job(*conditions), [pod(0)])
    assert found.state == state
    assert found.reason.startswith(reason)
    assert is_over(job(*conditions)) is over


@pytest.mark.parametrize(
    ("phase", "state", "over"),
    [
        ("Running", "running", False),
        ("Aborted", "suspended", False),
        ("Completed", "complete", True),
        ("Terminated", "failed", True),
    ],
)
def test_the_state_of_a_job_of_volcano(phase, state, over):
    found = {**job(), "status": {"state": {"phase": phase}, "conditions": [{"status": "Running"}]}}
    assert (summary(found, [pod(0)]).state, is_over(found)) == (state, over)


UNSCHEDULED = ("Pending", {"type": "PodScheduled", "status": "False", "message": "no GPU"})


@pytest.mark.parametrize(
    ("pods", "state", "reason"),
    [
        ([], "pending", "0 of 3 pods are running"),
        (
            [pod(index, *UNSCHEDULED, node="") for index in range(3)],
            "pending",
            "0 of 3 pods are running, 3 not scheduled",
        ),
        ([pod(0, "Pending"), pod(1, "Failed")], "pending", "0 of 3 pods are running"),
        ([pod(0, *UNSCHEDULED, node=""), pod(1)], "running", ""),
        ([pod(0, "Succeeded")], "running", ""),
    ],
)
def test_job_summary_without_a_running_pod_is_pending(pods, state, reason):
    found = summary(job(), pods)
    assert (found.state, found.reason) == (state, reason)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (pod(0), "Running"),
        (pod(0, deleted=True), "Terminating"),
        (pod(0, "Failed", deleted=True), "Failed"),
        (pod(0, "Pending", node=""), "Pending"),
        (
            pod(0, "Pending", {"type": "PodScheduled", "status": "False", "message": "no GPU"}),
            "Pending: no GPU",
        ),
        (
            pod(0, "Pending", state={"waiting": {"reason": "ImagePullBackOff"}}),
            "Pending: ImagePullBackOff",
        ),
    ],
)
def test_the_state_of_a_pod(given, state):
    (found,) = summary(job(), [given]).pods
    assert found.state == state


def test_what_people_see():
    pods = [
        pod(1, "Failed", is_true("DisruptionTarget", reason="EvictionByEvictionAPI"),
            state={"terminated": {"exitCode": 143, "message": "left the job"}}),
        pod(0, "Running", is_true("Ready")),
        pod(2, "Failed", state={"terminated": {"exitCode": 64, "message": REPORT}}),
    ]  # fmt: skip
    warnings = [
        {"lastTimestamp": "2026-01-01T00:00:01Z", "message": "exceeded quota"},
        {"lastTimestamp": "2026-01-01T00:00:00Z", "message": "older"},
    ]
    lines = summary(job(nodes=4, failedIndexes="2"), pods, warnings).lines()
    assert lines == [
        "kubernetes:team/train  running",
        "  1 of 4 nodes are in the world (--nnodes 2:4)",
        "  given up after repeated failures: index 2",
        "  warning: exceeded quota",
        "    train-0-abcde  n1  in the world",
        "    train-1-abcde  n1  Failed, exit code 143, EvictionByEvictionAPI",
        "    train-2-abcde  n1  Failed, exit code 64: KeyError: 'lr'",
    ]


def test_a_pod_without_a_probe_is_not_said_to_be_in_the_world():
    plain = pod(0, "Running", is_true("Ready"))
    plain["spec"]["containers"] = [{"name": "pytorch"}]
    _, counted, shown = summary(job(), [plain]).lines()
    assert counted == "  1 of 3 nodes are running (--nnodes 2:4)"
    assert shown == "    train-0-abcde  n1  Running"


def test_a_warning_of_the_past_is_not_shown():
    pods = [pod(index) for index in range(3)]
    assert summary(job(), pods, [{"message": "exceeded quota"}]).warning == ""


@pytest.mark.parametrize(
    ("text", "handle"),
    [
        ("kubernetes:train", JobHandle("train")),
        ("kubernetes:team/train", JobHandle("train", "team")),
        ("train", None),
        (None, None),
    ],
)
def test_how_a_job_is_named(text, handle):
    assert JobHandle.parse(text) == handle


@pytest.mark.parametrize("text", ["kubernetes:", "kubernetes:a/b/c", "kubernetes:A"])
def test_a_name_that_none_has(text):
    with pytest.raises(ConfigError, match="is not a job: write kubernetes:NAME or"):
        JobHandle.parse(text)


def test_a_job_of_others_is_refused():
    other = job()
    other["metadata"]["annotations"] = {}
    with pytest.raises(ConfigError, match="Job train was not made by `torchelastic submit kube"):
        nnodes_of(other)
    assert nnodes_of({**other, "status": {"nnodes": "1:2"}}) == (1, 2)
