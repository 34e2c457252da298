"""Kubeflow Trainer's TrainJob. Pure.

Variables: kubeflow/trainer v2.3.0, pkg/runtime/framework/plugins/torch/torch.go; a JobSet names its
pods. PET_NNODES is one number there: for an elastic job set --nnodes MIN:MAX.
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
from torchelastic.cluster.platform import without_unset as known
from torchelastic.config import format_endpoint


def detect(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    host, port = environ.get("PET_MASTER_ADDR", ""), whole(environ.get("PET_MASTER_PORT"))
    match = re.fullmatch(r"(.+)-node-0-0\.(.+)", host)
    nodes = whole(environ.get("PET_NNODES"))
    if not in_pod(environ) or match is None or port is None or nodes is None:
        return None
    run_id, from_id = first_set(environ, "PET_RDZV_ID", "JOB_UUID", "JOB_UID")
    node, from_node = first_set(environ, "POD_UID")
    return PlatformFacts(
        platform="Kubernetes",
        job=f"TrainJob {match[1]}",
        run_id=run_id or match[1],
        min_nodes=nodes,
        max_nodes=nodes,
        endpoints=(format_endpoint(host, port),),
        node=node,
        grace=pod_grace(environ),
        sources=known(
            {
                "run_id": from_id or "PET_MASTER_ADDR",
                "max_nodes": "PET_NNODES",
                "endpoints": "PET_MASTER_ADDR, PET_MASTER_PORT",
                "node": from_node,
            }
        ),
    )
