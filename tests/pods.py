"""The pods of `tests.kubelet`: each runs its containers as processes of this machine.

Every pod has an address and a network of its own (`tests.netns`). An image is not used: commands
are those of this environment, and a container without one runs the Dockerfile's. A container sees
its volumes under /run, /dev/shm and wherever this machine has such a directory; its other files are
this machine's.
"""

from __future__ import annotations

import base64
import ctypes
import http.client
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kubernetes import GATEWAY
from tests.netns import Host

if TYPE_CHECKING:
    from tests.kubelet import Kubelet

#: Seconds between two looks at the pods, and at the processes of one.
PERIOD = 0.1
_CLONE_NEWNET = 0x40000000
#: Of the image, see the Dockerfile.
ENTRYPOINT = ("torchelastic", "run")

Json = dict[str, Any]


class Container:
    """One container of a pod: its process, its probes and what is reported about it."""

    def __init__(self, pod: Pod, spec: Json) -> None:
        self.pod, self.spec, self.name = pod, spec, str(spec["name"])
        self.log = pod.directory / f"{self.name}.log"
        self.restarts = 0
        self.start()

    def start(self) -> None:
        environ = self._environ()
        words = [*self.spec.get("command", ENTRYPOINT), *self.spec.get("args", ())]
        words = [expanded(word, environ) for word in words]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                cwd=self.spec.get("workingDir") or self.pod.kubelet.workdir,
            )
        self.began, self._began = stamp(), time.monotonic()
        self._failures = {"readinessProbe": 0, "livenessProbe": 0}
        self._probed = dict.fromkeys(self._failures, -1e9)
        self.ready = "readinessProbe" not in self.spec
        self.ended = ""

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs these words in the container."""
        user = {
            **self.pod.spec.get("securityContext", {}),
            **self.spec.get("securityContext", {}),
        }.get("runAsUser", 0)
        identity = ["--pdeathsig", "KILL"]
        if user:
            # Python itself may be in a directory that only root can read.
            reads = "dac_read_search"
            identity += [f"--reuid={user}", "--regid=0", "--clear-groups"]
            identity += [f"--inh-caps=-all,+{reads}", f"--ambient-caps=-all,+{reads}"]
        setup = ['echo "$0" > /proc/sys/kernel/hostname', "mount -t tmpfs tmpfs /run"]
        for mount in self.spec.get("volumeMounts", ()):
            source, target = self.pod.volumes[mount["name"]], shlex.quote(mount["mountPath"])
            if (key := mount.get("subPath")) is not None:
                source = source / key
            make = "touch" if source.is_file() else "mkdir -p"
            setup += [f"mkdir -p $(dirname {target}) && {make} {target}"]
            setup += [f"mount --bind {source} {target}"]
        # Pdeathsig is of the thread that starts this, which waits for it; a change of user resets
        # it, so that comes first.
        setup += [f'exec setpriv {" ".join(identity)} -- "$@"']
        here = ["ip", "netns", "exec", self.pod.host.namespace, "unshare", "--uts"]
        return [*here, "sh", "-ec", "\n".join(setup), self.pod.hostname, *words]

    def _environ(self) -> dict[str, str]:
        environ = dict(self.pod.kubelet.environ)
        environ |= {"HOSTNAME": self.pod.hostname, "TMPDIR": str(self.pod.tmp)}
        environ |= {"KUBERNETES_SERVICE_HOST": GATEWAY, "KUBERNETES_SERVICE_PORT": "443"}
        for entry in self.spec.get("env", ()):
            value = entry.get("value", "")
            if (source := entry.get("valueFrom")) is not None:
                value = self.pod.value_from(source)
            environ[entry["name"]] = expanded(value, environ)
        return environ

    def look(self) -> None:
        """Note an end, and probe what is to be probed."""
        if self.ended:
            return
        if self.process.poll() is not None:
            self.ended, self.ready = stamp(), False
            return
        if (ready := self._probe("readinessProbe")) is not None:
            self.ready = ready
        if self._probe("livenessProbe") is False:
            self.pod.note(f"liveness probe of {self.name} failed")
            self.pod.terminate()

    def _probe(self, name: str) -> bool | None:
        """Whether a probe succeeds; None: not known, or it is not yet time."""
        probe, now = self.spec.get(name), time.monotonic()
        if probe is None or now < self._probed[name] + probe.get("periodSeconds", 10):
            return None
        if now < self._began + probe.get("initialDelaySeconds", 0):
            return None
        self._probed[name] = now
        if self._answers(probe):
            self._failures[name] = 0
            return True
        self._failures[name] += 1
        return False if self._failures[name] >= probe.get("failureThreshold", 3) else None

    def _answers(self, probe: Json) -> bool:
        timeout = probe.get("timeoutSeconds", 1)
        if (run := probe.get("exec")) is not None:
            done = subprocess.run(
                self.command(run["command"]), env=self._environ(), capture_output=True
            )
            return done.returncode == 0
        wanted = probe.get("httpGet") or probe["tcpSocket"]
        port = self._port(wanted["port"])
        try:
            with self.pod.connect(port, timeout) as connected:
                if "httpGet" not in probe:
                    return True
                return 200 <= _http_status(connected, wanted.get("path", "/")) < 400
        except (OSError, http.client.HTTPException):
            return False

    def _port(self, port: int | str) -> int:
        """The number of a port that a probe may give by name."""
        if isinstance(port, int):
            return port
        return next(p["containerPort"] for p in self.spec["ports"] if p.get("name") == port)

    @property
    def exit_code(self) -> int:
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def status(self) -> Json:
        state: Json = {"running": {"startedAt": self.began}}
        if self.ended:
            reason = "Error" if self.exit_code else "Completed"
            end = {"startedAt": self.began, "finishedAt": self.ended, "reason": reason}
            policy = self.spec.get("terminationMessagePolicy")
            if self.exit_code and policy == "FallbackToLogsOnError":
                end["message"] = self.log.read_text(errors="replace")[-2048:]
            state = {"terminated": {"exitCode": self.exit_code, **end}}
        image = {"image": self.spec.get("image", ""), "imageID": "test"}
        counts = {"restartCount": self.restarts, "started": not self.ended}
        return {"name": self.name, "state": state, "ready": self.ready, **image, **counts}


class Pod(threading.Thread):
    """One pod, from its start to the end of its processes."""

    def __init__(self, kubelet: Kubelet, host: Host, stored: Json) -> None:
        self.stored, self.spec = stored, stored["spec"]
        metadata = stored["metadata"]
        self.namespace, self.uid = metadata["namespace"], metadata["uid"]
        super().__init__(name=f"pod {metadata['name']}", daemon=True)
        self.full_name = str(metadata["name"])
        self.kubelet, self.host = kubelet, host
        self.hostname = str(self.spec.get("hostname") or self.full_name)
        self.began = stamp()
        self.directory = kubelet.directory / self.uid
        self.tmp = self.directory / "tmp"
        self.tmp.mkdir(parents=True)
        self.tmp.chmod(0o777)
        self.containers: list[Container] = []
        #: What was reported last, so that only changes are.
        self.reported: Json = {}
        self.notes: list[str] = []
        self._grace: float | None = None
        self._asked = threading.Event()
        self.volumes: dict[str, Path] = {}

    @property
    def node(self) -> str:
        return str(self.spec["nodeName"])

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log(self) -> str:
        """The output of its containers."""
        paths = sorted(self.directory.glob("*.log"))
        return "".join(path.read_text(errors="replace") for path in paths)

    def pids(self) -> list[int]:
        return self.host.pids()

    def kill(self) -> None:
        """End all its processes at once."""
        self.host.kill()

    def terminate(self, grace: float | None = None) -> None:
        """Ask its processes to end; kill them when the grace period is over."""
        if self._grace is None or (grace is not None and grace < self._grace):
            usual = self.spec.get("terminationGracePeriodSeconds", 30)
            self._grace = usual if grace is None else grace
            self._asked.set()

    def run(self) -> None:
        try:
            overwrite(self.host.hosts_file, self.own_names())
            for volume in self.spec.get("volumes", ()):
                self.volumes[volume["name"]] = self._volume(volume)
            self.containers = [Container(self, spec) for spec in self.spec["containers"]]
            told = 0.0
            while not all(one.ended for one in self.containers):
                if self._grace is not None and not told:
                    told = time.monotonic()
                    for one in self.containers:
                        one.process.send_signal(signal.SIGTERM)
                # A later request may shorten it.
                if self._grace is not None and time.monotonic() > told + self._grace:
                    self.kill()
                self._asked.wait(PERIOD / 2) if self._grace is None else time.sleep(PERIOD / 2)
                for one in self.containers:
                    one.look()
                    self._restart(one)
        finally:
            # What PID 1 of a container leaves behind ends with it.
            self.kill()

    def _restart(self, one: Container) -> None:
        policy = self.spec.get("restartPolicy", "Always")
        again = policy == "Always" or (policy == "OnFailure" and one.ended and one.exit_code)
        if one.ended and again and self._grace is None:
            one.restarts += 1
            one.start()

    def connect(self, port: int, timeout: float) -> socket.socket:
        """Connect to a port of this pod, as a kubelet does."""
        made = socket_in(self.kubelet.gateway.namespace)
        try:
            made.settimeout(timeout)
            made.connect((self.host.address, port))
        except BaseException:
            made.close()
            raise
        return made

    def own_names(self) -> list[str]:
        """The lines that a kubelet writes into /etc/hosts before a container starts."""
        names = [self.hostname]
        if subdomain := self.spec.get("subdomain"):
            names.insert(0, f"{self.hostname}.{subdomain}.{self.namespace}.svc.cluster.local")
        return ["127.0.0.1 localhost", f"{self.host.address} {' '.join(names)}"]

    # --- volumes and the downward API ------------------------------------------------------------

    def _volume(self, volume: Json) -> Path:
        """The directory with the content of a volume."""
        if (path := volume.get("hostPath")) is not None:
            return Path(path["path"])
        place = self.directory / "volumes" / volume["name"]
        place.mkdir(parents=True)
        place.chmod(0o777)
        for name, content, mode in self._files(volume):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
            (place / name).chmod(mode)
        return place

    def _files(self, volume: Json) -> list[tuple[str, bytes, int]]:
        for kind, name in (("secret", "secretName"), ("configMap", "name")):
            if (source := volume.get(kind)) is not None:
                mode = source.get("defaultMode", 0o644)
                data = self._data(kind, source[name])
                return [(key, content, mode) for key, content in data.items()]
        items = volume.get("downwardAPI", {}).get("items", ())
        return [(one["path"], self.value_from(one).encode(), 0o644) for one in items]

    def _data(self, kind: str, name: str) -> dict[str, bytes]:
        path = f"/api/v1/namespaces/{self.namespace}/{kind.lower()}s/{name}"
        data = self.kubelet.plane.api.get(path).get("data", {})
        return {
            key: base64.b64decode(text) if kind == "secret" else text.encode()
            for key, text in data.items()
        }

    def value_from(self, source: Json) -> str:
        for kind in ("secret", "configMap"):
            if (key := source.get(f"{kind}KeyRef")) is not None:
                return self._data(kind, key["name"])[key["key"]].decode()
        field = source["fieldRef"]["fieldPath"]
        if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", field):
            return str(self.stored["metadata"].get(match[1], {}).get(match[2], ""))
        if field == "status.podIP":
            return self.host.address
        part, name = field.split(".")
        return str(self.stored[part].get(name, ""))

    # --- what is reported ------------------------------------------------------------------------

    def status(self) -> Json:
        ended = bool(self.containers) and not self.is_alive()
        failed = [one for one in self.containers if one.ended and one.exit_code]
        phase = ("Failed" if failed else "Succeeded") if ended else "Running"
        ready = bool(self.containers) and all(one.ready for one in self.containers) and not ended
        conditions = [
            {"type": "Initialized", "status": "True"},
            *({"type": name, "status": str(ready)} for name in ("ContainersReady", "Ready")),
        ]
        return {
            "phase": phase,
            "startTime": self.began,
            "hostIP": "127.0.0.1",
            "podIP": self.host.address,
            "podIPs": [{"ip": self.host.address}],
            "conditions": conditions,
            "containerStatuses": [one.status() for one in self.containers],
        }


def socket_in(namespace: str) -> socket.socket:
    """A TCP socket of a network namespace. Only this thread enters it, and comes back."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as back, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        try:
            return socket.socket()
        finally:
            if libc.setns(back.fileno(), _CLONE_NEWNET):
                os.abort()  # this thread is lost in another network


def _http_status(connected: socket.socket, path: str) -> int:
    connection = http.client.HTTPConnection("pod")
    connection.sock = connected
    connection.request("GET", path)
    return connection.getresponse().status


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Text with `$(NAME)` replaced, and `$$` by `$`, as Kubernetes does."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda it: environ.get(it[1], it[0]) if it[1] else "$", text)


def overwrite(path: Path, lines: Sequence[str]) -> None:
    """Write a file that processes have mounted; whoever reads it meanwhile sees the first lines."""
    with path.open("r+b") as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.truncate()


def stamp() -> str:
    """The time, as the API writes it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
