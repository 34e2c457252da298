"""The controller performs what `reconcile` decides, at an API server that refuses."""

import pytest

from tests.unit.cluster.elastic_jobs import elastic_job, pod_of
from torchelastic.cluster.operator.elastic_job import condition
from torchelastic.cluster.operator.job_controller import JobController
from torchelastic.errors import KubernetesError

KEY = ("default", "imagenet")


class Server:
    """Answers every request, except those to the refused paths, and writes them down."""

    namespace = "elastic-job"

    def __init__(self, **refused):
        self.refused, self.said, self.version = refused, [], 100

    def _stored(self, body):
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        return {**body, "metadata": metadata}

    def get(self, path, **query):
        return {"metadata": {"resourceVersion": "1"}, "spec": {}}  # the Lease

    def create(self, path, body):
        collection = path.rpartition("/")[2]
        self._check(f"create_{collection}")
        if collection == "events":
            self.said.append(body["reason"])
        named = {"name": "x", "uid": "made", **body["metadata"]}
        return self._stored({**body, "metadata": named})

    def replace(self, path, body):
        return self._stored(body)

    def delete(self, path, **options):
        self._check("delete")
        stored = next(each for each in self.pods if path.endswith(each["metadata"]["name"]))
        when = {"deletionTimestamp": "2099-01-01T00:00:00Z"}
        return self._stored({**stored, "metadata": {**stored["metadata"], **when}})

    def _check(self, verb):
        if verb in self.refused:
            raise KubernetesError(f"{verb} is refused.", self.refused[verb], "Refused")


def controller(server, *pods, **job):
    """A leader that has these copies."""
    made = JobController(server)
    made._acts_until = made._ask_at = float("inf")
    stored = elastic_job(**job)
    stored["metadata"]["resourceVersion"] = "1"
    made._jobs.put(stored)
    server.pods = [pod_of(stored, index) for index in pods]
    for pod in server.pods:
        pod["metadata"]["resourceVersion"] = "1"
        made._pods.put(pod)
    return made


def test_a_pod_is_deleted_once_though_the_watch_is_late():
    """Else the choice could fall on another one the next time."""
    server = Server()
    made = controller(server, 0, 1, 2, replicas=2)
    made._handle(KEY)
    made._handle(KEY)
    assert server.said.count("SuccessfulDeletePod") == 1


@pytest.mark.parametrize(
    ("refused", "job"),
    [
        ({"create_pods": 403}, {}),
        ({"create_pods": 500}, {}),  # a webhook of the cluster
        ({"create_secrets": 403}, {}),
        ({"delete": 403}, {"replicas": 1}),
    ],
)
def test_a_refusal_is_told_once_and_not_tried_again_at_once(refused, job):
    server = Server(**refused)
    made = controller(server, 0, 1, **{"replicas": 3, **job})
    for _ in range(5):  # its own change of the status lets it decide again
        made._handle(KEY)
    assert server.said.count("Refused") == 1
    stalled = condition(made._jobs.get(KEY)["status"], "Stalled")
    [verb] = refused
    assert (stalled["status"], stalled["message"]) == ("True", f"{verb} is refused.")
