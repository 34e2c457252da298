"""A Kubernetes Job with `completionMode: Indexed`. Pure.

Variables and names: Kubernetes 1.31 and later, docs/concepts/workloads/controllers/job.md
("Completion mode"). No variable tells how many pods there are: set --nnodes. JOB_UID, POD_UID and
JOB_ENDPOINTS, the number of first pods that are endpoints, are those of `torchelastic submit
kubernetes`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.cluster.platform import (
    PlatformFacts,
    ReadFile,
    first_set,
    in_pod,
    pod_grace,
    whole,
)
from torchelastic.config import DEFAULT_PORT, format_endpoint

#: The kubelet writes the pod's full name here if it has a subdomain (a headless Service).
HOSTS_FILE = "/etc/hosts"


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    index, host = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("HOSTNAME", "")
    if not in_pod(environ) or not index.isdigit():
        return None
    name = host.removesuffix(f"-{index}") if host.endswith(f"-{index}") else ""
    run_id, from_id = first_set(environ, "JOB_UUID", "JOB_UID")
    node, from_node = first_set(environ, "POD_UID")
    full = full_name(host, read_file(HOSTS_FILE) or "") if name else ""
    pods = first_pods(name, full, whole(environ.get("JOB_ENDPOINTS")) or 1)
    return PlatformFacts(
        platform="Kubernetes",
        job=f"Indexed Job {name}".strip(),
        run_id=run_id or name,
        endpoints=tuple(format_endpoint(pod, DEFAULT_PORT) for pod in pods),
        node=node,
        grace=pod_grace(environ),
        sources={
            "run_id": from_id or (name and "HOSTNAME"),
            "endpoints": f"HOSTNAME, {HOSTS_FILE}" if pods else "",
            "node": from_node,
        },
    )


def full_name(host: str, hosts: str) -> str:
    """Return the name with a domain that a hosts file has for this host; empty: none.

    >>> full_name("job-1", "10.0.0.7 job-1.svc.default.svc.cluster.local job-1")
    'job-1.svc.default.svc.cluster.local'
    """
    for line in hosts.splitlines():
        names = line.partition("#")[0].split()[1:]
        if host in names:
            return next((name for name in names if name.startswith(f"{host}.")), "")
    return ""


def first_pods(job: str, full: str, count: int) -> list[str]:
    """Return the names of the first pods in the domain of another one; empty: it has no domain.

    >>> first_pods("job", "job-7.svc", 2)
    ['job-0.svc', 'job-1.svc']
    """
    _, _, domain = full.partition(".")
    return [f"{job}-{index}.{domain}" for index in range(count)] if domain else []
