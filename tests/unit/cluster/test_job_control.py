"""Jobs on a cluster that refuses: what is left, and what is said."""

from types import SimpleNamespace

import pytest

from torchelastic.cluster.kubernetes.job_control import JobControl
from torchelastic.cluster.kubernetes.job_summary import JobHandle
from torchelastic.cluster.submit.job_kinds import JOB_KINDS
from torchelastic.cluster.submit.kubernetes_manifests import KubernetesJob
from torchelastic.errors import ConfigError, KubernetesError

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


def test_what_others_have_made_is_not_deleted():
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


def test_who_shows_lines_may_stop():
    """Such as a pipe to `head`: it is raised where the command is, not in a thread."""
    api, control = submitted()
    with_pods(api, "a")

    def show(pod, line):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        control.logs(TRAIN, show, follow=True, lines=None)
