"""Kubeflow: Training Operator's PyTorchJob, which Run:ai's distributed jobs are, too, and Trainer's
TrainJob. Pure.

PyTorchJob: kubeflow/training-operator release-1.9, pkg/controller.v1/pytorch/{envvar,elastic}.go.
The PET_* variables are defaults of flags and win by themselves; what is missing there is the id.
TrainJob: kubeflow/trainer v2.3.0, pkg/runtime/framework/plugins/torch/torch.go; a JobSet names its
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
from torchelastic.config import format_endpoint, parse_endpoint, parse_nnodes
from torchelastic.errors import ConfigError


def detect_pytorchjob(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    is_plain = bool(environ.get("PET_MASTER_ADDR") and environ.get("WORLD_SIZE"))
    if not in_pod(environ) or not environ.get("PET_NNODES") or not (endpoint or is_plain):
        return None
    try:
        least, most = parse_nnodes(environ["PET_NNODES"])
        host = parse_endpoint(endpoint)[0] if endpoint else environ["PET_MASTER_ADDR"]
    except ConfigError:
        return None  # the flags say what is wrong with these variables
    name = re.sub(r"-(worker|master)-0(\..*)?$", "", host)
    run_id, from_id = first_set(environ, "PET_RDZV_ID", "JOB_UUID", "JOB_UID")
    from_host = "PET_RDZV_ENDPOINT" if endpoint else "PET_MASTER_ADDR"
    node, from_node = first_set(environ, "POD_UID")
    return PlatformFacts(
        platform="Run:ai" if environ.get("JOB_UUID") else "Kubernetes",
        job=f"PyTorchJob {name}",
        run_id=run_id or name,
        min_nodes=least,
        max_nodes=most,
        endpoints=(endpoint,) if endpoint else (),
        node=node,
        grace=pod_grace(environ),
        sources={
            "run_id": from_id or from_host,
            "max_nodes": "PET_NNODES",
            "endpoints": "PET_RDZV_ENDPOINT" if endpoint else "",
            "node": from_node,
        },
    )


def detect_trainjob(environ: Mapping[str, str], read_file: ReadFile) -> PlatformFacts | None:
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
        sources={
            "run_id": from_id or "PET_MASTER_ADDR",
            "max_nodes": "PET_NNODES",
            "endpoints": "PET_MASTER_ADDR, PET_MASTER_PORT",
            "node": from_node,
        },
    )
