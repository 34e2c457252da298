"""The controller of ElasticJobs at an API server: its loop, and its copy of the objects."""

import pytest

from tests.unit.cluster.elastic_jobs import elastic_job, pod_of
from torchelastic.cluster.operator.elastic_job import condition
from torchelastic.cluster.operator.job_controller import JobController
from torchelastic.cluster.operator.object_watch import ObjectWatch
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


# --- the copy -------------------------------------------------------------------------------------


def bare_pod(name, version):
    return {"metadata": {"namespace": "n", "name": name, "resourceVersion": str(version)}}


class EventServer:
    """Lists two pods; then a watch yields the given events, or raises."""

    def __init__(self, *events):
        self.events = events

    def get(self, path):
        items = [bare_pod("a", 1), bare_pod("b", 2)]
        return {"items": items, "metadata": {"resourceVersion": "2"}}

    def watch(self, path, since, seconds):
        assert since == "2"
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event


def followed(*events, answers=()):
    """The watch, with answers of the API server put between the list and its events; the failure;
    and whom it told of."""
    changed = []
    watch = ObjectWatch(EventServer(*events), "/pods", changed.append, print)
    watch._list()
    for item in answers:
        watch.put(item)
    watch._list = lambda: "2"
    failure = watch._list_and_watch()
    return watch, failure, [item["metadata"]["name"] for item in changed]


def test_a_copy_follows_the_events():
    events = [
        {"type": "ADDED", "object": bare_pod("c", 3)},
        {"type": "BOOKMARK", "object": {}},
        {"type": "DELETED", "object": bare_pod("a", 4)},
    ]
    watch, failure, changed = followed(*events)
    assert failure == ""
    assert sorted(each["metadata"]["name"] for each in watch.all()) == ["b", "c"]
    assert changed[-2:] == ["c", "a"]


@pytest.mark.parametrize("kind", ["MODIFIED", "DELETED"])
def test_an_event_does_not_undo_a_newer_answer(kind):
    """Such as the deletion of a pod, which an event of before would hide again."""
    watch, _, _ = followed({"type": kind, "object": bare_pod("a", 3)}, answers=[bare_pod("a", 5)])
    assert watch.get(("n", "a")) == bare_pod("a", 5)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KubernetesError("Gone.", 410), ""),
        (KubernetesError("No such path.", 404), "No such path. Is the resource installed?"),
        (KubernetesError("Too busy.", 429), "Too busy."),
        # Its thread must not end: the controller would lead and see nothing.
        (KeyError("type"), "/pods cannot be followed: KeyError: 'type' ("),
        ({"odd": 1}, "/pods cannot be followed: KeyError: 'object' ("),
    ],
)
def test_no_answer_ends_it(error, said):
    _, failure, _ = followed(error)
    assert failure.startswith(said)
    assert bool(failure) == bool(said)
