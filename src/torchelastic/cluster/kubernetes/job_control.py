"""Submit, scale, inspect and delete jobs on Kubernetes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torchelastic.cluster.kubernetes.cluster_api import JSON_PATCH, TIMEOUT, ClusterApi, Json
from torchelastic.cluster.kubernetes.job_summary import (
    JobHandle,
    JobSummary,
    container_of,
    is_over,
    nnodes_of,
    summary,
)
from torchelastic.cluster.submit.job_kinds import JOB_KINDS, JobKind
from torchelastic.cluster.submit.kubernetes_manifests import LOWEST_RELEASE
from torchelastic.errors import ConfigError, KubernetesError

#: Seconds between two looks for new pods.
_LOOK = 1.0
#: Lines that may wait to be shown; then reading them waits.
_MOST_LINES = 1000


class JobControl:
    """The jobs of one cluster."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api

    def find(self, text: str | None) -> JobHandle:
        """Return the job that a user names. Raises `ConfigError` for other platforms' jobs."""
        handle = JobHandle.parse(text)
        if handle is None:
            raise ConfigError(
                f"'{text or ''}' is not a job on Kubernetes: write kubernetes:NAME or "
                "kubernetes:NAMESPACE/NAME, as `torchelastic submit kubernetes` printed it."
            )
        return replace(handle, namespace=handle.namespace or self._api.namespace)

    def check_release(self) -> None:
        """Raise `ConfigError` if the cluster is older than what jobs need."""
        version = self._api.get("/version")
        digits = [
            "".join(filter(str.isdigit, str(version.get(part)))) for part in ("major", "minor")
        ]
        found = tuple(int(text or 0) for text in digits)
        if found < LOWEST_RELEASE:
            lowest, here = (".".join(map(str, pair)) for pair in (LOWEST_RELEASE, found))
            raise ConfigError(
                f"Kubernetes {lowest} or later is needed, and {self._api.server} runs {here}: use "
                "another cluster."
            )

    def submit(self, manifests: Sequence[Json]) -> JobHandle:
        """Create the objects of a job. If a request is refused, all of them are removed again."""
        job = manifests[-1]
        namespace = job["metadata"].get("namespace") or self._api.namespace
        handle = JobHandle(job["metadata"]["name"], namespace)
        made: list[str] = []
        try:
            for manifest in manifests:
                stored = self._create(manifest, handle)
                made.append(_path_of(manifest["apiVersion"], manifest["kind"], handle))
            owner = {name: job[name] for name in ("apiVersion", "kind")}
            owner |= {"name": handle.name, "uid": stored["metadata"]["uid"]}
            for path in made[:-1]:  # so that they go with the job, whoever deletes it
                self._api.patch(path, {"metadata": {"ownerReferences": [owner]}})
        except (KubernetesError, KeyboardInterrupt) as error:
            left = [path for path in reversed(made) if not self._is_removed(path)]
            if left and isinstance(error, KubernetesError):
                message = f"{error} What was created before cannot be removed: {', '.join(left)}."
                raise KubernetesError(message, error.status, error.reason) from None
            raise
        return handle

    def _is_removed(self, path: str) -> bool:
        try:
            self._delete(path)
        except KubernetesError:
            return False
        return True

    def _create(self, manifest: Json, handle: JobHandle) -> Json:
        kind, version = manifest["kind"], manifest["apiVersion"]
        collection = _path_of(version, kind, handle).rpartition("/")[0]
        try:
            return self._api.create(collection, manifest, fieldValidation="Strict")
        except KubernetesError as error:
            if error.status == 404 and not str(error).startswith("The namespace"):
                raise KubernetesError(
                    f"The cluster has no {kind} of {version}: install its "
                    "controller, or submit the job without --as.",
                    error.status,
                    error.reason,
                ) from None
            if error.reason != "AlreadyExists":
                raise
            by_hand = f"kubectl -n {handle.namespace} delete {kind.lower()} {handle.name}"
            raise KubernetesError(
                f"{kind} {handle.name} exists already in namespace "
                f"{handle.namespace}: give another --name, or delete the old job with "
                f"`torchelastic delete {handle}`. If there is no such job: `{by_hand}`.",
                error.status,
                error.reason,
            ) from None

    def scale(self, handle: JobHandle, nodes: int) -> int:
        """Change the number of nodes; return what it was. The newest pods go first."""
        kind, job = self._job(handle)
        least, most = nnodes_of(job)
        if not kind.scales:
            raise ConfigError(
                f"{handle} is a {kind.kind}, whose number of nodes cannot change while it runs: "
                "delete it and submit it with another --nnodes, or without --as."
            )
        if is_over(job):
            raise ConfigError(f"{handle} has ended: submit it again.")
        if not least <= nodes <= most:
            raise ConfigError(
                f"{handle} was submitted with --nnodes {least}:{most}: scale it to a number from "
                f"{least} to {most}."
            )
        change = {"op": "add", "path": kind.nodes, "value": nodes}
        self._api.patch(_job_path(kind, handle), [change], JSON_PATCH)
        return kind.nodes_of(job)

    def summary(self, handle: JobHandle) -> JobSummary:
        """Return the state of a job and its pods."""
        kind, job = self._job(handle)
        return summary(kind, job, self._pods(kind, handle), self._warnings(handle, job))

    def delete(self, handle: JobHandle) -> None:
        """Delete the job and all its objects; its nodes get their grace period."""
        kind, _ = self._job(handle)
        self._delete(_job_path(kind, handle))
        for other in kind.others:
            self._delete(_path_of("v1", other, handle))

    def logs(
        self,
        handle: JobHandle,
        show: Callable[[str, bytes], None],
        *,
        follow: bool,
        lines: int | None,
    ) -> None:
        """Pass each line of each pod to `show`, with the pod's name; until the job ends, if
        `follow`. Lines that were printed before are limited to the last `lines` of each pod."""
        kind, job = self._job(handle)
        query: Json = {} if lines is None else {"tailLines": lines}
        if not follow:
            pods = self._begun_pods(kind, handle)
            if not pods:
                raise ConfigError(f"{handle} has no output: see `torchelastic status {handle}`.")
            for pod in pods:
                for line in self._lines(handle, pod, query, TIMEOUT):
                    show(pod["metadata"]["name"], line)
            return
        query["follow"], ended = "true", is_over(job)
        read: queue.Queue[tuple[str, bytes] | KubernetesError] = queue.Queue(_MOST_LINES)
        readers: dict[str, threading.Thread] = {}
        while True:
            for pod in self._begun_pods(kind, handle):
                uid = pod["metadata"]["uid"]  # some kinds use a pod's name again
                if uid not in readers:
                    words = (handle, pod, query, read.put)
                    readers[uid] = threading.Thread(target=self._read, args=words, daemon=True)
                    readers[uid].start()
            over = ended and not any(reader.is_alive() for reader in readers.values())
            _show_all(read, show, 0.0 if over else time.monotonic() + _LOOK)
            if over:
                return
            ended = ended or self._has_ended(kind, handle)
            query = {"follow": "true"}  # of pods that come later, everything

    def _has_ended(self, kind: JobKind, handle: JobHandle) -> bool:
        """Return whether a job has ended, or was deleted."""
        try:
            return is_over(self._api.get(_job_path(kind, handle)))
        except KubernetesError as error:
            if error.status != 404:
                raise
            return True

    def _begun_pods(self, kind: JobKind, handle: JobHandle) -> list[Json]:
        pods = self._pods(kind, handle)
        return [pod for pod in pods if pod["status"].get("phase") != "Pending"]

    def _read(
        self,
        handle: JobHandle,
        pod: Json,
        query: Json,
        put: Callable[[tuple[str, bytes] | KubernetesError], None],
    ) -> None:
        try:
            for line in self._lines(handle, pod, query, None):
                put((pod["metadata"]["name"], line))
        except KubernetesError as error:
            put(error)

    def _lines(
        self, handle: JobHandle, pod: Json, query: Json, timeout: float | None
    ) -> Iterator[bytes]:
        path = f"{_pods_path(handle)}/{pod['metadata']['name']}/log"
        query = {**query, "container": container_of(pod)["name"]}
        try:
            yield from self._api.lines(path, timeout, **query)
        except KubernetesError as error:
            if error.status in (401, 403):
                raise
            if error.status != 404:  # it is gone since it was listed
                yield str(error).encode()

    def _job(self, handle: JobHandle) -> tuple[JobKind, Json]:
        """Find a job, which may be of any kind that we submit."""
        refusals: list[ConfigError] = []
        for kind in JOB_KINDS.values():
            try:
                job = self._api.get(_job_path(kind, handle))
                nnodes_of(job)
                return kind, job
            except KubernetesError as error:
                if error.status not in (403, 404):
                    raise
                # Who may see Jobs need not see resources that the cluster perhaps does not have.
                if error.status == 403 and kind is JOB_KINDS["job"]:
                    refusals.append(error)
            except ConfigError as error:  # of that name, but not ours
                refusals.append(error)
        if refusals:
            raise refusals[0]
        raise KubernetesError(
            f"There is no job {handle}: list the jobs of that namespace with "
            f"`kubectl get jobs -n {handle.namespace}`.",
            404,
            "NotFound",
        )

    def _pods(self, kind: JobKind, handle: JobHandle) -> list[Json]:
        found = self._api.get(_pods_path(handle), labelSelector=kind.pods_of(handle.name))
        items: list[Json] = found["items"]
        return items

    def _warnings(self, handle: JobHandle, job: Json) -> list[Json]:
        about = f"involvedObject.uid={job['metadata']['uid']},type=Warning"
        path = f"/api/v1/namespaces/{handle.namespace}/events"
        try:
            items: list[Json] = self._api.get(path, fieldSelector=about)["items"]
        except KubernetesError as error:
            if error.status != 403:  # who may see jobs and pods need not see events
                raise
            return []
        return items

    def _delete(self, path: str) -> None:
        try:
            self._api.delete(path, propagationPolicy="Background")
        except KubernetesError as error:
            if error.status != 404:
                raise


def _show_all(
    read: queue.Queue[tuple[str, bytes] | KubernetesError],
    show: Callable[[str, bytes], None],
    until: float,
) -> None:
    """Show what is read until then, on the monotonic clock; 0: what has been read."""
    while not until or time.monotonic() < until:
        try:
            one = read.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return
        if isinstance(one, KubernetesError):
            raise one
        show(*one)


def _job_path(kind: JobKind, handle: JobHandle) -> str:
    return _path_of(kind.api_version, kind.kind, handle)


def _pods_path(handle: JobHandle) -> str:
    return f"/api/v1/namespaces/{handle.namespace}/pods"


def _path_of(api_version: str, kind: str, handle: JobHandle) -> str:
    """Return where the API has an object of a job, of other projects' kinds, too."""
    place = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
    return f"{place}/namespaces/{handle.namespace}/{kind.lower()}s/{handle.name}"
