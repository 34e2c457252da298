"""A Run:ai workload of one pod; one of several pods is a PyTorchJob. Pure.

Variables: run-ai/docs v2.20, "Environment variables inside a workload". JOB_UUID stays the same
when the workload is preempted and comes back.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.cluster.platform import (
    PlatformFacts,
    ReadFile,
    first_set,
    pod_grace,
)


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    if not environ.get("JOB_UUID") or not environ.get("RUNAI_NUM_OF_GPUS"):
        return None
    node, from_node = first_set(environ, "POD_UID")
    return PlatformFacts(
        platform="Run:ai",
        job=f"job {environ.get('JOB_NAME', '')}".strip(),
        run_id=environ["JOB_UUID"],
        node=node,
        grace=pod_grace(environ),
        sources={"run_id": "JOB_UUID", "node": from_node},
    )
