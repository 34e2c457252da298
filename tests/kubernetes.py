"""A real Kubernetes control plane on this machine: etcd, API server, controllers, scheduler.

    with ControlPlane() as plane:
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": "mine"}})

Its programs are in the directory that KUBEBUILDER_ASSETS names, as controller-runtime's
`setup-envtest` installs them, or on PATH. There is no kubelet: `tests.kubelet` plays it. Everything
they write is in a temporary directory.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import etcd, needs
from tests.certificates import Authority
from tests.needs import kubernetes_program
from tests.ports import free_port
from tests.support import ending_with_us, poll_for
from torchelastic.cluster.kubernetes.cluster_api import ClusterApi
from torchelastic.errors import KubernetesError

#: Where pods reach the API server, see `tests.kubelet`.
GATEWAY = "10.77.0.1"
#: Seconds without a sign of life of a kubelet until its node is not ready any more. On a machine
#: that does much else, some of those that it gives every second come more than a second late.
NODE_GRACE = 10

_ADMIN, _POWERLESS = "admin", "powerless"


class ControlPlane:
    """Up when entered. Each part can be stopped and started again with the data it had."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kubernetes-")
        self.directory = Path(self._temporary.name)
        self.port = free_port()
        self.kubeconfig = str(self.directory / "kubeconfig")
        #: Of a user without any permission.
        self.powerless_kubeconfig = str(self.directory / "powerless-kubeconfig")
        self.etcd = etcd.Etcd(self.directory / "etcd", etcd.any_etcd())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> ControlPlane:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self, "api"):
            self.api.close()
        for name in reversed(list(self._processes)):
            self.stop(name)
        self.etcd.stop()
        self._temporary.cleanup()

    def _start(self) -> None:
        self.etcd.directory.mkdir()
        self.authority = Authority(self.directory, "authority")
        self._server = self.authority.issue(
            "server", "IP:127.0.0.1", f"IP:{GATEWAY}", "DNS:kubernetes.default.svc"
        )
        account = self.directory / "accounts.key"
        command = ["openssl", "genrsa", "-out", str(account), "2048"]
        subprocess.run(command, check=True, capture_output=True)
        self._write_users()
        self.etcd.start()
        self.start_api_server()
        self.api = ClusterApi(self.kubeconfig)
        self.start_controllers()
        self._run("kube-scheduler", "--leader-elect=false", f"--secure-port={free_port()}")
        self.api.close()

    def _write_users(self) -> None:
        tokens = {_ADMIN: secrets.token_hex(16), _POWERLESS: secrets.token_hex(16)}
        groups = {_ADMIN: "system:masters", _POWERLESS: ""}
        (self.directory / "tokens.csv").write_text(
            "".join(f"{token},{name},{name},{groups[name]}\n" for name, token in tokens.items())
        )
        for name, file in ((_ADMIN, self.kubeconfig), (_POWERLESS, self.powerless_kubeconfig)):
            self.write_kubeconfig(file, tokens[name])

    def write_kubeconfig(self, file: str, token: str) -> None:
        """Write how to come here as whom a token belongs to."""
        Path(file).write_text(
            f"""\
apiVersion: v1
kind: Config
clusters:
- name: test
  cluster: {{server: "https://127.0.0.1:{self.port}", certificate-authority: {self.authority.cert}}}
users: [{{name: user, user: {{token: {token}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: user}}}}]
current-context: test
"""
        )

    def start_api_server(self) -> None:
        """Start it, or start it again; returns when it answers."""
        account = self.directory / "accounts.key"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd.port}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={self._server.cert}",
            f"--tls-private-key-file={self._server.key}",
            f"--service-account-key-file={account}",
            f"--service-account-signing-key-file={account}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.directory}/tokens.csv",
            "--authorization-mode=RBAC",
            # Pods would wait for the account `default` of a new namespace.
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--shutdown-delay-duration=0s",
            config=False,
        )
        poll_for(self._answers, what="the API server answers")

    def start_controllers(self) -> None:
        self._run(
            "kube-controller-manager",
            f"--service-account-private-key-file={self.directory}/accounts.key",
            f"--root-ca-file={self.authority.cert}",
            "--leader-elect=false",
            f"--secure-port={free_port()}",
            f"--node-monitor-grace-period={NODE_GRACE}s",
            "--node-monitor-period=1s",
            # As many requests as it likes: tests wait for what it does.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
        )

    def stop(self, name: str) -> None:
        """Kill one of the programs."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def _run(self, name: str, *flags: str, config: bool = True) -> None:
        found = kubernetes_program(name)
        assert found, needs.missing("control plane")
        options = [f"--kubeconfig={self.kubeconfig}"] if config else []
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ending_with_us([found, *options, *flags]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _answers(self) -> bool:
        process = self._processes["kube-apiserver"]
        if process.poll() is not None:
            raise AssertionError((self.directory / "kube-apiserver.log").read_text()[-4000:])
        with contextlib.closing(ClusterApi(self.kubeconfig)) as api:
            try:
                # `/readyz` says `ok`, which is not JSON.
                return list(api.lines("/readyz", timeout=5)) == [b"ok"]
            except KubernetesError:
                return False

    # --- what tests do there ---------------------------------------------------------------------

    def kubectl(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command as a user types it."""
        found = kubernetes_program("kubectl")
        assert found, needs.missing("kubectl")
        return subprocess.run(
            [found, f"--kubeconfig={self.kubeconfig}", *words],
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )

    def new_namespace(self) -> str:
        name = f"test-{next(self._numbers)}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def delete_namespace(self, name: str) -> None:
        """Nothing runs there any more; the controllers remove what is left in their own time."""
        self.api.delete(f"/api/v1/namespaces/{name}")
        self.api.close()

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        return self.api.get(path, **query)["items"]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """One for all tests: each uses a namespace and nodes of its own."""
    with ControlPlane() as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    name = control_plane.new_namespace()
    yield name
    control_plane.delete_namespace(name)
