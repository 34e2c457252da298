"""The controller of ElasticJobs as a process, with the account that it is installed with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.kubernetes import ControlPlane

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
#: The controller's namespace.
HOME = "elastic-job"
ACCOUNT = f"/api/v1/namespaces/{HOME}/serviceaccounts/elastic-job-controller"


#: Where a pod finds its account; only what is started below has it there.
_MOUNTED = """\
mount -t tmpfs tmpfs /run
mkdir -p /run/secrets/kubernetes.io
ln -s "$0" /run/secrets/kubernetes.io/serviceaccount
exec setpriv --pdeathsig KILL -- "$@"
"""


def install(plane: ControlPlane) -> Path:
    """`kubectl apply -k`; return the directory that a pod of the controller's account has."""
    done = plane.kubectl("apply", "-k", str(DEPLOY))
    assert done.returncode == 0, done.stderr
    # Tests run it as a process: there is no image.
    deployment = f"/apis/apps/v1/namespaces/{HOME}/deployments/elastic-job-controller"
    plane.api.patch(deployment, {"spec": {"replicas": 0}})
    crd = "customresourcedefinition/elasticjobs.elastic.pytorch.org"
    assert plane.kubectl("wait", "--for=condition=Established", crd).returncode == 0
    token = plane.api.create(f"{ACCOUNT}/token", {"spec": {"expirationSeconds": 3600}})
    plane.api.close()
    account = plane.directory / "serviceaccount"
    account.mkdir()
    (account / "token").write_text(token["status"]["token"])
    (account / "namespace").write_text(HOME)
    (account / "ca.crt").write_text(Path(plane.authority.cert).read_text())
    (account / "port").write_text(str(plane.port))
    return account


class Operator:
    """A `torchelastic operator` process, which finds the cluster as in a pod."""

    def __init__(self, account: Path, log: Path) -> None:
        self.log = log
        here = ["unshare", "--mount", "sh", "-ec", _MOUNTED, str(account)]
        environ = {**os.environ, "HOME": "/nonexistent", "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        environ["KUBERNETES_SERVICE_PORT"] = (account / "port").read_text()
        environ.pop("KUBECONFIG", None)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*here, sys.executable, "-m", "torchelastic", "operator"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def said(self) -> str:
        return self.log.read_text()

    def leads(self) -> bool:
        assert self.process.poll() is None, self.said()
        return " leads." in self.said()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@contextlib.contextmanager
def operator(account: Path, log: Path) -> Iterator[Operator]:
    made = Operator(account, log)
    try:
        yield made
        assert "Traceback" not in made.said()
    finally:
        if made.process.poll() is None:
            made.end()
