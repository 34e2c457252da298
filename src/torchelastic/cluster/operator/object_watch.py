"""The objects of one kind, followed by list and watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchelastic.backoff import pause
from torchelastic.best_effort import described
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.operator.elastic_job import Json
from torchelastic.errors import KubernetesError

#: Seconds after which everything is listed again: a missed change is found then.
RESYNC = 60.0
#: Pauses after failures, and after a watch that has ended: perhaps a proxy ends each at once.
FIRST_PAUSE, LONGEST_PAUSE, SHORTEST_PAUSE = 0.5, 10.0, 0.1

#: Namespace and name.
Key = tuple[str, str]


def key_of(item: Json) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]


class ObjectWatch:
    """A copy of the objects at a path, kept up to date by a thread of its own."""

    def __init__(
        self,
        api: ClusterApi,
        path: str,
        on_change: Callable[[Json], None],
        say: Callable[[str], None],
        **query: str,
    ) -> None:
        self._api, self._path, self._query = api, path, query
        self._on_change, self._say = on_change, say
        self._objects: dict[Key, Json] = {}
        self._lock = threading.Lock()
        self._failures = 0
        #: Set once everything has been listed.
        self.complete = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, daemon=True, name=f"watch {self._path}").start()

    def get(self, key: Key) -> Json | None:
        with self._lock:
            return self._objects.get(key)

    def all(self) -> list[Json]:
        with self._lock:
            return list(self._objects.values())

    def put(self, item: Json) -> None:
        """Store an object as the API server answered, if it is newer than the copy."""
        with self._lock:
            old = self._objects.get(key_of(item))
            if old is None or _version(old) <= _version(item):
                self._objects[key_of(item)] = item

    def _follow(self) -> None:
        while True:
            if failure := self._list_and_watch():
                self._failures += 1
                seconds = pause(self._failures, FIRST_PAUSE, LONGEST_PAUSE)
                self._say(f"{failure} Trying again in {seconds:g} s.")
                time.sleep(seconds)
            else:
                time.sleep(SHORTEST_PAUSE)

    def _list_and_watch(self) -> str:
        """Follow the objects until the watch ends; return why it failed, as a sentence."""
        try:
            for event in self._api.watch(self._path, self._list(), RESYNC, **self._query):
                self._note(event)
        except KubernetesError as error:
            if error.status == 410:  # what changed since is too old to be told: list again
                return ""
            return f"{error} Is the resource installed?" if error.status == 404 else str(error)
        except Exception as error:
            # Without this thread, the controller would lead and see nothing.
            return f"{self._path} cannot be followed: {described(error)}."
        return ""

    def _list(self) -> str:
        """Fetch all objects; return the version of the list."""
        answer = self._api.get(self._path, **self._query)
        now = {key_of(item): item for item in answer["items"]}
        with self._lock:
            old, self._objects = self._objects, now
        for key in old.keys() | now.keys():
            self._on_change(now.get(key) or old[key])
        self._failures = 0
        self.complete.set()
        return str(answer["metadata"]["resourceVersion"])

    def _note(self, event: Json) -> None:
        item = event["object"]
        if event["type"] == "BOOKMARK":
            return
        with self._lock:
            old = self._objects.get(key_of(item))
            if old is not None and _version(old) > _version(item):
                return  # an answer came before this
            if event["type"] == "DELETED":
                self._objects.pop(key_of(item), None)
            else:
                self._objects[key_of(item)] = item
        self._on_change(item)


def _version(item: Json) -> int:
    return int(item["metadata"]["resourceVersion"])
