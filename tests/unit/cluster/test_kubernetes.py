"""Jobs on a Kubernetes cluster: their state, requests about them, and errors."""

import doctest
from types import SimpleNamespace

import pytest

from torchelastic.cluster.kubernetes import cluster_api, job_summary
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.cluster.kubernetes.job_summary import JobHandle, is_over, nnodes_of
from torchelastic.cluster.submit.job_kinds import JOB_KINDS
from torchelastic.cluster.submit.kubernetes_manifests import KubernetesJob
from torchelastic.errors import ConfigError, KubernetesError

# --- state ----------------------------------------------------------------------------------------


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


def test_summary_is_printed_with_its_pods():
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


# --- requests -------------------------------------------------------------------------------------


TRAIN = JobHandle("train", "team")
JOB = "/apis/batch/v1/namespaces/team/jobs/train"
SECRET = "/api/v1/namespaces/team/secrets/train"


def control(major, minor):
    """Of a cluster that says only which release it is: the real one of the tests is new enough."""
    version = {"major": major, "minor": minor}
    return JobControl(SimpleNamespace(get=lambda path: version, server="https://c"))


@pytest.mark.parametrize("release", [("1", "33"), ("1", "33+"), ("1", "38+"), ("2", "0")])
def test_new_enough(release):
    control(*release).check_release()


@pytest.mark.parametrize("release", [("1", "32"), ("1", "32+"), ("1", "9"), ("", "")])
def test_too_old(release):
    with pytest.raises(ConfigError, match=r"Kubernetes 1\.33 or later is needed, and https://c"):
        control(*release).check_release()


@pytest.mark.parametrize("text", [None, "", "train", "slurm:1"])
def test_jobs_of_other_platforms_are_refused(text):
    with pytest.raises(ConfigError, match="is not a job on Kubernetes: write kubernetes:NAME"):
        control("1", "33").find(text)


class Refusing:
    """Objects by their paths, and requests that are refused: by method and end of the path."""

    namespace = "team"

    def __init__(self, *refused, status=403):
        self.objects, self.refused, self.status = {}, refused, status

    def _check(self, method, path):
        if any(method == verb and path.endswith(end) for verb, end in self.refused):
            raise KubernetesError(f"{method} is refused.", self.status)
        if method not in ("create", "patch") and path not in self.objects:
            raise KubernetesError("not found", 404)

    def create(self, path, body, **query):
        self._check("create", path)
        stored = {**body, "metadata": {**body["metadata"], "uid": "u", "namespace": "team"}}
        self.objects[f"{path}/{body['metadata']['name']}"] = stored
        return stored

    def patch(self, path, body, *kind):
        self._check("patch", path)
        return body

    def get(self, path, **query):
        if path.endswith(("/pods", "/events")):
            return {"items": self.objects.get(path, [])}
        self._check("get", path)
        return self.objects[path]

    def delete(self, path, **options):
        self._check("delete", path)
        del self.objects[path]

    def lines(self, path, timeout, **query):
        self._check("lines", path)
        return iter(self.objects[path])


def submitted(*refused, kind="job", **more):
    api = Refusing(*refused, **more)
    job = KubernetesJob(
        name="train", image="i", min_nodes=2, max_nodes=4, arguments=["--"], secret="s"
    )
    control = JobControl(api)
    assert control.submit(JOB_KINDS[kind].manifests(job)) == TRAIN
    return api, control


@pytest.mark.parametrize("refused", [("create", "/jobs"), ("patch", "/secrets/train")])
def test_a_job_that_is_refused_leaves_nothing(refused):
    api = Refusing(refused)
    job = KubernetesJob(
        name="train", image="i", min_nodes=2, max_nodes=4, arguments=["--"], secret="s"
    )
    with pytest.raises(KubernetesError, match=f"^{refused[0]} is refused.$"):
        JobControl(api).submit(JOB_KINDS["job"].manifests(job))
    assert api.objects == {}
    api.refused = (refused, ("delete", "/secrets/train"))
    left = f"^{refused[0]} is refused. What was created before cannot be removed: {SECRET}.$"
    with pytest.raises(KubernetesError, match=left):
        JobControl(api).submit(JOB_KINDS["job"].manifests(job))


def test_a_job_that_is_interrupted_leaves_nothing():
    class Interrupted(Refusing):
        def create(self, path, body, **query):
            if path.endswith("/jobs"):
                raise KeyboardInterrupt
            return super().create(path, body, **query)

    api = Interrupted()
    job = KubernetesJob(
        name="train", image="i", min_nodes=2, max_nodes=4, arguments=["--"], secret="s"
    )
    with pytest.raises(KeyboardInterrupt):
        JobControl(api).submit(JOB_KINDS["job"].manifests(job))
    assert api.objects == {}


@pytest.mark.parametrize("kind", ["job", "volcano", "elasticjob"])
def test_a_job_is_deleted_with_what_was_submitted_beside_it(kind):
    api, control = submitted(kind=kind)
    control.delete(TRAIN)
    assert api.objects == {}


def test_delete_leaves_objects_of_others():
    """Though it has the name of a job of ours, and a Secret of that name."""
    api, control = submitted()
    del api.objects[JOB]["metadata"]["annotations"]
    for command in (control.delete, control.summary, lambda job: control.scale(job, 2)):
        with pytest.raises(ConfigError, match="Job train was not made by `torchelastic submit"):
            command(TRAIN)
    assert SECRET in api.objects


def test_a_job_is_found_by_who_may_see_its_kind_only():
    _, control = submitted(("get", "/jobs/train"), kind="elasticjob")
    assert control.summary(TRAIN).nodes == 4
    unseen = JobControl(Refusing(("get", "/jobs/train")))
    with pytest.raises(KubernetesError, match="get is refused"):
        unseen.summary(TRAIN)
    unseen = JobControl(Refusing(("get", "/elasticjobs/train")))
    with pytest.raises(KubernetesError, match="There is no job kubernetes:team/train: list the"):
        unseen.summary(TRAIN)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_kinds_with_a_fixed_number_of_nodes_are_not_scaled(kind):
    _, control = submitted(kind=kind)
    with pytest.raises(ConfigError, match="whose number of nodes cannot change while it runs: del"):
        control.scale(TRAIN, 2)


def test_a_job_that_has_ended_is_not_scaled():
    api, control = submitted()
    api.objects[JOB]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    with pytest.raises(ConfigError, match="kubernetes:team/train has ended: submit it again"):
        control.scale(TRAIN, 2)


def with_pods(api, *names):
    """Two pods may have one name, one after the other."""
    api.objects["/api/v1/namespaces/team/pods"] = [
        {
            "metadata": {"name": name, "uid": f"{number}"},
            "spec": {"containers": [{"name": "torchelastic"}]},
            "status": {"phase": "Running"},
        }
        for number, name in enumerate(names)
    ]
    for name in names:
        api.objects[f"/api/v1/namespaces/team/pods/{name}/log"] = [b"one", b"two"]


@pytest.mark.parametrize("follow", [False, True])
def test_logs_of_all_pods(follow):
    api, control = submitted()
    with_pods(api, "a", "a", "b")
    api.objects[JOB]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    shown = []
    control.logs(TRAIN, lambda *line: shown.append(line), follow=follow, lines=None)
    assert sorted(shown) == [("a", b"one")] * 2 + [("a", b"two")] * 2 + [
        ("b", b"one"), ("b", b"two")]  # fmt: skip


def test_following_a_job_ends_when_it_is_deleted():
    api, control = submitted()
    with_pods(api, "a")
    shown = []

    def show(pod, line):
        shown.append(line)
        api.objects.pop(JOB, None)

    control.logs(TRAIN, show, follow=True, lines=None)
    assert shown == [b"one", b"two"]


@pytest.mark.parametrize("follow", [False, True])
def test_logs_that_one_may_not_read(follow):
    api, control = submitted()
    with_pods(api, "a")
    api.refused = (("lines", "/log"),)
    with pytest.raises(KubernetesError, match="lines is refused"):
        control.logs(TRAIN, lambda *line: None, follow=follow, lines=None)


def test_logs_end_when_their_reader_stops():
    """Such as a pipe to `head`: it is raised where the command is, not in a thread."""
    api, control = submitted()
    with_pods(api, "a")

    def show(pod, line):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        control.logs(TRAIN, show, follow=True, lines=None)


# --- errors ---------------------------------------------------------------------------------------


#: As Kubernetes 1.38 writes them.
RBAC = 'jobs.batch is forbidden: User "u" cannot create resource "jobs" in API group "batch"'
QUOTA = 'jobs.batch "train" is forbidden: exceeded quota: q, requested: 1, used: 0, limited: 0'
WEBHOOK = 'admission webhook "policy.example" denied the request: no image from there'
ENDING = {"details": {"causes": [{"reason": "NamespaceTerminating"}]}}


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (401, {"message": "Unauthorized"}, "does not accept your credentials (Unauthorized): log"),
        (403, {"message": RBAC}, f"You are not allowed to do this ({RBAC}): ask for a Role"),
        (403, {"message": QUOTA}, f"The quota of the namespace is exceeded ({QUOTA}): ask"),
        (403, {"message": WEBHOOK}, f"A policy of the cluster forbids this ({WEBHOOK}): change"),
        (403, {"message": "x is forbidden", **ENDING}, "The namespace is being deleted (x is"),
        (404, {"message": 'namespaces "n" not found'}, "The namespace does not exist (name"),
        (500, {"message": "etcd timed out."}, "refused GET /x with status 500: etcd timed out."),
    ],
)
def test_a_refusal_is_one_sentence(status, answer, said):
    error = cluster_api._refused("GET", "/x", status, answer)
    assert said in str(error)
    assert error.status == status


@pytest.mark.needs("kubernetes")
def test_credentials_that_cannot_be_renewed():
    """Such as a token file that is gone: a sentence, as for any other request that fails."""

    def renew(headers, queries, settings):
        raise FileNotFoundError(2, "No such file or directory", "token")

    api = ClusterApi.__new__(ClusterApi)
    api.server, api._client = "https://c", SimpleNamespace(update_params_for_auth=renew)
    with pytest.raises(
        KubernetesError, match=r"for https://c cannot be renewed \(.*'token'\): log"
    ):
        api.get("/version")


@pytest.mark.parametrize("data", [b"", b"<html>Log in</html>", b'{"type": "ADD', b"[]"])
def test_answer_that_is_not_from_an_api_server_is_an_error(data):
    api = ClusterApi.__new__(ClusterApi)
    api.server = "https://c"
    with pytest.raises(KubernetesError, match="https://c does not answer as a Kubernetes API"):
        api._decoded(data)
