"""The controller of ElasticJobs: one loop that lets `reconcile` decide and performs it.

It keeps nothing but copies of the cluster's objects, so it can be killed at any time. While it is
away training goes on: the agents need it only for new pods.
"""

from __future__ import annotations

import queue
import secrets
import signal
import socket
import sys
import time
from types import FrameType

from torchelastic.best_effort import described
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.cluster.operator import leader_lease, worker_pods
from torchelastic.cluster.operator.elastic_job import API_VERSION, Json, condition, stamp
from torchelastic.cluster.operator.leader_lease import Seen
from torchelastic.cluster.operator.object_watch import Key, ObjectWatch, key_of
from torchelastic.cluster.operator.reconcile import (
    QUOTA_EXCEEDED,
    JobEvent,
    JobPlan,
    reconcile,
    refused,
)
from torchelastic.errors import EXIT_OK, KubernetesError

#: Name of the Lease, in the namespace of the controller, and of the source of events.
NAME = "elastic-job-controller"
JOBS = f"/apis/{API_VERSION}"
_COLLECTIONS = {"Pod": "pods", "Service": "services", "Secret": "secrets"}
#: A candidate looks this often whether it may lead.
_CANDIDATE_EVERY = 1.0
_LOOK_EVERY = 0.2
#: Pauses after an API server that did not answer, or a change that came in between.
_PAUSE = 1.0
#: A job that cannot be handled at all is looked at again after this.
_ODD_JOB_EVERY = 60.0
_LONGEST_EVENT = 1024
#: Trying again at once does not help. 500: a webhook of the cluster fails, for instance.
_REFUSALS = (400, 403, 404, 422, 500)


class _NotLeading(Exception):
    """Another controller leads, or this one could not renew its Lease in time."""


class JobController:
    """Follows all ElasticJobs of a cluster until it is stopped."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self.identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        self._changed: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._jobs = ObjectWatch(api, f"{JOBS}/elasticjobs", self._job_changed, self._say)
        self._pods = ObjectWatch(
            api, "/api/v1/pods", self._pod_changed, self._say, labelSelector=worker_pods.SELECTOR
        )
        #: When to decide about a job again, on the wall clock.
        self._due: dict[Key, float] = {}
        self._lease: Json = {}
        self._seen: Seen | None = None
        #: On the monotonic clock: until when it may act, and when to renew or ask again.
        self._acts_until = self._ask_at = 0.0
        self._said = ""
        self._stopped = False

    def run(self) -> int:
        """Act until SIGTERM or SIGINT; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for watch in (self._jobs, self._pods):
            watch.start()
            while not self._stopped and not watch.complete.wait(_LOOK_EVERY):
                pass
        while not self._stopped:
            try:
                self._lead()
                for key in self._wait():
                    self._handle(key)
            except _NotLeading:
                self._say("Another controller leads: waiting.")
        self._resign()
        return EXIT_OK

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        self._changed.put(None)

    def _job_changed(self, item: Json) -> None:
        self._changed.put(key_of(item))

    def _pod_changed(self, item: Json) -> None:
        self._changed.put(_job_of(item))

    def _wait(self) -> list[Key]:
        """Wait for changes, times that come, or the time to renew; return the jobs to look at."""
        pause = self._ask_at - time.monotonic()
        if self._leads():
            pause = min([pause, *(at - time.time() for at in self._due.values())])
        try:
            first = self._changed.get(timeout=max(pause, 0.0))
            while first is not None:
                self._due[first] = 0.0
                first = self._changed.get_nowait()
        except queue.Empty:
            pass
        now = time.time()
        return sorted(key for key, at in self._due.items() if at <= now and self._leads())

    def _handle(self, key: Key) -> None:
        """Decide about one job, and do it."""
        self._due.pop(key, None)
        job = self._jobs.get(key)
        if job is None:
            return
        pods = [pod for pod in self._pods.all() if _job_of(pod) == key]
        try:
            plan = reconcile(job, pods, time.time())
            if plan.again_at is not None:
                self._due[key] = plan.again_at
            self._perform(job, plan)
        except KubernetesError as error:
            self._due[key] = time.time() + _PAUSE
            self._say(f"{'/'.join(key)}: {error}")
        except _NotLeading:
            self._due[key] = time.time() + _PAUSE
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # Whatever is odd about one job must not stop the others.
            self._due[key] = time.time() + _ODD_JOB_EVERY
            self._say(f"{'/'.join(key)} cannot be handled: {described(error)}")

    def _perform(self, job: Json, plan: JobPlan) -> None:
        namespace = job["metadata"]["namespace"]
        try:
            if plan.secret is not None:
                self._create(worker_pods.with_secret(plan.secret, secrets.token_hex(32)))
            if plan.status is not None:
                job = self._store(job, plan.status)
            for event in plan.events:
                self._tell(job, event)
            for name, uid in plan.delete:
                self._delete(f"/api/v1/namespaces/{namespace}/pods/{name}", uid)
            for made in plan.create:
                self._create(made)
            if plan.delete_job:
                metadata = job["metadata"]
                self._delete(_path_of(job), metadata["uid"])
        except KubernetesError as error:
            if error.status not in _REFUSALS:
                raise
            self._stall(job, error)

    def _stall(self, job: Json, error: KubernetesError) -> None:
        """Write down what the API server refuses; `reconcile` tries it again later."""
        reason = QUOTA_EXCEEDED if "exceeded quota" in str(error) else error.reason or "Refused"
        before = condition(job.get("status") or {}, "Stalled")
        self._store(job, refused(job.get("status") or {}, reason, str(error), time.time()))
        if (before.get("status"), before.get("message")) != ("True", str(error)):
            self._tell(job, JobEvent(reason, str(error), warning=True))

    def _store(self, job: Json, status: Json) -> Json:
        """Write the status; the copy must be the newest version. Return the job as stored."""
        self._check()
        stored = self._api.replace(f"{_path_of(job)}/status", {**job, "status": status})
        self._jobs.put(stored)
        return stored

    def _create(self, made: Json) -> None:
        """Create an object unless it exists."""
        self._check()
        name, namespace = made["metadata"]["name"], made["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/{_COLLECTIONS[made['kind']]}"
        try:
            stored = self._api.create(path, made)
        except KubernetesError as error:
            if error.reason != "AlreadyExists":
                raise
            if made["kind"] == "Pod":
                self._check_owner(f"{path}/{name}", made)
            return
        if made["kind"] == "Pod":
            self._pods.put(stored)
        self._say(f"{namespace}: created {made['kind']} {name}.")

    def _check_owner(self, path: str, made: Json) -> None:
        """Take over a pod that the copy lacks; refuse one of another owner."""
        found = self._api.get(path)
        uid = made["metadata"]["ownerReferences"][0]["uid"]
        if worker_pods.owner_of(found)[1] != uid:
            raise KubernetesError(
                f"Pod {made['metadata']['name']} exists and does not belong to this job: delete "
                "it, or choose another name for the job.",
                400,
                "NameTaken",
            )
        self._pods.put(found)

    def _delete(self, path: str, uid: str) -> None:
        """Delete an object if it still is the one that was meant."""
        self._check()
        try:
            deleted = self._api.delete(path, preconditions={"uid": uid})
        except KubernetesError as error:
            if error.status not in (404, 409):
                raise
            return
        if deleted.get("kind") == "Pod" and self._pods.get(key_of(deleted)) is not None:
            self._pods.put(deleted)  # so that no other pod is deleted in its place
        self._say(f"Deleted {path.rpartition('/')[2]}.")

    def _tell(self, job: Json, event: JobEvent) -> None:
        """Record an event; without it, only `kubectl describe` knows less."""
        metadata, now = job["metadata"], stamp(time.time())
        about = {
            "apiVersion": API_VERSION,
            "kind": "ElasticJob",
            **{key: metadata[key] for key in ("name", "namespace", "uid")},
        }
        body = {
            "metadata": {
                "generateName": f"{metadata['name']}.",
                "namespace": metadata["namespace"],
            },
            "involvedObject": about,
            "reason": event.reason,
            "message": event.message[:_LONGEST_EVENT],
            "type": "Warning" if event.warning else "Normal",
            "source": {"component": NAME},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._say(f"{metadata['namespace']}/{metadata['name']}: {event.message}")
        try:
            self._api.create(f"/api/v1/namespaces/{metadata['namespace']}/events", body)
        except KubernetesError as error:
            self._say(f"The event was not recorded: {error}")

    # Leadership

    def _leads(self) -> bool:
        return time.monotonic() < self._acts_until

    def _check(self) -> None:
        """Renew the Lease if it is time; raise unless this controller may act."""
        self._lead()
        if not self._leads():
            raise _NotLeading

    def _lead(self) -> None:
        """Take or renew the Lease if it is time to, and allowed."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        led = self._leads()
        try:
            lease = self._find_lease()
            self._seen = leader_lease.seen(lease, self._seen, now)
            if leader_lease.may_take(lease, self.identity, self._seen, now):
                wanted = leader_lease.taken(lease, self.identity, time.time())
                self._lease = self._api.replace(self._lease_path, wanted)
                self._acts_until = now + leader_lease.ACT_FOR
        except KubernetesError as error:
            if error.status != 409:  # another one was faster
                self._say(f"The Lease cannot be renewed: {error}")
        if self._leads() and not led:
            self._say(f"{self.identity} leads.")
            self._due.update((key_of(job), 0.0) for job in self._jobs.all())
        every = leader_lease.RENEW_EVERY if self._leads() else _CANDIDATE_EVERY
        self._ask_at = now + every

    @property
    def _lease_path(self) -> str:
        namespace = self._api.namespace
        return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{NAME}"

    def _find_lease(self) -> Json:
        try:
            return self._api.get(self._lease_path)
        except KubernetesError as error:
            if error.status != 404:
                raise
        made = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME, "namespace": self._api.namespace},
            "spec": {},
        }
        return self._api.create(self._lease_path.rpartition("/")[0], made)

    def _resign(self) -> None:
        """Let another one lead at once."""
        if self._leads():
            try:
                self._api.replace(self._lease_path, leader_lease.given_up(self._lease))
            except KubernetesError as error:
                self._say(f"The Lease was not given up: {error}")

    def _say(self, text: str) -> None:
        """Print a line, unless it is the last one again."""
        if text != self._said:
            self._said = text
            print(f"[torchelastic] {text}", file=sys.stderr, flush=True)


def _path_of(job: Json) -> str:
    metadata = job["metadata"]
    return f"{JOBS}/namespaces/{metadata['namespace']}/elasticjobs/{metadata['name']}"


def _job_of(pod: Json) -> Key:
    return pod["metadata"]["namespace"], worker_pods.owner_of(pod)[0]
