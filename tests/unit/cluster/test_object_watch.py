"""A copy of a cluster's objects, whatever the API server says and in which order."""

import pytest

from torchelastic.cluster.operator.object_watch import ObjectWatch
from torchelastic.errors import KubernetesError


def pod(name, version):
    return {"metadata": {"namespace": "n", "name": name, "resourceVersion": str(version)}}


class Server:
    """Lists two pods; then a watch yields the given events, or raises."""

    def __init__(self, *events):
        self.events = events

    def get(self, path):
        items = [pod("a", 1), pod("b", 2)]
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
    watch = ObjectWatch(Server(*events), "/pods", changed.append, print)
    watch._list()
    for item in answers:
        watch.put(item)
    watch._list = lambda: "2"
    failure = watch._list_and_watch()
    return watch, failure, [item["metadata"]["name"] for item in changed]


def test_a_copy_follows_the_events():
    events = [
        {"type": "ADDED", "object": pod("c", 3)},
        {"type": "BOOKMARK", "object": {}},
        {"type": "DELETED", "object": pod("a", 4)},
    ]
    watch, failure, changed = followed(*events)
    assert failure == ""
    assert sorted(each["metadata"]["name"] for each in watch.all()) == ["b", "c"]
    assert changed[-2:] == ["c", "a"]


@pytest.mark.parametrize("kind", ["MODIFIED", "DELETED"])
def test_an_event_does_not_undo_a_newer_answer(kind):
    """Such as the deletion of a pod, which an event of before would hide again."""
    watch, _, _ = followed({"type": kind, "object": pod("a", 3)}, answers=[pod("a", 5)])
    assert watch.get(("n", "a")) == pod("a", 5)


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
