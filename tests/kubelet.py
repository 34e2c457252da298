"""A small kubelet for tests: runs the pods of `tests.kubernetes` as processes of this machine.

    with Kubelet(control_plane, nodes=3) as kubelet:
        ...                                     # create a Job: its pods run, and are reported
        kubelet.silence("node1")                # that machine is out of reach of the cluster
        kubelet.pod("train-0").kill()           # everything in a pod at once

Pods (`tests.pods`) find each other by the names of their Services.
"""

from __future__ import annotations

import http.server
import os
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes import GATEWAY, ControlPlane
from tests.netns import Network
from tests.pods import PERIOD, Json, Pod, overwrite, stamp
from tests.support import poll_for
from torchelastic.errors import KubernetesError

_HEARTBEAT = 1.0
#: Merges conditions by their type: others write some, too.
_STRATEGIC = "application/strategic-merge-patch+json"


class Kubelet:
    """The kubelets of several nodes. All that is said to the API server is said by one thread."""

    def __init__(
        self,
        plane: ControlPlane,
        *,
        nodes: int = 3,
        pods: int = 8,
        environ: Mapping[str, str] | None = None,
        capacity: Mapping[str, str] | None = None,
    ) -> None:
        """At most `pods` run at the same time. `environ` is the environment of the image."""
        self.plane = plane
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {"PATH": path, "HOME": "/root", "RES_OPTIONS": "timeout:1 attempts:1"}
        self.environ |= environ or {}
        self.network = Network(pods + 1, ipv6=False)
        self.gateway, *hosts = self.network.hosts
        #: Addresses that no pod has, in the order in which they became free.
        self._free = list(hosts)
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._capacity = {"cpu": "32", "memory": "64Gi", "pods": "16", **(capacity or {})}
        self._silent: set[str] = set()
        self.pods: dict[str, Pod] = {}
        #: Pods that are gone, for their logs.
        self.past: list[Pod] = []
        self._known: dict[str, list[str]] = {}
        self._heartbeat = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kubelet", daemon=True)
        self.error: BaseException | None = None

    def __enter__(self) -> Kubelet:
        self._temporary = tempfile.TemporaryDirectory(prefix="kubelet-")
        self.directory = Path(self._temporary.name)
        self.directory.chmod(0o755)
        #: Where containers start; anyone can read it.
        self.workdir = self.directory / "workspace"
        self.workdir.mkdir()
        self.network.__enter__()
        assert self.gateway.address == GATEWAY
        self._logs = _LogServer(self)
        for name in self.nodes:
            self._register(name)
        self._thread.start()
        poll_for(self._takes_pods, what="nodes that take pods")
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for pod in self.pods.values():
            pod.terminate(0)
        for pod in self.pods.values():
            pod.join()
            self._remove(pod.stored)
        for name in self.nodes:
            self.plane.api.delete(f"/api/v1/nodes/{name}")
        self._logs.close()
        self.network.__exit__(*error)
        self._temporary.cleanup()
        if self.error is not None:
            raise self.error

    # --- what tests do ---------------------------------------------------------------------------

    def pod(self, name: str) -> Pod:
        """The newest pod whose name begins so, such as `job-0` of `job-0-x7f2k`."""
        found = [pod for pod in [*self.past, *self.pods.values()] if pod.full_name.startswith(name)]
        assert found, f"no pod {name}: {[pod.full_name for pod in self.pods.values()]}"
        return found[-1]

    def silence(self, node: str) -> None:
        """Neither see nor say anything of this node from now on; its processes go on."""
        self._silent.add(node)

    def crash(self, node: str) -> None:
        """End everything on a node at once; nobody reports it."""
        self.silence(node)
        for pod in self.on(node):
            pod.kill()

    def speak(self, node: str) -> None:
        """End a silence."""
        self._silent.discard(node)

    def on(self, node: str) -> list[Pod]:
        return [pod for pod in list(self.pods.values()) if pod.node == node]

    def said(self) -> str:
        """The output of all pods, for messages of tests."""
        pods = [*self.past, *self.pods.values()]
        return "\n".join(f"--- {pod.full_name} on {pod.node}:\n{pod.log()}" for pod in pods)

    # --- the loop --------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._stop.wait(PERIOD):
                try:
                    self._turn()
                except KubernetesError as error:
                    # The API server is down, or has changed what we were about to change.
                    if error.status not in (0, 404, 409, 410, 429, 500, 503, 504):
                        raise
        except BaseException as error:
            self.error = error
            raise

    def _turn(self) -> None:
        if time.monotonic() > self._heartbeat + _HEARTBEAT:
            self._heartbeat = time.monotonic()
            for name in self.nodes:
                if name not in self._silent:
                    self._report_node(name)
        stored = {pod["metadata"]["uid"]: pod for pod in self.plane.items("/api/v1/pods")}
        for uid, pod in stored.items():
            node = pod["spec"].get("nodeName")
            if node in self.nodes and node not in self._silent:
                self._sync(uid, pod)
        for uid in [uid for uid in self.pods if uid not in stored]:
            if self.pods[uid].node not in self._silent:
                self.pods[uid].terminate(0)
                self._forget(uid)
        self._publish_names()

    def _sync(self, uid: str, stored: Json) -> None:
        """Bring one pod closer to what is wanted of it."""
        pod, deleted = self.pods.get(uid), "deletionTimestamp" in stored["metadata"]
        if pod is None:
            over = stored["status"]["phase"] in ("Succeeded", "Failed")
            if deleted:
                if not over:  # it never started here
                    self.plane.api.patch(f"{_path(stored)}/status", {"status": {"phase": "Failed"}})
                self._remove(stored)
            elif self._free and not over:
                self.pods[uid] = Pod(self, self._free.pop(0), stored)
                self.pods[uid].start()
            return
        if deleted:
            pod.terminate(stored["metadata"].get("deletionGracePeriodSeconds"))
        ended = not pod.is_alive()  # before its status is taken, which must be the last then
        status = pod.status()
        if status != pod.reported or not _has(stored, status["conditions"]):
            path = f"{_path(stored)}/status"
            self.plane.api.patch(path, {"status": status, "metadata": {"uid": uid}}, _STRATEGIC)
            pod.reported = status
        if deleted and ended and self._forget(uid):
            self._remove(stored)

    def _forget(self, uid: str) -> bool:
        """Free the address of a pod whose processes are gone."""
        pod = self.pods[uid]
        pod.join(1)
        if pod.is_alive():
            return False
        del self.pods[uid]
        self.past.append(pod)
        self._free.append(pod.host)
        return True

    def _remove(self, stored: Json) -> None:
        """Say that nothing is left of a pod; then it is gone."""
        try:
            self.plane.api.delete(
                _path(stored),
                gracePeriodSeconds=0,
                preconditions={"uid": stored["metadata"]["uid"]},
            )
        except KubernetesError as error:
            if error.status not in (404, 409):
                raise

    # --- nodes -----------------------------------------------------------------------------------

    def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        node = {"metadata": {"name": name, "labels": labels}}
        self.plane.api.create("/api/v1/nodes", node)
        self._report_node(name)

    def _takes_pods(self) -> bool:
        """Whether the taint is gone that a new node has: pods would gather on the first without."""
        nodes = (self.plane.api.get(f"/api/v1/nodes/{name}") for name in self.nodes)
        return not any(node["spec"].get("taints") for node in nodes)

    def _report_node(self, name: str) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "conditions": [{**ready, "lastHeartbeatTime": stamp()}],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._logs.port}},
        }
        self.plane.api.patch(f"/api/v1/nodes/{name}/status", {"status": status}, _STRATEGIC)
        lease = {"holderIdentity": name, "leaseDurationSeconds": 40}
        lease["renewTime"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        try:
            self.plane.api.patch(f"{leases}/{name}", {"spec": lease})
        except KubernetesError as error:
            if error.status != 404:
                raise
            self.plane.api.create(leases, {"metadata": {"name": name}, "spec": lease})

    # --- names -----------------------------------------------------------------------------------

    def _publish_names(self) -> None:
        """Let every pod resolve the names of Services, and of pods with a name in one."""
        slices = self.plane.items("/apis/discovery.k8s.io/v1/endpointslices")
        for pod in list(self.pods.values()):
            lines = [*pod.own_names(), *_names(slices, pod)]
            if self._known.get(pod.uid) != lines:
                self._known[pod.uid] = lines
                overwrite(pod.host.hosts_file, lines)


def _names(slices: Sequence[Json], pod: Pod) -> list[str]:
    """The lines of a hosts file for what a cluster's DNS would answer this pod."""
    lines = []
    for one in slices:
        service = one["metadata"].get("labels", {}).get("kubernetes.io/service-name")
        space = one["metadata"]["namespace"]
        for endpoint in one.get("endpoints") or ():
            if service is None or not endpoint["conditions"].get("ready"):
                continue
            host = endpoint.get("hostname")
            for prefix in ([f"{host}."] if host else []) + [""]:
                base = f"{prefix}{service}"
                names = [f"{base}.{space}{end}" for end in ("", ".svc", ".svc.cluster.local")]
                names += [base] if space == pod.namespace else []
                lines += [f"{address} {' '.join(names)}" for address in endpoint["addresses"]]
    return lines


class _LogServer:
    """Serves logs of containers where the API server asks kubelets for them."""

    def __init__(self, kubelet: Kubelet) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                kind, namespace, name, container = parts.path.strip("/").split("/")
                assert kind == "containerLogs"
                found = [
                    pod
                    for pod in [*kubelet.past, *list(kubelet.pods.values())]
                    if (pod.namespace, pod.full_name) == (namespace, name)
                ]
                self.send_response(200 if found else 404)
                self.end_headers()
                if found:
                    log = found[-1].directory / f"{container}.log"
                    self._send(found[-1], log, parse_qs(parts.query))

            def _send(self, pod: Pod, log: Path, query: Mapping[str, Sequence[str]]) -> None:
                lines = log.read_bytes().splitlines(keepends=True)
                last = int(query["tailLines"][0]) if "tailLines" in query else len(lines)
                self.wfile.write(b"".join(lines[len(lines) - min(last, len(lines)) :]))
                sent = sum(map(len, lines))
                while "follow" in query:
                    ended = not pod.is_alive()
                    more = log.read_bytes()[sent:]
                    sent += len(more)
                    self.wfile.write(more)
                    self.wfile.flush()
                    if ended:
                        break
                    time.sleep(PERIOD)

            def log_message(self, *words: object) -> None:
                pass

        certificate = kubelet.plane.authority.issue("kubelet", "IP:127.0.0.1")
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate.cert, certificate.key)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _has(stored: Json, conditions: Sequence[Json]) -> bool:
    """Whether these conditions are stored: others change them while our heartbeats are late."""
    found = {one["type"]: one["status"] for one in stored["status"].get("conditions") or ()}
    return all(found.get(one["type"]) == one["status"] for one in conditions)


def _path(stored: Json) -> str:
    metadata = stored["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
