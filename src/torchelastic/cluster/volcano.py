"""A Volcano Job. Pure.

Variables: volcano-sh/volcano 2026-08-20, pkg/controllers/job/plugins: `env` (VC_TASK_INDEX), `svc`
(VC_<TASK>_HOSTS) and `pytorch` (MASTER_ADDR, MASTER_PORT, WORLD_SIZE: the number of pods). Without
`pytorch` no variable tells how many pods there are at least: set --nnodes.
"""

from __future__ import annotations

import re
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

_HOSTS = re.compile(r"VC_\w+_HOSTS")


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    lists = sorted(name for name in environ if _HOSTS.fullmatch(name) and environ[name])
    if not in_pod(environ) or not (lists or environ.get("VC_TASK_INDEX")):
        return None
    host, port, source = _first(environ, lists, read_file)
    # The plug-ins name pods JOB-TASK-INDEX.JOB.
    name = host.partition(".")[2]
    run_id, from_id = first_set(environ, "JOB_UUID", "JOB_UID")
    nodes = whole(environ.get("WORLD_SIZE")) if environ.get("MASTER_ADDR") else None
    node, from_node = first_set(environ, "POD_UID")
    return PlatformFacts(
        platform="Volcano",
        job=f"job {name}".strip() if name else "",
        run_id=run_id or name,
        min_nodes=nodes,
        max_nodes=nodes,
        endpoints=(format_endpoint(host, port),) if host else (),
        node=node,
        grace=pod_grace(environ),
        sources={
            "run_id": from_id or (name and source),
            "max_nodes": "WORLD_SIZE" if nodes else "",
            "endpoints": source,
            "node": from_node,
        },
    )


def _first(
    environ: Mapping[str, str], lists: list[str], read_file: ReadFile
) -> tuple[str, int, str]:
    """Return host, port and source of the endpoint; an empty host if there is none."""
    host, port = environ.get("MASTER_ADDR", ""), whole(environ.get("MASTER_PORT"))
    if host and port:
        return host, port, "MASTER_ADDR, MASTER_PORT"
    for name in lists:
        # The variable is as old as the pod; the file follows the job.
        file = f"/etc/volcano/{name[3:-6].lower()}.host"
        if text := (read_file(file) or "").split():
            return text[0], DEFAULT_PORT, file
        return environ[name].split(",")[0], DEFAULT_PORT, name
    return "", 0, ""
